"""Weights of kept tokens, lists of their blocks and sums of their values on the GPU, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from test_cuda_key_codes import books_of, some_codes

from sglang_hybrid.ops import reference, reference_weights
from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.digests import HostPool
from sglang_hybrid.ops.cuda.kept_tokens import (
    SHARE_UNITS,
    KeptTokens,
    SumWorkspace,
    finish_sums,
    keep_tokens,
    token_logits,
)
from sglang_hybrid.ops.cuda.key_codes import QuantisedCodes
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.protocol.region import SharedRegion

HEADS = 2
SCALE, LOG2_E = 0.125, math.log2(math.e)


class Rows:
    """Rows with random keys in randomly ordered pages, and the keys' codes. Keys beyond a row's last token are NaN."""

    def __init__(
        self, lengths: list[int], codes: QuantisedCodes, group: int = 3, seed: int = 0, blocks: int | None = None
    ) -> None:
        random = seeded(seed)
        self.lengths, self.group, self.dim = lengths, group, codes.dim
        counts = [-(-length // BLOCK_TOKENS) for length in lengths]
        self.blocks = max(counts) if blocks is None else blocks
        pages = sum(counts) + 1
        self.table = torch.full((len(lengths), self.blocks), pages + 5)  # invalid pages beyond the end of a row
        free = torch.randperm(pages, generator=random)
        shape = (pages, HEADS, BLOCK_TOKENS, self.dim)
        self.keys = torch.randn(shape, generator=random).to(codes.dtype)
        filled = torch.zeros(pages, dtype=torch.int32)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.table[row, :count], free = free[:count], free[count:]
            filled[self.table[row, :count]] = BLOCK_TOKENS
            filled[self.table[row, count - 1]] = length - (count - 1) * BLOCK_TOKENS
        behind = torch.arange(BLOCK_TOKENS) >= filled[:, None, None]
        self.keys.masked_fill_(behind[..., None], torch.nan)
        made = torch.full((*shape[:3], codes.codes.shape[3]), 0xFF, dtype=torch.uint8, device=DEVICE)  # NaN as keys
        self.codes = QuantisedCodes(made, codes.dtype, codes.dim, codes.centroids, codes.groups, codes.index_bytes)
        every = torch.arange(pages, dtype=torch.int32, device=DEVICE)
        self.codes.encode_pages(self.keys.to(DEVICE), every, filled.to(DEVICE))
        self.query = torch.randn(len(lengths), HEADS * group, self.dim, generator=random).to(codes.dtype)
        self.kept = KeptTokens.zeros(len(lengths), HEADS, group, self.blocks, DEVICE)
        self.kept.weights.fill_(torch.nan)
        self.pages = pages

    def step(self, active: int | None = None) -> Step:
        rows = torch.arange(len(self.lengths), dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        real = None if active is None else torch.tensor([active], dtype=torch.int32, device=DEVICE)
        return Step(self.table.int().to(DEVICE), lengths, rows, real)

    def logits(self) -> list[torch.Tensor]:
        """Compute the logits of each row, ``[H, G, tokens]``, in float64 from the decoded codes."""
        found = []
        for row, length in enumerate(self.lengths):
            count = -(-length // BLOCK_TOKENS)
            codes = self.codes.codes.cpu()[self.table[row, :count]].transpose(0, 1).flatten(1, 2)[:, :length]
            query = self.query[row : row + 1].double()
            if self.codes.centroids is None:
                keys = codes.contiguous().view(self.codes.dtype).double()
                logits = query.view(HEADS, self.group, -1) @ keys.transpose(1, 2)
            else:
                books = books_of(self.codes)
                index = torch.uint8 if self.codes.index_bytes == 1 else torch.int16
                tables = reference_weights.lookup_tables(query, books).double()
                logits = reference_weights.lookup_logits(tables, codes.contiguous().view(index)[None])[0]
            found.append(logits * SCALE)
        return found

    def weights(self, row: int) -> torch.Tensor:
        """Return a row's weights as the kernels wrote them, up to the end of the last block: ``[H, G, tokens]``."""
        count = -(-self.lengths[row] // BLOCK_TOKENS)
        return self.kept.weights[row, :, :, :count].flatten(2).cpu()


KEYS = [
    ("whole", 0, 0, False, 64, torch.bfloat16),
    ("whole keys of 128 channels", 0, 0, False, 128, torch.float16),
    ("indices of a byte", 16, 256, False, 64, torch.bfloat16),
    ("indices of two bytes", 8, 8192, True, 64, torch.float16),  # tables take several rounds
]


def case_of(name: str) -> QuantisedCodes:
    _, groups, centroids, shared, dim, dtype = next(case for case in KEYS if case[0] == name)
    return some_codes(groups, centroids, shared, dtype, dim=dim)


@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("name", [case[0] for case in KEYS])
def test_logits_are_those_of_the_codes(name: str, group: int) -> None:
    rows = Rows([1, 33, 64, 400], case_of(name), group)
    token_logits(rows.query.to(DEVICE), rows.codes, rows.step(), SCALE, rows.kept)
    for row, (length, expected) in enumerate(zip(rows.lengths, rows.logits(), strict=True)):
        found = rows.weights(row)
        torch.testing.assert_close(found[..., :length].double() / LOG2_E, expected, rtol=1e-3, atol=1e-3)
        assert found[..., length:].isnan().all()  # not written


@pytest.mark.parametrize("name", ["whole", "indices of a byte"])
def test_rows_that_are_not_real_and_lengths_that_cannot_be_are_left_alone(name: str) -> None:
    rows = Rows([40, 40, 40], case_of(name))
    rows.lengths[1] = rows.blocks * BLOCK_TOKENS + 1
    token_logits(rows.query.to(DEVICE), rows.codes, rows.step(active=2), SCALE, rows.kept)
    keep_tokens(rows.step(active=2), rows.kept, 0.9, renormalises=True, pool_pages=rows.pages)
    assert not rows.kept.weights[0, ..., :8].isnan().any()
    assert rows.kept.weights[1:].isnan().all()
    assert rows.kept.counts[0].min() > 0 and not rows.kept.counts[1:].any()


@pytest.mark.parametrize("name", ["whole", "indices of a byte"])
def test_tokens_of_a_page_that_is_not_there_are_never_kept(name: str) -> None:
    rows = Rows([100], case_of(name))
    rows.table[0, 1] = rows.pages
    rows.table[0, 2] = -1
    token_logits(rows.query.to(DEVICE), rows.codes, rows.step(), SCALE, rows.kept)
    assert (rows.weights(0)[..., 32:96] == -torch.inf).all()
    keep_tokens(rows.step(), rows.kept, 1.0, renormalises=True, pool_pages=rows.pages)
    assert not rows.weights(0)[..., 32:96].any()
    assert rows.kept.counts.tolist() == [[2, 2]]
    assert rows.kept.positions[0, :, :2].tolist() == [[0, 3]] * 2


# -- kept tokens -----------------------------------------------------------------------------


def kept_of(
    logits: list[torch.Tensor], tau: float, renormalises: bool = True
) -> tuple[KeptTokens, torch.Tensor, list[int]]:
    """Run ``keep_tokens`` on rows with logits ``[H, G, tokens]``. Return weights, page table and counted shares."""
    lengths = [row.shape[2] for row in logits]
    blocks = max(-(-length // BLOCK_TOKENS) for length in lengths)
    kept = KeptTokens.zeros(len(lengths), logits[0].shape[0], logits[0].shape[1], blocks, DEVICE)
    kept.weights.fill_(torch.nan)
    for row, of_row in enumerate(logits):
        flat = kept.weights[row].flatten(2)
        flat[..., : of_row.shape[2]] = (of_row * LOG2_E).to(DEVICE)
    table = torch.randperm(len(lengths) * blocks, generator=seeded(4)).view(len(lengths), blocks)
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    step = Step(table.int().to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), numbers)
    counted = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    keep_tokens(step, kept, tau, renormalises=renormalises, pool_pages=table.numel(), counted=counted)
    return kept, table, counted.tolist()


def weights_of_policy(logits: torch.Tensor, tau: float, renormalises: bool) -> torch.Tensor:
    weights = logits.softmax(dim=2)
    weights = weights * reference_weights.cumulative_share(weights, tau)
    return weights / weights.sum(dim=2, keepdim=True) if renormalises else weights


@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize("tau", [0.01, 0.5, 0.9, 0.999, 1.0])
def test_kept_weights_and_lists_are_the_policys(tau: float, renormalises: bool) -> None:
    random = seeded(9)
    logits = [3 * torch.randn(HEADS, 3, length, generator=random) for length in (1, 31, 32, 33, 700, 1025)]
    kept, table, counted = kept_of(logits, tau, renormalises)
    shares = 0.0
    for row, of_row in enumerate(logits):
        length = of_row.shape[2]
        blocks = -(-length // BLOCK_TOKENS)
        found = kept.weights[row, :, :, :blocks].cpu()
        expected = torch.nn.functional.pad(
            weights_of_policy(of_row, tau, renormalises), (0, blocks * BLOCK_TOKENS - length)
        ).view_as(found)
        differs = (found != 0) != (expected != 0)
        assert differs.sum(dim=(2, 3)).max() <= 1  # one token at the edge, by rounding
        both = (found != 0) & (expected != 0)
        torch.testing.assert_close(found[both], expected[both], rtol=2e-2 if differs.any() else 1e-4, atol=1e-6)
        shares += float((found != 0).sum()) / length
        for head in range(HEADS):
            listed = (found[head] != 0).any(dim=2).any(dim=0).nonzero().flatten().tolist()
            count = int(kept.counts[row, head])
            assert kept.positions[row, head, :count].tolist() == listed
            assert kept.pages[row, head, :count].tolist() == table[row, listed].tolist()
    assert abs(counted[0] / SHARE_UNITS - shares) < 1e-3


def test_of_equal_weights_the_first_tokens_are_kept() -> None:
    kept, _, counted = kept_of([torch.zeros(HEADS, 2, 64), torch.zeros(HEADS, 2, 1300)], 0.25)
    for row, (length, first) in enumerate(((64, 16), (1300, 325))):
        found = kept.weights[row].flatten(2)[..., :length].cpu()
        assert ((found != 0) == (torch.arange(length) < first)).all()
        torch.testing.assert_close(found.sum(dim=2), torch.ones(HEADS, 2))
    assert abs(counted[0] - 2 * HEADS * 2 * SHARE_UNITS // 4) < 16


def test_logits_that_are_no_numbers_weigh_nothing() -> None:
    logits = torch.zeros(HEADS, 2, 40)
    logits[0, :, 3], logits[1, 0] = torch.nan, -torch.inf
    kept, _, _ = kept_of([logits], 1.0)
    found = kept.weights[0].flatten(2).cpu()
    assert not found[0, :, 3].any() and not found[1, 0].any() and not found.isnan().any()
    torch.testing.assert_close(found.sum(dim=2), torch.tensor([[1.0, 1.0], [0.0, 1.0]]))


def test_a_row_without_any_weight_has_an_empty_list() -> None:
    kept, _, _ = kept_of([torch.full((HEADS, 2, 40), -torch.inf)], 0.9)
    assert not kept.counts.any() and not kept.weights.any()


@pytest.mark.parametrize("groups", [0, 8], ids=["whole", "quantised"])
def test_a_long_row_keeps_what_the_reference_keeps(groups: int) -> None:
    rows = Rows([4500, 2100], some_codes(groups, 20, True, torch.bfloat16), group=2)
    token_logits(rows.query.to(DEVICE), rows.codes, rows.step(), SCALE, rows.kept)
    keep_tokens(rows.step(), rows.kept, 0.9, renormalises=True, pool_pages=rows.pages)
    for row, logits in enumerate(rows.logits()):
        expected = weights_of_policy(logits.float(), 0.9, True)
        found = rows.weights(row)
        assert not found[..., rows.lengths[row] :].any()
        # logits differ by rounding, so tokens at the edge differ
        torch.testing.assert_close(found[..., : rows.lengths[row]], expected, rtol=1e-2, atol=1e-4)


# -- sums ------------------------------------------------------------------------------------


class Sums:
    """Lists with weights, and values in registered host memory. Values of a token that always has weight 0 are NaN."""

    def __init__(self, counts: list[list[int]], dtype: torch.dtype, dim: int, group: int, blocks: int) -> None:
        random = seeded(dim + group)
        batch, pages = len(counts), 20
        shape = (pages, HEADS, BLOCK_TOKENS, dim)
        region = SharedRegion(SharedRegion.size_for(2 * math.prod(shape) * dtype.itemsize))
        self.values = region.take(shape, dtype)
        self.values.copy_(torch.randn(shape, generator=random))
        self.pool = HostPool(host_memory.RegisteredRegion(region), self.values, self.values)
        self.kept = KeptTokens.zeros(batch, HEADS, group, blocks, DEVICE)
        weights = torch.rand(self.kept.weights.shape, generator=random)
        weights[torch.rand(weights.shape, generator=random) < 0.8] = 0
        weights[..., 5] = 0  # token 5 of a block is never kept
        self.values[:, :, 5] = torch.nan
        self.kept.weights.copy_(weights)
        order = torch.rand(batch, HEADS, blocks, generator=random).argsort(dim=2)
        self.kept.positions.copy_(order.sort(dim=2).values)
        self.kept.pages.copy_(torch.randint(0, pages, (batch, HEADS, blocks), generator=random))
        self.kept.counts.copy_(torch.tensor(counts))
        self.workspace = SumWorkspace(batch, HEADS, group, dim, DEVICE)
        self.out = torch.full((batch, HEADS * group, dim), 77.0, dtype=dtype, device=DEVICE)

    def expected(self) -> torch.Tensor:
        kept, blocks = self.kept, self.kept.pages.shape[2]
        pages, positions, counts = (part.cpu().long() for part in (kept.pages, kept.positions, kept.counts))
        inside = (positions >= 0) & (positions < blocks) & (pages >= 0) & (pages < len(self.values))
        listed = (torch.arange(blocks) < counts[..., None]) & inside
        ids = pages.masked_fill(~listed, reference.NO_BLOCK)
        where = positions.clamp(0, blocks - 1)[:, :, None, :, None].expand_as(kept.weights)
        weights = kept.weights.cpu().gather(3, where) * listed[:, :, None, :, None]
        return reference_weights.sum_values(weights, self.values, ids)

    def finish(self, **options: torch.Tensor) -> torch.Tensor:
        finish_sums(self.pool, self.kept, self.out, workspace=self.workspace, **options)
        return self.out.cpu().float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (128, 4), (64, 7), (128, 16)])
def test_values_of_listed_blocks_are_summed_by_their_weights(dim: int, group: int, dtype: torch.dtype) -> None:
    sums = Sums([[0, 1], [9, 4], [3, 0]], dtype, dim, group, blocks=9)
    for _ in range(2):  # a launch must leave the workspace as before
        torch.testing.assert_close(sums.finish(), sums.expected(), rtol=1e-2, atol=5e-2)
        sums.out.fill_(77.0)
    assert not sums.workspace.arrived.any()


def test_many_lists_have_a_cta_each_and_few_share_ctas() -> None:
    assert SumWorkspace(200, HEADS, 1, 64, DEVICE).splits == 1
    assert SumWorkspace(1, HEADS, 1, 64, DEVICE).splits == 32
    sums = Sums([[40, 70]], torch.bfloat16, 64, 2, blocks=70)
    torch.testing.assert_close(sums.finish(), sums.expected(), rtol=1e-2, atol=0.1)


def test_entries_that_are_served_get_their_replies() -> None:
    sums = Sums([[2, 3], [9, 4], [1, 1], [5, 5]], torch.bfloat16, 64, 3, blocks=9)
    replies = torch.randn(sums.out.shape, generator=seeded(8)).to(DEVICE)
    served = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    active = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    found = sums.finish(served=served, replies=replies, active_rows=active)
    assert torch.equal(found[[0, 2]], replies.cpu().bfloat16().float()[[0, 2]])
    torch.testing.assert_close(found[1], sums.expected()[1], rtol=1e-2, atol=5e-2)
    assert (found[3] == 77.0).all()  # the entry is padding


def test_numbers_out_of_bounds_are_left_out() -> None:
    sums = Sums([[6, 6], [20, -1]], torch.bfloat16, 64, 2, blocks=6)
    sums.kept.pages[0, 0, 1], sums.kept.pages[0, 1, 2] = -1, 20
    sums.kept.positions[0, 0, 3], sums.kept.positions[1, 0, 0] = 6, -1
    torch.testing.assert_close(sums.finish(), sums.expected(), rtol=1e-2, atol=5e-2)
