"""``sglang-hybrid pd``: start prefill, decode and router, print the router's URL, end all three together."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import select
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid import events
from sglang_hybrid.commands import arguments, preflight
from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.child_process import Ended
from sglang_hybrid.commands.console import Console, Progress, announce, complain, last_words
from sglang_hybrid.commands.defaults import with_model
from sglang_hybrid.commands.foreground import own_foreground_group
from sglang_hybrid.commands.interrupts import Interrupted, Interrupts
from sglang_hybrid.commands.pd import command_lines
from sglang_hybrid.commands.pd.command_lines import LOOPBACK, Flags, Ports
from sglang_hybrid.commands.pd.processes import answers, get, wait_until
from sglang_hybrid.commands.ports import check_port
from sglang_hybrid.commands.run import Run
from sglang_hybrid.config_flags import add_config_flags
from sglang_hybrid.host import gpu_names

_START_SECONDS = 600
REFUSED, FAILED = 2, 1  # exit statuses


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 after Ctrl-C or SIGTERM, 2 for flags that are refused, 1 for a process that failed."""
    Interrupts()  # raises Interrupted, once
    try:
        options, more = _parser().parse_known_args(argv)
        flags = _flags(options, more)
        _check(options, flags)
        gpu = bool(gpu_names())
        ports = Ports(options.port, *_free_ports(4))
        lines = {
            "prefill": command_lines.prefill(ports, flags, gpu),
            "decode": command_lines.decode(ports, flags, gpu),
            "router": command_lines.router(options.host, ports, flags),
        }
        if options.dry_run:
            _print_commands(lines)
            return 0
        return _serve(lines, ports, options, arguments.read(flags.both).served_model_name or "default")
    except Refused as error:
        complain(str(error))
        return REFUSED
    except Interrupted:
        print("\nsglang-hybrid: ended before anything was started")
        return 0


def _check(options: argparse.Namespace, flags: Flags) -> None:
    """Raise Refused if a port, a package, the log directory, the settings or the model cannot be used."""
    if not options.dry_run:
        check_port(options.host, options.port)
        for package in ("mooncake", "sglang_router"):
            if importlib.util.find_spec(package) is None:
                raise Refused(f"{package} is not installed: see docs/pd.md, Installing")
        if options.log_dir:
            try:
                options.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Refused(f"--log-dir {options.log_dir}: {error.strerror}") from error
    decode = arguments.read([*flags.both, *flags.decode])
    config = preflight.check_settings(decode.hybrid_config, decode.hybrid, decode.ranks)
    preflight.check_model(decode, config)


def _print_commands(lines: dict[str, list[str]]) -> None:
    environment = " ".join(f"{key}={value}" for key, value in command_lines.ENVIRONMENT.items())
    for name, line in lines.items():
        print(f"# {name}\n{environment if name != 'router' else ''} {shlex.join(line)}".replace("\n ", "\n"))


def _serve(lines: dict[str, list[str]], ports: Ports, options: argparse.Namespace, model: str) -> int:
    console = Console()
    run = Run()
    with own_foreground_group(), run:
        refused: list[str] = []
        try:
            _start(lines, ports, options, model, run, console)
            _watch(run, console, refused)
        except Interrupted:
            console.say_goodbye("sglang-hybrid: ending router, decode and prefill")
            return 0
        except (Ended, TimeoutError) as error:
            refused += [event.sentence for event in run.events.read() if isinstance(event, events.Refused)]
            console.status("")
            complain(refused[0] if refused else _explain(run, error))
            return REFUSED if refused else FAILED
    return 0


def _start(
    lines: dict[str, list[str]], ports: Ports, options: argparse.Namespace, model: str, run: Run, console: Console
) -> None:
    logs: Path = options.log_dir or run.directory
    kept = "" if options.log_dir else " (removed at the end; --log-dir DIR keeps them)"
    console.say(f"sglang-hybrid starts prefill and decode of {model}, logs in {logs}{kept}")
    for name in ("prefill", "decode"):
        run.start(name, lines[name], command_lines.environment_beside(os.environ), logs / f"{name}.log")
    for name, port in (("prefill", ports.prefill), ("decode", ports.decode)):
        healthy = functools.partial(answers, f"http://{LOOPBACK}:{port}/health")
        wait_until(run.children, healthy, _START_SECONDS, f"{name} is not healthy")
        run.note_shared_memory()
        console.say(f"  {name} is healthy at http://{LOOPBACK}:{port}")
    run.start("router", lines["router"], {}, logs / "router.log")
    router = f"http://{LOOPBACK}:{ports.router}"
    ready = lambda: _healthy_workers(router) == 2  # noqa: E731
    wait_until(run.children, ready, _START_SECONDS, "the router does not see both instances")
    announce(console, f"http://{options.host}:{ports.router}", model)


def _watch(run: Run, console: Console, refused: list[str]) -> None:
    """Show the running requests until a process ends, then raise Ended. ``refused`` gets the refusals that came."""
    progress = Progress(console)
    processes = [os.pidfd_open(child.process.pid) for child in run.children]
    refused += [event.sentence for event in run.events.read() if isinstance(event, events.Refused)]
    while True:
        select.select([run.events.fileno(), *processes], [], [])
        for event in run.events.read():
            if isinstance(event, events.Refused):
                refused.append(event.sentence)
            progress.show(event)
        for child in run.children:
            child.check()
        for child in run.children:
            child.check()


def _explain(run: Run, error: Exception) -> str:
    for child in run.children:
        if (status := child.process.poll()) is not None:
            said = last_words(child.log_lines())
            return f"{child.name} ended with status {status}; --log-dir DIR keeps its log. It said last:\n{said}"
    return str(error)


def _healthy_workers(router: str) -> int:
    return int(json.loads(get(f"{router}/readiness") or "{}").get("healthy_workers", 0))


def _flags(options: argparse.Namespace, more: Sequence[str]) -> Flags:
    hybrid = [part for setting in options.hybrid for part in ("--hybrid", setting)]
    if options.hybrid_config:
        hybrid += ["--hybrid-config", options.hybrid_config]
    parts = (shlex.split(text) for text in (options.prefill, options.decode, options.router))
    prefill, decode, router = parts
    return Flags(with_model(more), prefill, [*hybrid, *decode], router)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid pd",
        allow_abbrev=False,  # unknown flags are SGLang's
        description="Prefill, decode and router on this machine, with the default model unless --model-path names "
        "another (see sglang-hybrid model --help). Flags that are not listed here go to both SGLang instances.",
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
    parser.add_argument(
        "--log-dir", metavar="DIR", type=Path, help="keep the three logs in DIR (default: they are removed at the end)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the three command lines and start nothing")
    add_config_flags(parser)
    return parser
