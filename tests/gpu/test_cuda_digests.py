"""Digests, codes and new tokens on the GPU, against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import LayerCase, Shape, numbers, random_layer, random_table

from sglang_hybrid.memory.resident import ResidentSet
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests, SlotTable, append, digest_pages
from sglang_hybrid.protocol.region import SharedRegion

UNTOUCHED = 77.0
SHAPES = [
    Shape(batch=1, heads=1, group=1, dim=64, channels=32, max_blocks=3),
    Shape(batch=5, heads=2, group=1, dim=128, channels=32, max_blocks=12),
    Shape(batch=3, heads=2, group=1, dim=128, channels=0, max_blocks=9),
    Shape(batch=4, heads=3, group=1, dim=64, channels=64, max_blocks=7, dtype=torch.float16),
    Shape(batch=2, heads=2, group=1, dim=96, channels=10, max_blocks=8),
    Shape(batch=2, heads=1, group=1, dim=256, channels=32, max_blocks=5),
    Shape(batch=5, heads=2, group=1, dim=128, channels=32, max_blocks=6, compact=True),
    Shape(batch=3, heads=2, group=1, dim=64, channels=64, max_blocks=7, dtype=torch.float16, compact=True),
    Shape(batch=2, heads=1, group=1, dim=256, channels=8, max_blocks=5, compact=True),
]


def blank(like: LayerDigests) -> LayerDigests:
    codes = None if like.codes is None else torch.full_like(like.codes, 0xEE)
    return replace(like, digests=torch.full_like(like.digests, UNTOUCHED), codes=codes)


def assert_summaries(
    found: LayerDigests, keys: torch.Tensor, pages: torch.Tensor, filled: torch.Tensor, untouched: torch.Tensor
) -> None:
    """Assert that ``pages`` have the reference's digests and codes of ``keys``, up to ``filled`` tokens.

    Entries of ``untouched`` pages must not be written.
    """
    expected = reference.minmax_digest(keys, filled)
    if found.compact_of is None:
        assert torch.equal(found.digests[pages].nan_to_num(nan=UNTOUCHED), expected.nan_to_num(nan=UNTOUCHED))
    else:
        assert found.channels is not None
        expected = reference.compact_digest(expected, found.channels)
        assert_compact(found.digests[pages], expected, found.channels, found.dim)
    assert (found.digests[untouched] == UNTOUCHED).all()
    if found.codes is not None and found.channels is not None:
        codes = reference.sketch_codes(keys, expected, found.channels)
        there = (torch.arange(BLOCK_TOKENS, device=keys.device) < filled[:, None])[:, None, :, None]
        assert torch.equal(found.codes[pages] * there, codes * there)
        assert (found.codes[untouched] == 0xEE).all()


def assert_compact(found: torch.Tensor, expected: torch.Tensor, channels: torch.Tensor, dim: int) -> None:
    """Assert that compact digests are equal; NaN may have any bits."""
    plain = [reference.expand_digest(compact, channels, dim) for compact in (found, expected)]
    assert torch.equal(*(digests.nan_to_num(nan=UNTOUCHED) for digests in plain))
    finite = plain[1].isfinite().flatten(2).all(dim=2)
    assert finite.any() and torch.equal(found[finite], expected[finite])


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_are_summarised_as_the_reference_does(shape: Shape, token_major: bool) -> None:
    case = random_layer(shape, 1)
    count = case.keys.shape[0] * 2 // 3
    random = seeded(4)
    pages = torch.randperm(case.keys.shape[0], generator=random)[:count].to(DEVICE)
    filled = torch.randint(1, BLOCK_TOKENS + 1, (count,), generator=random).to(DEVICE)
    filled[0], filled[-1] = 1, BLOCK_TOKENS
    keys = case.keys[pages]
    keys[0, 0, 0, 5] = torch.nan
    keys[-1, 0, 3, 7] = torch.inf
    keys[:, :, :, 2] = 0.25  # maximum and minimum are equal
    if token_major:  # the layout of prefill
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    found = blank(case.digests)
    digest_pages(found, keys, pages.int(), filled.int())
    untouched = torch.ones(case.keys.shape[0], dtype=torch.bool, device=DEVICE)
    untouched[pages] = False
    assert_summaries(found, keys.contiguous(), pages, filled, untouched)


def test_pages_outside_the_pool_are_left_out() -> None:
    case = random_layer(SHAPES[1], 1)
    found = blank(case.digests)
    outside = numbers(-1, case.keys.shape[0], 2)
    digest_pages(found, case.keys[:3], outside, numbers(32, 32, 32))
    untouched = torch.arange(case.keys.shape[0], device=DEVICE) != 2
    assert (found.digests[untouched] == UNTOUCHED).all() and (found.digests[2] != UNTOUCHED).any()


# -- append ----------------------------------------------------------------------------------


@dataclass
class Device:
    """A layer whose slots and pool hold the blocks of its rows, up to the step's new tokens."""

    case: LayerCase
    pool: HostPool
    table: SlotTable
    key_slots: torch.Tensor
    value_slots: torch.Tensor
    digests: LayerDigests
    keys: torch.Tensor  # keys of the new tokens
    values: torch.Tensor

    def append(self, *, scores: torch.Tensor | None = None, refused: torch.Tensor | None = None) -> None:
        append(
            self.digests, self.table, self.case.step, self.keys, self.values, self.key_slots, self.value_slots,
            self.pool, scores=scores, refused=refused,
        )  # fmt: skip


def region_pool(pages: int, heads: int, dim: int, dtype: torch.dtype) -> HostPool:
    shape = (pages, heads, BLOCK_TOKENS, dim)
    size = pages * heads * BLOCK_TOKENS * dim * dtype.itemsize
    memory = SharedRegion(SharedRegion.size_for(size, size))
    keys, values = (memory.take(shape, dtype) for _ in range(2))
    return HostPool(host_memory.RegisteredRegion(memory), keys, values)


def device_layer(
    shape: Shape, seed: int, lengths: list[int], sink: int = 1, recent: int = 2, resident: int = 3
) -> Device:
    case = random_layer(shape, seed, lengths)
    pages = case.keys.shape[0]
    pool = region_pool(pages, shape.heads, shape.dim, shape.dtype)
    pool.keys.copy_(case.keys)
    pool.values.copy_(-case.keys)
    table = random_table(shape, case.step.lengths.cpu(), case.step.row_of.cpu(), sink, recent, resident, seed)
    slots = (*table.positions.shape, BLOCK_TOKENS, shape.dim)
    key_slots = torch.full(slots, UNTOUCHED, dtype=shape.dtype, device=DEVICE)
    value_slots = key_slots.clone()
    heads = torch.arange(shape.heads, device=DEVICE)[:, None]
    for entry, row in enumerate(case.step.row_of.tolist()):
        held = table.positions[row].long()
        pages_of = case.step.page_table[entry].long()[held.clamp(min=0)]
        empty = (held < 0)[..., None, None]
        key_slots[row] = case.keys[pages_of, heads].masked_fill(empty, UNTOUCHED)
        value_slots[row] = (-case.keys[pages_of, heads]).masked_fill(empty, UNTOUCHED)
    random = seeded(seed + 100)
    keys, values = (
        torch.randn(shape.batch, shape.heads, shape.dim, generator=random).to(DEVICE, shape.dtype) for _ in range(2)
    )
    return Device(case, pool, table, key_slots, value_slots, blank(case.digests), keys, values)


def assert_appended(layer: Device, entries: range) -> None:
    """Assert that new tokens are in slots and pool, that tails have digests, and that nothing else was written."""
    case, shape = layer.case, layer.case.shape
    expected_keys, expected_values = case.keys.clone(), -case.keys
    tails, fills = [], []
    for entry in entries:
        length = int(case.step.lengths[entry])
        tail, token = divmod(length - 1, BLOCK_TOKENS)
        page = int(case.step.page_table[entry, tail])
        expected_keys[page, :, token], expected_values[page, :, token] = layer.keys[entry], layer.values[entry]
        tails.append(page)
        fills.append(token + 1)
        row = int(case.step.row_of[entry])
        for head in range(shape.heads):
            slot = (layer.table.positions[row, head] == tail).nonzero().flatten().tolist()
            assert len(slot) == 1
            there = slice(0, token + 1)
            assert torch.equal(layer.key_slots[row, head, slot[0], there], expected_keys[page, head, there])
            assert torch.equal(layer.value_slots[row, head, slot[0], there], expected_values[page, head, there])
    torch.cuda.synchronize()
    assert torch.equal(layer.pool.keys, expected_keys.to(layer.pool.keys.device))
    assert torch.equal(layer.pool.values, expected_values.to(layer.pool.values.device))
    pages, filled = torch.tensor(tails, device=DEVICE), torch.tensor(fills, device=DEVICE)
    untouched = torch.ones(case.keys.shape[0], dtype=torch.bool, device=DEVICE)
    untouched[pages] = False
    assert_summaries(layer.digests, expected_keys[pages], pages, filled, untouched)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_tokens_reach_slots_pool_and_digests(shape: Shape) -> None:
    longest = shape.max_blocks * BLOCK_TOKENS
    for seed in range(3):
        lengths = torch.randint(1, longest + 1, (shape.batch,), generator=seeded(seed)).tolist()
        layer = device_layer(shape, seed, lengths)
        layer.append()
        assert_appended(layer, range(shape.batch))


def test_first_and_last_tokens_of_blocks_are_appended() -> None:
    layer = device_layer(SHAPES[1], 3, [1, 32, 33, 12 * 32, 11 * 32 + 1])
    layer.append()
    assert_appended(layer, range(5))


def test_a_row_whose_slots_are_empty_gets_its_tail_from_the_pool() -> None:
    layer = device_layer(SHAPES[1], 4, [5, 40, 200, 384, 12 * 32 - 3])
    layer.table.positions.fill_(-1)
    layer.append()
    assert_appended(layer, range(5))
    assert int((layer.table.positions >= 0).sum()) == 5 * 2


def test_entries_that_are_not_active_append_nothing() -> None:
    layer = device_layer(SHAPES[1], 5, [100, 200, 300, 33, 65])
    before = layer.table.positions.clone()
    layer.case = layer.case.with_active(2)
    layer.append()
    assert_appended(layer, range(2))
    idle = layer.case.step.row_of[2:].long()
    assert torch.equal(layer.table.positions[idle], before[idle])


def test_pages_and_rows_that_do_not_exist_are_refused_and_counted() -> None:
    layer = device_layer(SHAPES[1], 6, [100, 200, 300, 40, 65])
    step = layer.case.step
    good = [0, 2]
    step.page_table[1, 199 // 32] = layer.case.keys.shape[0]
    step.page_table[4, 2] = -1
    step.row_of[3] = layer.table.positions.shape[0]
    refused = numbers(0, dtype=torch.int64)
    before = layer.table.positions.clone()
    layer.append(refused=refused)
    assert int(refused) == 3
    layer.case = replace(
        layer.case,
        step=replace(step, page_table=step.page_table[good], lengths=step.lengths[good], row_of=step.row_of[good]),
    )
    layer.keys, layer.values = layer.keys[good], layer.values[good]
    assert_appended(layer, range(2))
    assert torch.equal(layer.table.positions[step.row_of[[1, 4]].long()], before[step.row_of[[1, 4]].long()])


@pytest.mark.parametrize("resident", [0, 1, 5])
def test_a_block_that_is_recent_no_more_stays_in_place_of_the_lowest_score(resident: int) -> None:
    """``ResidentSet.admit`` is the specification. The slots' positions are compared, not their contents."""
    shape, sink, recent = SHAPES[1], 1, 2
    lengths = [11 * 32 + 1, 6 * 32 + 1, 4 * 32 + 1, 32 + 1, 8 * 32 + 1]
    layer = device_layer(shape, 8, lengths, sink, recent, resident)
    scores = torch.randn(shape.batch, shape.heads, shape.max_blocks, generator=seeded(2)).to(DEVICE)
    before = layer.table.positions.clone()
    layer.append(scores=scores)
    for entry, row in enumerate(layer.case.step.row_of.tolist()):
        count = lengths[entry] // 32 + 1
        left = count - 2 - recent
        residents = ResidentSet(1, shape.heads, resident, "cpu")
        held = before[row].long().cpu()
        for head in range(shape.heads):
            listed = [p for p in held[head].tolist() if sink <= p < left]
            residents.positions[0, head, : len(listed)] = torch.tensor(listed)
        if left >= sink:
            first = torch.zeros(1, dtype=torch.int64)
            residents.admit(first, torch.tensor([left]), scores[entry : entry + 1].cpu())
        near = [p for p in range(max(sink, count - 1 - recent), count) if p >= sink]
        for head in range(shape.heads):
            expected = {p for p in residents.positions[0, head].tolist() if p >= 0} | set(near) | set(range(sink))
            found = [p for p in layer.table.positions[row, head].tolist() if p >= 0]
            assert set(found) == expected and len(found) == len(expected)
            changed = (layer.table.positions[row, head] != before[row, head]).nonzero().flatten().tolist()
            assert len(changed) == 1  # all other blocks keep their slots


def test_a_graph_appends_one_token_after_the_other() -> None:
    shape = SHAPES[1]
    layer = device_layer(shape, 9, [30, 64, 200, 1, 380])
    reference_keys = layer.case.keys.clone()
    layer.append()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.append()
    random = seeded(7)
    step = layer.case.step
    # the first token was appended before the capture
    for _ in range(5):
        for entry in range(shape.batch):
            tail, token = divmod(int(step.lengths[entry]) - 1, BLOCK_TOKENS)
            reference_keys[int(step.page_table[entry, tail]), :, token] = layer.keys[entry]
        step.lengths.add_(1).clamp_(max=shape.max_blocks * BLOCK_TOKENS)
        # rows that open a block get a page
        for entry in range(shape.batch):
            tail = (int(step.lengths[entry]) - 1) // BLOCK_TOKENS
            if int(step.page_table[entry, tail]) < 0:
                unused = set(range(layer.case.keys.shape[0])) - set(step.page_table.flatten().tolist())
                step.page_table[entry, tail] = min(unused)
        layer.keys.copy_(torch.randn(layer.keys.shape, generator=random))
        graph.replay()
    torch.cuda.synchronize()
    for entry in range(shape.batch):
        tail, token = divmod(int(step.lengths[entry]) - 1, BLOCK_TOKENS)
        page = int(step.page_table[entry, tail])
        reference_keys[page, :, token] = layer.keys[entry]
        there = slice(0, token + 1)
        assert torch.equal(layer.pool.keys[page, :, there], reference_keys[page, :, there].cpu())
        expected = reference.minmax_digest(reference_keys[page][None], torch.tensor([token + 1], device=DEVICE))
        assert torch.equal(layer.digests.digests[page], expected[0])
