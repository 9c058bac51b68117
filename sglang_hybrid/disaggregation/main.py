"""``sglang-hybrid pd``: start prefill, decode and router, say where, end them together."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.config import config_from_environment
from sglang_hybrid.config_flags import add_config_flags
from sglang_hybrid.disaggregation import commands
from sglang_hybrid.disaggregation.commands import LOOPBACK, Flags, Ports
from sglang_hybrid.disaggregation.processes import Ended, Member, answers, end_all, get, wait_until

_START_SECONDS = 600


def main(argv: Sequence[str]) -> int:
    options, more = _parser().parse_known_args(argv)
    import torch

    gpu = torch.cuda.is_available()
    ports = Ports(options.port, *_free_ports(4))
    flags = _flags(options, more)
    page_tokens = config_from_environment().block_tokens
    lines = {
        "prefill": commands.prefill(ports, flags, page_tokens, gpu),
        "decode": commands.decode(ports, flags, gpu),
        "router": commands.router(options.host, ports, flags),
    }
    if options.dry_run:
        environment = " ".join(f"{key}={value}" for key, value in commands.ENVIRONMENT.items())
        for name, line in lines.items():
            print(f"# {name}\n{environment if name != 'router' else ''} {shlex.join(line)}".replace("\n ", "\n"))
        return 0
    for package in ("mooncake", "sglang_router"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"sglang-hybrid: {package} is not installed: see docs/pd.md, Installing")
    logs = Path(options.log_dir or tempfile.mkdtemp(prefix="sglang-hybrid-pd-"))
    logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _interrupt)
    members: list[Member] = []
    status = 0
    try:
        _serve(lines, ports, logs, members, options.host)
    except KeyboardInterrupt:
        print("\nsglang-hybrid: ending router, decode and prefill", flush=True)
    except (Ended, TimeoutError) as error:
        print(f"sglang-hybrid: {error}", file=sys.stderr)
        status = 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave some of them running
        end_all(members)
    return status


def _serve(lines: dict[str, list[str]], ports: Ports, logs: Path, members: list[Member], host: str) -> None:
    """Returns only by an exception."""
    print(f"starting prefill and decode, logs in {logs}", flush=True)
    for name in ("prefill", "decode"):
        environment = commands.environment_beside(os.environ)
        members.append(Member(name, lines[name], logs / f"{name}.log", environment))
    for name, port in (("prefill", ports.prefill), ("decode", ports.decode)):
        healthy = functools.partial(answers, f"http://{LOOPBACK}:{port}/health")
        wait_until(members, healthy, _START_SECONDS, f"{name} is not healthy")
        print(f"{name} is healthy at http://{LOOPBACK}:{port}", flush=True)
    members.append(Member("router", lines["router"], logs / "router.log", {}))
    router = f"http://{LOOPBACK}:{ports.router}"
    wait_until(members, lambda: _healthy_workers(router) == 2, _START_SECONDS, "the router does not see both instances")
    url = f"http://{host}:{ports.router}"
    body = json.dumps({"model": "default", "prompt": "The capital of France is", "max_tokens": 8})
    print(
        f"\nsglang-hybrid is serving at {url} (OpenAI-compatible: {url}/v1), Ctrl-C ends it. Try it:\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n",
        flush=True,
    )
    wait_until(members, lambda: False, math.inf, "")


def _healthy_workers(router: str) -> int:
    return int(json.loads(get(f"{router}/readiness") or "{}").get("healthy_workers", 0))


def _flags(options: argparse.Namespace, more: Sequence[str]) -> Flags:
    hybrid = [part for setting in options.hybrid for part in ("--hybrid", setting)]
    if options.hybrid_config:
        hybrid += ["--hybrid-config", options.hybrid_config]
    both = list(more)
    if not any(flag.split("=")[0] in ("--model-path", "--model", "--config") for flag in more):
        from sglang_hybrid.default_model import prepare_default_model

        model = prepare_default_model(report=lambda line: print(line, file=sys.stderr, flush=True))
        both += ["--model-path", str(model), "--served-model-name", model.name]
    parts = (shlex.split(text) for text in (options.prefill, options.decode, options.router))
    prefill, decode, router = parts
    return Flags(both, prefill, [*hybrid, *decode], router)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid pd",
        allow_abbrev=False,  # what is not ours is SGLang's
        description="Prefill, decode and router on this machine, with the default model unless --model-path names "
        "another. Flags that are not listed here go to both SGLang instances.",
    )
    parser.add_argument("--host", default=LOOPBACK, help=f"where the router listens (default: {LOOPBACK})")
    parser.add_argument("--port", type=int, default=30000, help="the router's port (default: 30000)")
    parser.add_argument(
        "--prefill",
        metavar="FLAGS",
        default="",
        help="flags of the prefill instance, as in --prefill='--chunked-prefill-size 2048'",
    )
    parser.add_argument("--decode", metavar="FLAGS", default="", help="flags of the decode instance")
    parser.add_argument("--router", metavar="FLAGS", default="", help="flags of the router (sglang_router)")
    parser.add_argument("--log-dir", metavar="DIR", help="where the three logs go (default: a new temporary directory)")
    parser.add_argument("--dry-run", action="store_true", help="print the three command lines and start nothing")
    add_config_flags(parser)
    return parser
