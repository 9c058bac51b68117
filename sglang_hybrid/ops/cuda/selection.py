"""Selection on the device: finds the misses of a step, and the blocks that a recall makes resident.

A step of one layer::

    score_blocks -> select_blocks -> post the misses ...          by the predicted query, before the layer
                                  -> gather_blocks -> apply_plan  a share of the misses, before attend_slots
    append -> attend_slots -> wait -> shift_lse -> merge          by the real query
    score_blocks -> select_blocks                                 by the real query, the plan of rows that recall
    gather_blocks -> apply_plan                                   the plan, before the layer's next selection

The first resident blocks of a row are planned in the same way, with ``due`` set and the length of the row's first step.
All planned blocks but the tail are gathered; ``append`` brings the tail.
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

_MOST = 256  # limit of the budget in blocks, and of slots of a (row, KV head): each thread handles one of each


class Misses:
    """Lists of misses: pages and positions ``[B, H, most]``, by ascending position, then -1; counts ``[B, H]``; int32.

    All listed blocks are full.
    """

    def __init__(self, batch: int, heads: int, most: int, device: torch.device | str = "cuda") -> None:
        self.pages = torch.full((batch, heads, most), -1, dtype=torch.int32, device=device)
        self.positions = torch.full_like(self.pages, -1)
        self.counts = torch.zeros(batch, heads, dtype=torch.int32, device=device)

    def of_batch(self, count: int) -> Misses:
        """Return the part that a smaller batch needs, in the same memory."""
        part = copy.copy(self)
        part.pages, part.positions, part.counts = self.pages[:count], self.positions[:count], self.counts[:count]
        return part


class RecallPlan:
    """List of ``count`` blocks to make resident: pages, destination slots ``(row * H + head) * S + slot``, positions.

    ``gather_blocks`` takes pages, destinations and count. Afterwards ``apply_plan`` writes positions to the slot table.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cuda") -> None:
        """Allocate ``capacity`` entries. B * H * S is always enough; a gather needs B * H * ``most_gathered``."""
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
    """Schedule of recalls: a row recalls when (its steps so far + ``layer``) is a multiple of the interval.

    Unless the interval is 0, a row also recalls in each of its first ``early`` steps.
    """

    steps: torch.Tensor  # one int32: steps between two recalls; 0: never recall
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
    """Select blocks by scores ``[B, H, max_blocks]`` and split them by residency, as policy ``scout`` does.

    ``reference.select_blocks`` specifies the selection. ``by_row``: scores are ``[rows, H, max_blocks]``. ``put_off``:
    scores are not written yet, and are computed from these estimates first. budget: number of blocks, at most 256.

    Misses need a score of at least ``min_miss_score``, except sink and recent blocks without a slot. With ``any_block``
    every block with such a score that is not resident is a miss (``reference.blocks_worth``), up to the budget;
    otherwise only selected blocks are. A tail that this step opened gets its slot here; see ``digests``. Without
    ``misses`` no list of misses is written.

    With ``plan``, rows that recall add the blocks that they need in slots to the plan. ``recall`` says which rows do:
    ``[B]`` int32 or an interval; with an interval, rows in ``due`` recall too. ``recalls`` ``[B]`` int32 receives which
    rows recall, for another launch that makes the plan.

    ``gather_share`` (one float32 in device memory) is the share of each list's misses that go to ``gathered``: those
    with the best scores, and their number is rounded up or down so that the share is right on average. ``gathered``
    also takes misses that do not fit in ``misses``. Gathered blocks become resident before the layer is attended. They
    get empty slots first, then slots of resident blocks that are not selected, lowest score first. (With ``any_block``,
    resident blocks that would be misses without their slot keep the slot.) At most ``most_gathered`` (default: budget)
    blocks of a list are gathered, and no more than there are such slots; the others are misses. ``plan`` assumes slots
    that hold the gathered blocks.

    ``near_bias`` ``[rows, H, G]`` receives ``reference.near_bias`` of the blocks that are then in slots or listed, by
    the estimates of ``put_off``. Entries with ``whole`` ``[B]`` 1 have no misses: another kernel attends to all of
    their blocks that score at least ``whole_score``, so the bias counts these blocks as attended. ``held``
    ``[B, H, words]`` receives a bit for each block that such an entry has in a slot. ``attended`` ``[rows, H, slots]``
    int32 receives the slot table, as it is after the gather, with -1 for blocks that are not selected.

    These numbers of blocks are added to ``totals`` (int64, in the order of ``TOTALS``): all misses, including dropped
    ones; entries of the plan; gathered blocks; selected blocks other than sink, recent and tail blocks; those of them
    that had a slot before.
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
    """Write the plan's positions to the slot table. The plan's blocks must be in their slots already."""
    launch(
        "apply_plan",
        plan=plan.arguments(),
        positions=address("positions", table.positions, torch.int32, tuple(table.positions.shape)),
        slots=table.positions.numel(),
    )
