"""Selection on the device: which blocks are misses, and what a recall makes resident.

A step of one layer::

    score_blocks -> select_blocks -> post the misses ...          by the predicted query, before the layer
                                  -> gather_blocks -> apply_plan  a share of them, before attend_slots
    append -> attend_slots -> wait -> shift_lse -> merge          by the real one
    score_blocks -> select_blocks                                 by the real one, the plan of rows that recall
    gather_blocks -> apply_plan                                   the plan, before the layer's next selection

Rows that begin to decode are planned the same way, with ``due`` set and the length of their first step: everything but
the tail is gathered, which ``append`` brings along.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from sglang_hybrid.ops.cuda.digests import SlotTable
from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.scoring import PendingScores
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import TOTALS, KernelStruct, struct
from sglang_hybrid.ops.cuda.tensors import address, bit_words, scalar_address

_MOST = 256  # blocks of a selection, and slots of a (row, KV head): a thread has one of each


class Misses:
    """Pages and positions ``[B, H, most]``, ascending, -1 behind the last, and counts ``[B, H]``, int32.

    All of them are full blocks.
    """

    def __init__(self, batch: int, heads: int, most: int, device: torch.device | str = "cuda") -> None:
        self.pages = torch.full((batch, heads, most), -1, dtype=torch.int32, device=device)
        self.positions = torch.full_like(self.pages, -1)
        self.counts = torch.zeros(batch, heads, dtype=torch.int32, device=device)

    def of_batch(self, count: int) -> Misses:
        """The part that a smaller batch needs, in the same memory."""
        part = copy.copy(self)
        part.pages, part.positions, part.counts = self.pages[:count], self.positions[:count], self.counts[:count]
        return part


class RecallPlan:
    """What becomes resident: ``count`` blocks, their pages, slots ``(row * H + head) * S + slot`` and positions.

    ``gather_blocks`` takes pages, destinations and count; ``apply_plan`` writes the positions afterwards.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cuda") -> None:
        """``capacity``: B * H * S is always enough; of gathered blocks, B * H * ``most_gathered``."""
        self.pages, self.destinations, self.positions = torch.zeros(
            3, capacity, dtype=torch.int32, device=device
        ).unbind(0)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self._progress = torch.zeros(2, dtype=torch.int32, device=device)

    def arguments(self) -> KernelStruct:
        capacity = self.pages.numel()
        return struct(
            "plan",
            pages=address("the plan's pages", self.pages, torch.int32, (capacity,)),
            destinations=address("the plan's destinations", self.destinations, torch.int32, (capacity,)),
            positions=address("the plan's positions", self.positions, torch.int32, (capacity,)),
            count=address("the plan's count", self.count, torch.int32, (1,)),
            progress=address("the plan's progress", self._progress, torch.int32, (2,)),
            capacity=capacity,
        )


@dataclass(frozen=True)
class RecallInterval:
    """Rows recall when ``steps + layer`` is a multiple of the interval, steps counted from each row's first one.

    ``early``: and in so many of their first steps, unless the interval is 0.
    """

    steps: torch.Tensor  # one int32: between two recalls, 0 for never
    first_lengths: torch.Tensor  # [rows] int32: each row's length in its first step
    layer: int = 0
    early: int = 0


def select_blocks(
    scores: torch.Tensor,
    table: SlotTable,
    step: Step,
    budget: int,
    misses: Misses | None,
    *,
    pool_pages: int,
    bonus: float = 0.0,
    min_miss_score: float = -math.inf,
    any_block: bool = False,
    plan: RecallPlan | None = None,
    recall: torch.Tensor | RecallInterval | None = None,
    due: torch.Tensor | None = None,
    gathered: RecallPlan | None = None,
    gather_share: torch.Tensor | None = None,
    most_gathered: int | None = None,
    totals: torch.Tensor | None = None,
    by_row: bool = False,
    put_off: PendingScores | None = None,
    near_bias: torch.Tensor | None = None,
    recalls: torch.Tensor | None = None,
    whole: torch.Tensor | None = None,
    whole_score: float = -math.inf,
    held: torch.Tensor | None = None,
    attended: torch.Tensor | None = None,
) -> None:
    """``reference.select_blocks`` of scores ``[B, H, max_blocks]``, split by residency, as policy ``scout`` does it.

    ``by_row``: scores are ``[rows, H, max_blocks]``. ``put_off``: they are not written yet, which is done first.
    budget: blocks, at most 256. ``min_miss_score``: what a miss must have; with ``any_block`` every block that has it
    is one (``reference.blocks_worth``), as many as a selection holds, otherwise those only that are selected. A tail
    that was opened by this step gets its slot here; see ``digests``. With ``plan``, rows that are due (``recall``:
    ``[B]`` int32 or an interval; ``due`` beside an interval: these rows too) add what they want to have in their slots.
    ``recalls`` ``[B]`` int32 gets who is due, for another launch that makes the plan. Without ``misses`` nobody is told
    what is missed.

    ``gather_share`` (one float32 in device memory) of each list's misses go to ``gathered``, those with the best
    scores, rounded up or down so that it is that share on average. It also takes what ``misses`` has no room for. They
    become resident before the layer is attended: in empty slots, then in those of residents that are not selected and,
    with ``any_block``, would not be misses without them, lowest score first. At most ``most_gathered`` (or a budget) of
    a list, and as many as there are such slots; the others are misses. ``plan`` is for slots that have these blocks.

    ``near_bias`` ``[rows, H, G]`` gets ``reference.near_bias`` of what is then in slots or in a list, by what was
    estimated for ``put_off``. Entries that are ``whole`` ``[B]`` miss nothing, since somebody attends to all of their
    blocks that score at least ``whole_score``: these count as well. ``held`` ``[B, H, words]`` gets a bit for each
    block that such an entry has in a slot. ``attended`` ``[rows, H, slots]`` int32 gets the slot table, as it is when
    gathered blocks are there, with -1 for blocks that are not selected.

    To ``totals`` (int64, in the order of ``TOTALS``) are added the number of all misses, also of those that find no
    room at all, of the plan's entries, of gathered blocks, of selected blocks that are not always in, and of those of
    them that had a slot before.
    """
    rows, heads, _ = table.positions.shape
    batch, most = step.batch, 0 if misses is None else misses.pages.shape[2]
    if isinstance(recall, torch.Tensor):
        if due is not None:
            raise ValueError("rows that are due are given twice")
        recall, due = None, recall
    if (plan is None and recalls is None) != (recall is None and due is None):
        raise ValueError("a plan needs to know who recalls, and the other way round")
    if (gathered is None) != (gather_share is None):
        raise ValueError("a second list needs a share, and a share a second list")
    most_gathered = budget if most_gathered is None else most_gathered
    if gathered is not None and gathered.pages.numel() < batch * heads * most_gathered:
        raise ValueError(f"{gathered.pages.numel()} entries are too few for {batch * heads} times {most_gathered}")
    if max(budget, table.positions.shape[2]) > _MOST:
        raise ValueError(f"at most {_MOST} blocks: the budget is {budget}, slots are {table.positions.shape[2]}")
    if budget < table.sink + table.recent + 1:
        raise ValueError(f"a budget of {budget} blocks does not hold what is always selected")
    if put_off is not None and put_off.scores.data_ptr() != scores.data_ptr():
        raise ValueError("what was put off are other scores")
    if put_off is None and near_bias is not None:
        raise ValueError("nothing was estimated that a bias could be told by")
    launch(
        "select_blocks",
        table=table.arguments(heads),
        step=step.arguments(),
        scored=struct("score_blocks") if put_off is None else put_off.arguments,
        scores=address("scores", scores, torch.float32, (rows if by_row else step.batch, heads, step.max_blocks)),
        scores_by_row=by_row,
        **_addresses(misses, batch, heads),
        gather_share=scalar_address("gather_share", gather_share, torch.float32),
        gathered=struct("plan") if gathered is None else gathered.arguments(),
        near_bias=None
        if near_bias is None or put_off is None
        else address("near_bias", near_bias, torch.float32, (rows, heads, put_off.arguments.group)),
        totals=address("totals", totals, torch.int64, (len(TOTALS),)),
        due=address("due", due, torch.int32, (batch,)),
        interval=None if recall is None else scalar_address("interval", recall.steps, torch.int32),
        first_lengths=None if recall is None else address("first_lengths", recall.first_lengths, torch.int32, (rows,)),
        recalls=address("recalls", recalls, torch.int32, (batch,)),
        whole=address("whole", whole, torch.int32, (batch,)),
        whole_score=whole_score,
        held=address("held", held, torch.int32, (batch, heads, bit_words(step.max_blocks))),
        attended=address("attended", attended, torch.int32, tuple(table.positions.shape)),
        plan=struct("plan") if plan is None else plan.arguments(),
        bonus=bonus,
        min_miss_score=min_miss_score,
        kv_heads=heads,
        budget=budget,
        most_misses=most,
        layer=0 if recall is None else recall.layer,
        early=0 if recall is None else recall.early,
        pool_pages=pool_pages,
        most_gathered=most_gathered,
        any_block=any_block,
    )


def _addresses(misses: Misses | None, batch: int, heads: int) -> dict[str, int | None]:
    if misses is None:
        return {}
    of_lists = (batch, heads, misses.pages.shape[2])
    return {
        "miss_pages": address("the misses' pages", misses.pages, torch.int32, of_lists),
        "miss_positions": address("the misses' positions", misses.positions, torch.int32, of_lists),
        "miss_counts": address("the misses' counts", misses.counts, torch.int32, of_lists[:2]),
    }


def apply_plan(plan: RecallPlan, table: SlotTable) -> None:
    """The plan's blocks are in their slots: the table says so from now on."""
    launch(
        "apply_plan",
        plan=plan.arguments(),
        positions=address("positions", table.positions, torch.int32, tuple(table.positions.shape)),
        slots=table.positions.numel(),
    )
