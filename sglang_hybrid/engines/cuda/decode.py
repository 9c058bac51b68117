"""Policy ``scout`` on a GPU, layer by layer: which kernel runs on which lane, and which lanes wait for each other.

    scout lane    predicted query -> scores -> selection                                  of the next layer
    post lane     its misses -> mailbox of the worker
    gather lane   a share of its misses -> slots -> slot table
    main lane     append -> attention over slots -> merging with replies -> what is late
    reply lane    replies of the worker, when they are there -> shifted                   beside attention
    plan lane     scores by the real query -> plan, for rows that recall                  beside attention
    recall lane   copies of the plan -> slot table                                        of the layer just attended

All kernels are launched with static shapes on persistent buffers, so a whole step can be recorded in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Self

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.engines.cuda.ahead import AheadProgram
from sglang_hybrid.engines.cuda.buffers import MOST_GATHERED, LaneBuffers, MissBuffers, plan_for
from sglang_hybrid.engines.cuda.handover import Handover
from sglang_hybrid.engines.cuda.lanes import Lane
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.program import ProgramContext, SlotProgram
from sglang_hybrid.engines.cuda.settings import (
    FIRST_GATHER_SHARE,
    ScoutSettings,
    path_rates,
    scout_tuning,
    settings_of,
)
from sglang_hybrid.engines.cuda.slots import ResidentSlots
from sglang_hybrid.engines.cuda.watch import DeviceWatch, schedule_of
from sglang_hybrid.ops.cuda.attention import Partial, attend_slots, merge
from sglang_hybrid.ops.cuda.copies import gather_blocks
from sglang_hybrid.ops.cuda.digests import append
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.missed import WorthBlocks, finish_late
from sglang_hybrid.ops.cuda.scoring import PendingScores, ScoreWorkspace, score_blocks, shift_lse
from sglang_hybrid.ops.cuda.selection import RecallInterval, RecallPlan, apply_plan, select_blocks
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import TOTALS
from sglang_hybrid.ops.reference import FP8
from sglang_hybrid.policies.scout.tuning import Tuning

_GATHER_NS = TOTALS.index("gather_ns")


class DeviceScout(AheadProgram, SlotProgram):
    """Step program of policy ``scout``: the state of all rows, and the order of kernels."""

    loads_initial_blocks: ClassVar[bool] = True
    reads_digests: ClassVar[bool] = True
    # Whether, once the real query of a layer with a predicted query is known, the LSE of replies is corrected and the
    # blocks that become resident are selected anew.
    corrects: ClassVar[bool] = True

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        settings: ScoutSettings,
        intervals: Sequence[int],
        mailbox: DeviceMailboxClient | None,
        handover: Handover | None = None,
    ) -> None:
        """``mailbox``: mailbox of the worker that computes misses; None: the GPU reads all misses from the host pool.

        ``intervals``: recall interval of each layer. ``handover``: None if whole rows are never held.
        """
        device, dtype, pool_dtype = layers[0].digests.digests.device, layers[0].digests.dtype, layers[0].pool.keys.dtype
        has_codes = settings.has_codes and pool_dtype != FP8  # FP8 has 8 bits already
        if has_codes and any(layer.steps is None for layer in layers):
            raise ValueError("slots of codes need steps for all layers")
        kept = torch.uint8 if has_codes else pool_dtype
        slots = ResidentSlots(len(layers), shape.rows, shape.heads, settings.slots, shape.dim, kept, device)
        super().__init__(layers, shape, slots, whole=settings.whole, handover=handover)
        self._settings, self._mailbox = settings, mailbox
        self._tables = [self.slots.table(layer, settings.sink, settings.recent) for layer in range(len(layers))]
        # indexed by row, like slots: a kernel that reads one reads the other
        of_scores = (shape.rows, shape.heads, shape.max_blocks)
        self._scores = [torch.full(of_scores, -math.inf, device=device) for _ in layers]
        of_heads = (shape.rows, shape.heads, shape.group)
        self._near_bias = [torch.zeros(of_heads, device=device) for _ in layers]  # indexed by row too
        gathers = settings.gather_share != 0
        self._lanes = [LaneBuffers(shape, settings.budget, gathers, dtype, device) for _ in range(2)]
        of_layers = (len(layers),)
        first_share = FIRST_GATHER_SHARE if settings.gather_share is None else settings.gather_share
        self.gather_shares = torch.full(of_layers, first_share, device=device) if gathers else None
        self._main = MissBuffers(shape, device)
        self._receipts = [mailbox.new_receipt(shape.max_batch) for _ in range(2)] if mailbox else []
        # one plan per layer: copies of a plan may still be in flight when the layer after the next is selected
        self._plans = [plan_for(shape, settings.slots, device) for _ in layers]
        self.intervals = torch.tensor(list(intervals), dtype=torch.int32, device=device)
        # blocks of each layer, summed over all steps
        self.counted = torch.zeros(len(layers), len(TOTALS), dtype=torch.int64, device=device)
        # Per layer, which rows recall in this step. Planning has its own workspace, because the scout lane scores
        # another layer at the same time.
        self._recalls = torch.zeros(len(layers), shape.max_batch, dtype=torch.int32, device=device)
        self._planning = ScoreWorkspace(shape.max_batch, shape.heads, shape.group, shape.max_blocks, device)
        self._everybody = torch.ones(shape.max_batch, dtype=torch.int32, device=device)
        self._scout, self._gather, self._recall = Lane(device), Lane(device), Lane(device)
        # a few small CTAs that wait beside attention, and must not queue behind its CTAs
        self._replies, self._plan_lane = Lane(device, urgent=True), Lane(device, urgent=True)
        self._posts = Lane(device, urgent=True)  # the worker's time begins with the post
        self._ahead: set[int] = set()  # layers of this step whose misses were selected by a predicted query
        # Whether end_step is called behind the logits: then recalls may continue after the last layer's attention.
        self.recall_joins_at_logits = False
        self._unended: int | None = None  # last layer of a step whose recalls were not waited for

    @classmethod
    def create(cls, context: ProgramContext) -> Self:
        tuning = cls.tuning_in(context)
        settings = settings_of(context.config, tuning, context.shape.group)
        made = cls(context.layers, context.shape, settings, tuning.intervals, context.mailbox, handover_of(context))
        made.recall_joins_at_logits = context.has_logits
        return made

    @staticmethod
    def tuning_in(context: ProgramContext) -> Tuning:
        return scout_tuning(context.config, context.tuning, has_profile=context.rates is not None)

    def new_watch(self, context: ProgramContext) -> DeviceWatch:
        tuning, mailbox = self.tuning_in(context), context.mailbox
        return DeviceWatch(
            self,
            schedule_of(tuning, gathers=self.gather_shares is not None),
            self._shape.heads * self._settings.budget,
            mailbox=mailbox.counts if mailbox else None,
            rates=path_rates(context.rates, context.worker_cores),
            gathers=self._settings.gather_share is None,
            follows_host=tuning.follows_host and mailbox is not None,
        )

    @property
    def without_whole_requests(self) -> str:
        return f"blocks are selected, {self._settings.budget * BLOCK_TOKENS} tokens of each"

    # -- settings that change while graphs are replayed ----------------------------------------

    def set_intervals(self, intervals: Sequence[int]) -> None:
        """Set the number of steps between two recalls of each layer. Recorded graphs read the new numbers."""
        self.intervals.copy_(torch.tensor(list(intervals), dtype=torch.int32).pin_memory(), non_blocking=True)

    def set_gather_shares(self, shares: Sequence[float]) -> None:
        """Set the share of each layer's misses that is copied to the device. Ignored if the setting is a fixed 0."""
        if self.gather_shares is not None:
            self.gather_shares.copy_(torch.tensor(list(shares)).pin_memory(), non_blocking=True)

    # -- steps and rows ----------------------------------------------------------------------

    def begin_step(self) -> None:
        self._ahead.clear()

    # -- lanes -------------------------------------------------------------------------------

    def query_ahead(self, layer: int, count: int) -> torch.Tensor:
        return self._lanes[layer % 2].query(count)

    def ahead(self, layer: int, count: int, scale: float) -> None:
        self._begin_layer(layer, self.query_ahead(layer, count), scale, predicted=True)
        self._scout.mark(layer)
        self._ahead.add(layer)

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.is_dense:
            return self.dense.decode(layer, query, keys, values, scale)
        count = query.shape[0]
        step, lane = self.step.of_batch(count), self._lanes[layer % 2]
        predicted = layer in self._ahead
        if predicted:
            self._scout.wait_for(layer)
        else:
            self._begin_layer(layer, query, scale)
        of_layer, table, misses = self._layers[layer], self._tables[layer], lane.misses(count)
        key_slots, value_slots = self.slots.keys[layer], self.slots.values[layer]
        append(
            of_layer.digests, table, step, keys, values, key_slots, value_slots, of_layer.pool,
            scores=self._scores[layer], by_row=True, refused=self.refused, codes=self._codes(layer),
        )  # fmt: skip
        if lane.gathered:
            # append need not wait for these copies: selection never gives the tail's slot to another block
            self._gather.wait_for(layer)
        local, served, out = self._main.local(count), self._main.served(count), self._attention.out(count)
        corrected = predicted and self.corrects
        replies = self._collect(layer, query, scale, corrected)
        if corrected:
            with self._plan_lane.fork():
                self._plan(layer, step, query, scale, self._recalls[layer, :count], totals=self.counted[layer])
                self._plan_lane.mark(layer)
        attend_slots(
            query, key_slots, value_slots, self._attended(layer), self.step.lengths, step.row_of, scale,
            active_rows=step.active_rows, workspace=self._attention.attending(count), out=local[0], lse=local[1],
            near_bias=self._near_bias[layer], sink=table.sink, recent=table.recent, codes=self._codes(layer),
        )  # fmt: skip
        if corrected:
            self._plan_lane.wait_for(layer)
        with self._recall.fork():
            self._make_resident(layer, self._plans[layer])
            self._recall.mark(layer)
        if replies is not None:
            self._replies.wait_for(layer)
            merge(local, replies, active_rows=step.active_rows, out=out)
        # For rows in their first steps (``whole``) this adds blocks without a slot whose score is high enough.
        finish_late(
            query, of_layer.pool, step, misses.pages, misses.counts, scale, local, out,
            served=served, whole=self.step.whole(count), worth=self._worth(layer, count),
            workspace=self._attention.attending(count),
        )  # fmt: skip
        if layer == len(self._layers) - 1:
            self._end_layers(layer)
        return out

    def _codes(self, layer: int) -> SlotCodes | None:
        return self.slots.codes(layer, self._layers[layer].steps)

    def _attended(self, layer: int) -> torch.Tensor:
        """Return the attended block of each slot ``[rows, KV heads, slots]``, -1 for none."""
        return self._tables[layer].positions

    def _worth(self, layer: int, count: int) -> WorthBlocks:
        """Return which blocks rows in their first steps attend to, by their real query."""
        settings, held = self._settings, self._lanes[layer % 2].held(count)
        return WorthBlocks(
            self._scores[layer], self._near_bias[layer], settings.whole_score, settings.sink, settings.recent, held
        )

    def _end_layers(self, last: int) -> None:
        """Note that the step must wait for its recalls. Wait now unless ``end_step`` is called behind the logits."""
        self.recall_joins_at_logits &= self._unended is None  # else end_step was not called for the step before
        self._unended = last
        if not self.recall_joins_at_logits:
            self.end_step()

    def end_step(self) -> None:
        if self._unended is not None:
            self._recall.wait_for(self._unended)  # and thereby for all layers before it
            self._unended = None

    def _collect(self, layer: int, query: torch.Tensor, scale: float, corrected: bool) -> Partial | None:
        """Wait for the worker on the reply lane, and copy its replies to the device. Return None without a worker.

        ``corrected``: shift the replies' LSE by the real query. Replies cross PCIe beside attention. Nothing else waits
        for the worker, even if the GPU computes its misses in the end.
        """
        if self._mailbox is None:
            return None
        count = query.shape[0]
        lane, step, served = self._lanes[layer % 2], self.step.of_batch(count), self._main.served(count)
        out, lse = self._main.replies(count)
        with self._replies.fork():
            self._posts.wait_for(layer)
            self._mailbox.wait(self._receipt(layer, count), self._settings.deadline_s, out, lse, served)
            if corrected:
                misses = lane.misses(count)
                shift_lse(
                    query, lane.query(count), self._layers[layer].digests, misses.pages, misses.counts, scale, lse,
                    active_rows=step.active_rows,
                )  # fmt: skip
            self._replies.mark(layer)
        return out, lse

    # -- prompts -----------------------------------------------------------------------------

    def load_initial_blocks(self, layer: int, step: Step, query: torch.Tensor, scale: float) -> None:
        self._plan(layer, step, query, scale, self._everybody[: step.batch])
        self._make_resident(layer, self._plans[layer])

    # -- rows that were held as a whole ------------------------------------------------------

    def hand_over(self, count: int, handover: Handover) -> None:
        """Fill the slots of rows that go on with the blocks that their last query selects, but not with the tail.

        ``append`` gives the tail its slot.
        """
        step, due, staged = self.step.of_batch(count), handover.goes_on(count), handover.borrow()
        for layer in range(len(self._layers)):
            self._plan(layer, step, *handover.query(layer), due, query_by_row=True)
            if staged is not None:
                self.dense.move_to_slots(layer, self._plans[layer], staged)
            self._make_resident(layer, self._plans[layer])  # blocks that were not held, or did not fit in the staging

    # -- kernels -----------------------------------------------------------------------------

    def _begin_layer(self, layer: int, query: torch.Tensor, scale: float, predicted: bool = False) -> None:
        count = query.shape[0]
        lane, step = self._lanes[layer % 2], self.step.of_batch(count)
        self._select(layer, step, query, scale, self.step.begins(count), predicted=predicted)
        if self._mailbox is not None:
            misses = lane.misses(count)
            with self._posts.fork():
                self._mailbox.post(
                    query, misses.pages, misses.counts, self._main.full(count), layer, scale,
                    self._receipt(layer, count), begins_step=layer == 0, active_rows=step.active_rows,
                )  # fmt: skip
                self._posts.mark(layer)
        if lane.gathered:
            with self._gather.fork():
                self._make_resident(layer, lane.gathered, taken_ns=self.counted[layer, _GATHER_NS])
                self._gather.mark(layer)

    def _select(
        self, layer: int, step: Step, query: torch.Tensor, scale: float, due: torch.Tensor, predicted: bool
    ) -> None:
        """Select the misses of a step, and plan recalls. ``predicted``: only note which rows recall, for ``_plan``."""
        settings, lane, count = self._settings, self._lanes[layer % 2], step.batch
        scores = self._scores[layer]
        share = None if self.gather_shares is None else self.gather_shares[layer : layer + 1]
        put_off = score_blocks(
            query, self._layers[layer].digests, step, scale, self._main.scoring(count), scores, by_row=True
        )
        select_blocks(
            scores, self._tables[layer], step, settings.budget, lane.misses(count),
            pool_pages=self._shape.pool_pages, bonus=settings.bonus[layer],
            min_miss_score=settings.min_miss_score[layer], any_block=settings.any_block[layer],
            plan=None if predicted else self._plans[layer], due=due,
            recall=RecallInterval(
                self.intervals[layer : layer + 1], self.step.first_lengths, layer, settings.early_recalls
            ),
            recalls=self._recalls[layer, :count] if predicted else None,
            gathered=lane.gathered, gather_share=share, most_gathered=MOST_GATHERED, totals=self.counted[layer],
            by_row=True, put_off=put_off, near_bias=self._near_bias[layer],
            whole=self.step.whole(count), whole_score=settings.whole_score, held=lane.held(count),
        )  # fmt: skip

    def _plan(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        scale: float,
        due: torch.Tensor,
        *,
        query_by_row: bool = False,
        totals: torch.Tensor | None = None,
    ) -> None:
        """Plan which blocks become resident in rows that are ``due`` ``[B]``, by their real query."""
        scores, workspace = self._scores[layer], self._planning.of_batch(step.batch)
        put_off = self._scored(
            score_blocks(
                query, self._layers[layer].digests, step, scale, workspace, scores,
                by_row=True, query_by_row=query_by_row, only=due,
            )
        )  # fmt: skip
        select_blocks(
            scores, self._tables[layer], step, self._settings.budget, None, pool_pages=self._shape.pool_pages,
            bonus=self._settings.bonus[layer], plan=self._plans[layer], recall=due, totals=totals,
            by_row=True, put_off=put_off,
        )  # fmt: skip

    def _scored(self, pending: PendingScores) -> PendingScores | None:
        """Return the scores that ``select_blocks`` still has to write; None if all scores are written."""
        return pending

    def _make_resident(self, layer: int, plan: RecallPlan, taken_ns: torch.Tensor | None = None) -> None:
        pool, slots = self._layers[layer].pool, self.slots
        gather_blocks(
            pool.region, pool.keys, pool.values, plan.pages, slots.keys[layer], slots.values[layer],
            destinations=plan.destinations, count=plan.count, refused=self.refused, codes=self._codes(layer),
            taken_ns=taken_ns,
        )  # fmt: skip
        apply_plan(plan, self._tables[layer])

    def _receipt(self, layer: int, count: int) -> torch.Tensor:
        assert self._mailbox is not None
        return self._mailbox.receipt_of_batch(self._receipts[layer % 2], count)


def handover_of(context: ProgramContext) -> Handover | None:
    if not context.holds_whole_requests:
        return None
    digests = context.layers[0].digests
    device = digests.digests.device
    return Handover(len(context.layers), context.shape, digests.dtype, device, context.borrow_staging)
