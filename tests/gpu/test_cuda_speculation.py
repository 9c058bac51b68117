"""Partial keys and the tokens that they choose on the GPU, against ``PartialKeys`` and the torch policy infinigen."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import BlockList, DecodeBatch, LayerCache
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests
from sglang_hybrid.ops.cuda.partial_keys import PartialKeyCodes
from sglang_hybrid.ops.cuda.speculation import (
    SpeculationWorkspace,
    TokenLists,
    choose_tokens,
    gather_tokens,
    speculate,
)
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.policies.infinigen.options import InfinigenOptions
from sglang_hybrid.policies.infinigen.policy import InfinigenPolicy
from sglang_hybrid.protocol.region import SharedRegion

Unit = Literal["tokens", "blocks"]
SCALE = 0.25
EVERYTHING = 1e9
LENGTHS = [1, 2, 31, 33, 64, 65, 300, 1000]


class Layer:
    """A pool with random pages, their partial keys, and rows of different lengths.

    With ``exact``, keys and queries are small whole numbers and the basis selects single channels: logits are exact,
    and many are equal.
    """

    def __init__(
        self, lengths: list[int], *, heads: int = 2, group: int = 3, dim: int = 64, columns: int = 8,
        dtype: torch.dtype = torch.bfloat16, exact: bool = True, spare_blocks: int = 3,
    ) -> None:  # fmt: skip
        random = seeded(7)
        self.lengths, self.heads, self.dim, self.dtype = lengths, heads, dim, dtype
        self.batch, self.max_blocks = len(lengths), -(-max(lengths) // BLOCK_TOKENS) + spare_blocks
        counts = [-(-length // BLOCK_TOKENS) for length in lengths]
        shape = (sum(counts) + 5, heads, BLOCK_TOKENS, dim)
        region = SharedRegion(SharedRegion.size_for(*[math.prod(shape) * 2] * 2))
        self.keys, self.values = (region.take(shape, dtype) for _ in range(2))
        self.values.copy_(torch.randn(shape, generator=random))
        of_query = (self.batch, heads * group, dim)
        if exact:
            self.keys.copy_(torch.randint(-3, 4, shape, generator=random))
            self.query = torch.randint(-3, 4, of_query, generator=random).to(dtype)
            order = torch.rand(heads, dim, generator=random).argsort(dim=1)
            basis = torch.eye(dim)[order].transpose(1, 2)
        else:
            self.keys.copy_(torch.randn(shape, generator=random))
            self.query = torch.randn(of_query, generator=random).to(dtype)
            basis = torch.linalg.qr(torch.randn(heads, dim, dim, generator=random)).Q
        self.partial = PartialKeys([basis.contiguous()], columns, dtype)
        self.pool = HostPool(host_memory.RegisteredRegion(region), self.keys, self.values)
        # never read beyond a row's end
        self.table = torch.full((self.batch, self.max_blocks), -7, dtype=torch.int32)
        order = torch.randperm(shape[0], generator=random)
        for row, count in enumerate(counts):
            self.table[row, :count], order = order[:count].int(), order[count:]
        self.codes = self.partial.encode(0, self.keys)
        # the step's own token, and all slots beyond it, are not written yet
        for row, length in enumerate(lengths):
            page, token = self.table[row, counts[row] - 1], (length - 1) % BLOCK_TOKENS
            self.partial.decode(self.codes)[page, :, token:] = torch.nan

    def layer_keys(self) -> PartialKeyCodes:
        return PartialKeyCodes(self.codes.to(DEVICE), self.partial.basis(0).to(DEVICE), self.dtype)

    def step(self, active: int | None = None) -> Step:
        count = None if active is None else torch.tensor([active], dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        return Step(self.table.to(DEVICE), lengths, torch.zeros_like(lengths), count)

    def choose(self, options: InfinigenOptions, budget: int, active: int | None = None) -> TokenLists:
        by_block = options.unit == "blocks"
        limit = budget // BLOCK_TOKENS if by_block else budget
        workspace = SpeculationWorkspace(self.batch, self.heads, self.max_blocks, by_block=by_block, device=DEVICE)
        # garbage, as earlier launches may leave it
        for part in (workspace.ranks, workspace.wanted, workspace.chosen):
            part.fill_(-1)
        lists = TokenLists(self.batch, self.heads, min(limit, self.max_blocks), DEVICE)
        for part in (lists.pages, lists.masks, lists.counts, lists.tokens):
            part.fill_(99)
        step, kept = self.step(active), self.layer_keys()
        self.counted = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        speculate(self.query.to(DEVICE), kept, step, SCALE, options.alpha, workspace)
        choose_tokens(step, limit, workspace, lists, budget // BLOCK_TOKENS, counted=self.counted)
        torch.cuda.synchronize()
        return lists

    def expected(self, options: InfinigenOptions, budget: int) -> BlockList:
        """Return the lists of the torch policy."""
        config = HybridConfig(policy="infinigen", budget_tokens=budget, sink_blocks=0, recent_blocks=0)
        policy = InfinigenPolicy(config.with_section(options), self.partial)
        lengths, rows = torch.tensor(self.lengths), list(range(self.batch))
        table = self.table.long().clamp(min=0)
        batch = DecodeBatch(table, lengths, self.lengths, torch.tensor(rows), rows)
        cache = LayerCache(self.keys, self.values, None, 0, None, self.codes)
        return policy.select(self.query, cache, batch, SCALE)

    def tokens(self, entry: int, lists: TokenLists, head: int) -> list[tuple[int, int]]:
        """Return page and token number of all listed tokens, in the order of the list."""
        count = int(lists.counts[entry, head])
        pages, masks = (part[entry, head, :count].tolist() for part in (lists.pages, lists.masks))
        return [
            (page, t) for page, mask in zip(pages, masks, strict=True) for t in range(BLOCK_TOKENS) if mask >> t & 1
        ]

    def check(self, options: InfinigenOptions, budget: int) -> TokenLists:
        lists, expected = self.choose(options, budget), self.expected(options, budget)
        is_in = reference.is_counted(expected.fill, BLOCK_TOKENS, expected.masks)
        total = 0
        for entry, length in enumerate(self.lengths):
            for head in range(self.heads):
                listed = [
                    (page, t)
                    for page, bits in zip(expected.ids[entry, head].tolist(), is_in[entry, head].tolist(), strict=True)
                    if page != reference.NO_BLOCK
                    for t in range(BLOCK_TOKENS)
                    if bits[t]
                ]
                found = self.tokens(entry, lists, head)
                assert found == listed, f"row of {length} tokens, KV head {head}"
                assert len(found) == int(lists.tokens[entry]) <= budget
                total += len(found)
                count = int(lists.counts[entry, head])
                sizes = [mask.bit_count() for mask in (lists.masks[entry, head, :count].long() & 0xFFFFFFFF).tolist()]
                assert lists.offsets[entry, head, :count].tolist() == [sum(sizes[:i]) for i in range(count)]
            assert int(lists.places[entry]) == entry * budget + int(lists.tokens[entry]) - 1
        assert int(self.counted) == total
        return lists


@pytest.mark.parametrize("unit", ["tokens", "blocks"])
@pytest.mark.parametrize(("alpha", "budget"), [(4.0, 64), (1.5, 256), (0.0, 64), (EVERYTHING, 128), (EVERYTHING, 2048)])
def test_chosen_tokens_are_the_policys_where_many_are_equal(unit: Unit, alpha: float, budget: int) -> None:
    Layer(LENGTHS).check(InfinigenOptions(alpha=alpha, unit=unit), budget)


@pytest.mark.parametrize(
    ("heads", "group", "dim", "columns", "dtype"),
    [
        (1, 1, 64, 4, torch.float16),
        (3, 16, 64, 64, torch.bfloat16),
        (2, 5, 128, 40, torch.bfloat16),
        (2, 2, 128, 128, torch.float16),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_chosen_tokens_are_the_policys_for_all_shapes(
    heads: int, group: int, dim: int, columns: int, dtype: torch.dtype, exact: bool
) -> None:
    layer = Layer([1, 70, 500], heads=heads, group=group, dim=dim, columns=columns, dtype=dtype, exact=exact)
    layer.check(InfinigenOptions(alpha=1.0), 128)
    layer.check(InfinigenOptions(alpha=0.5, unit="blocks"), 128)


@pytest.mark.parametrize("unit", ["tokens", "blocks"])
def test_rows_of_many_tokens_are_ranked_as_a_whole(unit: Unit) -> None:
    layer = Layer([32_001], heads=2, group=2, columns=4)
    lists = layer.check(InfinigenOptions(alpha=3.0, unit=unit), 2048)
    assert int(lists.tokens) > 1024
    layer.check(InfinigenOptions(alpha=EVERYTHING, unit=unit), 2048)  # the budget is smaller than what is wanted


def test_pages_of_nan_are_worse_than_all_others_and_better_than_none() -> None:
    layer = Layer([300, 200])
    layer.partial.decode(layer.codes)[int(layer.table[0, 3]), 0] = torch.nan
    layer.partial.decode(layer.codes)[layer.table[1, :7].long()] = torch.nan  # no partial key of this row is valid
    for alpha in (2.0, EVERYTHING):
        lists = layer.check(InfinigenOptions(alpha=alpha), 128)
        assert lists.tokens[0] > 1
    layer.check(InfinigenOptions(alpha=2.0, unit="blocks"), 128)


def test_pages_that_are_not_in_the_pool_are_not_read() -> None:
    layer = Layer([300, 100])
    layer.table[0, 2], layer.table[0, 4] = 10**6, -3
    lists = layer.choose(InfinigenOptions(alpha=1.0), 128)
    for head in range(2):
        pages = lists.pages[0, head, : int(lists.counts[0, head])].tolist()
        assert 10**6 not in pages and -3 not in pages and len(pages) > 1


def test_padding_and_lengths_that_cannot_be_are_left_alone() -> None:
    layer = Layer([300, 100, 200, 40])
    layer.lengths = [300, 0, 10**6, 40]
    lists = layer.choose(InfinigenOptions(), 128, active=3)
    assert lists.counts[:, 0].tolist()[1:] == [0, 0, 99]
    assert lists.tokens.tolist()[1:] == [0, 0, 99]
    assert lists.places.tolist()[1:] == [-1, -1, -1]
    assert lists.tokens[0] > 1


def test_lists_and_staged_blocks_that_are_too_short_are_refused() -> None:
    layer = Layer([300])
    workspace = SpeculationWorkspace(1, 2, layer.max_blocks, by_block=False, device=DEVICE)
    for most, staged in ((layer.max_blocks - 1, 4), (layer.max_blocks, 3)):
        with pytest.raises(ValueError, match="do not hold 128 items"):
            choose_tokens(layer.step(), 128, workspace, TokenLists(1, 2, most, DEVICE), staged)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["tokens", "blocks"])
@pytest.mark.parametrize(("dim", "budget", "ctas"), [(64, 256, 1), (128, 96, 3)])
def test_listed_tokens_are_staged_one_behind_the_other(unit: Unit, dim: int, budget: int, ctas: int) -> None:
    layer, blocks = Layer([*LENGTHS, 77], dim=dim), budget // BLOCK_TOKENS
    lists = layer.choose(InfinigenOptions(alpha=2.0, unit=unit), budget, active=len(LENGTHS))
    shape = (layer.batch * blocks, layer.heads, BLOCK_TOKENS, dim)
    staged = [torch.full(shape, 77.0, dtype=layer.dtype, device=DEVICE) for _ in range(2)]
    refused = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    active = torch.tensor([len(LENGTHS)], dtype=torch.int32, device=DEVICE)
    gather_tokens(layer.pool, lists, *staged, active_rows=active, refused=refused, ctas=ctas)
    torch.cuda.synchronize()
    assert int(refused) == 0
    for found, pool in zip(staged, (layer.keys, layer.values), strict=True):
        by_head = found.cpu().view(layer.batch, blocks, layer.heads, BLOCK_TOKENS, dim).transpose(1, 2).flatten(2, 3)
        for entry in range(len(LENGTHS)):
            for head in range(layer.heads):
                tokens = layer.tokens(entry, lists, head)[:-1]  # without the step's own token, the last one
                there = by_head[entry, head]
                for place, (page, token) in enumerate(tokens):
                    assert torch.equal(there[place], pool[page, head, token])
                assert (there[len(tokens) :] == 77).all()
        assert (by_head[len(LENGTHS)] == 77).all()  # padding


def test_lists_out_of_bounds_are_not_copied() -> None:
    layer = Layer([300, 300])
    lists = layer.choose(InfinigenOptions(alpha=2.0), 128)
    staged = [torch.full((2 * 4, 2, 32, 64), 77.0, dtype=layer.dtype, device=DEVICE) for _ in range(2)]
    refused = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    lists.pages.fill_(10**6)
    lists.pages[1] = -1
    gather_tokens(layer.pool, lists, *staged, refused=refused)
    lists.pages.fill_(1)
    lists.offsets.fill_(4 * 32)
    lists.offsets[1] = -5
    lists.masks.fill_(-1)
    gather_tokens(layer.pool, lists, *staged, refused=refused)
    torch.cuda.synchronize()
    assert all((part == 77).all() for part in staged)
    assert int(refused) == 2 * int(lists.counts.sum())


# -- partial keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "columns", "dtype"), [(64, 20, torch.bfloat16), (128, 40, torch.float16)])
def test_pages_and_tokens_are_encoded_as_partial_keys(dim: int, columns: int, dtype: torch.dtype) -> None:
    layer = Layer([40, 64, 7], dim=dim, columns=columns, dtype=dtype, exact=False)
    kept = layer.layer_keys()
    kept.codes.zero_()
    partial = PartialKeyCodes(kept.codes, kept.basis, dtype)
    pages, filled = (
        torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in ([3, 10**6, 0, -1], [32, 32, 5, 32])
    )
    blocks = layer.keys[[3, 1, 0, 2]].to(DEVICE)
    as_prefill_has_them = blocks.transpose(1, 2).contiguous().transpose(1, 2)
    partial.encode_pages(as_prefill_has_them, pages, filled)
    torch.cuda.synchronize()
    expected = layer.partial.decode(layer.partial.encode(0, layer.keys)).float()
    found = layer.partial.decode(kept.codes.cpu()).float()
    for page, count in ((3, 32), (0, 5)):
        torch.testing.assert_close(found[page, :, :count], expected[page, :, :count], rtol=1e-2, atol=1e-3)
    assert not found[0, :, 5:].any() and not found[[1, 2]].any()

    kept.codes.zero_()
    projected = torch.randn(3, 4, dim, generator=seeded(2)).to(dtype)  # keys are a slice of a projection
    keys = projected.to(DEVICE)[:, 1:3]
    layer.table[2, 0] = -1
    partial.encode_step(layer.step(), keys)
    torch.cuda.synchronize()
    found, new = layer.partial.decode(kept.codes.cpu()).float(), layer.partial.encode(0, keys.cpu().unsqueeze(2))
    expected = layer.partial.decode(new).float()[:, :, 0]
    written = torch.zeros(found.shape[:3], dtype=torch.bool)
    for entry in (0, 1):
        last = layer.lengths[entry] - 1
        page = int(layer.table[entry, last // 32])
        torch.testing.assert_close(found[page, :, last % 32], expected[entry], rtol=1e-2, atol=1e-3)
        written[page, :, last % 32] = True
    assert not found[~written].any()


def test_summarised_pages_have_partial_keys() -> None:
    layer = Layer([64])
    kept = layer.layer_keys()
    empty = torch.zeros(len(layer.keys), 2, 2, 64, dtype=layer.dtype, device=DEVICE)
    pages, filled = (torch.tensor([part], dtype=torch.int32, device=DEVICE) for part in (1, 32))
    for digests in (LayerDigests(empty), LayerDigests.none(layer.keys, DEVICE)):  # with digests and without
        kept.codes.zero_()
        DeviceLayer(layer.pool, digests, kept).summarise(layer.keys[1:2].to(DEVICE), pages, filled)
        torch.cuda.synchronize()
        assert torch.equal(kept.codes[1].cpu(), layer.partial.encode(0, layer.keys)[1])
