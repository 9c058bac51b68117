"""``sglang-hybrid profile --codebook``: codebooks of a model's keys, for policy hcattention.

The KV pool holds keys after rotation, so rotated keys are quantised. Rotation turns each channel with the position:
slow channels take values at the end of a context that they never have at its beginning. So keys are recorded at
positions from all over the context, and a codebook has to hold values that a codebook of keys before rotation would
not. Groups are neighbouring channels, as in the paper. Groups of the two channels that rotate together were tried and
are no better.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.tokenizer import tokens
from sglang_hybrid.commands.profile.cluster_keys import (
    Cluster,
    codebook_of,
    codebooks_to_fit,
    minibatch_kmeans,
    relative_error,
)
from sglang_hybrid.integration.decoder_layers import UnknownLayers
from sglang_hybrid.integration.model_session import ModelSession
from sglang_hybrid.integration.predictor import identity
from sglang_hybrid.integration.record_keys import record_keys
from sglang_hybrid.integration.session_flags import session_flags
from sglang_hybrid.policies.hcattention.codebook_facts import MOST_CENTROIDS, CodebookFacts
from sglang_hybrid.policies.hcattention.codebooks import Codebooks, QuantisedKeys
from sglang_hybrid.policies.scout.calibration_text import CalibrationText, NoWords, calibration_text
from sglang_hybrid.policies.scout.profile_facts import ModelIdentity
from sglang_hybrid.progress import steps


@dataclass(frozen=True)
class CodebookPlan:
    groups: int
    centroids: int
    shared: bool

    def check(self, head_dim: int, samples: int) -> None:
        """Raise InputError if these codebooks cannot be fitted. ``samples``: number of keys of a KV head."""
        if not 1 <= self.groups <= head_dim or head_dim % self.groups:
            raise InputError(f"--groups {self.groups}: {head_dim} channels cannot be cut into so many equal groups")
        if not 2 <= self.centroids <= MOST_CENTROIDS:
            raise InputError(f"--centroids {self.centroids}: must be from 2 to {MOST_CENTROIDS}")
        if samples * (self.groups if self.shared else 1) < self.centroids:
            raise InputError(
                f"{samples} keys are too few for {self.centroids} centroids: raise --key-tokens, lower --centroids, or "
                "let groups share a codebook (--shared)"
            )


@dataclass(frozen=True)
class Made:
    """Codebooks, and for each layer the relative error of keys of a text that they were not fitted on."""

    codebooks: Codebooks
    errors: list[float]

    def lines(self) -> list[str]:
        facts = self.codebooks.facts
        layers = " ".join(f"{error:.2%}" for error in self.errors)
        size = sum(table.numel() for table in self.codebooks.layers) * torch.float32.itemsize / 2**20
        return [
            f"squared error of quantised keys, as a share of their variance, of text that was not fitted on: mean "
            f"{sum(self.errors) / len(self.errors):.2%}; layers: {layers}",
            f"on the device: {facts.code_bytes} bytes of each key of a KV head, "
            f"{100 * facts.code_bytes / (4 * facts.model.head_dim):g} % of a 16-bit KV cache, and {size:.1f} MiB of "
            "codebooks",
        ]


def make_codebooks(options: argparse.Namespace, notes: dict[str, object], console: Console) -> Made:
    """Fit codebooks of a model. Raise InputError, ConfigError or ProfileError for what the user can change."""
    cluster = minibatch_kmeans()  # a missing package is reported before the model is loaded
    console.print("loading the model")
    session = ModelSession(session_flags(options, options.hybrid))
    model, longest = identity(session.runner), session.model_config.context_len
    if options.context is not None:
        longest = min(longest, options.context)
    text = _text(session, options, longest)
    plan = CodebookPlan(options.groups or model.head_dim, options.centroids, options.shared)
    plan.check(model.head_dim, sum(map(len, text.fit)))
    fits = model.layers * codebooks_to_fit(model.kv_heads, plan.groups, shared=plan.shared)
    with steps(console, 1.0) as bar:
        bar.say(f"recording keys of {text.tokens} tokens")
        try:
            keys, unseen = (
                record_keys(session.runner, windows, longest, lambda part: bar.advance(0.1 * part))
                for windows in (text.fit, text.unseen)
            )
        except UnknownLayers as unknown:
            raise InputError(f"keys of this model cannot be recorded: {unknown}") from unknown
        bar.say(f"clustering keys, {fits} codebooks of {plan.centroids}")
        notes = {**notes, "tokens": sum(map(len, text.fit)), "context": longest}
        return fit_codebooks(model, plan, keys, unseen, notes, cluster, lambda: bar.advance(0.8 / fits))


def _text(session: ModelSession, options: argparse.Namespace, longest: int) -> CalibrationText:
    hidden = session.model_config.hidden_size
    try:
        return calibration_text(lambda text: tokens(session.tokenizer, text), hidden, longest, options.key_tokens)
    except NoWords as error:
        raise InputError(f"codebooks are fitted on text, but this model has no tokenizer: {error}") from error


def fit_codebooks(
    model: ModelIdentity,
    plan: CodebookPlan,
    keys: list[torch.Tensor],
    unseen: list[torch.Tensor],
    notes: dict[str, object],
    cluster: Cluster,
    done: Callable[[], None],
) -> Made:
    """Fit on keys and measure errors on unseen, both of each layer ``[KV heads, tokens, head_dim]``.

    ``done`` is called after each codebook.
    """
    facts = CodebookFacts(
        model=model, groups=plan.groups, centroids=plan.centroids, shared=plan.shared, notes=dict(notes)
    )
    layers = [
        codebook_of(of_layer, plan.groups, plan.centroids, shared=plan.shared, cluster=cluster, done=done)
        for of_layer in keys
    ]
    codebooks = Codebooks(facts, layers)
    quantised = codebooks.part(slice(None), "cpu")
    errors = [relative_error(of_layer.float(), _decoded(quantised, n, of_layer)) for n, of_layer in enumerate(unseen)]
    return Made(codebooks, errors)


def _decoded(quantised: QuantisedKeys, layer: int, keys: torch.Tensor) -> torch.Tensor:
    """Return keys ``[KV heads, tokens, head_dim]`` after quantisation, in the same shape."""
    codes = quantised.encode(layer, keys.float().transpose(0, 1).unsqueeze(2))  # [tokens, KV heads, 1, bytes]
    indices = quantised.indices(codes).squeeze(2).permute(1, 2, 0).to(torch.int64)  # [KV heads, groups, tokens]
    tables = quantised.tables(layer)
    where = indices.unsqueeze(3).expand(-1, -1, -1, tables.shape[3])
    return tables.gather(2, where).permute(0, 2, 1, 3).flatten(2)
