"""The command line of ``sglang-hybrid eval``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.integration.session_flags import add_model_flags

TASKS = ("text", "needle", "multi-needle", "lines")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; ``tasks`` of the result are those to run. Raise InputError for flags that conflict."""
    options = _parser().parse_args(argv)
    if options.tasks is None:
        options.tasks = _default_tasks(options)
    if not options.url:
        if options.stock_url or options.concurrency is not None:
            raise InputError("--stock-url and --concurrency are of servers: name the one to evaluate with --url")
        return options
    if options.run:
        raise InputError("--run has settings for a model in this process, a server has its own: drop --run or --url")
    if options.ruler_make:
        raise InputError("--ruler-make only writes prompts, and asks no server: drop --url")
    if "text" in options.tasks:
        raise InputError("--tasks text needs logits of given tokens, which no server tells: drop text or --url")
    if options.concurrency is not None and options.concurrency < 1:
        raise InputError(f"--concurrency {options.concurrency}: at least 1 prompt has to be sent at a time")
    return options


def _default_tasks(options: argparse.Namespace) -> list[str]:
    if options.ruler is not None or options.ruler_prompts is not None:
        return []
    return [task for task in TASKS if task != "text" or not options.url]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid eval",
        description="Compare settings with full attention on the same prompts: perplexity and KL over text that is "
        "decoded token by token, and retrieval. Prefill is exact and shared by all runs. With --url, ask running "
        "servers instead: what is scored is what is served.",
        epilog="examples: sglang-hybrid eval --tasks text needle --run 'small: budget_tokens=1024' "
        "--run 'raw: budget_tokens=1024 prediction=raw'; sglang-hybrid eval --ruler 8k,32k "
        "--url http://127.0.0.1:30000 --stock-url http://127.0.0.1:30001",
    )
    add_model_flags(parser)
    _add_comparison(parser)
    _add_text(parser)
    _add_retrieval(parser)
    _add_ruler(parser)
    parser.add_argument("--out", type=Path, default=Path("eval"), help="directory of results (default: eval)")
    return parser


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to compare")
    what.add_argument(
        "--run", action="append", metavar="'[NAME:] KEY=VALUE ...'",
        help="settings as in serve --hybrid; give it several times to compare (default: one run with the defaults). "
        "Full attention is always the first. whole_requests is never unless it is named: the few prompts of a batch "
        "would fit in GPU memory, where attention is exact",
    )  # fmt: skip
    what.add_argument("--tasks", nargs="*", choices=TASKS, help="default: all, with --ruler none, with --url not text")
    what.add_argument("--longbench", type=Path, nargs="+", default=[], metavar="JSONL", help="LongBench-format files")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--url", action="append", default=[], metavar="[NAME=]URL",
        help="evaluate the server there, by its own settings; give it several times to compare",
    )  # fmt: skip
    servers.add_argument("--stock-url", metavar="URL", help="what to compare with (default: the first --url)")
    servers.add_argument("--concurrency", type=int, help="prompts that each server has at a time (default: 16)")


def _add_text(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE",
        help="to predict, and to hide needles in (default: Python's language reference)",
    )  # fmt: skip
    text.add_argument("--windows", type=int, default=4, help="places in the text, evenly spread (default: 4)")
    text.add_argument("--prompt-tokens", type=int, default=6000, help="before each of them (default: 6000)")
    text.add_argument("--decode-tokens", type=int, default=64, help="decoded behind them (default: 64)")


def _add_retrieval(parser: argparse.ArgumentParser) -> None:
    retrieval = parser.add_argument_group("retrieval")
    retrieval.add_argument("--lengths", type=int, nargs="+", default=[4096, 6144, 8000], help="tokens of the prompts")
    retrieval.add_argument(
        "--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9], help="0 (beginning) to 1, of the needle"
    )
    retrieval.add_argument("--repeats", type=int, default=1, help="prompts per length and depth (default: 1)")
    retrieval.add_argument("--seed", type=int, default=0)


def _add_ruler(parser: argparse.ArgumentParser) -> None:
    ruler = parser.add_argument_group(
        "RULER", "NVIDIA's tasks, made by NVIDIA's programs: pip install 'sglang-hybrid[ruler]'. Prompts are kept in "
        "the user's cache.",
    )  # fmt: skip
    ruler.add_argument("--ruler", metavar="LENGTHS", help="tokens of prompts and answers, such as 8k,16k,32k")
    ruler.add_argument("--ruler-tasks", nargs="+", metavar="TASK", help="such as niah_multikey_2 vt (default: all 13)")
    ruler.add_argument("--samples", type=int, help="prompts of each task and length (default: 20, or all of a file)")
    ruler.add_argument("--ruler-seed", type=int, help="default: 42, as NVIDIA's")
    ruler.add_argument("--ruler-make", type=Path, metavar="FILE", help="only write the prompts, as token ids")
    ruler.add_argument(
        "--ruler-prompts", type=Path, metavar="FILE", help="read them: no package and no network are needed"
    )
