"""Makes a profile: runs all steps in order, with one progress bar over all of them."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.profile.rates import measure_rates
from sglang_hybrid.commands.profile.recording import RecordingPolicy
from sglang_hybrid.commands.profile.records import LayerRecord
from sglang_hybrid.commands.profile.share_costs import ShareCosts
from sglang_hybrid.commands.profile.simulation import Budget
from sglang_hybrid.commands.profile.texts import Kind, kinds
from sglang_hybrid.commands.profile.tune import block_change, choose_bonus, choose_interval, choose_shares
from sglang_hybrid.config import HybridConfig, load_config
from sglang_hybrid.integration.calibrate import calibrate
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.integration.model_session import ModelSession, Prefilled
from sglang_hybrid.integration.predictor import identity
from sglang_hybrid.integration.session_flags import model_directory, session_flags
from sglang_hybrid.policies.scout.calibration_file import Calibration
from sglang_hybrid.policies.scout.calibration_text import CalibrationText
from sglang_hybrid.policies.scout.fit_predictor import LayerCalibration
from sglang_hybrid.policies.scout.profile import Curve, HostRates, ModelIdentity, Profile, ProfileFacts, load_profile
from sglang_hybrid.policies.scout.special_tokens import special_windows
from sglang_hybrid.progress import DECODE_STEP_COST, Steps, steps

WITHOUT_RECALL, WITH_RECALL = "without recall", "with recall at the profiled intervals"


def make_profile(options: argparse.Namespace, notes: dict[str, object], console: Console) -> tuple[Profile, Path]:
    """Make a profile and save it. Return the profile and its path.

    Raise InputError, ConfigError or ProfileError for what the user can change.
    """
    served = [*options.hybrid, f"budget_tokens={options.budget}"]
    config = load_config(None, [*served, f"scout.target_cpu_ratio={options.beta}"])
    console.print("loading the model")
    session = ModelSession(session_flags(options, served))
    model = identity(session.runner)
    _check_lengths(options, session, config)
    texts = kinds(session.tokenizer, options.text, options.windows, options.window_tokens)
    windows = sum(len(kind.fit) + 1 for kind in texts)
    fit_cost = 0 if options.predictor_of else windows * options.window_tokens
    decode_cost = options.prompts * (options.prompt_tokens + 3 * options.steps * DECODE_STEP_COST)
    with steps(console, fit_cost + decode_cost) as bar:
        if options.predictor_of:
            fitted = _reuse(options.predictor_of, model)
        else:
            fitted = _fit(session, texts, options.rank, fit_cost, bar)
        facts = _facts(model, config, options.beta, fitted.layers, notes)
        draft = Profile(facts, fitted.corrections, fitted.channels, fitted.skews, fitted.steps)
        profile = _decode(session, draft, config, _prompts(texts, options), options, bar)
    console.print("measuring this host")
    rates = measure_rates(
        model.kv_heads, model.query_heads // model.kv_heads, model.head_dim, session.runner.kv_cache_dtype,
        session.runner.dtype,
    )  # fmt: skip
    profile = profile.with_facts(rates=rates)
    path = options.out or Path("configs/profiles") / f"{_model_name(options)}-{options.budget}.safetensors"
    profile.save(path)
    return profile, path


def _prefill(session: ModelSession, prompts: Sequence[Sequence[int]], bar: Steps) -> Prefilled:
    """Prefill, and advance ``bar`` by the tokens of all prompts, layer by layer: the longest prompts take minutes."""
    tokens = sum(map(len, prompts))
    return session.prefill(prompts, lambda part: bar.advance(part * tokens))


def _model_name(options: argparse.Namespace) -> str:
    return model_directory(options).resolve().name


def _check_lengths(options: argparse.Namespace, session: ModelSession, config: HybridConfig) -> None:
    longest = options.prompt_tokens + options.steps
    if longest > session.model_config.context_len:
        raise InputError(
            f"{options.prompt_tokens} prompt tokens and {options.steps} steps are more than the model's context of "
            f"{session.model_config.context_len}: lower --prompt-tokens or --steps"
        )
    if options.prompt_tokens <= config.budget_tokens:
        raise InputError(
            f"prompts of {options.prompt_tokens} tokens fit into the budget of {config.budget_tokens}: there is "
            "nothing to select; raise --prompt-tokens or lower --budget"
        )
    needed = max(options.window_tokens, options.prompts * (longest + 2 * BLOCK_TOKENS))
    if needed > session.capacity_tokens:
        raise InputError(
            f"{options.prompts} prompts need room for {needed} tokens, the KV cache has {session.capacity_tokens}: "
            "raise --host-memory or lower --prompts"
        )


# -- the predictor -----------------------------------------------------------------------------------------------------


def _fit(session: ModelSession, texts: Sequence[Kind], rank: int | str, cost: float, bar: Steps) -> Calibration:
    bar.say(f"fitting the predictor on {', '.join(kind.name for kind in texts)}")
    text = CalibrationText(
        tuple(window for kind in texts for window in kind.fit),
        tuple(kind.unseen for kind in texts),
        special_windows(session.tokenizer, session.model_config.context_len),
    )
    try:
        return calibrate(session.runner, text, rank, lambda part: bar.advance(part * cost))
    except UnknownLayers as unknown:
        raise InputError(f"this model's queries cannot be predicted: {unknown}") from unknown


def _reuse(path: Path, model: ModelIdentity) -> Calibration:
    other = load_profile(path)
    other.check(model, other.facts.block_tokens, other.facts.budget_tokens)
    facts = other.facts
    fitted = {
        layer: LayerCalibration(correction, facts.ranks[layer], facts.cosine_raw[layer], facts.cosine_calibrated[layer])
        for layer, correction in other.corrections.items()
    }
    return Calibration(fitted, other.channels, other.skews, other.steps)


def _facts(
    model: ModelIdentity,
    config: HybridConfig,
    beta: float,
    fitted: dict[int, LayerCalibration],
    notes: dict[str, object],
) -> ProfileFacts:
    layers = model.layers

    def per_layer(read: Callable[[LayerCalibration], float], first: float) -> list[float]:
        return [round(read(fitted[layer]), 4) if layer in fitted else first for layer in range(layers)]

    return ProfileFacts(
        model=model,
        block_tokens=BLOCK_TOKENS,
        budget_tokens=config.budget_tokens,
        beta=beta,
        intervals=[1] * layers,
        bonus=[0.0] * layers,
        ranks=[fitted[layer].rank if layer in fitted else 0 for layer in range(layers)],
        cosine_raw=per_layer(lambda one: one.cosine_raw, 1.0),
        cosine_calibrated=per_layer(lambda one: one.cosine, 1.0),
        block_change=[0.0] * layers,
        curves=[],
        rates=HostRates(cpu="", threads=0, read_gb_s=0.0, attention_gb_s=0.0),
        notes=notes,
    )


# -- bonus and intervals -----------------------------------------------------------------------------------------------


def _prompts(texts: Sequence[Kind], options: argparse.Namespace) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return prompts and the tokens behind each, from joined windows. Kinds take turns, as traffic is mixed."""
    length = options.prompt_tokens + options.steps
    pairs = []
    for number in range(options.prompts):
        kind = texts[number % len(texts)]
        pieces = [kind.unseen, *kind.fit[number // len(texts) :]]
        ids = tuple(token for piece in pieces for token in piece)
        while len(ids) < length:
            ids += ids
        pairs.append((ids[: options.prompt_tokens], ids[options.prompt_tokens : length]))
    return pairs


def _decode(
    session: ModelSession,
    draft: Profile,
    config: HybridConfig,
    prompts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    options: argparse.Namespace,
    bar: Steps,
) -> Profile:
    bar.say("prefilling prompts")
    session.choose_channels(draft)
    prefilled = _prefill(session, [prompt for prompt, _ in prompts], bar)
    following = torch.tensor([behind for _, behind in prompts])
    cost = len(prompts) * DECODE_STEP_COST

    bar.say("decoding exactly, recording scores")
    budget = _budget(config, draft.facts.model)
    costs, norms, stop = _watch_costs(session, budget, draft.facts.model)
    recorder = RecordingPolicy(costs)
    session.use_policy(recorder, config, draft)
    try:
        _teacher_force(prefilled, following, lambda: bar.advance(cost))
    finally:
        stop()

    every_layer = range(draft.facts.model.layers)
    shares = choose_shares([costs.of(layer) for layer in every_layer], [math.sqrt(norms[n]) for n in every_layer])
    intervals, bonuses, changes = [], [], []
    for layer in every_layer:
        bar.say(f"choosing bonus and interval of layer {layer}")
        records: list[LayerRecord] = [recorder.record(layer)]
        bonuses.append(choose_bonus(records, budget))
        own = _with_share(budget, config, draft.facts.model, shares[layer])
        intervals.append(choose_interval(records, own, bonuses[-1], options.beta))
        changes.append(round(block_change(records, budget), 4))
    profile = draft.with_facts(
        intervals=intervals,
        bonus=bonuses,
        miss_shares=[float(f"{share:.4g}") for share in shares],
        block_change=changes,
    )

    curves = []
    for name, every in ((WITHOUT_RECALL, [0] * len(intervals)), (WITH_RECALL, intervals)):
        bar.say(f"decoding {name}")
        served = profile.with_facts(intervals=every)
        curves.append(Curve(name=name, ratios=_ratios(session, config, served, prefilled, following, bar, cost)))
    return profile.with_facts(curves=curves)


def _watch_costs(
    session: ModelSession, budget: Budget, model: ModelIdentity
) -> tuple[ShareCosts, dict[int, float], Callable[[], None]]:
    """Watch the next decode: return costs of least shares, squared norms of inputs, and a function that ends this."""
    layers = DecoderLayers(session.model)
    projections = {layer: layers.output_projection(layer) for layer in layers.ids}
    norms: dict[int, float] = dict.fromkeys(layers.ids, 0.0)  # sums do as well as means: all have as many steps

    def watch(layer: int, inputs: torch.Tensor, _positions: torch.Tensor, _batch: object) -> None:
        norms[layer] += float(inputs.float().square().sum(dim=1).mean())

    costs = ShareCosts(budget, model.query_heads // model.kv_heads, projections)
    return costs, norms, layers.on_input(watch)


def _budget(config: HybridConfig, model: ModelIdentity) -> Budget:
    group = model.query_heads // model.kv_heads  # query heads whose shares of attention a score adds up
    least = config.scout.min_miss_attention
    share = 0.0 if least == "auto" else float(least)
    min_miss_score = math.log(share * group) if share else -math.inf
    return Budget(config.budget_tokens // BLOCK_TOKENS, config.sink_blocks, config.recent_blocks, min_miss_score)


def _with_share(budget: Budget, config: HybridConfig, model: ModelIdentity, share: float) -> Budget:
    """Return a layer's budget as it is served: with its own least share, unless the settings name one for all."""
    if config.scout.min_miss_attention != "auto":
        return budget
    min_miss_score = math.log(share * (model.query_heads // model.kv_heads))
    return dataclasses.replace(budget, min_miss_score=min_miss_score, any_block=True)


def _ratios(
    session: ModelSession,
    config: HybridConfig,
    profile: Profile,
    prefilled: Prefilled,
    following: torch.Tensor,
    bar: Steps,
    cost: float,
) -> list[list[float]]:
    """Decode with the policy as it is served, and return the CPU compute ratio ``[layers][steps]``."""
    seen: list[list[float]] = [[] for _ in range(profile.facts.model.layers)]
    session.use(config.with_section(msgspec.structs.replace(config.scout, recall_adapt=False)), profile)
    session.watch_ratio(lambda layer, ratio: seen[layer].append(round(ratio, 4)))
    _teacher_force(prefilled, following, lambda: bar.advance(cost))
    return seen


def _teacher_force(prefilled: Prefilled, following: torch.Tensor, advance: Callable[[], None]) -> None:
    prefilled.rewind()
    for step in range(following.shape[1]):
        prefilled.step(following[:, step])
        advance()
