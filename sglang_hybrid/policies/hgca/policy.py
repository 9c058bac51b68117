"""Policy ``hgca``: hybrid attention as the paper HGCA has it.

A row attends densely to a window of its newest tokens, with the layer's real query (``window.py``; on a GPU the window
is in device memory). Meanwhile the CPU attends to the row's contextual set: those older tokens that were salient when
they left the window. The two outputs are merged by their LSE. Older tokens outside the set stay in the host pool, and
are not attended to.

MAW. Every token of the window has a moving average of its attention weight, as a share of a head's attention over the
window (Algorithm 1, line 8). It is 0 before a token's first step. The paper names no value of ``alpha``. The paper's
averages and sets are per attention head. Here they are per KV head, because the query heads of a group share one list
as they share one KV head. The average is over the largest weight that any of these query heads gives the token, so a
token that is salient for one query head is in the set.

Leaving the window. A token that leaves enters the contextual set if its MAW is above ``beta / size``, where ``size`` is
the window's size in tokens (lines 10 to 14 and 23 to 25). The paper scales the averages of a set to a sum of 1
afterwards. Nothing reads the scaled averages, so this step is left out.

After an append. The first decode step after a prefill (a new request, a new turn, a request that was retracted)
computes the whole contextual set anew: it compares the attention weights of the prompt's last query over all tokens
before the window, as shares of that attention, with ``beta / tokens`` (lines 19 to 22). The same query's weights over
the window are the first averages of the window's tokens. If the prompt was computed elsewhere, the first step's query
is used instead. No older state of the row survives this, so rows may share pages, and be rewound. The paper does this
in parallel with other work; here the first step waits for it.

Heads as tasks. The paper merges adjacent heads into one task, padded to one length, when tasks outnumber cores. The
worker needs no merging: its threads are not bound to heads. They take parts of lists of up to 8 blocks, whatever head
the lists belong to, and steal from each other when they are idle. Lists keep their lengths.

``on_ratio`` gets the number of tokens in the contextual sets over the number of tokens in the window: the CPU's work
relative to the GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.core import BlockList, DecodeBatch, LayerCache
from sglang_hybrid.memory.prompt_queries import PromptQueries
from sglang_hybrid.ops import reference, reference_salience
from sglang_hybrid.ops.reference_weights import token_weights
from sglang_hybrid.policies.base import DecodePolicy
from sglang_hybrid.policies.hgca.options import HgcaOptions
from sglang_hybrid.policies.hgca.rows import RowEntries
from sglang_hybrid.policies.hgca.state import LayerState
from sglang_hybrid.policies.hgca.window import Window, ring_positions
from sglang_hybrid.worker.miss_server import MissServer


@dataclass(frozen=True)
class _Leaving:
    """Blocks that leave their windows at the beginning of a step, at most one per row."""

    rows: torch.Tensor  # [n], indices into the batch
    positions: torch.Tensor  # [n], of the blocks in their rows' sequences
    least: torch.Tensor  # [n], MAW above which a token is salient


@dataclass(frozen=True)
class _StepPlan:
    """What is the same for all layers of a step."""

    entries: torch.Tensor  # [rows], index of each row's state (RowEntries)
    first: torch.Tensor  # [rows], oldest block of the window
    window: torch.Tensor  # [rows, slots], position of each slot's block
    is_new: torch.Tensor  # [rows, slots, tokens of a block], True for the step's new token
    fresh: list[int]  # rows without state, as indices into the batch
    first_of_fresh: list[int]  # oldest block of their windows
    leaving: _Leaving


class HgcaPolicy(DecodePolicy):
    def __init__(self, options: HgcaOptions, misses: MissServer, prompts: PromptQueries) -> None:
        self._alpha, self._beta = options.alpha, options.beta
        self._window = Window.of(options)
        self._misses = misses
        self._prompts = prompts
        self._rows = RowEntries()
        self._layers: dict[int, LayerState] = {}
        self._plan: _StepPlan | None = None

    # -- steps and rows ----------------------------------------------------------------------

    def reset_rows(self, rows: list[int]) -> None:
        self._rows.forget(rows)

    def begin_step(self, batch: DecodeBatch) -> None:
        device = batch.lengths.device
        entries, fresh = self._rows.take(batch.rows_on_host, batch.lengths_on_host)
        counts = [-(-length // BLOCK_TOKENS) for length in batch.lengths_on_host]
        first = torch.tensor([self._window.first(count) for count in counts], dtype=torch.int64, device=device)
        slots = self._window.slots(max(counts, default=0))
        window = ring_positions(first, batch.block_counts(BLOCK_TOKENS), slots)
        tokens = window[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=device)
        self._plan = _StepPlan(
            torch.tensor(entries, dtype=torch.int64, device=device),
            first,
            window,
            tokens == batch.lengths[:, None, None] - 1,
            fresh,
            [self._window.first(counts[row]) for row in fresh],
            self._leaving(batch.lengths_on_host, set(fresh), device),
        )
        if any(self._window.first(count) for count in counts):
            self._misses.wake()

    def _leaving(self, lengths: list[int], fresh: set[int], device: torch.device) -> _Leaving:
        left = []
        for row, length in enumerate(lengths):
            count = -(-length // BLOCK_TOKENS)
            before = self._window.first(count - 1)
            if length % BLOCK_TOKENS == 1 and row not in fresh and self._window.first(count) > before:
                left.append((row, before, self._beta / (self._window.blocks(count - 1) * BLOCK_TOKENS)))
        rows, positions, least = zip(*left, strict=True) if left else ((), (), ())
        return _Leaving(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(least, dtype=torch.float32, device=device),
        )

    # -- one layer ---------------------------------------------------------------------------

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        plan = self._plan
        assert plan is not None
        state = self._state(query, cache, batch, plan)
        self._evict(state, plan)
        for row, first in zip(plan.fresh, plan.first_of_fresh, strict=True):
            self._evaluate(row, first, query, cache, batch, scale, state, plan)
        contextual = self._contextual(state, cache, batch, plan)
        posted = self._misses.post(query, cache, contextual, scale, batch.step)
        window = self._block_list(plan.window, batch.lengths, batch, cache)
        out, lse = reference.attend_blocks(query, cache.keys, cache.values, window.ids, window.fill, scale)
        weights = token_weights(query, cache.keys, window.ids, window.fill, scale, lse)
        slots = plan.window.shape[1]
        state.maw[plan.entries, :, :slots] = reference_salience.move_averages(
            state.maw[plan.entries, :, :slots], weights, plan.is_new, self._alpha
        )
        if self.on_ratio and query.shape[0]:
            self._tell_ratio(contextual, window, cache)
        merged, _ = reference.merge(out, lse, *posted.collect())
        return merged.to(query.dtype)

    def _state(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, plan: _StepPlan) -> LayerState:
        heads = cache.keys.shape[1]
        if cache.layer not in self._layers:
            self._layers[cache.layer] = LayerState(heads, cache.block_tokens, query.device)
        state = self._layers[cache.layer]
        state.grow(self._rows.capacity, plan.window.shape[1], batch.page_table.shape[1])
        return state

    def _evict(self, state: LayerState, plan: _StepPlan) -> None:
        """Move the salient tokens of blocks that leave the window to the contextual sets."""
        leaving = plan.leaving
        if not len(leaving.rows):
            return
        entries, slots = plan.entries[leaving.rows], self._window.slot_of(leaving.positions)
        averages = state.maw[entries, :, slots].unsqueeze(2)
        masks = reference_salience.salient_masks(averages, leaving.least)
        state.masks[entries, :, leaving.positions] = masks.squeeze(2)

    def _evaluate(
        self,
        row: int,
        first: int,
        query: torch.Tensor,
        cache: LayerCache,
        batch: DecodeBatch,
        scale: float,
        state: LayerState,
        plan: _StepPlan,
    ) -> None:
        """Compute all state of a row that has none, by its prompt's last query. One row at a time, as in prefill."""
        one = slice(row, row + 1)
        entry, slots = plan.entries[row], plan.window.shape[1]
        asked = self._prompts.of(cache.layer, batch.rows[one], otherwise=query[one])
        before = batch.lengths[one] - 1  # without the step's token, which is not of the prompt

        def weights_of(positions: torch.Tensor) -> torch.Tensor:
            blocks = self._block_list(positions, before, batch, cache, one)
            _, lse = reference.attend_blocks(asked, cache.keys, cache.values, blocks.ids, blocks.fill, scale)
            return token_weights(asked, cache.keys, blocks.ids, blocks.fill, scale, lse).amax(dim=2)

        state.maw[entry, :, :slots] = weights_of(plan.window[one])[0]
        state.masks[entry] = 0
        if first:
            weights = weights_of(torch.arange(first, device=query.device)[None])
            least = torch.full((1,), self._beta / (first * BLOCK_TOKENS), device=query.device)
            state.masks[entry, :, :first] = reference_salience.salient_masks(weights, least)[0]

    def _contextual(self, state: LayerState, cache: LayerCache, batch: DecodeBatch, plan: _StepPlan) -> BlockList:
        masks = state.masks[plan.entries][..., : batch.page_table.shape[1]]
        positions, masks = reference_salience.list_masks(masks)
        ids = reference.block_ids(positions, batch.page_table)
        return BlockList(ids, reference.block_fill(positions, batch.lengths, cache.block_tokens), masks)

    @staticmethod
    def _block_list(
        positions: torch.Tensor,
        lengths: torch.Tensor,
        batch: DecodeBatch,
        cache: LayerCache,
        rows: slice = slice(None),
    ) -> BlockList:
        """List the blocks at positions ``[rows, n]``, the same for all KV heads."""
        of_heads = positions[:, None].expand(-1, cache.keys.shape[1], -1)
        ids = reference.block_ids(of_heads, batch.page_table[rows])
        return BlockList(ids, reference.block_fill(of_heads, lengths, cache.block_tokens))

    def _tell_ratio(self, contextual: BlockList, window: BlockList, cache: LayerCache) -> None:
        assert self.on_ratio is not None
        counted = reference.is_counted(contextual.fill, cache.block_tokens, contextual.masks)
        attended = counted.sum(dim=(2, 3)) / window.fill.sum(dim=2)
        self.on_ratio(cache.layer, float(attended.mean()))
