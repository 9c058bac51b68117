"""``sglang-hybrid eval --url``: compares servers on the same prompts."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_hybrid.commands.eval.asked_prompts import own_prompts, prompts_of_ruler
from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.model_tokenizer import ModelTokenizer
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.report import print_report, write_report
from sglang_hybrid.commands.eval.result import Run
from sglang_hybrid.commands.eval.scoring import Answered, needle_grid, task_results
from sglang_hybrid.commands.eval.servers.asking import Outcome, ask_all
from sglang_hybrid.commands.eval.servers.server import Reply, Server, ServerError, servers_of
from sglang_hybrid.progress import DECODE_STEP_COST, steps

_CONCURRENCY = 16
# parts of a server's description of itself that the report shows
_SETTINGS = ("version", "model_path", "attention_backend", "dtype", "max_running_requests", "disable_cuda_graph")


def evaluate_servers(options: argparse.Namespace, command: str) -> int:
    """Evaluate servers, print and write the report. Return the exit status: 1 if a server failed.

    Raise InputError for flags, files and servers that cannot be used.
    """
    console = Console(stderr=True)
    servers = servers_of(options.url, options.stock_url)
    try:
        infos = [server.info() for server in servers]
    except ServerError as error:
        raise InputError(str(error)) from error
    tokenizer = functools.cache(lambda: ModelTokenizer(_tokenizer_directory(options.model_path, infos)))
    prompts = [one for one in own_prompts(options, tokenizer) if isinstance(one, RetrievalPrompt)]
    # A file of prompts needs no tokenizer here: perhaps only the server has it. So it is checked only if one is named.
    named = options.model_path is not None
    prompts += prompts_of_ruler(options, tokenizer, console, check_tokenizer=named)
    if not prompts:
        raise InputError("nothing to do: name --tasks, --ruler or --longbench files")
    with steps(console, len(servers) * sum(map(_cost, prompts))) as bar:
        bar.say(f"{len(prompts)} prompts to {', '.join(server.name for server in servers)}")
        outcomes = ask_all(
            servers, prompts, options.concurrency or _CONCURRENCY, lambda prompt: bar.advance(_cost(prompt))
        )
    answered = [_answered(prompts, outcome, tokenizer) for outcome in outcomes]
    if any(answered):
        runs = runs_of(servers, infos, answered)
        print_report(runs)
        for path in write_report(options.out, runs, command):
            print(path)
    return _tell_errors(servers, outcomes, len(prompts))


def _cost(prompt: RetrievalPrompt) -> float:
    return len(prompt.ids) + prompt.new_tokens * DECODE_STEP_COST


def _tokenizer_directory(named: Path | None, infos: Sequence[dict[str, Any]]) -> Path:
    """Return the named directory, else the first one that a server names and that is on this machine.

    Raise InputError if there is no tokenizer.json in it.
    """
    said = [Path(path) for info in infos for key in ("tokenizer_path", "model_path") if (path := info.get(key))]
    for directory in [named] if named else said:
        if (directory / "tokenizer.json").is_file():
            return directory
    if named:
        raise InputError(f"{named} has no tokenizer.json: name a model's directory with --model-path")
    raise InputError("the servers' tokenizer is not on this machine: name its directory with --model-path")


def _answered(
    prompts: Sequence[RetrievalPrompt], outcome: Outcome, tokenizer: Callable[[], ModelTokenizer]
) -> dict[int, Answered]:
    def text(reply: Reply) -> str:
        return tokenizer().decode(reply.ids) if reply.text is None else reply.text

    return {number: Answered(prompts[number], text(outcome.replies[number])) for number in sorted(outcome.replies)}


def runs_of(
    servers: Sequence[Server], infos: Sequence[dict[str, Any]], answered: Sequence[dict[int, Answered]]
) -> list[Run]:
    """Return one run per server, scored on the prompts that all servers with any answers have answered."""
    common = set.intersection(*(set(one) for one in answered if one))
    runs = []
    for server, info, own in zip(servers, infos, answered, strict=True):
        shared = [one for number, one in own.items() if number in common]
        settings = {"url": server.url} | {key: info[key] for key in _SETTINGS if key in info}
        kept = tuple(one.kept() for one in own.values())
        runs.append(Run(server.name, settings, task_results(shared), needle=needle_grid(shared), answers=kept))
    return runs


def _tell_errors(servers: Sequence[Server], outcomes: Sequence[Outcome], asked: int) -> int:
    status = 0
    for server, outcome in zip(servers, outcomes, strict=True):
        if outcome.error:
            status = 1
            kept = f"{len(outcome.replies)} of {asked} answers of {server.name} are kept"
            print(f"sglang-hybrid eval: {outcome.error}; {kept}", file=sys.stderr)
    return status
