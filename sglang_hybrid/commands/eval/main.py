"""``sglang-hybrid eval``: accuracy of settings against full attention on the same prompts."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.model import DefaultModelError
from sglang_hybrid.config import ConfigError, HybridConfig, load_config
from sglang_hybrid.integration.session_flags import add_model_flags, session_flags

TASKS = ("text", "needle", "multi-needle", "lines")
_BASELINE = "full attention"
_OF_PREFILL = ("digest_dtype", "sketch_channels")


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    try:
        return _evaluate(options, shlex.join(["sglang-hybrid", "eval", *argv]))
    except (InputError, ConfigError, DefaultModelError) as error:
        print(f"sglang-hybrid eval: {error}", file=sys.stderr)
        return 2


def _evaluate(options: argparse.Namespace, command: str) -> int:
    from rich.console import Console

    from sglang_hybrid.commands.eval.prompts import TextPrompt
    from sglang_hybrid.commands.eval.report import print_report, write_report
    from sglang_hybrid.commands.eval.running import Evaluation, Variant, batches, cost
    from sglang_hybrid.integration.model_session import ModelSession
    from sglang_hybrid.integration.refusals import Refusal
    from sglang_hybrid.progress import steps

    console = Console(stderr=True)
    variants = [Variant(_BASELINE, {"policy": "full"}, load_config(None, ["policy=full"]))]
    variants += [Variant(*_named(text)) for text in options.run or [""]]
    if len({variant.name for variant in variants}) < len(variants):
        raise InputError(
            "two runs have the same name: begin each with a name of its own, as in --run 'raw: prediction=raw'"
        )
    # the kernels are told once how long a list can be
    budget = max(variant.config.budget_tokens for variant in variants)
    console.print("loading the model")
    shared = _settings_of_prefill([variant.config for variant in variants[1:]])
    session = ModelSession(session_flags(options, [*shared, f"budget_tokens={budget}", "prediction=none"]))
    _choose_channels(session, variants)
    prompts = make_prompts(options, session.tokenizer)
    longest = max(len(prompt.ids) for prompt in prompts) + options.decode_tokens
    if longest > session.model_config.context_len:
        raise InputError(
            f"prompts of up to {longest} tokens, decoded ones included, exceed the model's context of "
            f"{session.model_config.context_len}: lower --lengths or --prompt-tokens"
        )
    if longest + 64 > session.capacity_tokens:
        raise InputError(
            f"a prompt of {longest} tokens does not fit the KV cache of {session.capacity_tokens}: raise --host-memory"
        )
    groups = batches(prompts, session.capacity_tokens)
    with steps(console, sum(cost(group, len(variants)) for group in groups)) as bar:
        evaluation = Evaluation(session, variants, bar)
        try:
            evaluation.check()
        except Refusal as refusal:
            raise InputError(str(refusal)) from refusal
        for group in groups:
            if isinstance(group[0], TextPrompt):
                evaluation.texts([one for one in group if isinstance(one, TextPrompt)])
            else:
                evaluation.retrieval([one for one in group if not isinstance(one, TextPrompt)])
    runs = evaluation.runs()
    print_report(runs, Console())
    for path in write_report(options.out, runs, command):
        print(path)
    return 0


def _settings_of_prefill(runs: Sequence[HybridConfig]) -> list[str]:
    """What prefill does by settings, which all runs share: digests and sketches. Raises InputError if they differ."""
    for name in _OF_PREFILL:
        values = {str(getattr(config, name)) for config in runs}
        if len(values) > 1:
            raise InputError(
                f"runs differ in {name} ({', '.join(sorted(values))}), which prefill works by, and all runs share one: "
                "compare them in evaluations of their own"
            )
    return [f"{name}={getattr(runs[0], name)}" for name in _OF_PREFILL]


def _choose_channels(session: Any, variants: Sequence[Any]) -> None:
    """Sketches are made in prefill, which all runs share: so they share what sketches hold, the profiles' choice."""
    from sglang_hybrid.policies.scout.profile import ProfileError, load_profile

    chosen = None
    for name in dict.fromkeys(variant.config.profile for variant in variants if variant.config.profile != "none"):
        try:
            profile = load_profile(Path(name))
        except ProfileError as error:
            raise InputError(str(error)) from error
        orders = {layer: order.tolist() for layer, order in profile.channels.items()}
        if chosen not in (None, orders):
            raise InputError(
                "the profiles of these runs choose different channels for sketches: compare them one by one"
            )
        chosen = orders
        session.choose_channels(profile)


def make_prompts(options: argparse.Namespace, tokenizer: Any) -> list[Any]:
    """Raises InputError."""
    from sglang_hybrid.commands.eval import lines, longbench, multi_needle, needle, text
    from sglang_hybrid.commands.eval.haystack import Haystack

    asked, repeats, seed = options.tasks, options.repeats, options.seed
    read = text.read_text(options.text)
    haystack = Haystack(tokenizer, read)
    prompts: list[Any] = []
    if "text" in asked:
        ids = tokenizer.encode(read, add_special_tokens=False)
        prompts += text.windows(ids, options.windows, options.prompt_tokens, options.decode_tokens)
    if "needle" in asked:
        prompts += needle.needle_prompts(haystack, options.lengths, options.depths, repeats, seed)
    if "multi-needle" in asked:
        prompts += multi_needle.multi_needle_prompts(haystack, options.lengths, repeats=repeats, seed=seed)
    if "lines" in asked:
        prompts += lines.lines_prompts(haystack, options.lengths, repeats * len(options.depths), seed)
    for file in options.longbench:
        prompts += longbench.longbench_prompts(tokenizer, longbench.read_records(file), max(options.lengths))
    if not prompts:
        raise InputError("nothing to do: name --tasks or --longbench files")
    return prompts


def _named(text: str) -> tuple[str, dict[str, object], HybridConfig]:
    """``NAME: key=value key=value``; the name may be left out."""
    name, colon, rest = text.partition(":")
    if not colon or "=" in name:
        name, rest = "", text
    settings = rest.replace(",", " ").split()
    given: dict[str, object] = dict(setting.partition("=")[::2] for setting in settings)
    return name.strip() or " ".join(settings) or "defaults", given, load_config(None, settings)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid eval",
        description="Compare settings with full attention on the same prompts: perplexity and KL over text that is "
        "decoded token by token, and retrieval. Prefill is exact and shared by all runs.",
        epilog="example: sglang-hybrid eval --tasks text needle --run 'small: budget_tokens=1024' "
        "--run 'raw: budget_tokens=1024 prediction=raw'",
    )
    add_model_flags(parser)
    what = parser.add_argument_group("what to compare")
    what.add_argument(
        "--run", action="append", metavar="'[NAME:] KEY=VALUE ...'",
        help="settings as in serve --hybrid; give it several times to compare (default: one run with the defaults). "
        "Full attention is always the first",
    )  # fmt: skip
    what.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), help="default: all")
    what.add_argument("--longbench", type=Path, nargs="+", default=[], metavar="JSONL", help="LongBench-format files")
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE",
        help="to predict, and to hide needles in (default: Python's language reference)",
    )  # fmt: skip
    text.add_argument("--windows", type=int, default=4, help="places in the text, evenly spread (default: 4)")
    text.add_argument("--prompt-tokens", type=int, default=6000, help="before each of them (default: 6000)")
    text.add_argument("--decode-tokens", type=int, default=64, help="decoded behind them (default: 64)")
    retrieval = parser.add_argument_group("retrieval")
    retrieval.add_argument("--lengths", type=int, nargs="+", default=[4096, 6144, 8000], help="tokens of the prompts")
    retrieval.add_argument(
        "--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9], help="0 (beginning) to 1, of the needle"
    )
    retrieval.add_argument("--repeats", type=int, default=1, help="prompts per length and depth (default: 1)")
    retrieval.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("eval"), help="directory of results (default: eval)")
    return parser.parse_args(argv)
