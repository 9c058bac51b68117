"""``sglang-hybrid``: the command line of the package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from sglang_hybrid import __version__

_BENCHES = ("one_batch", "offline_throughput", "one_batch_server", "serving")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # these parse what follows themselves: SGLang's flags, all of them, or the worker's
    if arguments[:1] == ["serve"]:
        from sglang_hybrid.commands.serve import main as serve

        sys.exit(serve(arguments[1:]))
    elif arguments[:1] == ["pd"]:
        from sglang_hybrid.disaggregation.main import main as disaggregate

        sys.exit(disaggregate(arguments[1:]))
    elif arguments[:1] == ["worker"]:
        from cpu_worker.main import main as work

        sys.exit(work(arguments[1:]))
    elif arguments[:1] == ["profile"]:
        from sglang_hybrid.profiling.main import main as profile

        sys.exit(profile(arguments[1:]))
    elif arguments[:1] == ["eval"]:
        from sglang_hybrid.eval.main import main as evaluate

        sys.exit(evaluate(arguments[1:]))
    elif arguments[:2] == ["bench", "worker"]:
        from cpu_worker.bench.main import main as bench_worker

        sys.exit(bench_worker(arguments[2:]))
    elif arguments[:1] == ["bench"] and arguments[1:2] and arguments[1] in _BENCHES:
        _bench(arguments[1], arguments[2:])
    else:
        options = _parser().parse_args(arguments)
        options.run(options)


def _bench(name: str, arguments: Sequence[str]) -> None:
    # the benchmark of a running server is a client: it needs no plugin
    module = "sglang.benchmark.serving" if name == "serving" else f"sglang_hybrid.bench_{name}"
    # as the main module of a process of its own, which is what the processes it spawns import again
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _config(options: argparse.Namespace) -> None:
    from sglang_hybrid import env
    from sglang_hybrid.config import ConfigError, describe, load_with_sources
    from sglang_hybrid.integration.server_args import export_config_flags

    export_config_flags(options)
    try:
        print(describe(*load_with_sources(env.CONFIG.get(), env.SET.get())), end="")
    except ConfigError as error:
        sys.exit(f"sglang-hybrid: {error}")


def _model(_options: argparse.Namespace) -> None:
    from sglang_hybrid.default_model.__main__ import main as prepare

    sys.exit(prepare([]))


def _check(_options: argparse.Namespace) -> None:
    from sglang_hybrid.integration import hooks
    from sglang_hybrid.integration.loading import load_plugin
    from sglang_hybrid.integration.versions import installed_sglang

    load_plugin()
    print(f"sglang {installed_sglang()}: all hooks of sglang-hybrid {__version__} are in place")
    for hook in hooks.all_hooks():
        print(f"  {hook.kind.value:7} {hook.target}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-hybrid", description="KV cache in host memory for SGLang.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    commands.add_parser("serve", help="start an OpenAI-compatible server; takes every SGLang flag (serve --help)")
    commands.add_parser("pd", help="start prefill, decode and router on this machine (pd --help)")
    commands.add_parser("worker", help="start a CPU worker by hand; servers start their own (worker --help)")
    commands.add_parser("profile", help="tune prediction, selection and recall for a model (profile --help)")
    commands.add_parser("eval", help="accuracy of settings against full attention (eval --help)")
    bench = commands.add_parser("bench", help="measure this host's CPU worker, or run one of SGLang's benchmarks")
    bench.add_argument(
        "name",
        choices=("worker", *_BENCHES),
        help="worker: GB/s of block attention beside this host's read bandwidth (bench worker --help); the others are "
        "SGLang's, with the plugin loaded. Followed by the benchmark's own flags",
    )

    config = commands.add_parser("config", help="print the effective configuration and where each value comes from")
    from sglang_hybrid.integration.server_args import add_config_flags

    add_config_flags(config)
    config.set_defaults(run=_config)

    model = commands.add_parser("model", help="prepare the default model and print its directory")
    model.set_defaults(run=_model)
    check = commands.add_parser("check", help="verify that this SGLang takes all our hooks")
    check.set_defaults(run=_check)
    return parser


if __name__ == "__main__":
    main()
