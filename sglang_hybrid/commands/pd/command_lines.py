"""Makes the three command lines that ``sglang-hybrid pd`` starts: prefill, decode and router on one machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.integration import BACKEND_NAME

# environment of both instances, unless the user's environment has other values
ENVIRONMENT = {
    "MOONCAKE_PROTOCOL": "tcp",  # mooncake without RDMA
    "MC_FORCE_TCP": "1",
    # The pages of an aborted request are kept until the prefill instance reports that it writes to them no more.
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "1",
    # seconds: an instance that computes a long prompt answers late and is healthy. The router waits longer, see below.
    "SGLANG_HEALTH_CHECK_TIMEOUT": "50",
    # seconds, 300 by default: without a GPU requests wait longer than 300 s behind a few long prompts. An instance that
    # died is detected by its missing heartbeat.
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "1800",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "1800",
    # seconds, 5 by default: an instance that closes an idle connection while the router sends a request on it loses the
    # request, and the client gets status 502. The router itself closes connections that were idle for 50 s. It reads
    # the prefill instance's answer only when decode has answered too, for which it waits up to 1800 s.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "1900",
}
LOOPBACK = "127.0.0.1"
# The other instance, the router and the worker need the core that an idle scheduler would spin on. A chunk of a long
# prompt takes minutes if other processes compute too, and after 300 s SGLang's watchdog takes the server for stuck and
# ends it.
WITHOUT_GPU = ("--device", "cpu", "--sleep-on-idle", "--watchdog-timeout", "1800")


def environment_beside(users: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ENVIRONMENT that the user's environment does not set."""
    return {name: value for name, value in ENVIRONMENT.items() if name not in users}


@dataclass(frozen=True)
class Ports:
    """Ports of all processes. Only the router's host can be chosen; all other ports are on loopback."""

    router: int
    prefill: int
    decode: int
    bootstrap: int  # where decode instances find the prefill instance
    metrics: int  # of the router


@dataclass(frozen=True)
class Flags:
    """Flags that are added at the end of the command lines, where they override the flags before them."""

    both: Sequence[str] = ()
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    router: Sequence[str] = ()


def prefill(ports: Ports, flags: Flags, gpu: bool) -> list[str]:
    """Return the command line of the prefill instance, which is stock SGLang.

    Its pages must be as large as the decode instance's, whose blocks they become.
    """
    # Without a GPU, SGLang sizes its pool by all of the machine's memory, and its overlapped prefill needs CUDA events.
    # The dtype is the one that our plugin gives the decode instance on such a host.
    on_cpu = (
        "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "16384",
        "--disable-overlap-schedule",
    )  # fmt: skip
    return [
        *_server("sglang.launch_server", "prefill", ports.prefill, gpu),
        "--page-size", str(BLOCK_TOKENS),
        "--disaggregation-bootstrap-port", str(ports.bootstrap),
        *(() if gpu else on_cpu),
        *flags.both, *flags.prefill,
    ]  # fmt: skip


def decode(ports: Ports, flags: Flags, gpu: bool) -> list[str]:
    return [
        *_server("sglang_hybrid.server", "decode", ports.decode, gpu),
        "--attention-backend", BACKEND_NAME,
        *flags.both, *flags.decode,
    ]  # fmt: skip


def router(host: str, ports: Ports, flags: Flags) -> list[str]:
    return [
        sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation",
        "--prefill", f"http://{LOOPBACK}:{ports.prefill}", str(ports.bootstrap),
        "--decode", f"http://{LOOPBACK}:{ports.decode}",
        "--host", host, "--port", str(ports.router),
        "--prometheus-host", LOOPBACK, "--prometheus-port", str(ports.metrics),
        "--policy", "round_robin", "--log-level", "warn",
        # Only the client may repeat a request that failed half-way: a part of the answer may have been sent.
        "--disable-retries",
        # seconds: an instance that is busy with a long prompt answers late
        "--health-check-timeout-secs", "60",
        *flags.router,
    ]  # fmt: skip


def _server(module: str, role: str, port: int, gpu: bool) -> list[str]:
    return [
        sys.executable, "-m", module, "--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake",
        "--host", LOOPBACK, "--port", str(port),
        *(() if gpu else WITHOUT_GPU),
    ]  # fmt: skip
