"""Settings side by side in this process, behind one prefill: perplexity, KL and retrieval."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_hybrid.commands.eval.asked_prompts import own_prompts, prompts_of_ruler
from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.model_tokenizer import ModelTokenizer
from sglang_hybrid.commands.eval.prompts import TextPrompt
from sglang_hybrid.commands.eval.report import print_report, write_report
from sglang_hybrid.commands.eval.running import Evaluation, Variant, batches, cost, new_tokens
from sglang_hybrid.config import HybridConfig, load_config
from sglang_hybrid.integration.model_session import ModelSession
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.integration.session_flags import has_cuda, model_directory, session_flags
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import code_bytes
from sglang_hybrid.policies.registry import calibrates_at_start, policy_named
from sglang_hybrid.progress import steps

_BASELINE = "full attention"
_OF_PREFILL = ("digest_dtype", "sketch_channels")
_ANY_SHAPE = KVShape(layers=1, kv_heads=1, key_dim=128, value_dim=128, itemsize=2)  # tells settings of codes apart
# The few prompts of a batch would fit in GPU memory, where attention is exact.
_UNLESS_NAMED = ("whole_requests=never",)


def evaluate_in_process(options: argparse.Namespace, command: str) -> int:
    """The exit status. Raises InputError or ConfigError."""
    console = Console(stderr=True)
    variants = [Variant(_BASELINE, {"policy": "full"}, load_config(None, ["policy=full"]))]
    variants += [Variant(*_named(text)) for text in options.run or [""]]
    if len({variant.name for variant in variants}) < len(variants):
        raise InputError(
            "two runs have the same name: begin each with a name of its own, as in --run 'raw: prediction=raw'"
        )
    # before the model is loaded: what is missing is said at once
    of_ruler = prompts_of_ruler(
        options, lambda: ModelTokenizer(model_directory(options)), console, check_tokenizer=True
    )
    console.print("loading the model")
    session = _load(options, variants)
    prompts = [*own_prompts(options, lambda: session.tokenizer), *of_ruler]
    if not prompts:
        raise InputError("nothing to do: name --tasks, --ruler or --longbench files")
    longest = max(len(prompt.ids) + new_tokens(prompt) for prompt in prompts)
    if longest > session.model_config.context_len:
        raise InputError(
            f"prompts of up to {longest} tokens, decoded ones included, exceed the model's context of "
            f"{session.model_config.context_len}: lower --lengths, --prompt-tokens or --ruler"
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
    print_report(runs)
    for path in write_report(options.out, runs, command):
        print(path)
    return 0


def _load(options: argparse.Namespace, variants: Sequence[Variant]) -> ModelSession:
    # the kernels are told once how long a list can be
    budget = max(variant.config.budget_tokens for variant in variants)
    shared = _settings_of_prefill([variant.config for variant in variants[1:]])
    on_gpu = has_cuda(options)
    # sketches hold the channels that a calibration chose, as in the servers that have one
    calibrates = any(calibrates_at_start(variant.config, on_gpu=on_gpu) for variant in variants)
    settings = [*shared, *_codes([variant.config for variant in variants]), f"budget_tokens={budget}"]
    settings.append("profile=auto" if calibrates else "prediction=none")
    try:
        session = ModelSession(session_flags(options, settings, as_served=True))
    except Refusal as refusal:
        raise InputError(str(refusal)) from refusal
    _choose_channels(session, variants)
    return session


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


def _codes(runs: Sequence[HybridConfig]) -> list[str]:
    """Settings by which prefill keeps codes of keys, which all runs share. Raises InputError if they differ."""
    coded = [run for run in runs if policy_named(run.policy).code_bytes]
    if len({(run.policy, code_bytes(run, _ANY_SHAPE)) for run in coded}) > 1:
        raise InputError(
            f"runs differ in what prefill keeps of every key (policy {', '.join(run.policy for run in coded)}), and "
            "all runs share one: compare them in evaluations of their own"
        )
    if not coded:
        return []
    policy, values = coded[0].policy, coded[0].by_key()
    return [f"policy={policy}", *(f"{key}={values[key]}" for key in values if key.startswith(f"{policy}."))]


def _choose_channels(session: Any, variants: Sequence[Any]) -> None:
    """Sketches are made in prefill, which all runs share: so they share what sketches hold, the profiles' choice."""
    from sglang_hybrid.policies.scout.profile import ProfileError, load_profile

    chosen = None
    for name in dict.fromkeys(variant.config.profile_file for variant in variants if variant.config.profile_file):
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


def _named(text: str) -> tuple[str, dict[str, object], HybridConfig]:
    """``NAME: key=value key=value``; the name may be left out."""
    name, colon, rest = text.partition(":")
    if not colon or "=" in name:
        name, rest = "", text
    settings = rest.replace(",", " ").split()
    given: dict[str, object] = dict(setting.partition("=")[::2] for setting in settings)
    return name.strip() or " ".join(settings) or "defaults", given, load_config(None, [*_UNLESS_NAMED, *settings])
