"""Handover of whole rows to slots: blocks that the rows' last queries select are moved within device memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE
from selection_cases import later
from test_gpu_dense import check_exact
from test_gpu_scout import DIM, DTYPE, HEADS, LAYERS, LENGTHS, RECENT, SCALE, SINK, Decoding

from sglang_hybrid.engines.cuda.decode import DeviceScout
from sglang_hybrid.engines.cuda.handover import Handover
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.engines.cuda.scoutattention import DeviceScoutAttention
from sglang_hybrid.engines.cuda.settings import ScoutSettings, WholeSteps
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.whole_requests import StagedBlocks

PLENTY = 1000
SHARED = 10  # pages of the prefix that the two long rows have in common
ON_GPU = DEVICE == "cuda"


class Held(Decoding):
    def __init__(
        self, budget: int, interval: int = 0, *, staged: int = PLENTY, paper: bool = False, **more: Any
    ) -> None:
        """Create rows that are held as a whole. ``staged``: size of the staging in blocks; 0: the staging is in use."""
        self.budget, self.paper = budget, paper
        self.staged = None
        if staged:
            empty = torch.full((2, staged, BLOCK_TOKENS, DIM), torch.nan, dtype=DTYPE, device=DEVICE)
            self.staged = StagedBlocks(*empty.to(more.get("pool", DTYPE)))
        super().__init__(budget, interval, **more)
        self.pages[3, :SHARED] = self.pages[0, :SHARED]
        rows = list(LENGTHS)
        of_prefix = SHARED * BLOCK_TOKENS
        self.req_to_token[rows[3], :of_prefix] = self.req_to_token[rows[0], :of_prefix]
        self.scout.reset_rows(self.rows)
        self.last_query = self.query.clone()
        # in emulation, forget_all must run after the kernels that were launched before it
        allocator = self.scout.dense._allocator
        forget = allocator.forget_all
        allocator.forget_all = lambda: later(forget)

    def program(
        self, layers: list[DeviceLayer], settings: ScoutSettings, interval: int, client: DeviceMailboxClient | None
    ) -> Any:
        handover = Handover(LAYERS, self.shape, DTYPE, DEVICE, lambda: self.staged)
        kind = DeviceScoutAttention if self.paper else DeviceScout
        return kind(layers, self.shape, settings, (interval,) * LAYERS, client, handover)

    def begin(self, whole: bool) -> None:
        """Begin a step without launching its layers. Full blocks must not be read from the host pool here."""
        self.last_query.copy_(self.query)
        self.next_tokens()
        torch.cuda.synchronize()
        if whole != self.scout.is_dense:
            self.scout.hold_rows(whole, count=self.query.shape[1])
            torch.cuda.synchronize()
            self.load_rows()
        if whole:
            self.scout.dense.begin_step(self.query.shape[1], self.lengths.tolist())
        torch.cuda.synchronize()

    def hide_full_blocks(self) -> list[torch.Tensor]:
        """Overwrite the host pool except tails with NaN, and return its previous content."""
        tails = self.pages[torch.arange(len(LENGTHS)), (self.lengths - 1) // BLOCK_TOKENS]
        others = torch.ones(len(self.keys[0]), dtype=torch.bool)
        others[tails] = False
        before = [part.clone() for part in (*self.keys, *self.values)]
        for part in (*self.keys, *self.values):
            part.view(torch.uint8)[others] = 0xFF  # NaN, in 16 bits and in FP8
        return before

    def show(self, before: list[torch.Tensor]) -> None:
        for part, there in zip((*self.keys, *self.values), before, strict=True):
            part.copy_(there)

    def finish(self, predicts: bool = False) -> None:
        self.run(predicts)
        torch.cuda.synchronize()

    def check_tokens_so_far(self) -> None:
        self.lengths -= 1
        self.check_slots()
        self.lengths += 1

    def selected(self, layer: int) -> torch.Tensor:
        """Return which blocks the last query selects, without the tail: bool ``[rows, KV heads, blocks]``."""
        logits, counts = self.logits(layer, self.last_query[layer, :-1].cpu().float())
        scores = reference.block_scores(logits, counts, SCALE)
        if self.paper:
            scores = scores.logsumexp(dim=1, keepdim=True).expand_as(scores).contiguous()
        chosen = self.is_held(reference.select_blocks(scores, counts, self.budget, SINK, RECENT))
        return chosen & ~self.tails()

    def tails(self) -> torch.Tensor:
        tails = (self.lengths - 1) // BLOCK_TOKENS
        return self.is_held(tails[:, None, None].expand(-1, HEADS, 1))

    def entries_of_plan(self, layer: int) -> tuple[int, int]:
        """Return how many blocks got slots, and how many of them were read from the host pool."""
        plan = self.scout._plans[layer]
        count = int(plan.count)
        return count, int((plan.pages[:count] >= 0).sum())

    def begins(self) -> list[int]:
        begins: list[int] = self.scout.step.begins(len(LENGTHS)).cpu().tolist()
        return begins

    def whole(self) -> list[int]:
        whole: list[int] = self.scout.step.whole(len(LENGTHS)).cpu().tolist()
        return whole

    def check_output(self) -> None:
        for layer in range(LAYERS):
            expected = self.expected(layer, everything=self.budget == 36)
            torch.testing.assert_close(self.out[layer, :-1].cpu().float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "more",
    # codes take half of the memory, in which whole rows of 16 bits have to fit too
    [{"slots": 12}, {"slots": 12, "paper": True}, {"slots": 24, "coded": True}, {"slots": 12, "pool": reference.FP8}],
    ids=["scout", "scoutattention", "codes", "fp8"],
)
@pytest.mark.parametrize("staged", [PLENTY, 30, 0])
def test_what_the_last_query_selects_is_resident_and_comes_from_the_device_as_far_as_the_staging_goes(
    staged: int, more: dict[str, Any]
) -> None:
    decoding = Held(9, staged=staged, **more)
    for _ in range(2):
        decoding.begin(whole=True)
        decoding.finish()
    before = decoding.hide_full_blocks() if staged == PLENTY else None
    decoding.begin(whole=False)
    if before is not None:
        decoding.show(before)
    decoding.check_tokens_so_far()
    wanted = found = 0
    for layer in range(LAYERS):
        selected, held = decoding.selected(layer), decoding.is_held(decoding.held(layer)) & ~decoding.tails()
        assert torch.equal(selected.sum(dim=2), held.sum(dim=2))
        wanted, found = wanted + int(selected.sum()), found + int((selected & held).sum())
        count, gathered = decoding.entries_of_plan(layer)
        assert (count, gathered) == (int(held.sum()), max(0, count - staged))
    assert found >= 0.99 * wanted > 0  # of two blocks with equal scores, either may be selected
    assert decoding.begins() == [0] * len(LENGTHS)
    for _ in range(2):
        decoding.finish()
        decoding.check_slots()
        if not decoding.paper:  # the paper's policy attends to selected blocks only
            decoding.check_output()
        decoding.begin(whole=False)
    assert int(decoding.scout.refused) == 0


def test_of_more_selected_blocks_than_there_are_slots_the_best_are_resident() -> None:
    slots = 6
    decoding = Held(9, slots=slots)
    decoding.lengths = torch.tensor([500, 33, 96, 600])
    decoding.begin(whole=True)
    decoding.finish()
    before = decoding.hide_full_blocks()
    decoding.begin(whole=False)
    decoding.show(before)
    decoding.check_tokens_so_far()
    for layer in range(LAYERS):
        selected, held = decoding.selected(layer), decoding.is_held(decoding.held(layer)) & ~decoding.tails()
        assert (held <= selected).all()
        wanted = selected.sum(dim=2).clamp(max=slots - 1)  # one slot is the tail's
        assert torch.equal(held.sum(dim=2), wanted)
    decoding.finish()
    decoding.check_slots()
    decoding.check_output()


@pytest.mark.parametrize("budget", [9, 36])
@pytest.mark.parametrize("predicts", [False, True])
def test_the_mode_ends_and_comes_back_while_requests_come_and_go(budget: int, predicts: bool) -> None:
    decoding = Held(budget, slots=max(budget, 12), staged=200 if budget == 36 else 40)
    rows = list(LENGTHS)
    first_steps = set(range(len(rows)))  # rows whose first step is the next one
    for whole, steps in itertools.islice(itertools.cycle([(True, 2), (False, 2), (True, 1), (False, 1)]), 6):
        for step in range(steps):
            entry = int(torch.randint(len(rows), (), generator=decoding.random))
            if torch.rand((), generator=decoding.random) < 0.4:  # a new request takes this row
                low = SHARED * BLOCK_TOKENS + 1 if entry in (0, 3) else 1
                decoding.lengths[entry] = int(torch.randint(low, 700, (), generator=decoding.random))
                decoding.scout.reset_rows(torch.tensor([rows[entry]], device=DEVICE))
                first_steps.add(entry)
            decoding.begin(whole)
            if not whole:
                assert decoding.begins() == [int(entry in first_steps) for entry in range(len(rows))]
                if step == 0:
                    decoding.check_tokens_so_far()
            decoding.finish(predicts)
            if whole:
                check_exact(decoding)
            elif not first_steps or budget == 36:  # a row without resident blocks gets its slots in this step
                decoding.check_output()
            if not whole:
                decoding.check_slots()
            first_steps.clear()
    assert int(decoding.scout.refused) == 0


def test_a_row_that_another_request_took_begins_and_gets_nothing_of_what_was_held_before() -> None:
    decoding = Held(9, slots=12)
    decoding.begin(whole=True)
    decoding.finish()
    entry = 3
    decoding.scout.reset_rows(decoding.rows[entry:])
    decoding.lengths[entry] = 500
    decoding.begin(whole=False)
    assert decoding.begins() == [0, 0, 0, 1]
    positions = decoding.scout.slots.all_positions[:, decoding.rows[entry]]
    assert (positions.cpu() == reference.NO_BLOCK).all()
    decoding.check_tokens_so_far()
    decoding.finish()
    decoding.check_slots()
    # the length is the same as before, so kept lengths alone do not show that a new request took the row
    decoding.begin(whole=True)
    decoding.finish()
    decoding.scout.reset_rows(decoding.rows[:1])
    decoding.begin(whole=False)
    assert decoding.begins() == [1, 0, 0, 0]
    decoding.check_tokens_so_far()
    assert int(decoding.scout.refused) == 0


def test_rows_that_go_on_keep_the_count_of_their_first_steps() -> None:
    steps = 4
    decoding = Held(9, 50, early=steps, slots=12, whole=WholeSteps(beyond=600, steps=steps), whole_score=-math.inf)
    decoding.begin(whole=True)
    decoding.finish()
    decoding.scout.reset_rows(decoding.rows[3:])  # this row has its first step later than the other long row
    decoding.begin(whole=True)
    decoding.finish()
    flags = []
    for _ in range(4):
        decoding.begin(whole=False)
        flags.append(decoding.whole())
        assert not any(decoding.begins())
        decoding.finish()
        decoding.check_slots()
        for layer, (entry, is_whole) in itertools.product(range(LAYERS), enumerate(flags[-1])):
            expected = decoding.expected(layer, everything=bool(is_whole))[entry]
            if is_whole:
                found = decoding.out[layer, entry].cpu().float()
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert flags == [[1, 0, 0, 1], [1, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_rows_that_go_on_recall_when_their_turn_comes() -> None:
    decoding = Held(9, 3, slots=9)
    decoding.lengths = torch.tensor([500, 33, 96, 600])  # short enough that nine slots per row hold all whole rows
    first = decoding.lengths + 1
    for step in range(6):
        decoding.begin(whole=step < 2)
        before = [decoding.is_held(decoding.held(layer)) for layer in range(LAYERS)]
        decoding.finish()
        for layer in range(LAYERS if step >= 2 else 0):
            held = decoding.is_held(decoding.held(layer))
            due = (decoding.lengths - first + 1 + layer) % 3 == 0
            assert not (held & ~before[layer] & ~decoding.tails())[~due].any(), (
                "somebody recalled whose turn it was not"
            )
        if step >= 2:
            decoding.check_slots()


@pytest.mark.skipif(not ON_GPU, reason="a graph that is recorded is not checked in emulation")
@pytest.mark.device
def test_queries_of_recorded_steps_are_kept() -> None:
    decoding = Held(9, slots=12)
    decoding.scout.hold_rows(whole=True)
    decoding.scout.step.load_nothing()
    decoding.run(predicts=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoding.run(predicts=False)
    for _ in range(3):
        decoding.begin(whole=True)
        graph.replay()
        torch.cuda.synchronize()
        check_exact(decoding)
        for layer in range(LAYERS):
            kept, scale = decoding.scout.handover.query(layer)
            assert scale == SCALE
            assert torch.equal(kept[decoding.rows], decoding.query[layer, :-1])
    decoding.begin(whole=False)
    assert not any(decoding.begins())
    decoding.check_tokens_so_far()
    decoding.finish()
    decoding.check_output()
