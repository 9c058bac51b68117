"""Attention over slots and merging on the GPU, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_cases import DEVICE, Shape, SlotCase, random_partial, random_slots

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.attention import AttendWorkspace, attend_slots, merge

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
LSE_TOLERANCE = 1e-3
UNTOUCHED = 77.0

SHAPES = [
    Shape(batch=1, heads=1, group=1, dim=64, slots=1),
    Shape(batch=3, heads=2, group=7, dim=128, slots=8),
    Shape(batch=2, heads=1, group=16, dim=128, slots=41),
    Shape(batch=1, heads=1, group=9, dim=64, slots=130, dtype=torch.float16),
    Shape(batch=5, heads=3, group=3, dim=96, slots=12),
    Shape(batch=2, heads=2, group=4, dim=96, slots=17, dtype=torch.float16),
    Shape(batch=2, heads=2, group=8, dim=256, slots=13),
    Shape(batch=3, heads=2, group=5, dim=128, slots=6),
    Shape(batch=3, heads=2, group=5, dim=128, slots=9, pool=reference.FP8),
    Shape(batch=2, heads=1, group=16, dim=64, slots=41, dtype=torch.float16, pool=reference.FP8),
]
LARGE = [
    Shape(batch=1, heads=8, group=5, dim=128, slots=64),
    Shape(batch=8, heads=4, group=16, dim=128, slots=41),
    Shape(batch=64, heads=8, group=5, dim=128, slots=68),
    Shape(batch=40, heads=8, group=8, dim=128, slots=16, dtype=torch.float16),
    Shape(batch=4, heads=2, group=2, dim=64, slots=132),
    Shape(batch=2, heads=1, group=9, dim=64, slots=300, dtype=torch.float16),
    Shape(batch=6, heads=2, group=4, dim=96, slots=40, dtype=torch.float16),
    Shape(batch=64, heads=8, group=5, dim=128, slots=68, pool=reference.FP8),
    Shape(batch=4, heads=2, group=16, dim=128, slots=256, pool=reference.FP8),
]


def large(shape: Shape) -> object:
    """Mark ``shape`` as a case for the full tests, because it takes minutes on an emulated device."""
    return pytest.param(shape, marks=pytest.mark.full)


def attended(case: SlotCase, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    kept = case.resident
    return attend_slots(
        case.query, kept.keys, kept.values, kept.positions, case.lengths, case.row_of, case.shape.scale, **options
    )


def assert_attention(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    torch.testing.assert_close(found[1], expected[1], atol=LSE_TOLERANCE, rtol=LSE_TOLERANCE)
    torch.testing.assert_close(found[0], expected[0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [*SHAPES, *map(large, LARGE)], ids=str)
def test_slots_are_attended_as_the_reference_does(shape: Shape) -> None:
    for seed in range(3):
        case = random_slots(shape, seed)
        assert_attention(attended(case), case.expected(), shape.dtype)


def test_groups_of_every_size_are_attended() -> None:
    for group in range(1, 17):
        case = random_slots(Shape(batch=2, heads=2, group=group, dim=64, slots=6), seed=group)
        assert_attention(attended(case), case.expected(), torch.bfloat16)


def test_a_list_without_tokens_gives_zero_and_no_lse() -> None:
    case = random_slots(Shape(batch=4, heads=2, group=5, dim=128, slots=14), seed=1)
    case.resident.positions[case.row_of[1].long()] = reference.NO_BLOCK
    case.resident.positions[case.row_of[2].long()] = 10_000  # beyond the end of the row
    out, lse = attended(case)
    assert torch.equal(out[1:3], torch.zeros_like(out[1:3]))
    assert torch.equal(lse[1:3], torch.full_like(lse[1:3], -torch.inf))
    assert_attention((out, lse), case.expected(), torch.bfloat16)


def test_a_row_that_does_not_exist_has_no_tokens() -> None:
    case = random_slots(Shape(batch=3, heads=2, group=5, dim=128, slots=12), seed=1)
    expected = case.expected()
    case.row_of[0], case.row_of[2] = -1, case.shape.pool_rows
    out, lse = attended(case)
    assert torch.equal(lse[::2], torch.full_like(lse[::2], -torch.inf))
    assert not out[::2].any()
    assert_attention((out[1], lse[1]), (expected[0][1], expected[1][1]), torch.bfloat16)


@pytest.mark.parametrize("active", [0, 1, 5, 16])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=16, heads=1, group=5, dim=64, slots=6),
        large(Shape(batch=16, heads=4, group=5, dim=128, slots=27)),
    ],
    ids=str,
)
def test_entries_that_are_not_active_are_left_alone(shape: Shape, active: int) -> None:
    case = random_slots(shape, seed=active)
    expected = case.expected()
    out = torch.full_like(expected[0], UNTOUCHED)
    lse = torch.full_like(expected[1], UNTOUCHED)
    attended(case, out=out, lse=lse, active_rows=torch.tensor([active], dtype=torch.int32, device=DEVICE))
    assert_attention((out[:active], lse[:active]), (expected[0][:active], expected[1][:active]), shape.dtype)
    assert (out[active:] == UNTOUCHED).all() and (lse[active:] == UNTOUCHED).all()


# slots of one row are split over CTAs
@pytest.mark.parametrize(
    ("shape", "times"),
    [
        (Shape(batch=1, heads=2, group=5, dim=64, slots=40), 5),
        pytest.param(Shape(batch=5, heads=8, group=5, dim=128, slots=64), 20, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_same_launch_gives_the_same_bits(shape: Shape, times: int) -> None:
    case = random_slots(shape, seed=3)
    workspace = AttendWorkspace(shape.batch, shape.heads, shape.group, shape.dim, device=DEVICE)
    first = attended(case, workspace=workspace)
    for _ in range(times):
        again = attended(case, workspace=workspace)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not workspace.arrived.any()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(batch=6, heads=1, group=5, dim=64, slots=7),
        large(Shape(batch=12, heads=4, group=5, dim=128, slots=36)),
    ],
    ids=str,
)
def test_a_graph_attends_to_what_is_there_when_it_is_replayed(shape: Shape) -> None:
    case = random_slots(shape, seed=0)
    active = torch.tensor([shape.batch], dtype=torch.int32, device=DEVICE)
    workspace = AttendWorkspace(shape.batch, shape.heads, shape.group, shape.dim, device=DEVICE)
    out, lse = attended(case, workspace=workspace)
    merged = torch.empty(out.shape, dtype=shape.dtype, device=DEVICE)
    nothing = random_partial((shape.batch, shape.heads * shape.group, shape.dim), 1, empty=1.0)
    merge((out, lse), nothing, out=merged)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended(case, workspace=workspace, out=out, lse=lse, active_rows=active)
        merge((out, lse), nothing, out=merged, active_rows=active)
    for seed in range(1, 20):
        other = random_slots(shape, seed)
        for mine, theirs in zip(_tensors(case), _tensors(other), strict=True):
            mine.copy_(theirs)
        active.fill_(seed % (shape.batch + 1))
        graph.replay()
        rows = slice(0, int(active))
        expected = case.expected()
        assert_attention((out[rows], lse[rows]), (expected[0][rows], expected[1][rows]), shape.dtype)
        assert torch.equal(merged[rows], out[rows].to(shape.dtype))


def _tensors(case: SlotCase) -> list[torch.Tensor]:
    kept = case.resident
    return [case.query, case.lengths, case.row_of, kept.keys, kept.values, kept.positions]


@pytest.mark.device  # the emulation checks tensors itself
def test_tensors_that_do_not_fit_are_refused_with_their_name() -> None:
    case = random_slots(Shape(batch=2, heads=2, group=3, dim=64, slots=4), seed=0)
    kept = case.resident
    good: tuple[Any, ...] = (case.query, kept.keys, kept.values, kept.positions, case.lengths, case.row_of, 1.0)
    for place, wrong, sentence in (
        (0, case.query.float(), "query is torch.float32"),
        (1, kept.keys.cpu(), "keys of slots is on cpu"),
        (2, kept.values.transpose(1, 2).contiguous().transpose(1, 2), "values of slots must be contiguous"),
        (3, kept.positions.long(), "positions of slots is torch.int64"),
        (4, case.lengths[:2], "lengths has shape"),
    ):
        arguments = list(good)
        arguments[place] = wrong
        with pytest.raises(ValueError, match=sentence):
            attend_slots(*arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 64), (7, 15, 128), (64, 40, 128), (3, 6, 96)])
def test_two_sides_are_merged_as_the_reference_does(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    sides = [random_partial(shape, seed) for seed in range(2)]
    expected, expected_lse = reference.merge(*sides[0], *sides[1])
    out, lse = torch.empty(shape, dtype=dtype, device=DEVICE), torch.empty(shape[:2], device=DEVICE)
    merge(*sides, out=out, lse=lse)
    torch.testing.assert_close(lse, expected_lse, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out, expected.to(dtype), atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 1e-2)


def test_an_empty_side_leaves_the_bits_of_the_other() -> None:
    shape = (5, 8, 128)
    full, empty = random_partial(shape, 1, empty=0.0), random_partial(shape, 2, empty=1.0)
    out, lse = torch.empty(shape, device=DEVICE), torch.empty(shape[:2], device=DEVICE)
    for sides in ((full, empty), (empty, full)):
        merge(*sides, out=out, lse=lse)
        assert torch.equal(out, full[0]) and torch.equal(lse, full[1])
    merge(empty, empty, out=out, lse=lse)
    assert not out.any() and (lse == -torch.inf).all()


def test_merging_leaves_inactive_entries_alone() -> None:
    shape = (6, 4, 64)
    out = torch.full(shape, UNTOUCHED, device=DEVICE)
    sides = [random_partial(shape, seed, empty=0.0) for seed in range(2)]
    merge(*sides, out=out, active_rows=torch.tensor([2], dtype=torch.int32, device=DEVICE))
    assert (out[2:] == UNTOUCHED).all() and (out[:2] != UNTOUCHED).all()
