"""Compares settings in this process after one shared prefill: perplexity, KL and retrieval."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_hybrid.commands.eval.asked_prompts import own_prompts, prompts_of_ruler
from sglang_hybrid.commands.eval.errors import INTERRUPTED, InputError
from sglang_hybrid.commands.eval.model_tokenizer import ModelTokenizer
from sglang_hybrid.commands.eval.report import print_report, write_report
from sglang_hybrid.commands.eval.running import Evaluation, Variant, batches, cost, new_tokens
from sglang_hybrid.config import HybridConfig, load_config
from sglang_hybrid.integration.model_session import ModelSession
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.integration.session_flags import has_cuda, model_directory, session_flags
from sglang_hybrid.policies.registry import PolicyError, calibrates_at_start, policy_named
from sglang_hybrid.progress import steps

_BASELINE = "full attention"
_OF_PREFILL = ("digest_dtype", "sketch_channels")  # settings that prefill depends on, beside Policy.code_settings
# The few prompts of a batch would fit in GPU memory, where attention is exact.
_UNLESS_NAMED = ("whole_requests=never",)


def evaluate_in_process(options: argparse.Namespace, command: str) -> int:
    """Evaluate, print and write the report, also after an interruption. Return the exit status.

    Raise InputError or ConfigError for wrong flags, and KeyboardInterrupt if nothing was measured before it.
    """
    console = Console(stderr=True)
    variants = [Variant(_BASELINE, {"policy": "full"}, load_config(None, ["policy=full"]))]
    variants += [Variant(*_named(text)) for text in options.run or [""]]
    if len({variant.name for variant in variants}) < len(variants):
        raise InputError(
            "two runs have the same name: begin each with a name of its own, as in --run 'raw: prediction=raw'"
        )
    # before the model is loaded, so that a missing package or file is reported at once
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
        except (Refusal, PolicyError) as refusal:
            raise InputError(str(refusal)) from refusal
        try:
            for group in groups:
                evaluation.measure(group)
        except KeyboardInterrupt:
            if not evaluation.measured:
                raise
    runs = evaluation.runs()
    print_report(runs)
    for path in write_report(options.out, runs, command):
        print(path)
    if evaluation.measured == len(prompts):
        return 0
    console.print(f"interrupted: the report is of the first {evaluation.measured} of {len(prompts)} prompts")
    return INTERRUPTED


def _load(options: argparse.Namespace, variants: Sequence[Variant]) -> ModelSession:
    # The kernels get the maximum length of a list once, when the model is loaded.
    budget = max(variant.config.budget_tokens for variant in variants)
    shared = _settings_of_prefill([variant.config for variant in variants[1:]])
    on_gpu = has_cuda(options)
    # Sketches hold the channels that a calibration chose, as in servers with a calibration.
    calibrates = any(calibrates_at_start(variant.config, on_gpu=on_gpu) for variant in variants)
    settings = [*shared, f"budget_tokens={budget}", "profile=auto" if calibrates else "prediction=none"]
    try:
        session = ModelSession(session_flags(options, settings, as_served=True))
    except (Refusal, PolicyError) as refusal:
        raise InputError(str(refusal)) from refusal
    _choose_channels(session, variants)
    return session


def _settings_of_prefill(runs: Sequence[HybridConfig]) -> list[str]:
    """Return the settings of what prefill keeps of keys. All runs share them: raise InputError if they differ."""
    coded = [run for run in runs if policy_named(run.policy).code_bytes]
    shared = _shared([{name: str(getattr(run, name)) for name in _OF_PREFILL} for run in runs])
    if not coded:
        return shared
    shared += _shared([_settings_of_codes(run) for run in coded])
    kept = policy_named(coded[0].policy)
    without = [run.policy for run in runs if policy_named(run.policy).needs.digests and not kept.needs.digests]
    if without:
        raise InputError(
            f"policy {without[0]} needs digests and policy {kept.name} keeps none: compare them in evaluations of "
            "their own"
        )
    return shared


def _settings_of_codes(run: HybridConfig) -> dict[str, str]:
    """Return the policy and those of its settings that codes of keys depend on."""
    policy, values = policy_named(run.policy), run.by_key()
    return {"policy": policy.name} | {
        name: str(values[name]) for name in (f"{policy.name}.{setting}" for setting in policy.code_settings)
    }


def _shared(runs: Sequence[dict[str, str]]) -> list[str]:
    for name in runs[0]:
        values = {run.get(name, "") for run in runs}
        if len(values) > 1:
            raise InputError(
                f"runs differ in {name} ({', '.join(sorted(values))}), which prefill works by, and all runs share one: "
                "compare them in evaluations of their own"
            )
    return [f"{name}={value}" for name, value in runs[0].items()]


def _choose_channels(session: Any, variants: Sequence[Any]) -> None:
    """Apply the profiles' choice of sketch channels. Raise InputError if choices differ: all runs share one prefill."""
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
    """Parse ``NAME: key=value key=value`` into name, settings and config. The name may be left out."""
    name, colon, rest = text.partition(":")
    if not colon or "=" in name:
        name, rest = "", text
    settings = rest.replace(",", " ").split()
    given: dict[str, object] = dict(setting.partition("=")[::2] for setting in settings)
    return name.strip() or " ".join(settings) or "defaults", given, load_config(None, [*_UNLESS_NAMED, *settings])
