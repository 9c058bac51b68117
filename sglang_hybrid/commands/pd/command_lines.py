"""The three command lines of a disaggregated set on one machine: what ``sglang-hybrid pd`` starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.integration import BACKEND_NAME

# of both instances, unless the user's environment says otherwise
ENVIRONMENT = {
    "MOONCAKE_PROTOCOL": "tcp",  # mooncake without RDMA
    "MC_FORCE_TCP": "1",
    # pages of a request that is aborted half-way are kept until the prefill instance says that it writes no more
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "1",
    # seconds: an instance that computes a long prompt is not ill. The router waits longer, see below.
    "SGLANG_HEALTH_CHECK_TIMEOUT": "50",
    # seconds, 300 by default: without a GPU requests wait longer than that behind a few long prompts. An instance that
    # died is found out by its heartbeat.
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "1800",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "1800",
}
LOOPBACK = "127.0.0.1"
# The other instance, the router and the worker need the core that an idle scheduler would spin on. A chunk of a long
# prompt takes minutes if others compute too, and after 300 s SGLang takes itself for stuck and ends.
WITHOUT_GPU = ("--device", "cpu", "--sleep-on-idle", "--watchdog-timeout", "1800")


def environment_beside(users: Mapping[str, str]) -> dict[str, str]:
    """What of ENVIRONMENT the user's does not say."""
    return {name: value for name, value in ENVIRONMENT.items() if name not in users}


@dataclass(frozen=True)
class Ports:
    """Where everybody listens, all on loopback but the router."""

    router: int
    prefill: int
    decode: int
    bootstrap: int  # where decode instances learn of the prefill instance
    metrics: int  # of the router


@dataclass(frozen=True)
class Flags:
    """What is added to the command lines, last and so with the last word."""

    both: Sequence[str] = ()
    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    router: Sequence[str] = ()


def prefill(ports: Ports, flags: Flags, gpu: bool) -> list[str]:
    """Stock SGLang. Pages must be as large as the decode instance's, whose blocks they become."""
    # without a GPU: SGLang sizes its pool by all of the machine's memory, and its overlapped prefill wants CUDA events;
    # the dtype is what our plugin gives the decode instance there
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
        # a request that failed half-way is the client's to repeat: it may have been answered in part
        "--disable-retries",
        # an instance that is busy with a long prompt answers late
        "--health-check-timeout-secs", "60",
        *flags.router,
    ]  # fmt: skip


def _server(module: str, role: str, port: int, gpu: bool) -> list[str]:
    return [
        sys.executable, "-m", module, "--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake",
        "--host", LOOPBACK, "--port", str(port),
        *(() if gpu else WITHOUT_GPU),
    ]  # fmt: skip
