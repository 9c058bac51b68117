"""Selection, misses and recall plans on the GPU, against the reference and policy ``scout``'s use of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import LayerCase, Shape, numbers, random_layer, random_table
from test_cuda_digests import Device, device_layer

from sglang_hybrid.memory.resident import ResidentSet
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.copies import gather_blocks
from sglang_hybrid.ops.cuda.digests import SlotTable
from sglang_hybrid.ops.cuda.scoring import ScoreWorkspace, score_blocks
from sglang_hybrid.ops.cuda.selection import Misses, RecallInterval, RecallPlan, apply_plan, select_blocks
from sglang_hybrid.ops.cuda.structs import TOTALS

SINK, RECENT = 2, 3
ALWAYS = SINK + RECENT + 1


def layer_shape(batch: int, max_blocks: int, heads: int = 2) -> Shape:
    return Shape(batch=batch, heads=heads, group=1, dim=64, channels=0, max_blocks=max_blocks)


def random_scores(shape: Shape, seed: int) -> torch.Tensor:
    """Return random scores: logarithms of attention shares, most of which are small."""
    return (torch.randn(shape.batch, shape.heads, shape.max_blocks, generator=seeded(seed)) * 3 - 6).to(DEVICE)


class Expected:
    """Expected selection of policy ``scout`` by scores and slots of one (row, KV head), in plain Python."""

    def __init__(
        self,
        length: int,
        held: list[int],
        scores: torch.Tensor,
        budget: int,
        bonus: float,
        min_miss_score: float,
        any_block: bool = False,
    ) -> None:
        count = -(-length // BLOCK_TOKENS)
        counts = torch.tensor([count])
        scores = scores.cpu()[None, None]
        opens = length % BLOCK_TOKENS == 1 and count - 1 not in held
        left = count - 2 - RECENT
        listed = [p for p in held if SINK <= p < (left if opens else count - 1 - RECENT)]
        room = len(held) - ALWAYS
        residents = ResidentSet(1, 1, room, "cpu")
        residents.positions[0, 0, : len(listed)] = torch.tensor(listed, dtype=torch.int64)
        if opens and left >= SINK and left in held:
            residents.admit(torch.zeros(1, dtype=torch.int64), torch.tensor([left]), scores)
        listed_now = residents.of(torch.zeros(1, dtype=torch.int64))
        is_resident = reference.is_listed(listed_now, scores.shape[2])
        chosen = reference.select_blocks(scores + bonus * is_resident, counts, budget, SINK, RECENT)
        forced = reference.is_forced(chosen, counts, SINK, RECENT)
        self.selected = [p for p in reference.split(chosen, forced)[1].flatten().tolist() if p >= 0]
        self.always = [p for p in reference.split(chosen, forced)[0].flatten().tolist() if p >= 0]
        self.residents = {p for p in listed_now.flatten().tolist() if p >= 0}
        self.misses = [p for p in self.selected if p not in self.residents and float(scores[0, 0, p]) >= min_miss_score]
        if any_block:
            most = budget - ALWAYS
            missing = reference.blocks_worth(scores, is_resident, counts, min_miss_score, most, SINK, RECENT)
            self.misses = [p for p in missing.flatten().tolist() if p >= 0]
        value = scores[0, 0].tolist()
        by_score = sorted(self.selected, key=lambda p: -value[p])
        self.recalled = set(by_score[:room])
        # resident blocks that give up slots to gathered blocks, in this order; and the number of empty slots
        victims = {p for p in self.residents - set(self.selected) if not (any_block and value[p] >= min_miss_score)}
        self.victims = sorted(victims, key=lambda p: value[p])
        near = {p for p in held if max(SINK, count - 1 - RECENT) <= p < count} | {count - 1} - set(range(SINK))
        self.empty = len(held) - SINK - len(near) - len(self.residents)
        # near blocks without a slot are misses too, except the tail, which gets a slot from append
        homeless = [p for p in self.always if p != count - 1 and p not in held]
        self.misses = sorted(self.misses + homeless)
        self.best_misses = homeless + sorted((p for p in self.misses if p not in homeless), key=lambda p: -value[p])
        self.room_to_gather = sum(p < SINK for p in homeless) + self.empty + len(self.victims)


def expected_lists(
    case: LayerCase,
    table: SlotTable,
    scores: torch.Tensor,
    budget: int,
    bonus: float,
    min_miss_score: float,
    any_block: bool = False,
) -> list[list[Expected]]:
    return [
        [
            Expected(int(case.step.lengths[entry]), table.positions[row, head].tolist(), scores[entry, head], budget,
                     bonus, min_miss_score, any_block)
            for head in range(case.shape.heads)
        ]
        for entry, row in enumerate(case.step.row_of.tolist())
    ]  # fmt: skip


def assert_misses(case: LayerCase, misses: Misses, expected: list[list[Expected]]) -> None:
    for entry, lists in enumerate(expected):
        for head, one in enumerate(lists):
            count = int(misses.counts[entry, head])
            assert misses.positions[entry, head, :count].tolist() == one.misses
            pages = case.step.page_table[entry].long()[torch.tensor(one.misses, dtype=torch.int64, device=DEVICE)]
            assert misses.pages[entry, head, :count].tolist() == pages.tolist()
            assert (misses.positions[entry, head, count:] == -1).all()
            assert (misses.pages[entry, head, count:] == -1).all()


@pytest.mark.parametrize(
    ("batch", "max_blocks", "budget", "resident"),
    [(1, 40, 16, 10), (5, 100, 24, 18), (3, 30, 64, 58), (4, 1000, 64, 58), (2, 300, 128, 40), (3, 50, 6, 0)],
)
def test_misses_are_what_the_reference_selects_beyond_the_residents(
    batch: int, max_blocks: int, budget: int, resident: int
) -> None:
    shape = layer_shape(batch, max_blocks)
    for seed, (bonus, min_miss_score) in enumerate([(0.0, -math.inf), (1.0, -math.inf), (2.0, math.log(0.01))]):
        case = random_layer(shape, seed)
        table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, resident, seed)
        scores = random_scores(shape, seed)
        expected = expected_lists(case, table, scores, budget, bonus, min_miss_score)
        misses = Misses(batch, shape.heads, budget, DEVICE)
        select_blocks(scores, table, case.step, budget, misses, pool_pages=case.keys.shape[0], bonus=bonus,
                      min_miss_score=min_miss_score)  # fmt: skip
        assert_misses(case, misses, expected)


@pytest.mark.parametrize("group", [1, 5, 12])
def test_scores_are_written_and_selected_from(group: int) -> None:
    shape = Shape(batch=3, heads=2, group=group, dim=64, channels=32, max_blocks=50)
    case = random_layer(shape, 4)
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 10, 4)
    workspace = ScoreWorkspace(shape.batch, shape.heads, group, shape.max_blocks, DEVICE)
    scores = torch.full((shape.batch, shape.heads, shape.max_blocks), 5.0, device=DEVICE)
    put_off = score_blocks(case.query, case.digests, case.step, shape.scale, workspace, scores)
    found, again = (Misses(shape.batch, shape.heads, 20, DEVICE) for _ in range(2))
    of_written = replace(table, positions=table.positions.clone())
    select_blocks(scores, table, case.step, 20, found, pool_pages=case.keys.shape[0], put_off=put_off)
    torch.testing.assert_close(scores, case.expected_scores(), atol=0.02, rtol=1e-3)
    select_blocks(scores, of_written, case.step, 20, again, pool_pages=case.keys.shape[0])
    assert torch.equal(found.positions, again.positions) and found.counts.sum() > 0
    with pytest.raises(ValueError, match="other scores"):
        select_blocks(scores.clone(), table, case.step, 20, found, pool_pages=9, put_off=put_off)


@pytest.mark.parametrize(
    ("batch", "max_blocks", "budget", "resident"),
    [(2, 40, 16, 10), (5, 100, 24, 18), (3, 30, 64, 58), (4, 1000, 64, 58), (2, 300, 128, 40), (3, 50, 6, 0)],
)
def test_every_block_that_is_worth_it_is_a_miss_where_the_score_decides_alone(
    batch: int, max_blocks: int, budget: int, resident: int
) -> None:
    shape = layer_shape(batch, max_blocks)
    beyond = 0
    for seed, min_miss_score in enumerate((-math.inf, -6.0, math.log(0.01), 1.0, 1e9)):
        case = random_layer(shape, seed)
        table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, resident, seed)
        scores = random_scores(shape, seed)
        expected = expected_lists(case, table, scores, budget, 1.0, min_miss_score, any_block=True)
        misses = Misses(batch, shape.heads, budget, DEVICE)
        plan = RecallPlan(batch * shape.heads * table.positions.shape[2], DEVICE)
        select_blocks(scores, table, case.step, budget, misses, pool_pages=case.keys.shape[0], bonus=1.0,
                      min_miss_score=min_miss_score, any_block=True,
                      plan=plan, recall=numbers(*[1] * batch))  # fmt: skip
        assert_misses(case, misses, expected)
        beyond += sum(not set(one.misses) <= set(one.selected + one.always) for lists in expected for one in lists)
        # min_miss_score does not change which blocks become resident: the selected ones
        positions = plan.positions[: int(plan.count)].tolist()
        assert set(positions) <= {p for lists in expected for one in lists for p in (*one.recalled, *one.always)}
    assert beyond or max_blocks < budget or budget == ALWAYS


def test_of_thousands_of_blocks_the_best_are_selected() -> None:
    shape = layer_shape(2, 8192, heads=1)
    small = layer_shape(2, 4, heads=1)
    case = random_layer(small, 0)
    table = torch.randint(0, case.keys.shape[0], (2, 8192), generator=seeded(1)).int().to(DEVICE)
    step = type(case.step)(table, numbers(8192 * 32, 8000 * 32 - 7), case.step.row_of)
    case = LayerCase(shape, case.keys, case.digests, step, case.query)
    slots = random_table(shape, step.lengths.cpu(), step.row_of.cpu(), SINK, RECENT, 122, 0)
    scores = random_scores(shape, 3)
    misses = Misses(2, 1, 128, DEVICE)
    expected = expected_lists(case, slots, scores, 128, 1.5, -math.inf)
    select_blocks(scores, slots, step, 128, misses, pool_pages=case.keys.shape[0], bonus=1.5)
    assert_misses(case, misses, expected)


def test_damaged_blocks_are_selected_last() -> None:
    shape = layer_shape(1, 30)
    case = random_layer(shape, 0, [30 * 32])
    table = SlotTable(torch.full((shape.rows, 2, ALWAYS + 4), -1, dtype=torch.int32, device=DEVICE), SINK, RECENT)
    scores = random_scores(shape, 0)
    scores[0, :, 10:20] = torch.finfo(torch.float32).min
    scores[0, 1, 10:20] = torch.nan
    misses = Misses(1, 2, 64, DEVICE)
    select_blocks(scores, table, case.step, 30 - 5, misses, pool_pages=case.keys.shape[0])
    for head in range(2):
        found = set(misses.positions[0, head].tolist()) - {-1}
        # all undamaged blocks except the tail, and as many damaged ones as fit in the budget
        assert set(range(29)) - set(range(10, 20)) <= found and len(found) == 24


def test_more_misses_than_there_is_room_for_are_cut_by_score() -> None:
    shape = layer_shape(2, 60)
    case = random_layer(shape, 1, [60 * 32, 55 * 32])
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 0, 1)
    scores = random_scores(shape, 1)
    expected = expected_lists(case, table, scores, 30, 0.0, -math.inf)
    misses = Misses(2, 2, 7, DEVICE)
    select_blocks(scores, table, case.step, 30, misses, pool_pages=case.keys.shape[0])
    for entry in range(2):
        for head in range(2):
            best = sorted(expected[entry][head].misses, key=lambda p: -float(scores[entry, head, p]))[:7]
            assert misses.positions[entry, head].tolist() == sorted(best)


def test_blocks_whose_page_does_not_exist_are_no_misses() -> None:
    shape = layer_shape(1, 40)
    case = random_layer(shape, 1, [40 * 32])
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 4, 1)
    case.step.page_table[0, 5:15], case.step.page_table[0, 15:20] = -1, case.keys.shape[0]
    misses = Misses(1, 2, 40, DEVICE)
    select_blocks(random_scores(shape, 1), table, case.step, 40, misses, pool_pages=case.keys.shape[0])
    for head in range(2):
        found = set(misses.positions[0, head].tolist()) - {-1}
        held = set(table.positions[int(case.step.row_of[0]), head].tolist())
        assert found == set(range(39)) - set(range(5, 20)) - held


@pytest.mark.parametrize("active", [0, 2])
def test_entries_that_are_not_active_and_rows_that_do_not_exist(active: int) -> None:
    shape = layer_shape(4, 40)
    case = random_layer(shape, 1, [1000, 33 * 32 + 1, 1200, 1280]).with_active(active)
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 4, 1)
    before = table.positions.clone()
    case.step.row_of[0] = -1
    misses = Misses(4, 2, 20, DEVICE)
    misses.counts.fill_(55)
    plan = RecallPlan(4 * 2 * 10, DEVICE)
    plan.count.fill_(9)
    due = numbers(0, 0, 1, 1)
    select_blocks(
        random_scores(shape, 1), table, case.step, 20, misses, pool_pages=case.keys.shape[0], plan=plan, recall=due
    )
    assert (misses.counts[active:] == 55).all() and int(plan.count) == 0
    if active:
        assert (misses.counts[0] == 0).all() and (misses.counts[1] < 55).all()
        assert (table.positions != before).any()  # the second row opened a block
    else:
        assert torch.equal(table.positions, before)


def test_more_than_a_selection_can_hold_is_refused() -> None:
    shape = layer_shape(1, 12)
    case = random_layer(shape, 0)
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 4, 0)
    scores, misses = random_scores(shape, 0), Misses(1, 2, 8, DEVICE)
    for budget, sentence in ((257, "at most 256"), (5, "does not hold what is always selected")):
        with pytest.raises(ValueError, match=sentence):
            select_blocks(scores, table, case.step, budget, misses, pool_pages=9)


# -- two lists -------------------------------------------------------------------------------


def phase_of(row: int, head: int, length: int) -> float:
    """Return the kernel's ``rounding_phase``."""
    mask = 0xFFFFFFFF
    bits = (row * 0x9E3779B1 ^ head * 0x85EBCA77 ^ length * 0xC2B2AE3D) & mask
    bits = (bits ^ bits >> 15) * 0x2C1B3C6D & mask
    bits = (bits ^ bits >> 12) * 0x297A2D39 & mask
    return ((bits ^ bits >> 15) >> 8) * 2.0**-24


def gathered_of(misses: int, share: float, phase: float, most: int, most_gathered: int) -> int:
    rounded = torch.tensor(float(misses)) * torch.tensor(share) + torch.tensor(phase)
    wanted = min(int(rounded), most_gathered, misses)
    return min(wanted + max(misses - wanted - most, 0), most_gathered, misses)


@pytest.mark.parametrize("any_block", [False, True])
@pytest.mark.parametrize(
    ("share", "most", "most_gathered"),
    [(0.0, 40, 8), (0.3, 40, 40), (0.55, 40, 6), (1.0, 40, 40), (0.25, 5, 9), (0.5, 3, 2), (0.7, 0, 20), (7.0, 4, 40)],
)
def test_misses_are_shared_between_worker_and_gather(
    share: float, most: int, most_gathered: int, any_block: bool
) -> None:
    shape = layer_shape(5, 60, heads=3)
    beyond = 0  # lists with fewer slots than gathered blocks
    for seed, resident in ((0, 4), (1, 24), (2, 18)):
        case = random_layer(shape, seed, [60 * 32, 55 * 32 + 1, 40 * 32 - 3, 300, 20])
        table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, resident, seed)
        if seed == 2:  # one row without its sinks, and one without any blocks in slots
            table.positions[case.step.row_of[0].long(), :, :SINK] = -1
            table.positions[case.step.row_of[1].long()] = -1
        scores = random_scores(shape, seed)
        expected = expected_lists(case, table, scores, 30, 0.5, -9.0, any_block)
        misses, gathered = Misses(5, 3, most, DEVICE), RecallPlan(5 * 3 * most_gathered, DEVICE)
        total = torch.full((len(TOTALS),), 1000, dtype=torch.int64, device=DEVICE)
        select_blocks(
            scores, table, case.step, 30, misses, pool_pages=case.keys.shape[0], bonus=0.5, min_miss_score=-9.0,
            any_block=any_block, gathered=gathered, gather_share=torch.tensor([9.0, share], device=DEVICE)[1],
            most_gathered=most_gathered, totals=total,
        )  # fmt: skip
        counted = dict(zip(TOTALS, (total - 1000).tolist(), strict=True))
        assert counted["recalled"] == 0  # there is no plan
        assert counted["misses"] == sum(len(one.misses) for lists in expected for one in lists)
        assert counted["gathered"] == int(gathered.count)
        assert counted["selected"] == sum(len(one.selected) for lists in expected for one in lists)
        assert counted["resident"] == sum(len(one.residents & {*one.selected}) for lists in expected for one in lists)
        before = table.positions.clone()
        apply_plan(gathered, table)
        assert_plan(case, gathered, before, table)
        for entry, row in enumerate(case.step.row_of.tolist()):
            length = int(case.step.lengths[entry])
            for head in range(shape.heads):
                one = expected[entry][head]
                first = gathered_of(len(one.misses), min(share, 1.0), phase_of(row, head, length), most, most_gathered)
                beyond += first > one.room_to_gather
                first = min(first, one.room_to_gather)
                positions = sorted(one.best_misses[first : first + most])
                pages = [int(case.step.page_table[entry, p]) for p in positions]
                behind = [-1] * (most - len(positions))
                assert int(misses.counts[entry, head]) == len(positions)
                assert misses.positions[entry, head].tolist() == positions + behind
                assert misses.pages[entry, head].tolist() == pages + behind
                assert_gathered(one, one.best_misses[:first], before[row, head].tolist(), table.positions[row, head])
    assert beyond or share < 0.5 or most_gathered < 9


def assert_gathered(one: Expected, gathered: list[int], before: list[int], positions: torch.Tensor) -> None:
    """Assert that gathered blocks have slots, and that only as many blocks as needed lost theirs, the worst victims."""
    now = [p for p in positions.tolist() if p >= 0]
    assert len(now) == len(set(now))
    assert set(now) - set(before) == set(gathered)
    others = sum(p >= SINK for p in gathered)  # sinks have slots of their own
    assert set(before) - set(now) - {-1} == set(one.victims[: max(0, others - one.empty)])


def test_a_share_is_kept_on_average_and_can_change_in_a_graph() -> None:
    shape = layer_shape(4, 60, heads=8)
    case = random_layer(shape, 0, [50 * 32] * 4)
    table = SlotTable(torch.full((shape.rows, 8, 20), -1, dtype=torch.int32, device=DEVICE), SINK, RECENT)
    scores, share = random_scores(shape, 0), torch.zeros(1, device=DEVICE)
    misses, gathered = Misses(4, 8, 20, DEVICE), RecallPlan(4 * 8 * 13, DEVICE)

    def launch() -> None:
        select_blocks(
            scores, table, case.step, 13, misses, pool_pages=case.keys.shape[0], gathered=gathered, gather_share=share
        )

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for wanted in (0.03, 0.31, 0.8):
        share.fill_(wanted)
        parts = []
        for step in range(12):
            case.step.lengths.fill_(50 * 32 - 31 + step * 2 + 1)
            graph.replay()
            found = int(gathered.count)
            assert int(misses.counts.sum()) + found == 4 * 8 * 12
            parts.append(found / (4 * 8 * 12))
        assert abs(sum(parts) / len(parts) - wanted) < 0.015


def test_gathered_blocks_come_with_a_share_and_room() -> None:
    shape = layer_shape(1, 12)
    case = random_layer(shape, 0)
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 4, 0)
    scores, misses = random_scores(shape, 0), Misses(1, 2, 8, DEVICE)
    with pytest.raises(ValueError, match="a share a second list"):
        select_blocks(scores, table, case.step, 9, misses, pool_pages=9, gather_share=torch.zeros(1, device=DEVICE))
    with pytest.raises(ValueError, match="too few"):
        select_blocks(scores, table, case.step, 9, misses, pool_pages=9, gather_share=torch.zeros(1, device=DEVICE),
                      gathered=RecallPlan(9, DEVICE), most_gathered=5)  # fmt: skip
    with pytest.raises(ValueError, match="given twice"):
        select_blocks(scores, table, case.step, 9, misses, pool_pages=9, recall=numbers(1), due=numbers(1))


# -- recall ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "resident"), [(24, 18), (24, 7), (40, 34), (20, 30)])
def test_a_plan_makes_the_best_of_the_selection_resident(budget: int, resident: int) -> None:
    shape = layer_shape(6, 80)
    for seed in range(3):
        case = random_layer(shape, seed, [80 * 32, 79 * 32 + 1, 500, 33 * 32 + 1, 7 * 32, 40])
        table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, resident, seed)
        scores = random_scores(shape, seed + 50)
        expected = expected_lists(case, table, scores, budget, 1.0, -math.inf)
        plan, misses = RecallPlan(shape.batch * shape.heads * (ALWAYS + resident), DEVICE), Misses(6, 2, budget, DEVICE)
        due = numbers(1, 1, 1, 1, 0, 1)
        for _ in range(2):  # a second plan replaces one that was not applied
            select_blocks(
                scores,
                table,
                case.step,
                budget,
                misses,
                pool_pages=case.keys.shape[0],
                bonus=1.0,
                plan=plan,
                recall=due,
            )
        before = table.positions.clone()
        apply_plan(plan, table)
        assert_plan(case, plan, before, table)
        for entry, row in enumerate(case.step.row_of.tolist()):
            count = -(-int(case.step.lengths[entry]) // BLOCK_TOKENS)
            for head in range(shape.heads):
                one, held = expected[entry][head], table.positions[row, head].tolist()
                there = {p for p in held if p >= 0}
                assert len([p for p in held if p >= 0]) == len(there)
                candidates = {p for p in there if SINK <= p < count - 1 - RECENT}
                if not int(due[entry]):
                    assert candidates == one.residents
                    continue
                assert one.recalled <= candidates and set(one.always) - {count - 1} <= there
                # blocks that lost their slots had the lowest scores of the resident blocks that were not selected
                gone = one.residents - candidates
                kept = candidates - one.recalled
                assert kept <= one.residents
                value = scores[entry, head].tolist()
                assert not gone or not kept or max(value[p] for p in gone) <= min(value[p] for p in kept)
                if len(one.selected) >= resident:
                    assert candidates == one.recalled


@pytest.mark.parametrize("any_block", [False, True])
@pytest.mark.parametrize(("budget", "resident"), [(24, 18), (24, 7), (40, 34), (20, 30)])
def test_a_plan_is_made_for_slots_that_have_the_gathered_blocks(budget: int, resident: int, any_block: bool) -> None:
    shape = layer_shape(6, 80)
    slots, gathered_selected = ALWAYS + resident, 0
    for seed, share in enumerate((0.2, 0.5, 1.0)):
        case = random_layer(shape, seed, [80 * 32, 79 * 32 + 1, 500, 33 * 32 + 1, 7 * 32, 40])
        table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, resident, seed)
        table.positions[case.step.row_of[seed].long()] = -1  # a row without blocks in slots
        alone = SlotTable(table.positions.clone(), SINK, RECENT)
        scores, due = random_scores(shape, seed + 50), numbers(1, 1, 1, 1, 0, 1)
        expected = expected_lists(case, table, scores, budget, 1.0, -8.0, any_block)
        plan, gathered = RecallPlan(6 * 2 * slots, DEVICE), RecallPlan(6 * 2 * 5, DEVICE)
        misses, totals = Misses(6, 2, budget, DEVICE), torch.zeros(len(TOTALS), dtype=torch.int64, device=DEVICE)
        options: dict[str, Any] = {
            "pool_pages": case.keys.shape[0], "bonus": 1.0, "min_miss_score": -8.0, "any_block": any_block,
            "plan": plan, "recall": due,
        }  # fmt: skip
        select_blocks(scores, alone, case.step, budget, misses, **options)
        apply_plan(plan, alone)
        for _ in range(2):  # a second plan replaces one that was not applied
            select_blocks(
                scores, table, case.step, budget, misses, gathered=gathered, most_gathered=5,
                gather_share=torch.full((1,), share, device=DEVICE), totals=totals.zero_(), **options,
            )  # fmt: skip
        both = [set(part.destinations[: int(part.count)].tolist()) for part in (gathered, plan)]
        assert both[0] and not both[0] & both[1]
        missed = sum(len(one.misses) for lists in expected for one in lists)
        assert totals[:3].tolist() == [missed, int(plan.count), int(gathered.count)]
        for part in (gathered, plan):
            before = table.positions.clone()
            apply_plan(part, table)
            assert_plan(case, part, before, table)
        for entry, row in enumerate(case.step.row_of.tolist()):
            for head in range(shape.heads):
                one = expected[entry][head]
                now, other = ({p for p in part.positions[row, head].tolist() if p >= 0} for part in (table, alone))
                assert len(now) == int((table.positions[row, head] >= 0).sum())
                assert one.residents & set(one.selected) <= now or (int(due[entry]) and len(one.selected) > resident)
                first = row * shape.heads + head
                brought = [
                    position
                    for position, slot in zip(gathered.positions.tolist(), gathered.destinations.tolist(), strict=True)
                    if slot in both[0] and slot // slots == first
                ]
                assert set(brought) <= now
                if int(due[entry]) and set(brought) <= set(one.selected + one.always):
                    assert now == other  # the same blocks are resident, gathered or planned
                    gathered_selected += len(brought)
    assert gathered_selected


def assert_plan(case: LayerCase, plan: RecallPlan, before: torch.Tensor, table: SlotTable) -> None:
    """Assert that every entry of the plan has its block's page and changes one slot, and that no other slot changes."""
    count = int(plan.count)
    slots, heads = before.shape[2], before.shape[1]
    flat = before.flatten().clone()
    destinations = plan.destinations[:count].tolist()
    assert len(set(destinations)) == count
    entries = {row: entry for entry, row in enumerate(case.step.row_of.tolist())}
    for page, slot, position in zip(plan.pages[:count].tolist(), destinations, plan.positions[:count].tolist(),
                                    strict=True):  # fmt: skip
        entry = entries[slot // (slots * heads)]
        assert page == int(case.step.page_table[entry, position])
        assert slot % slots >= SINK or slot % slots == position
        flat[slot] = position
    assert torch.equal(flat, table.positions.flatten())


def test_rows_recall_when_their_steps_are_a_multiple_of_the_interval() -> None:
    shape = layer_shape(4, 40)
    case = random_layer(shape, 0, [1000, 1001, 1002, 1003])
    first = torch.full((shape.rows,), 990, dtype=torch.int32, device=DEVICE)
    scores = random_scores(shape, 0)
    for interval, layer, expected in ((4, 0, {1}), (4, 2, {3}), (1, 0, {0, 1, 2, 3}), (0, 0, set())):
        table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 10, 0)
        plan, misses = RecallPlan(4 * 2 * 16, DEVICE), Misses(4, 2, 20, DEVICE)
        select_blocks(
            scores, table, case.step, 20, misses, pool_pages=case.keys.shape[0], plan=plan,
            recall=RecallInterval(numbers(interval), first, layer),
        )  # fmt: skip
        rows = {slot // (2 * 16) for slot in plan.destinations[: int(plan.count)].tolist()}
        assert rows == {int(case.step.row_of[entry]) for entry in expected}


def test_rows_that_are_due_recall_beside_those_of_the_interval() -> None:
    shape = layer_shape(4, 40)
    case = random_layer(shape, 0, [1000, 1001, 1002, 1003])
    first = torch.full((shape.rows,), 990, dtype=torch.int32, device=DEVICE)
    scores = random_scores(shape, 0)
    for interval, expected in ((4, {1, 2}), (0, {2})):
        table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), SINK, RECENT, 10, 0)
        plan, misses = RecallPlan(4 * 2 * 16, DEVICE), Misses(4, 2, 20, DEVICE)
        select_blocks(
            scores, table, case.step, 20, misses, pool_pages=case.keys.shape[0], plan=plan,
            recall=RecallInterval(numbers(interval), first), due=numbers(0, 0, 1, 0),
        )  # fmt: skip
        rows = {slot // (2 * 16) for slot in plan.destinations[: int(plan.count)].tolist()}
        assert rows == {int(case.step.row_of[entry]) for entry in expected}


# -- many steps ------------------------------------------------------------------------------


def gather(layer: Device, plan: RecallPlan) -> None:
    gather_blocks(
        layer.pool.region, layer.pool.keys, layer.pool.values, plan.pages, layer.key_slots, layer.value_slots,
        destinations=plan.destinations, count=plan.count,
    )  # fmt: skip


def assert_contents(layer: Device) -> None:
    """Assert that every slot has the same contents as the pool has for the block at the slot's position."""
    step = layer.case.step
    for entry, row in enumerate(step.row_of.tolist()):
        length = int(step.lengths[entry])
        for head in range(layer.case.shape.heads):
            for slot, position in enumerate(layer.table.positions[row, head].tolist()):
                if position < 0:
                    continue
                page, there = int(step.page_table[entry, position]), slice(0, min(32, length - 32 * position))
                for held, pool in ((layer.key_slots, layer.pool.keys), (layer.value_slots, layer.pool.values)):
                    assert torch.equal(held[row, head, slot, there].cpu(), pool[page, head, there])


def test_slots_stay_those_of_policy_scout_over_many_steps() -> None:
    budget, resident, interval, steps = 16, 10, 5, 40
    shape = layer_shape(3, 26)
    lengths = [20 * 32, 23 * 32 - 9, 15]
    layer = device_layer(shape, 0, lengths, SINK, RECENT, resident)
    step = layer.case.step
    layer.table.positions.fill_(-1)
    unused = list(set(range(layer.case.keys.shape[0])) - set(step.page_table.flatten().tolist()))
    plan, misses = RecallPlan(3 * 2 * (ALWAYS + resident), DEVICE), Misses(3, 2, budget, DEVICE)
    options: dict[str, Any] = {"pool_pages": layer.case.keys.shape[0], "bonus": 1.0, "plan": plan}
    residents: dict[tuple[int, int], ResidentSet] = {}
    first = torch.zeros(shape.rows, dtype=torch.int32, device=DEVICE)
    first[step.row_of.long()] = step.lengths + 1
    everyone, only = numbers(1, 1, 1), torch.zeros(1, dtype=torch.int64)

    for number in range(steps):
        step.lengths.add_(1)
        for entry in range(shape.batch):
            tail = (int(step.lengths[entry]) - 1) // BLOCK_TOKENS
            if int(step.page_table[entry, tail]) < 0:
                step.page_table[entry, tail] = unused.pop()
        if number == 0:  # the prompt's query selects, before the first step
            scores = random_scores(shape, 1000)
            select_blocks(scores, layer.table, step, budget, misses, recall=everyone, **options)
            gather(layer, plan)
            apply_plan(plan, layer.table)
        scores_now = random_scores(shape, number)
        select_blocks(
            scores_now, layer.table, step, budget, misses,
            recall=RecallInterval(numbers(interval), first, layer=2), **options,
        )  # fmt: skip
        layer.keys.copy_(torch.randn(layer.keys.shape, generator=seeded(number)))
        layer.values.copy_(layer.keys * 2)
        layer.append()
        torch.cuda.synchronize()
        assert_contents(layer)
        for entry, row in enumerate(step.row_of.tolist()):
            length = int(step.lengths[entry])
            count = -(-length // BLOCK_TOKENS)
            counts = torch.tensor([count])
            for head in range(shape.heads):
                kept = residents.setdefault((row, head), ResidentSet(1, 1, resident, "cpu"))
                if number == 0:
                    kept.replace(only, best_of(scores[entry, head].cpu(), counts, budget, resident))
                of_block = scores_now[entry, head].cpu()[None, None]
                left = count - 2 - RECENT
                if number and length % BLOCK_TOKENS == 1 and left >= SINK:
                    kept.admit(only, torch.tensor([left]), of_block)
                listed = kept.of(only)
                is_resident = reference.is_listed(listed, shape.max_blocks)
                chosen = reference.select_blocks(of_block + 1.0 * is_resident, counts, budget, SINK, RECENT)
                forced = reference.is_forced(chosen, counts, SINK, RECENT)
                selected = reference.split(chosen, forced)[1]
                missed = [p for p in selected.flatten().tolist() if p >= 0 and p not in listed.flatten().tolist()]
                found = int(misses.counts[entry, head])
                assert misses.positions[entry, head, :found].tolist() == missed
                near = {p for p in chosen[forced].tolist() if p >= 0}
                held = sorted(p for p in layer.table.positions[row, head].tolist() if p >= 0)
                assert held == sorted(near | {p for p in listed.flatten().tolist() if p >= 0})
                if (number + 1 + 2) % interval == 0:
                    best = sorted((p for p in selected.flatten().tolist() if p >= 0), key=lambda p: -of_block[0, 0, p])
                    kept.replace(only, torch.tensor(best[:resident], dtype=torch.int64)[None, None])
        gather(layer, plan)
        apply_plan(plan, layer.table)


@pytest.mark.parametrize("appends_first", [False, True])  # on a GPU, append and gather run concurrently
@pytest.mark.parametrize(("share", "min_miss_score", "any_block"), [(1.0, -math.inf, False), (0.6, -6.0, True)])
def test_gathered_blocks_are_resident_from_their_step_on(
    share: float, min_miss_score: float, any_block: bool, appends_first: bool
) -> None:
    budget, resident, steps, interval = 16, 10, 36, 7
    shape = layer_shape(3, 26)
    layer = device_layer(shape, 0, [20 * 32, 23 * 32 - 9, 15], SINK, RECENT, resident)
    step, slots = layer.case.step, ALWAYS + resident
    layer.table.positions.fill_(-1)
    unused = list(set(range(layer.case.keys.shape[0])) - set(step.page_table.flatten().tolist()))
    plan, gathered = RecallPlan(3 * 2 * slots, DEVICE), RecallPlan(3 * 2 * 4, DEVICE)
    misses, scores = Misses(3, 2, budget, DEVICE), random_scores(shape, 999)
    first = torch.zeros(shape.rows, dtype=torch.int32, device=DEVICE)
    first[step.row_of.long()] = step.lengths + 1
    found = left = 0
    for number in range(steps):
        step.lengths.add_(1)
        for entry in range(shape.batch):
            tail = (int(step.lengths[entry]) - 1) // BLOCK_TOKENS
            if int(step.page_table[entry, tail]) < 0:
                step.page_table[entry, tail] = unused.pop()
        scores = scores * 0.8 + (random_scores(shape, number) + 6) * 0.6 - 1.2
        expected = expected_lists(layer.case, layer.table, scores, budget, 0.5, min_miss_score, any_block)
        select_blocks(
            scores, layer.table, step, budget, misses, pool_pages=layer.case.keys.shape[0], bonus=0.5,
            min_miss_score=min_miss_score, any_block=any_block,
            plan=plan, recall=RecallInterval(numbers(interval), first),
            gathered=gathered, gather_share=torch.full((1,), share, device=DEVICE), most_gathered=4,
        )  # fmt: skip
        layer.keys.copy_(torch.randn(layer.keys.shape, generator=seeded(number)))
        layer.values.copy_(layer.keys * 2)
        if appends_first:
            layer.append(scores=scores)
        gather(layer, gathered)
        apply_plan(gathered, layer.table)
        if not appends_first:
            layer.append(scores=scores)
        torch.cuda.synchronize()
        assert_contents(layer)
        for entry, row in enumerate(step.row_of.tolist()):
            for head in range(shape.heads):
                one, held = expected[entry][head], layer.table.positions[row, head].tolist()
                there = [p for p in held if p >= 0]
                assert len(there) == len(set(there))
                count = int(misses.counts[entry, head])
                missed = misses.positions[entry, head, :count].tolist()
                # every miss is in a slot now or in the list, and no block in a slot is listed
                assert set(one.misses) <= set(there + missed) and not set(there) & set(missed)
                assert (one.residents & set(one.selected)) <= set(there)
                found += len(one.misses) - count
                left += count
        gather(layer, plan)
        apply_plan(plan, layer.table)
    assert found > 100 and left > 0


def best_of(scores: torch.Tensor, counts: torch.Tensor, budget: int, resident: int) -> torch.Tensor:
    chosen = reference.select_blocks(scores[None, None], counts, budget, SINK, RECENT)
    forced = reference.is_forced(chosen, counts, SINK, RECENT)
    selected = [p for p in reference.split(chosen, forced)[1].flatten().tolist() if p >= 0]
    best = sorted(selected, key=lambda p: -float(scores[p]))[:resident]
    return torch.tensor(best, dtype=torch.int64)[None, None]


def test_a_graph_selects_plans_gathers_and_appends() -> None:
    shape = layer_shape(4, 40)
    layer = device_layer(shape, 3, [1000, 33, 1279, 700], SINK, RECENT, 10)
    case = layer.case
    scores = random_scores(shape, 0)
    plan, misses = RecallPlan(4 * 2 * 16, DEVICE), Misses(4, 2, 16, DEVICE)
    due, active = numbers(1, 0, 1, 1), numbers(4)
    step = type(case.step)(case.step.page_table, case.step.lengths, case.step.row_of, active)
    layer.case = LayerCase(shape, case.keys, case.digests, step, case.query)

    def launch() -> None:
        select_blocks(
            scores, layer.table, step, 16, misses, pool_pages=case.keys.shape[0], bonus=1.0, plan=plan, recall=due
        )
        layer.append()
        gather(layer, plan)
        apply_plan(plan, layer.table)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for seed in range(1, 12):
        scores.copy_(random_scores(shape, seed))
        active.fill_(seed % 5)
        expected = expected_lists(layer.case, layer.table, scores, 16, 1.0, -math.inf)
        graph.replay()
        torch.cuda.synchronize()
        assert_contents(layer)
        for entry in range(seed % 5):
            for head in range(2):
                count = int(misses.counts[entry, head])
                assert misses.positions[entry, head, :count].tolist() == expected[entry][head].misses
    assert int(plan.count) > 0 or seed % 5 == 0
