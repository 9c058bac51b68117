"""Moving averages and contextual sets on the GPU against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, Shape, random_slots, seeded

from sglang_hybrid.ops import reference, reference_salience, reference_weights
from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.attention import attend_slots
from sglang_hybrid.ops.cuda.digests import HostPool
from sglang_hybrid.ops.cuda.salience import LayerWindow, MaskedLists, contextual_sets, move_averages
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.protocol.region import SharedRegion

SHAPES = [
    Shape(batch=3, heads=2, group=3, dim=64, slots=5),
    Shape(batch=2, heads=1, group=1, dim=128, slots=33, dtype=torch.float16),
    Shape(batch=2, heads=2, group=16, dim=64, slots=17),
    Shape(batch=1, heads=3, group=5, dim=128, slots=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("active", [None, 1])
def test_averages_move_towards_the_largest_weight_of_the_group(shape: Shape, active: int | None) -> None:
    case, alpha = random_slots(shape, 3), 0.3
    kept, owner = case.resident, case.row_of.long()
    of_maw = (*kept.positions.shape, BLOCK_TOKENS)
    maw = torch.rand(of_maw, generator=seeded(5)).to(DEVICE)
    window = LayerWindow(kept.keys, kept.values, kept.positions, maw.clone(), torch.zeros(0, device=DEVICE))
    _, lse = attend_slots(case.query, kept.keys, kept.values, kept.positions, case.lengths, case.row_of, shape.scale)
    count = None if active is None else torch.tensor([active], dtype=torch.int32, device=DEVICE)
    move_averages(case.query, window, case.lengths, case.row_of, shape.scale, lse, alpha, active_rows=count)

    positions, lengths = kept.positions[owner].long(), case.lengths[owner].long()
    fill = reference.block_fill(positions, lengths, BLOCK_TOKENS)
    pool = kept.keys.transpose(1, 2).flatten(0, 1).float()
    slots = torch.arange(pool.shape[0], device=DEVICE).view(-1, 1, shape.slots)
    ids = slots[owner].expand_as(positions).masked_fill(fill == 0, reference.NO_BLOCK)
    weights = reference_weights.token_weights(case.query, pool, ids, fill, shape.scale, lse)
    for entry in range(shape.batch if active is None else active):
        row = int(owner[entry])
        for head in range(shape.heads):  # here KV heads have different positions, unlike in a window
            of_head = positions[entry, head]
            tokens = of_head[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=DEVICE)
            is_new = tokens == lengths[entry] - 1
            expected = reference_salience.move_averages(
                maw[row, head][None, None], weights[entry, head][None, None], is_new[None], alpha
            )[0, 0]
            counted = reference.is_counted(fill[entry, head], BLOCK_TOKENS)
            torch.testing.assert_close(window.maw[row, head][counted], expected[counted], rtol=2e-3, atol=1e-5)
            assert torch.equal(window.maw[row, head][~counted], maw[row, head][~counted])
    others = torch.ones(shape.pool_rows, dtype=torch.bool, device=DEVICE)
    others[owner[: shape.batch if active is None else active]] = False
    assert torch.equal(window.maw[others], maw[others])


class Layer:
    """A pool with random pages, rows of different lengths, and an empty window."""

    def __init__(self, lengths: list[int], slots: int, group: int = 3, dim: int = 64, seed: int = 1) -> None:
        self.random, self.slots, self.lengths, heads = seeded(seed), slots, lengths, 2
        self.batch, rows, max_blocks, pages = len(lengths), len(lengths) + 2, 150, 40 + sum(lengths) // 32
        shape = (pages, heads, BLOCK_TOKENS, dim)
        region = SharedRegion(SharedRegion.size_for(*[math.prod(shape) * 2] * 2))
        self.keys, self.values = (region.take(shape, torch.bfloat16) for _ in range(2))
        self.keys.copy_(torch.randn(shape, generator=self.random))
        self.values.copy_(torch.randn(shape, generator=self.random))
        self.pool = HostPool(host_memory.RegisteredRegion(region), self.keys, self.values)
        order = torch.randperm(pages, generator=self.random)
        self.table = torch.full((self.batch, max_blocks), -7, dtype=torch.int32)  # never read beyond a row's end
        for row, length in enumerate(lengths):
            count = -(-length // BLOCK_TOKENS)
            self.table[row, :count], order = order[:count].int(), order[count:]
            # the step's own token, and all slots beyond it, are not written yet
            page, token = self.table[row, count - 1], (length - 1) % BLOCK_TOKENS
            self.keys[page, :, token:] = self.values[page, :, token:] = torch.nan
        self.row_of = torch.randperm(rows, generator=self.random)[: self.batch]
        self.query = torch.randn(self.batch, heads * group, dim, generator=self.random).to(torch.bfloat16)
        of_slots = (rows, heads, slots, BLOCK_TOKENS, dim)
        self.window = LayerWindow(
            torch.zeros(of_slots, dtype=torch.bfloat16, device=DEVICE),
            torch.zeros(of_slots, dtype=torch.bfloat16, device=DEVICE),
            torch.full((rows, heads, slots), -1, dtype=torch.int32, device=DEVICE),
            torch.full((rows, heads, slots, BLOCK_TOKENS), -5.0, device=DEVICE),
            torch.full((rows, heads, max_blocks), 7, dtype=torch.int32, device=DEVICE),
        )
        self.lists = MaskedLists(self.batch, heads, max_blocks, DEVICE)
        self.counted, self.refused = torch.zeros(2, dtype=torch.int64, device=DEVICE).split(1)
        self.scale = dim**-0.5

    def step(self, active: int | None = None) -> Step:
        count = None if active is None else torch.tensor([active], dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return Step(self.table.to(DEVICE), lengths.to(DEVICE), self.row_of.int().to(DEVICE), count)

    def run(self, beta: float, begins: list[int] | None = None, active: int | None = None, lists: bool = True) -> None:
        flags = None if begins is None else torch.tensor(begins, dtype=torch.int32, device=DEVICE)
        contextual_sets(
            self.query.to(DEVICE), self.pool, self.step(active), self.window, self.scale, beta, begins=flags,
            lists=self.lists if lists else None, counted=self.counted, refused=self.refused,
        )  # fmt: skip
        torch.cuda.synchronize()

    def first(self, entry: int) -> int:
        return max(0, -(-self.lengths[entry] // BLOCK_TOKENS) - self.slots)

    def weights(self, entry: int, blocks: range) -> torch.Tensor:
        """Return the query's weights over these blocks, without the step's token: ``[KV heads, blocks, 32]``.

        Of the query heads of a KV head, the largest weight counts.
        """
        positions = torch.tensor(blocks).expand(1, self.keys.shape[1], -1)
        ids = reference.block_ids(positions, self.table[entry : entry + 1].long())
        fill = reference.block_fill(positions, torch.tensor([self.lengths[entry] - 1]), BLOCK_TOKENS)
        query, keys = self.query[entry : entry + 1].float(), self.keys.float()
        _, lse = reference.attend_blocks(query, keys, self.values.float(), ids, fill, self.scale)
        return reference_weights.token_weights(query, keys, ids, fill, self.scale, lse).amax(dim=2)[0]

    def listed(self, entry: int, head: int) -> dict[int, int]:
        """Return the listed masks by page, in the order of the list."""
        count = int(self.lists.counts[entry, head])
        pages, masks = (part[entry, head, :count].tolist() for part in (self.lists.pages, self.lists.masks))
        return dict(zip(pages, masks, strict=True))


def bits(mask: int) -> list[bool]:
    return [bool(mask >> t & 1) for t in range(BLOCK_TOKENS)]


LENGTHS = [1, 33, 5 * 32, 5 * 32 + 1, 700, 1100]


@pytest.mark.parametrize(("beta", "group", "dim"), [(1.0, 3, 64), (0.25, 16, 64), (2.0, 1, 128), (0.0, 5, 128)])
def test_rows_that_begin_are_loaded_and_evaluated_by_the_query(beta: float, group: int, dim: int) -> None:
    layer = Layer(LENGTHS, slots=5, group=group, dim=dim)
    layer.run(beta)
    tokens = 0
    for entry, length in enumerate(LENGTHS):
        row, first, count = int(layer.row_of[entry]), layer.first(entry), -(-length // BLOCK_TOKENS)
        for head in range(2):
            positions = layer.window.positions[row, head].tolist()
            held = {p % 5: p for p in range(first, count)}
            assert positions == [held.get(slot, -1) for slot in range(5)]
            expected = layer.weights(entry, range(first, count))[head]
            for slot, position in held.items():
                page, fill = layer.table[entry, position], min(32, length - 1 - 32 * position)
                for slots, pool in ((layer.window.keys, layer.keys), (layer.window.values, layer.values)):
                    assert torch.equal(slots[row, head, slot, :fill].cpu(), pool[page, head, :fill])
                found = layer.window.maw[row, head, slot, :fill].cpu()
                torch.testing.assert_close(found, expected[position - first, :fill], rtol=2e-3, atol=1e-6)
            listed = layer.listed(entry, head)
            pages = layer.table[entry, :first].tolist()
            assert list(listed) == [page for page in pages if page in listed]  # in the order of the row
            if not first:
                assert not listed
                continue
            weights, least = layer.weights(entry, range(first))[head], beta / (first * 32)
            for block, page in enumerate(pages):
                mask = int(layer.window.masks[row, head, block])
                assert mask == listed.get(page, 0)
                for is_in, weight in zip(bits(mask), weights[block].tolist(), strict=True):
                    assert is_in == (weight > least or beta == 0) or abs(weight / least - 1) < 1e-3
                tokens += sum(bits(mask))
    assert int(layer.counted) == tokens > 0
    assert int(layer.refused) == 0


def test_a_block_that_leaves_the_window_is_known_by_its_averages() -> None:
    beta, slots = 1.5, 5
    lengths = [9 * 32 + 1, 9 * 32 + 2, 3 * 32 + 1, 5 * 32 + 1]  # a block of the first and of the last row leaves
    layer = Layer(lengths, slots)
    window = layer.window
    before = torch.zeros_like(window.masks)
    before[:, :, 1], before[:, :, 3] = 0x0F0, -1  # masks of blocks that left earlier
    window.masks.copy_(before)
    averages = 3 * torch.rand(window.maw.shape, generator=layer.random) / (slots * 32)
    window.maw.copy_(averages)
    for entry, length in enumerate(lengths):  # positions as the previous step left them
        count = -(-(length - 1) // BLOCK_TOKENS)
        for slot in range(slots):
            newest = [p for p in range(max(0, count - slots), count) if p % slots == slot]
            window.positions[int(layer.row_of[entry]), :, slot] = newest[0] if newest else -1
    others = [row for row in range(len(lengths) + 2) if row not in layer.row_of.tolist()]
    layer.run(beta, begins=[0] * len(lengths))
    for entry, length in enumerate(lengths):
        row, first, count = int(layer.row_of[entry]), layer.first(entry), -(-length // BLOCK_TOKENS)
        for head in range(2):
            positions = window.positions[row, head].tolist()
            assert sorted(p for p in positions if p >= 0) == list(range(first, count))
            masks = before[row, head].clone()
            if entry in (0, 3):
                left = averages[row, head, (first - 1) % slots]
                salient = reference_salience.salient_masks(left.view(1, 1, 1, 32), torch.tensor([beta / (slots * 32)]))
                masks[first - 1] = salient.item()
                assert 0 < sum(bits(int(salient))) < 32
            assert torch.equal(window.masks[row, head].cpu(), masks.cpu())
            expected = {int(layer.table[entry, p]): int(masks[p]) for p in range(first) if masks[p]}
            assert layer.listed(entry, head) == expected
    assert torch.equal(window.maw.cpu(), averages)
    assert (window.positions[others] == -1).all()


def test_lists_longer_than_a_cta_keep_their_order() -> None:
    layer = Layer([145 * 32 + 5], slots=2)
    masks = torch.randint(-(2**31), 2**31, layer.window.masks.shape, generator=layer.random).int()
    masks[torch.rand(masks.shape, generator=layer.random) < 0.4] = 0
    layer.window.masks.copy_(masks)
    layer.run(1.0, begins=[0])
    row, first = int(layer.row_of[0]), layer.first(0)
    assert first > 128
    for head in range(2):
        listed = layer.listed(0, head)
        assert list(listed.items()) == [
            (int(layer.table[0, p]), int(masks[row, head, p])) for p in range(first) if masks[row, head, p]
        ]


def test_padding_and_rows_that_do_not_exist_are_left_alone() -> None:
    layer = Layer([700, 300, 400], slots=5)
    layer.row_of[1] = 99
    layer.lists.counts.fill_(3)
    layer.run(1.0, active=2)
    begun = int(layer.row_of[0])
    untouched = [row for row in range(5) if row != begun]
    assert (layer.window.positions[untouched] == -1).all() and (layer.window.masks[untouched] == 7).all()
    assert (layer.window.positions[begun] >= 0).all()
    assert layer.lists.counts[:, 0].tolist()[1:] == [0, 3]


def test_pages_that_are_not_in_the_pool_are_not_read() -> None:
    layer = Layer([700], slots=5)
    layer.table[0, 3] = 10**6
    layer.table[0, layer.first(0) + 1] = -3
    layer.run(0.0)
    row = int(layer.row_of[0])
    assert layer.window.masks[row, :, 3].tolist() == [0, 0]
    assert layer.window.masks[row, :, 2].tolist() == [-1, -1]
    assert int(layer.refused) == 2  # one block of the window, for each KV head
