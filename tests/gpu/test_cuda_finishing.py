"""The end of a layer on the GPU: wait for replies, shift LSEs, merge, and compute misses that the worker did not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import Shape as DigestShape
from selection_cases import bits_of, numbers, summaries
from test_cuda_digests import region_pool
from test_cuda_mailbox import PATIENCE_S, SCALE, SHORT_S, Host, Lists

from sglang_hybrid.core import LayerCache
from sglang_hybrid.memory.sketches import LayerSketch
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda import host_memory
from sglang_hybrid.ops.cuda.attention import AttendWorkspace, Partial, merge
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests
from sglang_hybrid.ops.cuda.missed import WorthBlocks, attend_pool, finish_late
from sglang_hybrid.ops.cuda.scoring import shift_lse
from sglang_hybrid.ops.cuda.step import Step

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
LSE_TOLERANCE = 1e-3
UNTOUCHED = 77.0


def random_local(shape: tuple[int, int, int], seed: int, empty: float = 0.1) -> Partial:
    """Return random outputs and LSEs. A share ``empty`` of the heads has LSE -inf and NaN as output."""
    random = seeded(seed)
    out, lse = torch.randn(shape, generator=random), torch.randn(shape[:2], generator=random) + 4
    nothing = torch.rand(shape[:2], generator=random) < empty
    lse = lse.masked_fill(nothing, -torch.inf)
    return out.masked_fill(nothing[..., None], torch.nan).to(DEVICE), lse.to(DEVICE)


# -- misses that the worker did not compute --------------------------------------------------


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    group: int
    dim: int
    most: int
    dtype: torch.dtype = torch.bfloat16
    pool: torch.dtype | None = None  # dtype of the pool; None: `dtype`


SHAPES = [
    Shape(1, 1, 1, 64, 1),
    Shape(3, 2, 3, 64, 9),
    Shape(2, 8, 5, 128, 6),
    Shape(5, 2, 16, 128, 3, torch.float16),
    Shape(2, 1, 9, 64, 40, torch.float16),
    Shape(9, 3, 2, 64, 4),
    Shape(2, 2, 4, 96, 5),
    Shape(1, 2, 8, 256, 5),
    Shape(2, 2, 5, 128, 6, pool=reference.FP8),
]


def rows_of(batch: int, pages: int, longest: int, seed: int, active: torch.Tensor | None = None) -> Step:
    """Return a step of rows with random lengths up to ``longest`` blocks, and random pages of a pool."""
    random = seeded(seed)
    table = torch.randint(0, pages, (batch, longest), generator=random).int().to(DEVICE)
    lengths = torch.randint(1, longest * BLOCK_TOKENS + 1, (batch,), generator=random).int().to(DEVICE)
    return Step(table, lengths, torch.arange(batch, dtype=torch.int32, device=DEVICE), active)


class Missed:
    """Lists of full blocks in a pool; some batch entries were served by a worker."""

    def __init__(self, shape: Shape, seed: int) -> None:
        random = seeded(seed)
        self.shape, pages = shape, 30
        self.pool = region_pool(pages, shape.heads, shape.dim, shape.pool or shape.dtype)
        for part in (self.pool.keys, self.pool.values):
            part.copy_(torch.randn(part.shape, generator=random))
        query = torch.randn(shape.batch, shape.heads * shape.group, shape.dim, generator=random)
        self.query = query.to(DEVICE, shape.dtype)
        listed = (shape.batch, shape.heads, shape.most)
        self.pages = torch.randint(0, pages, listed, generator=random).int().to(DEVICE)
        self.counts = torch.randint(0, shape.most + 1, listed[:2], generator=random).int().to(DEVICE)
        self.counts[0] = shape.most
        self.served = (torch.rand(shape.batch, generator=random) < 0.4).int().to(DEVICE)
        self.served[0] = 0
        self.scale = shape.dim**-0.5
        self.step = rows_of(shape.batch, pages, 11, seed)
        self.workspace = AttendWorkspace(shape.batch, shape.heads, shape.group, shape.dim, DEVICE)

    def finish(self, local: Partial | None = None, **more: Any) -> torch.Tensor:
        """Run ``finish_late`` and return its output. ``local``: by default an empty partial attention."""
        if local is None:
            local = torch.full(self.query.shape, torch.nan, device=DEVICE), torch.full(self.query.shape[:2], -torch.inf)
        out = torch.full(self.query.shape, UNTOUCHED, dtype=self.shape.dtype, device=DEVICE)
        options = {"served": self.served, **more}
        partial = local[0], local[1].to(DEVICE)
        finish_late(
            self.query, self.pool, self.step, self.pages, self.counts, self.scale, partial, out,
            workspace=self.workspace, **options,
        )  # fmt: skip
        assert not self.workspace.arrived.any()
        return out

    def expected(self, masks: torch.Tensor | None = None) -> Partial:
        """Compute attention over the lists of all entries, served or not."""
        place = torch.arange(self.shape.most, device=DEVICE)
        absent = (place >= self.counts[..., None]) | (self.pages < 0) | (self.pages >= self.pool.keys.shape[0])
        ids = self.pages.long().masked_fill(absent, reference.NO_BLOCK)
        fill = torch.full_like(ids, BLOCK_TOKENS).masked_fill(absent, 0)
        return reference.attend_blocks(self.query, self.pool.keys, self.pool.values, ids, fill, self.scale, masks=masks)

    def expected_of_rows(self, worth: WorthBlocks | None = None) -> torch.Tensor:
        """Compute the outputs of all entries as if all of them attended to their rows."""
        return self.partial_of_rows(worth)[0]

    def partial_of_rows(self, worth: WorthBlocks | None) -> Partial:
        table, lengths = self.step.page_table.long(), self.step.lengths.long()
        positions = torch.arange(table.shape[1], device=DEVICE).expand(len(table), self.shape.heads, -1)
        fill, bias = reference.block_fill(positions, lengths, BLOCK_TOKENS), None
        absent = fill == 0
        if worth is not None:
            rows, counts = self.step.row_of.long(), -(-lengths // BLOCK_TOKENS)
            always = reference.is_forced(positions, counts, worth.sink, worth.recent)
            absent = absent | ~(always | (worth.scores[rows] >= worth.least))
            bias = worth.bias[rows][..., None] * always[:, :, None, :]
            if worth.held is not None:
                absent = absent | bits_of(worth.held, table.shape[1])
        ids, fill = (
            reference.block_ids(positions, table).masked_fill(absent, reference.NO_BLOCK),
            fill.masked_fill(absent, 0),
        )
        return reference.attend_blocks(self.query, self.pool.keys, self.pool.values, ids, fill, self.scale, bias)


def assert_rows(found: torch.Tensor, expected: torch.Tensor, which: torch.Tensor) -> None:
    tolerance = 2 * TOLERANCE[found.dtype]
    torch.testing.assert_close(found[which], expected[which].to(found.dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_missed_blocks_are_attended_where_they_lie(shape: Shape) -> None:
    for seed in range(2):
        case = Missed(shape, seed)
        found, served = case.finish(), case.served.bool()
        assert_rows(found, case.expected()[0], ~served)
        assert (found[served] == UNTOUCHED).all()
        everybody = case.finish(served=torch.zeros_like(case.served))
        assert_rows(everybody, case.expected()[0], torch.ones_like(served))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_missed_blocks_with_masks_only_tokens_whose_bit_is_set_are_attended(shape: Shape) -> None:
    case = Missed(shape, 5)
    masks = torch.randint(-(2**31), 2**31, case.pages.shape, generator=seeded(6))
    kind = torch.randint(0, 4, masks.shape, generator=seeded(7))  # 0: no token of the block is attended; 1: all are
    masks = torch.where(kind == 0, 0, torch.where(kind == 1, -1, masks)) & ~(1 << 11)
    masks[0, 0] = 0  # a list without tokens
    masks = masks.int().to(DEVICE)
    everybody = torch.ones_like(case.served)
    whole = case.finish(masks=masks, whole=everybody)
    assert_rows(whole, case.expected_of_rows(), everybody.bool())  # masks apply to lists only
    expected = case.expected(masks)[0]
    for part in (case.pool.keys, case.pool.values):
        part[:, :, 11] = torch.nan
    assert_rows(case.finish(masks=masks), expected, ~case.served.bool())


def test_groups_of_every_size_are_attended() -> None:
    for group in range(1, 17):
        case = Missed(Shape(2, 2, group, 64, 3), group)
        assert_rows(case.finish(), case.expected()[0], ~case.served.bool())


def test_lists_that_are_empty_or_wrong_harm_nobody() -> None:
    case = Missed(Shape(4, 2, 3, 64, 5), 1)
    case.served.zero_()
    case.counts[1] = 0
    case.counts[2, 0], case.counts[2, 1] = -7, 1000
    case.pages[3, 0, :2], case.pages[3, 1, 1] = numbers(-1, 30), 1 << 30
    found = case.finish()
    assert not found[1].any() and not found[2, :3].any()
    case.counts.clamp_(0, 5)
    assert_rows(found, case.expected()[0], torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("active", [0, 2])
def test_entries_that_are_not_active_are_left_alone(active: int) -> None:
    case = Missed(Shape(4, 2, 3, 64, 5), 1)
    case.served.zero_()
    case.step = replace(case.step, active_rows=numbers(active))
    found = case.finish()
    assert_rows(found, case.expected()[0], torch.arange(4) < active)
    assert (found[active:] == UNTOUCHED).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_was_late_is_merged_with_what_is_local(shape: Shape) -> None:
    case = Missed(shape, 3)
    local = random_local((shape.batch, shape.heads * shape.group, shape.dim), 4)
    out, served = case.finish(local), case.served.bool()
    assert (out[served] == UNTOUCHED).all()
    assert_rows(out, reference.merge(*local, *case.expected())[0], ~served)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entries_that_are_whole_attend_to_their_rows_whoever_served_them(shape: Shape) -> None:
    case = Missed(shape, 5)
    local = random_local((shape.batch, shape.heads * shape.group, shape.dim), 6)
    for first in range(2):
        whole = torch.zeros_like(case.served)
        whole[first::2] = 1
        out, of_row = case.finish(local, whole=whole), whole.bool()
        assert_rows(out, case.expected_of_rows(), of_row)
        assert_rows(out, reference.merge(*local, *case.expected())[0], ~of_row & ~case.served.bool())
        assert (out[~of_row & case.served.bool()] == UNTOUCHED).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_entries_that_are_whole_leave_out_what_is_not_worth_it(shape: Shape) -> None:
    case, random, rows = Missed(shape, 5), seeded(8), shape.batch + 2
    case.step = replace(case.step, row_of=torch.randperm(rows, generator=random)[: shape.batch].int().to(DEVICE))
    whole, nobody = torch.ones_like(case.served), torch.zeros_like(case.served)
    scores = torch.randn(rows, shape.heads, case.step.max_blocks, generator=random)
    scores[torch.rand(scores.shape, generator=random) < 0.1] = -torch.inf
    bias = -torch.rand(rows, shape.heads, shape.group, generator=random)
    worth = WorthBlocks(scores.to(DEVICE), bias.to(DEVICE), least=0.3, sink=1, recent=2)
    assert_rows(case.finish(whole=whole, worth=worth), case.expected_of_rows(worth), whole.bool())
    assert_rows(
        case.finish(whole=nobody, worth=worth), case.expected()[0], ~case.served.bool()
    )  # lists are attended in full, regardless of scores
    every = replace(worth, least=-torch.inf, bias=torch.zeros_like(worth.bias))
    assert_rows(case.finish(whole=whole, worth=every), case.expected_of_rows(), whole.bool())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_whole_rows_hold_is_local_and_merged_with_what_else_is_worth_it(shape: Shape) -> None:
    case, random = Missed(shape, 5), seeded(9)
    case.step = rows_of(shape.batch, 30, 41, 5)
    whole = torch.ones_like(case.served)
    scores = torch.randn(shape.batch, shape.heads, 41, generator=random).to(DEVICE)
    bias = -torch.rand(shape.batch, shape.heads, shape.group, generator=random).to(DEVICE)
    held = torch.randint(-(2**31), 2**31, (shape.batch, shape.heads, 2), generator=random).int().to(DEVICE)
    held[0, 0] = -1  # all blocks are in slots: none is left to be read
    worth = WorthBlocks(scores, bias, 0.3, sink=1, recent=2, held=held)
    local = random_local((shape.batch, shape.heads * shape.group, shape.dim), 6)
    expected = reference.merge(*local, *case.partial_of_rows(worth))[0]
    assert_rows(case.finish(local, whole=whole, worth=worth), expected, whole.bool())


def test_many_ctas_share_one_long_row() -> None:
    case = Missed(Shape(40, 2, 3, 64, 5), 1)
    case.step = rows_of(40, 30, 700, 2)
    case.served.fill_(1)
    whole = torch.zeros_like(case.served)
    whole[33] = 1
    case.step.lengths[33] = 700 * BLOCK_TOKENS - 5
    out = case.finish(whole=whole)
    assert_rows(out, case.expected_of_rows(), whole.bool())
    assert (out[~whole.bool()] == UNTOUCHED).all()


def test_a_pool_of_another_shape_is_refused() -> None:
    case = Missed(Shape(2, 2, 3, 64, 5), 1)
    case.query = case.query.half()
    with pytest.raises(ValueError, match="the pool's keys are"):
        case.finish()


def test_a_workspace_for_others_is_refused() -> None:
    case = Missed(Shape(2, 2, 3, 64, 5), 1)
    case.workspace = AttendWorkspace(3, 2, 3, 64, DEVICE)
    with pytest.raises(ValueError, match="the workspace is for"):
        case.finish()


# -- whole rows ------------------------------------------------------------------------------


class WholeRows:
    """Rows of random lengths in a pool whose pages have NaN beyond a row's last token."""

    def __init__(self, shape: Shape, seed: int) -> None:
        random = seeded(seed)
        self.shape, pages = shape, shape.batch * shape.most
        self.pool = region_pool(pages, shape.heads, shape.dim, shape.dtype)
        most = shape.most * BLOCK_TOKENS
        # the first rows: maximum length; one block and the first token of the next; exactly one block
        self.lengths = torch.randint(1, most + 1, (shape.batch,), generator=random)
        self.lengths[: min(3, shape.batch)] = torch.tensor([most, BLOCK_TOKENS + 1, BLOCK_TOKENS])[: shape.batch]
        self.lengths.clamp_(max=most)
        self.table = torch.randperm(pages, generator=random).view(shape.batch, shape.most)
        places = torch.arange(most).view(shape.most, BLOCK_TOKENS)
        beyond = places >= self.lengths[:, None, None]  # [batch, blocks, tokens]
        for part in (self.pool.keys, self.pool.values):
            content = torch.randn(part.shape, generator=random)
            content[self.table] = content[self.table].masked_fill(beyond[:, :, None, :, None], torch.nan)
            part.copy_(content)
        query = torch.randn(shape.batch, shape.heads * shape.group, shape.dim, generator=random)
        self.query, self.scale = query.to(DEVICE, shape.dtype), shape.dim**-0.5
        self.active = numbers(shape.batch)
        lengths, owners = self.lengths.int().to(DEVICE), torch.arange(shape.batch, dtype=torch.int32, device=DEVICE)
        self.step = Step(self.table.int().to(DEVICE), lengths, owners, self.active)

    def attend(self) -> torch.Tensor:
        out = torch.full(self.query.shape, UNTOUCHED, dtype=self.shape.dtype, device=DEVICE)
        shape = self.shape
        workspace = AttendWorkspace(shape.batch, shape.heads, shape.group, shape.dim, DEVICE)
        return attend_pool(self.query, self.pool, self.step, self.scale, workspace=workspace, out=out)

    def expected(self) -> torch.Tensor:
        """Compute softmax attention over the tokens of each row."""
        rows = []
        for entry, length in enumerate(self.lengths.tolist()):
            keys, values = (
                part.cpu()[self.table[entry]].transpose(0, 1).flatten(1, 2)[:, :length].float()
                for part in (self.pool.keys, self.pool.values)
            )
            rows.append(reference.attend_prefill(self.query[entry : entry + 1].cpu().float(), keys, values, self.scale))
        return torch.cat(rows).to(DEVICE)


@pytest.mark.parametrize("shape", [*SHAPES, Shape(2, 1, 2, 64, 300)], ids=str)
def test_whole_rows_are_attended_in_the_pool_up_to_their_last_token(shape: Shape) -> None:
    for seed in range(2):
        case = WholeRows(shape, seed)
        assert_rows(case.attend(), case.expected(), torch.ones(shape.batch, dtype=torch.bool))


def test_rows_of_every_length_within_two_blocks_are_attended() -> None:
    case = WholeRows(Shape(64, 1, 2, 64, 2), 3)
    for part in (case.pool.keys, case.pool.values):
        part.copy_(torch.randn(part.shape, generator=seeded(4)))
    case.lengths = torch.arange(1, 65)
    case.step.lengths.copy_(case.lengths)
    assert_rows(case.attend(), case.expected(), torch.ones(64, dtype=torch.bool))


def test_rows_that_are_not_active_or_wrong_harm_nobody() -> None:
    case = WholeRows(Shape(5, 2, 3, 64, 4), 1)
    case.active.fill_(4)
    case.step.lengths[0] = 1000  # more tokens than the row's pages hold
    case.step.lengths[1] = 0
    case.step.page_table[2] = -1
    case.step.page_table[3] = numbers(1 << 30, *[case.pool.keys.shape[0]] * 3)
    found = case.attend()
    assert_rows(found, case.expected(), torch.tensor([True, False, False, False, False]))
    assert not found[1:4].any()
    assert (found[4] == UNTOUCHED).all()


# -- the end of a layer ----------------------------------------------------------------------


class Layer:
    """One layer of a host with a mailbox: digests, local partial attention, and the real and the predicted query."""

    number = 1

    def __init__(self, dtype: str, kv_heads: int, group: int, dim: int, channels: int, compact: bool = False) -> None:
        self.host = Host(dtype, kv_heads, group, dim)
        self.shape = (self.host.rows, kv_heads * group, dim)
        keys, values = self.host.pool[0, self.number], self.host.pool[1, self.number]
        self.pool = HostPool(host_memory.RegisteredRegion(self.host.memory), keys, values)
        of_digests = DigestShape(1, kv_heads, group, dim, channels, 1, self.host.dtype, compact)
        self.digests: LayerDigests = summaries(keys, of_digests, 0)
        self.lists = self.new_lists(0)
        self.query = torch.zeros(self.shape, dtype=self.host.dtype, device=DEVICE)
        self.local = random_local(self.shape, 0)
        self.out = torch.zeros_like(self.query)
        self.replies = torch.zeros(self.shape, device=DEVICE), torch.zeros(self.shape[:2], device=DEVICE)
        self.served = torch.zeros(self.host.rows, dtype=torch.int32, device=DEVICE)
        self.step = rows_of(self.host.rows, self.host.pages, 1, 0)
        self.workspace = AttendWorkspace(self.host.rows, kv_heads, group, dim, DEVICE)
        self.begin(0)

    def new_lists(self, seed: int, shortest: int = 0) -> Lists:
        lists = self.host.lists(seed, shortest)
        return replace(lists, last_fill=torch.full_like(lists.last_fill, BLOCK_TOKENS))

    def begin(self, seed: int, shortest: int = 0) -> None:
        """Write new random lists, queries and local partial attentions to the same memory."""
        self.lists.copy_(self.new_lists(seed, shortest))
        wrong = torch.randn(self.shape, generator=seeded(seed)).to(DEVICE) * 0.3
        self.query.copy_(self.lists.query + wrong)
        for mine, other in zip(self.local, random_local(self.shape, seed), strict=True):
            mine.copy_(other)
        self.out.fill_(UNTOUCHED)
        self.served.fill_(7)

    def post(self, **more: Any) -> None:
        self.host.post(self.lists, self.number, **more)

    def finish(
        self, deadline_s: float = PATIENCE_S, shifted: bool = True, active_rows: torch.Tensor | None = None
    ) -> None:
        lists, (out, lse) = self.lists, self.replies
        self.host.client.wait(self.host.receipt, deadline_s, out, lse, self.served)
        if shifted:
            shift_lse(
                self.query, lists.query, self.digests, lists.pages, lists.counts, SCALE, lse, active_rows=active_rows
            )
        merge(self.local, (out, lse), active_rows=active_rows, out=self.out)

    def finish_late(self, active_rows: torch.Tensor | None = None) -> None:
        lists = self.lists
        finish_late(
            self.query, self.pool, replace(self.step, active_rows=active_rows), lists.pages, lists.counts, SCALE,
            self.local, self.out, served=self.served, workspace=self.workspace,
        )  # fmt: skip

    def attended(self, query: torch.Tensor) -> Partial:
        ids, fill = (part.to(DEVICE) for part in self.lists.as_reference())
        return reference.attend_blocks(query, self.pool.keys, self.pool.values, ids, fill, SCALE)

    def expected(self, shifted: bool = True) -> torch.Tensor:
        """Compute the outputs of rows that the worker serves."""
        out, lse = self.attended(self.lists.query)
        if shifted:
            codes, channels = self.digests.codes, self.digests.channels
            sketch = None if codes is None or channels is None else LayerSketch(codes, channels)
            cache = LayerCache(self.pool.keys, self.pool.values, self.digests.digests, sketch=sketch)
            ids = self.lists.as_reference()[0].to(DEVICE)
            exact, predicted = (
                cache.estimates(q, ids.clamp(min=0), 0.0, SCALE) for q in (self.query, self.lists.query)
            )
            lse = lse + reference.lse_shift(exact, predicted, ids != reference.NO_BLOCK, SCALE)
        return reference.merge(*self.local, out, lse)[0].to(self.out.dtype)

    def expected_late(self) -> torch.Tensor:
        return reference.merge(*self.local, *self.attended(self.query))[0].to(self.out.dtype)

    def expected_alone(self) -> torch.Tensor:
        out, lse = self.local
        return out.masked_fill((lse == -torch.inf)[..., None], 0.0).to(self.out.dtype)

    def assert_rows(self, expected: torch.Tensor, rows: list[int] | slice = slice(None)) -> None:
        tolerance = 2 * TOLERANCE[self.out.dtype]
        torch.testing.assert_close(self.out[rows], expected[rows], atol=tolerance, rtol=tolerance)


@pytest.fixture
def layer() -> Iterator[Layer]:
    made = Layer("bfloat16", 2, 3, 64, 32)
    yield made
    made.host.client.attach(None)


LAYERS = [
    ("bfloat16", 2, 3, 64, 32),
    ("bfloat16", 8, 5, 128, 32),
    ("float16", 3, 16, 128, 64),
    ("float16", 9, 1, 64, 0),
    ("bfloat16", 4, 12, 64, 64),
    ("bfloat16", 1, 8, 128, 0),
    ("bfloat16", 3, 5, 128, 32, True),
    ("float16", 2, 12, 64, 64, True),
]


@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_a_layer_is_finished_with_the_replies_of_the_worker(shape: tuple[str, int, int, int, int, bool]) -> None:
    layer = Layer(*shape)
    host = layer.host
    with host.engine():
        for seed in range(4):
            layer.begin(seed)
            shifted = seed != 3
            layer.post()
            layer.finish(shifted=shifted)
            assert layer.served.tolist() == [1] * host.rows
            layer.assert_rows(layer.expected(shifted))
            finished = layer.out.clone()
            layer.finish_late()
            assert torch.equal(layer.out, finished)  # no row was late
    outcomes = host.client.outcomes()
    assert outcomes["served"] + outcomes["empty"] == 4 * host.rows and outcomes["empty"] >= 4
    host.client.attach(None)


def test_a_worker_that_is_late_leaves_its_rows_to_the_gpu(layer: Layer) -> None:
    for seed in range(4):
        layer.begin(seed, shortest=1)
        layer.post()
        layer.finish(SHORT_S)
        assert layer.served.tolist() == [0] * layer.host.rows
        assert torch.equal(layer.out, layer.expected_alone())
        layer.finish_late()
        layer.assert_rows(layer.expected_late())
    outcomes = layer.host.client.outcomes()
    assert outcomes["late"] == outcomes["withheld"] == 2 * layer.host.rows
    layer.begin(9)
    layer.lists.counts.zero_()
    layer.post()
    layer.finish(SHORT_S)
    assert layer.served.all()  # rows without blocks count as served
    assert torch.equal(layer.out, layer.expected_alone())


def test_only_a_reply_to_this_post_counts(layer: Layer) -> None:
    layer.begin(3, shortest=1)
    host = layer.host
    layer.post()
    torch.cuda.synchronize()
    generation = host.client.read_state().generation
    host.write_reply(1, 0, claimed=3, generation=generation)  # reply to a later post
    host.write_reply(1, 1, claimed=1, generation=generation + 1)  # reply of another decode step
    host.write_reply(1, 2, claimed=1, generation=generation, status=2)
    host.write_reply(1, 3, claimed=1, generation=generation)
    layer.finish(SHORT_S)
    assert layer.served.tolist() == [0, 0, 0, 1, 0, 0]
    others = [0, 1, 2, 4, 5]
    assert torch.equal(layer.out[others], layer.expected_alone()[others])
    assert host.client.outcomes() == {"served": 1, "empty": 0, "late": 2, "damaged": 2, "refused": 1, "withheld": 0}
    finished = layer.out.clone()
    layer.finish_late()
    layer.assert_rows(layer.expected_late(), others)
    assert torch.equal(layer.out[3], finished[3])


def test_rows_that_the_worker_refuses_are_finished_late(layer: Layer) -> None:
    layer.begin(3, shortest=1)
    pages = layer.lists.pages[1, 0, 0].item()
    layer.lists.pages[1, 0, 0] = layer.host.pages  # out of bounds: the worker refuses the row, the GPU skips the block
    with layer.host.engine():
        layer.post()
        layer.finish(shifted=False)
    assert layer.served.tolist() == [1, 0, 1, 1, 1, 1]
    layer.finish_late()
    layer.lists.pages[1, 0, 0] = pages
    layer.assert_rows(layer.expected(shifted=False), [0, 2, 3, 4, 5])
    tolerance = 2 * TOLERANCE[layer.out.dtype]
    expected = layer.expected_late()[1, 3:]  # the query heads of the valid list
    torch.testing.assert_close(layer.out[1, 3:], expected, atol=tolerance, rtol=tolerance)


def test_a_graph_finishes_layers_with_a_worker_and_without(layer: Layer) -> None:
    host, active = layer.host, numbers(layer.host.rows)

    def step(deadline_s: float = PATIENCE_S) -> None:
        layer.post(active_rows=active)
        layer.finish(deadline_s, active_rows=active)
        layer.finish_late(active_rows=active)

    step(SHORT_S)  # loads the kernels
    host.client.attach(host.mailbox)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with host.engine():
        for replay in range(12):
            rows = 1 + replay % host.rows
            layer.begin(replay)
            active.fill_(rows)
            host.mailbox.wake()
            graph.replay()
            assert layer.served[:rows].all() and (layer.served[rows:] == 7).all()
            layer.assert_rows(layer.expected(), slice(0, rows))
            assert (layer.out[rows:] == UNTOUCHED).all()
    host.client.attach(None)
    for replay in range(6):
        rows = 1 + replay % host.rows
        layer.begin(replay, shortest=1)
        active.fill_(rows)
        graph.replay()
        assert not layer.served[:rows].any()
        layer.assert_rows(layer.expected_late(), slice(0, rows))
        assert (layer.out[rows:] == UNTOUCHED).all()
