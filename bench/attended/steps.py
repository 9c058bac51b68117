"""Decode steps behind one prompt, all steps at once: the model is fed the answer that full attention gave.

So a variant's steps do not depend on tokens that the variant would have chosen, and its logits can be compared step by
step. Hidden states, and so keys and values of the answer's tokens, are the variant's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.attended.attention import Mean, Slots, attend
from bench.attended.block_keys import approximate, coded, estimates
from bench.attended.calibrated import Calibrated
from bench.attended.plain_model import Cache, PlainModel
from bench.attended.selection import Row, Rules, Selected, select
from bench.attended.variants import Variant
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops import reference


@dataclass(frozen=True)
class PromptLayer:
    """What one layer has of a prompt. Shapes are ``[KV heads, tokens, dim]`` unless they are given."""

    keys: torch.Tensor
    values: torch.Tensor
    approximated: torch.Tensor  # keys of whole blocks, as digests and sketches represent them
    coded_keys: torch.Tensor
    coded_values: torch.Tensor
    mean_value: torch.Tensor  # [KV heads, dim]: of all tokens behind the sink
    last_query: torch.Tensor  # [1, heads, dim]


@dataclass(frozen=True)
class Answered:
    """A prompt and the answer that full attention gave."""

    length: int  # tokens of the prompt
    layers: list[PromptLayer]
    answer: list[int]  # its first token is the prompt's prediction, which no variant changes

    @property
    def steps(self) -> int:
        """Number of decode steps: each is fed one token of the answer and predicts the next one."""
        return len(self.answer) - 1


@dataclass(frozen=True)
class Simulated:
    """The decode steps of one variant."""

    logits: torch.Tensor  # [steps, vocabulary]
    late: torch.Tensor  # [steps]: blocks of a (layer, KV head) that the step reads from host memory, on average


def greedy(model: PlainModel, first: torch.Tensor, cache: Cache, most: int) -> list[int]:
    """Return the answer of full attention, at most ``most`` tokens. ``first``: logits of the answer's first token."""
    answer = [int(first.argmax())]
    while len(answer) < most and answer[-1] not in model.shape.ends:
        answer.append(int(model.run(answer[-1:], cache).argmax()))
    return answer


def answered(model: PlainModel, calibrated: Calibrated, rules: Rules, prompt: Sequence[int], most: int) -> Answered:
    """Run ``prompt``, and decode at most ``most`` tokens with full attention."""
    cache = model.new_cache(len(prompt) + most)
    last_queries: dict[int, torch.Tensor] = {}
    first = model.run(prompt, cache, last_queries)
    answer = greedy(model, first, cache, most)
    layers = []
    for layer, last_query in last_queries.items():
        keys, values = cache.first(layer, len(prompt))
        of_keys, of_values = calibrated.steps[layer]
        layers.append(
            PromptLayer(
                keys,
                values,
                approximate(keys, calibrated.channels[layer]),
                coded(keys, of_keys),
                coded(values, of_values),
                values[:, rules.settings.sink * BLOCK_TOKENS :].float().mean(dim=1),
                last_query,
            )
        )
    return Answered(len(prompt), layers, answer)


def full_attention(model: PlainModel, row: Answered) -> torch.Tensor:
    """Return the logits ``[steps, vocabulary]`` of steps that attend to everything."""
    visible = _visible(row, model.device)

    def attend_to_all(
        layer: int, _inputs: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        prompt = row.layers[layer]
        own = (_behind(prompt.keys, keys), _behind(prompt.values, values))
        return attend(queries, *own, visible[:, None].expand(-1, len(prompt.keys), -1), model.shape.scale)

    return model.logits(model.forward(row.answer[:-1], row.length, attend_to_all))


def simulate(model: PlainModel, calibrated: Calibrated, rules: Rules, row: Answered, variant: Variant) -> Simulated:
    """Return the steps of ``variant`` behind the same prompt, fed the same tokens."""
    steps = VariantSteps(model, calibrated, rules, row, variant)
    logits = model.logits(model.forward(row.answer[:-1], row.length, steps.attend))
    return Simulated(logits, torch.stack(steps.late).mean(dim=0))


class VariantSteps:
    """The attention of one variant, layer by layer."""

    def __init__(
        self, model: PlainModel, calibrated: Calibrated, rules: Rules, row: Answered, variant: Variant
    ) -> None:
        self._scale, self._calibrated, self._rules, self._variant = model.shape.scale, calibrated, rules, variant
        self._row = row
        self._blocks = Row.of(row.length, row.steps, rules, model.device)
        self._visible = _visible(row, model.device)
        self._positions = row.length + torch.arange(row.steps, device=model.device)
        self._inputs_before = torch.empty(0)  # of the layer before
        self.late: list[torch.Tensor] = []  # by layer, [steps]

    def attend(
        self, layer: int, inputs: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        prompt, variant = self._row.layers[layer], self._variant
        predictor = self._calibrated.predictors.get(layer)
        ahead = predictor.query(self._inputs_before, self._positions) if predictor else queries
        self._inputs_before = inputs
        all_keys, all_values = _behind(prompt.keys, keys), _behind(prompt.values, values)
        real, predicted = self._estimates(layer, queries, all_keys), self._estimates(layer, ahead, all_keys)
        scores, scores_ahead = (
            reference.block_scores(logits, self._blocks.counts, self._scale) for logits in (real, predicted)
        )
        selected = select(self._blocks, scores, scores_ahead, layer, self._rules, variant.first_share)
        self.late.append(selected.late.sum(dim=2).float().mean(dim=1))
        near = self._blocks.near[1:, None]
        slots = None
        if variant.slot_codes:
            of_keys, of_values = self._calibrated.steps[layer]
            slots = Slots(
                self._of_tokens(selected.resident | near),
                torch.cat((prompt.coded_keys, coded(keys.transpose(0, 1), of_keys)), dim=1),
                torch.cat((prompt.coded_values, coded(values.transpose(0, 1), of_values)), dim=1),
            )
        return attend(
            queries,
            all_keys,
            all_values,
            self._of_tokens(selected.attended | near) & self._visible[:, None],
            self._scale,
            bias=self._bias(real, predicted, selected),
            slots=slots,
            mean=self._mean(real, selected, prompt.mean_value) if variant.mean_part else None,
        )

    def _estimates(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the estimates ``[entries, KV heads, group, blocks]`` for the prompt's last query and those of steps.

        Blocks that are not whole yet have an arbitrary estimate: they are tails, whose estimates do not count.
        """
        prompt = self._row.layers[layer]
        answer = approximate(keys[:, prompt.approximated.shape[1] :], self._calibrated.channels[layer])
        approximated = torch.cat((prompt.approximated, answer), dim=1)
        found = estimates(torch.cat((prompt.last_query, queries)), approximated, self._scale)
        blocks = self._blocks.age.shape[1]
        found = torch.nn.functional.pad(found, (0, blocks - found.shape[3]))
        return reference.without_tail(found, self._blocks.counts)

    def _bias(self, real: torch.Tensor, predicted: torch.Tensor, selected: Selected) -> torch.Tensor | None:
        """Return the bias of sink, recent and tail blocks, for each token: ``[steps, KV heads, group, tokens]``."""
        settings, variant = self._rules.settings, self._variant
        if variant.bias == "none":
            return None
        of_query = (real, selected.attended) if variant.bias == "real" else (predicted, selected.expected)
        logits, attended = of_query[0][1:], of_query[1]
        counts = self._blocks.counts[1:]
        bias = reference.near_bias(logits, attended, counts, self._scale, settings.sink, settings.recent)
        return variant.bias_part * bias[..., None] * self._of_tokens(self._blocks.near[1:])[:, None, None]

    def _mean(self, real: torch.Tensor, selected: Selected, value: torch.Tensor) -> Mean:
        """Return the mean of values with the estimated attention of the candidates that are left out."""
        left_out = self._blocks.candidates[1:, None] & ~selected.attended
        mass = (real[1:] * self._scale).masked_fill(~left_out[:, :, None], -torch.inf).logsumexp(dim=3)
        return Mean(mass + math.log(self._variant.mean_part), value)

    def _of_tokens(self, blocks: torch.Tensor) -> torch.Tensor:
        """Convert a mask ``[..., blocks]`` to one of their tokens, as many as the last step has."""
        return blocks.repeat_interleave(BLOCK_TOKENS, dim=-1)[..., : self._row.length + self._row.steps]


def _behind(prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Append keys or values of the answer ``[steps, KV heads, dim]`` to the prompt's ``[KV heads, tokens, dim]``."""
    return torch.cat((prompt, answer.transpose(0, 1)), dim=1)


def _visible(row: Answered, device: torch.device) -> torch.Tensor:
    """Return which tokens each step may attend to, its own included: ``[steps, tokens]``."""
    token = torch.arange(row.length + row.steps, device=device)
    return token <= token[row.length :, None]
