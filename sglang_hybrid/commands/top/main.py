"""``sglang-hybrid top``: command line."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence

from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.top.server import BadUrl, Server

DEFAULT_URL = "http://127.0.0.1:30000"
_INTERRUPTED = 130
_DESCRIPTION = """\
Watch a running server: requests and decode speed; CPU compute ratio and recall interval of each layer over time;
bandwidth by path; waiting for the CPU worker; host pool and slots; workers, restarts and fallbacks; settings.

The server needs --enable-metrics. What an engine does not export is named as such. A server that goes away is
waited for."""
_EPILOG = """\
Ranks and replicas are shown together. Requests, rows, tokens and slots: the sum over replicas. Bytes, blocks
and memory: the sum over all ranks. Ratios, recall intervals and cosines: the mean. Workers are listed by rank.
Rates and waits are those of the last five seconds, or of one --interval if that is longer.

what --once --json prints: one object
  problem      null, or {"kind": "no-answer" | "no-metrics" | "not-sglang" | "stock", "text", "since"}
  points       two readings, --interval apart; the last has rates. null: not exported
  latest       workers by rank, misses by who served, calibration, info, names that are not exported
  settings     of sglang-hybrid as the server uses them, null where it does not tell
  facts        what followed from them, such as the worker's threads; arguments: of SGLang

exit status: 0; 1 with --once if there is a problem; 2 for a wrong command line

examples:
  sglang-hybrid top                                     the server at port 30000, in this terminal
  sglang-hybrid top --web                               the same as a page at http://127.0.0.1:8090
  sglang-hybrid top --url http://10.0.0.7:30000 --interval 5
  sglang-hybrid top --once --json | jq '.points[-1].cpu_ratio'
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        server = Server.at(options.url, options.api_key)
        if wrong := _contradiction(options):
            raise Refused(wrong)
        if options.web:
            from sglang_hybrid.commands.top.web import serve_page

            return serve_page(server, options.interval, options.host, options.port, options.all_interfaces)
        if options.once:
            return _once(server, options.interval, options.json)
        from sglang_hybrid.commands.top.terminal import watch_in_terminal

        return watch_in_terminal(server, options.interval)
    except (BadUrl, Refused) as error:
        print(f"sglang-hybrid top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid top", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two readings (default: 2)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's key; only its settings need one")
    parser.add_argument("--once", action="store_true", help="print two readings' worth and end, in place of refreshing")
    parser.add_argument("--json", action="store_true", help="with --once: one JSON object")
    page = parser.add_argument_group("as a web page")
    page.add_argument("--web", action="store_true", help="serve a page in place of the terminal; Ctrl-C ends it")
    page.add_argument("--port", type=int, default=8090, help="of the page (default: 8090)")
    page.add_argument("--host", default="127.0.0.1", help="address of the page (default: 127.0.0.1, this machine only)")
    page.add_argument(
        "--all-interfaces", action="store_true",
        help="allow a --host that stands for all addresses of this machine; the page has no password",
    )  # fmt: skip
    return parser


def _contradiction(options: argparse.Namespace) -> str | None:
    if not 0.1 <= options.interval <= 3600:
        return f"--interval {options.interval:g} must be between 0.1 and 3600 seconds"
    if options.json and not options.once:
        return "--json prints one object: add --once"
    if options.once and options.web:
        return "--once prints and ends, and --web serves a page: choose one of them"
    if not (options.once or options.web or sys.stdout.isatty()):
        return "standard output is no terminal: add --once, with --json for a program"
    return None


def _once(server: Server, interval: float, as_json: bool) -> int:
    """Print two readings, which rates need, and return the exit status. After a failed first one there is no second."""
    import msgspec

    from sglang_hybrid.commands.top.watch import Watch

    watch = Watch(server, interval)
    watch.poll(ask_info=False)
    if watch.answers:
        watch.ask_info()
        threading.Event().wait(interval)
        watch.poll(ask_info=False)
    state = watch.state()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(state), indent=2).decode())
    elif watch.answers:
        from sglang_hybrid.commands.top.terminal import print_once

        print_once(state)
    if state.problem:
        print(f"sglang-hybrid top: {state.problem.text}", file=sys.stderr)
    return int(state.problem is not None)
