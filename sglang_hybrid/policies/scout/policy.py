"""Policy ``scout``: a small resident set, and the best blocks beyond it, which are selected one layer ahead.

Every (row, KV head) attends to its resident blocks with the real query: sink, recent and tail blocks, and as many other
blocks as the budget holds. The misses of a step are blocks that are not resident, but score well enough for the budget
or get enough estimated attention. The miss server computes attention over them with a predicted query, and starts while
the layer before still runs. When the real query is known, the estimated error of the misses' weight is corrected. From
time to time a layer recalls: the blocks that the real query selects become resident, from the next step on.

Attended blocks stand for all blocks that could have been selected: the logits of sink, recent and tail blocks are
lowered by the logarithm of the attended blocks' estimated share of the attention of all these candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import BlockList, DecodeBatch, LayerCache
from sglang_hybrid.memory.prompt_queries import PromptQueries
from sglang_hybrid.memory.resident import ResidentSet
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import DecodePolicy
from sglang_hybrid.policies.scout.recall import RecallSchedule
from sglang_hybrid.policies.scout.rules import ScoutRules
from sglang_hybrid.policies.scout.tuning import Tuning
from sglang_hybrid.worker.miss_server import MissServer, PendingAttention


@dataclass(frozen=True)
class Selection:
    """The blocks that one layer attends to in one step: positions ``[rows, KV heads, n]`` in the rows' sequences."""

    near: torch.Tensor  # sink, recent, tail and resident blocks
    misses: torch.Tensor
    recalled: torch.Tensor  # blocks that become resident if the layer recalls: the best selected ones
    near_bias: torch.Tensor | None = None  # [rows, KV heads, group], added to logits of sink, recent and tail blocks


@dataclass(frozen=True)
class _Begun:
    """A layer whose misses are being computed."""

    query: torch.Tensor  # with which the misses are computed
    selection: Selection
    misses: BlockList
    posted: PendingAttention


class ScoutPolicy(DecodePolicy):
    def __init__(
        self,
        config: HybridConfig,
        rules: ScoutRules,
        misses: MissServer,
        tuning: Tuning,
        prompts: PromptQueries | None = None,
        rows: int = 1,
    ) -> None:
        self._misses = misses
        self._budget_blocks = config.budget_tokens // BLOCK_TOKENS
        self._sink = config.sink_blocks
        self._recent = config.recent_blocks
        self._rules = rules
        self._bonus = tuning.bonus
        self._miss_shares = tuning.miss_shares
        self._any_block = tuning.any_block
        self._slots = max(0, rules.resident_tokens // BLOCK_TOKENS - self._always)
        self._rows = rows
        self._prompts = prompts or PromptQueries(rows)
        self.recall = RecallSchedule(tuning.intervals, tuning.beta, tuning.adapt, rules.early_recalls)
        self._resident: dict[int, ResidentSet] = {}
        self._ahead: dict[int, _Begun] = {}
        self._fresh: set[int] = set()  # rows that have not decoded yet
        self._first_length = torch.zeros(rows, dtype=torch.int64)  # of each row, at its first decode step
        self._steps = torch.empty(0, dtype=torch.int64)  # decode steps of this batch's rows, this one included
        self._begin = torch.empty(0, dtype=torch.int64)  # indices of rows of this batch that decode for the first time
        self._leave = torch.empty(0, dtype=torch.int64)  # indices of rows with a block that is no longer recent
        self._selected = self._hits = torch.zeros((), dtype=torch.int64)  # blocks so far; hits: of them resident

    # -- steps and rows ----------------------------------------------------------------------

    def reset_rows(self, rows: list[int]) -> None:
        self._fresh.update(rows)

    def begin_step(self, batch: DecodeBatch) -> None:
        self._ahead.clear()
        fresh = [row in self._fresh for row in batch.rows_on_host]
        self._fresh.difference_update(batch.rows_on_host)
        opens = [length % BLOCK_TOKENS == 1 for length in batch.lengths_on_host]
        device = batch.lengths.device
        self._first_length = self._first_length.to(device)
        self._begin = torch.tensor([i for i, new in enumerate(fresh) if new], dtype=torch.int64, device=device)
        leave = [i for i, (new, opened) in enumerate(zip(fresh, opens, strict=True)) if opened and not new]
        self._leave = torch.tensor(leave, dtype=torch.int64, device=device)
        self._first_length[batch.rows[self._begin]] = batch.lengths[self._begin]
        self._steps = batch.lengths - self._first_length[batch.rows] + 1
        if max(batch.lengths_on_host, default=0) > self._always * BLOCK_TOKENS:
            self._misses.wake()

    def readings(self) -> Readings:
        return Readings(
            selected_blocks=int(self._selected),
            resident_blocks=int(self._hits),
            recall_intervals=tuple(self.recall.intervals),
        )

    @property
    def _always(self) -> int:
        return self._sink + self._recent + 1

    # -- one layer ---------------------------------------------------------------------------

    def ahead(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> None:
        self._ahead[cache.layer] = self._begin_layer(query, cache, batch, scale)

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        begun = self._ahead.pop(cache.layer, None) or self._begin_layer(query, cache, batch, scale)
        near = self._block_list(begun.selection.near, cache, batch)
        bias = self._bias_of_blocks(begun.selection, batch.block_counts(cache.block_tokens))
        local = reference.attend_blocks(query, cache.keys, cache.values, near.ids, near.fill, scale, bias)
        missed, lse = begun.posted.collect()
        if self._rules.shifts and begun.query is not query:
            lse = lse + self._shift(query, begun, cache, scale)
        out, _ = reference.merge(*local, missed, lse)
        due = self.recall.due(cache.layer, self._steps)
        if due.any():
            recalled = begun.selection.recalled[due]
            if self._rules.recalls_by_real_query and begun.query is not query:
                recalled = self._wanted(query[due], cache, batch.part(due.nonzero()[:, 0]), scale)
            self._resident[cache.layer].replace(batch.rows[due], recalled)
        return out.to(query.dtype)

    def _bias_of_blocks(self, selection: Selection, counts: torch.Tensor) -> torch.Tensor | None:
        if selection.near_bias is None:
            return None
        always = reference.is_forced(selection.near, counts, self._sink, self._recent)
        return selection.near_bias[..., None] * always[:, :, None, :]

    @staticmethod
    def _shift(query: torch.Tensor, begun: _Begun, cache: LayerCache, scale: float) -> torch.Tensor:
        pages, listed = begun.misses.ids.clamp(min=0), begun.misses.ids != reference.NO_BLOCK
        real, ahead = (cache.estimates(asked, pages, 0.0, scale) for asked in (query, begun.query))
        return reference.lse_shift(real, ahead, listed, scale)

    def _begin_layer(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> _Begun:
        selection = self.select(query, cache, batch, scale)
        misses = self._block_list(selection.misses, cache, batch)
        if self.on_ratio or self.recall.adapts:
            self._tell_ratio(misses, batch, cache)
        return _Begun(query, selection, misses, self._misses.post(query, cache, misses, scale, batch.step))

    def _tell_ratio(self, misses: BlockList, batch: DecodeBatch, cache: LayerCache) -> None:
        missed = (misses.ids != reference.NO_BLOCK).sum(dim=2).float().mean(dim=1) / self._budget_blocks
        # a row within the budget has no misses: it says nothing about the intervals that longer rows need
        if (longer := missed[batch.block_counts(cache.block_tokens) > self._budget_blocks]).numel():
            self.recall.observe(cache.layer, float(longer.mean()))
        if self.on_ratio and missed.numel():
            self.on_ratio(cache.layer, float(missed.mean()))

    def select(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> Selection:
        counts = batch.block_counts(cache.block_tokens)
        logits = self._estimates(query, cache, batch, scale)
        scores = self._scores_of(logits, counts, scale)
        self._prepare(query, cache, batch, scale, scores)
        listed = self._listed(cache.layer, batch.rows, counts)
        chosen, is_resident = self._choose(scores, listed, counts, cache.layer)
        forced = reference.is_forced(chosen, counts, self._sink, self._recent)
        always, selected = map(_compact, reference.split(chosen, forced))
        here = is_resident.gather(2, selected.clamp(min=0)) & (selected != reference.NO_BLOCK)
        self._selected = self._selected.to(here.device) + (selected != reference.NO_BLOCK).sum()
        self._hits = self._hits.to(here.device) + here.sum()
        both, missing = reference.split(selected, here)
        misses = self._worth_it(missing, scores, is_resident, counts, cache.layer, query.shape[1] // scores.shape[1])
        resident_part = both if self._rules.only_selected else listed
        recalled = self._best_for_slots(selected, scores)
        near, misses = _compact(torch.cat((always, resident_part), dim=2)), _compact(misses)
        bias = None
        if self._rules.stands_for_all:
            attended = reference.is_listed(torch.cat((near, misses), dim=2), logits.shape[3])
            bias = reference.near_bias(logits, attended, counts, scale, self._sink, self._recent)
        return Selection(near, misses, recalled, bias)

    def _listed(self, layer: int, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the resident blocks of these rows, without sink, recent and tail blocks."""
        listed = self._resident[layer].of(rows)
        always = reference.is_forced(listed, counts, self._sink, self._recent)
        return listed.masked_fill(always | (listed >= counts[:, None, None]), reference.NO_BLOCK)

    def _wanted(self, query: torch.Tensor, cache: LayerCache, rows: DecodeBatch, scale: float) -> torch.Tensor:
        """Return the blocks that become resident for these rows, by this query."""
        counts = rows.block_counts(cache.block_tokens)
        scores = self._scores_of(self._estimates(query, cache, rows, scale), counts, scale)
        chosen, _ = self._choose(scores, self._listed(cache.layer, rows.rows, counts), counts, cache.layer)
        forced = reference.is_forced(chosen, counts, self._sink, self._recent)
        return self._best_for_slots(_compact(reference.split(chosen, forced)[1]), scores)

    def _prepare(
        self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float, scores: torch.Tensor
    ) -> None:
        """Update the resident set: first blocks of rows that start to decode, and blocks that are no longer recent."""
        if cache.layer not in self._resident:
            heads = cache.keys.shape[1]
            self._resident[cache.layer] = ResidentSet(self._rows, heads, self._slots, query.device)
        resident = self._resident[cache.layer]
        if len(self._begin):
            rows = batch.part(self._begin)
            asked = self._prompts.of(cache.layer, rows.rows, otherwise=query[self._begin])
            resident.forget(rows.rows)
            resident.replace(rows.rows, self._wanted(asked, cache, rows, scale))
        if len(self._leave):
            rows = batch.part(self._leave)
            left = rows.block_counts(cache.block_tokens) - 1 - self._recent - 1
            entering = left >= self._sink
            resident.admit(rows.rows[entering], left[entering], scores[self._leave][entering])

    @staticmethod
    def _estimates(query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        estimates = cache.estimates(query, batch.page_table, reference.DIGEST_SPREAD, scale)
        return reference.without_tail(estimates, batch.block_counts(cache.block_tokens))

    def _scores_of(self, logits: torch.Tensor, counts: torch.Tensor, scale: float) -> torch.Tensor:
        scores = reference.block_scores(logits, counts, scale)
        return scores.logsumexp(dim=1, keepdim=True).expand_as(scores) if self._rules.per_layer else scores

    def _choose(
        self, scores: torch.Tensor, listed: torch.Tensor, counts: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best blocks' positions, resident ones favoured, and for every block whether it is resident."""
        is_resident = reference.is_listed(listed, scores.shape[2])
        ranked = scores + self._bonus[layer] * is_resident
        return reference.select_blocks(ranked, counts, self._budget_blocks, self._sink, self._recent), is_resident

    def _worth_it(
        self,
        missing: torch.Tensor,
        scores: torch.Tensor,
        is_resident: torch.Tensor,
        counts: torch.Tensor,
        layer: int,
        group: int,
    ) -> torch.Tensor:
        """Return the misses: blocks that are selected (or any), not resident, and get enough estimated attention."""
        if self._miss_shares[layer] == 0:
            return missing
        heads = group * scores.shape[1] if self._rules.per_layer else group  # query heads whose shares a score sums
        least = math.log(self._miss_shares[layer] * heads)
        if self._any_block[layer]:
            most = self._budget_blocks - self._always
            return reference.blocks_worth(scores, is_resident, counts, least, most, self._sink, self._recent)
        return reference.split(missing, scores.gather(2, missing.clamp(min=0)) >= least)[0]

    def _best_for_slots(self, selected: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the selected positions with the best scores, as many as there are slots.

        Positions keep their order, whether some are dropped or not: sums in another order round differently, and a row
        must not depend on how many blocks another row selects.
        """
        if selected.shape[2] <= self._slots:
            return selected
        absent = selected == reference.NO_BLOCK
        rank = scores.gather(2, selected.clamp(min=0)).masked_fill(absent, -torch.inf)
        return selected.gather(2, rank.topk(self._slots, dim=2).indices.sort(dim=2).values)

    @staticmethod
    def _block_list(positions: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> BlockList:
        return BlockList(
            reference.block_ids(positions, batch.page_table),
            reference.block_fill(positions, batch.lengths, cache.block_tokens),
        )


def _compact(positions: torch.Tensor) -> torch.Tensor:
    """Shift each list's blocks to the front, in order, and cut off the end that is empty in all lists."""
    present = positions != reference.NO_BLOCK
    order = (~present).to(torch.uint8).argsort(dim=2, stable=True)
    longest = int(present.sum(dim=2).max()) if positions.numel() else 0
    return positions.gather(2, order)[..., :longest]
