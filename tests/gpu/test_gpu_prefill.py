"""Exact prefill on the GPU with the pool in host memory, against the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from prefill_cases import Model, Row, Shape
from selection_cases import later

from sglang_hybrid.engines.cuda import staging
from sglang_hybrid.engines.cuda.prefill import PrefillRows
from sglang_hybrid.ops.cuda.copies import gather_blocks
from sglang_hybrid.ops.reference import FP8

SHAPES = [  # few pairs of head_dim and dtype, because FlashInfer compiles kernels for each pair
    Shape(),
    Shape(heads=8, group=5, dim=128),
    Shape(heads=2, group=5, dim=128, compact=True),
    Shape(heads=1, group=1, dim=128, dtype=torch.float16),
    Shape(heads=2, group=8, dim=128, dtype=torch.float16, channels=0),
    Shape(heads=4, group=7, dim=128),
    Shape(heads=2, group=5, dim=128, compact=True, pool=FP8),
]
EMULATED = DEVICE == "cpu"
LARGE = 1 if EMULATED else 16  # factor of the pages per row


@pytest.fixture(params=["engine", "kernels"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let prefill copy pages by the copy engine, or by kernels."""
    name: str = request.param
    monkeypatch.setattr(staging, "ENGINE_RUN_BYTES", 0 if name == "engine" else 1 << 60)
    return name


def random_rows(sizes: list[tuple[int, int]], pages: int, seed: int) -> list[Row]:
    """Return rows of (cached tokens, new tokens). Each has its own pages, random pairs of neighbouring ones."""
    free = torch.arange(pages).view(-1, 2)[torch.randperm(pages // 2, generator=seeded(seed))].flatten().tolist()
    rows = []
    for old, new in sizes:
        blocks = -(-(old + new) // BLOCK_TOKENS)
        rows.append(Row(free[:blocks], old + new, new))
        free = free[blocks:]
    return rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_all_kinds(shape: Shape, copies: str) -> None:
    model = Model(shape, staging_pages=30)
    rows = random_rows([(0, 70), (64, 33), (45, 1), (31, 98), (0, 1), (96, 32), (33, 31)], shape.pages, 3)
    model.have_prefixes(rows)
    result = model.run(rows, padding=5)
    model.check(result)


def test_other_pages_are_left_alone(copies: str) -> None:
    model = Model(Shape(), staging_pages=20)
    rows = random_rows([(0, 70), (0, 33)], 40, 3)
    model.check(model.run(rows))
    written = sorted(page for row in rows for page in row.pages)
    for untouched in model.untouched():
        assert untouched.tolist() == [page for page in range(40) if page not in written]


def test_a_prompt_in_chunks_is_a_prompt(copies: str) -> None:
    model = Model(Shape(), staging_pages=20)
    row = random_rows([(0, 200)], 40, 1)[0]
    for end, new in ((75, 75), (96, 21), (97, 1), (200, 103)):
        model.check(model.run([Row(row.pages, end, new)]))


def test_chunks_follow_each_other_without_the_host_waiting(copies: str) -> None:
    model = Model(Shape(), staging_pages=20 * LARGE)
    for seed in range(5):
        row = random_rows([(0, 250)], 40, seed)[0]
        results = [model.run([Row(row.pages, end, new)], seed=end) for end, new in ((75, 75), (130, 55), (250, 120))]
        model.check(results[-1])
        for result in results:
            model.check_outputs(result)


def test_what_follows_on_the_main_stream_finds_the_pool_written(copies: str) -> None:
    shape = Shape(pages=60 * LARGE)
    model = Model(shape, staging_pages=30 * LARGE)
    for seed in range(5):
        row = random_rows([(0, 900 * LARGE)], shape.pages, seed)[0]
        pages = torch.tensor(row.pages, dtype=torch.int32, device=DEVICE)[:, None, None].repeat(1, shape.heads, 1)
        found = torch.zeros(2, *pages.shape, BLOCK_TOKENS, shape.dim, dtype=shape.dtype, device=DEVICE)
        result = model.run([row], seed=seed)
        last = model.layers[-1].pool
        gather_blocks(last.region, last.keys, last.values, pages, found[0], found[1])
        torch.cuda.synchronize()
        for copied, truth in zip(found, model.truth[-1], strict=True):
            tokens = copied.squeeze(2).transpose(1, 2).flatten(0, 1)[: row.length]
            assert torch.equal(tokens.cpu(), model.tokens(row, truth))
        model.check(result)


def test_rows_share_the_pages_of_their_prefix(copies: str) -> None:
    model = Model(Shape(), staging_pages=9)  # too few to hold the prefix twice
    shared = [31, 4, 5, 6]
    rows = [Row([*shared, 9], 140, 12), Row([*shared, 20, 2], 128 + 50, 50), Row([*shared[:2], 11], 65, 1)]
    model.have_prefixes(rows)
    model.check(model.run(rows))


@pytest.mark.parametrize("staging_pages", [4, 6, 11])
def test_rows_that_do_not_fit_together_take_turns(staging_pages: int, copies: str) -> None:
    model = Model(Shape(), staging_pages)
    rows = random_rows([(32, 70), (45, 10), (0, 0), (0, 128), (64, 33), (100, 1), (7, 90)], 40, 5)
    model.have_prefixes(rows)
    for seed in range(3):
        model.check(model.run(rows, padding=3, seed=seed))


def test_keys_with_any_strides() -> None:
    model = Model(Shape(), staging_pages=12)
    rows = random_rows([(10, 70), (0, 33)], 40, 6)
    model.have_prefixes(rows)
    model.check(model.run(rows, fused=False))


def test_streams_do_not_overtake_each_other(copies: str) -> None:
    """Passes with different rows use the same two staging buffers, and the host does not wait between them."""
    shape = Shape(layers=4 if EMULATED else 8, pages=60 * LARGE)
    model = Model(shape, staging_pages=30 * LARGE)
    sizes = [(64, 60), (17, 45), (0, 100), (130, 7)]
    sizes = [(old * LARGE, new * LARGE) for old, new in sizes]
    for repeat in range(6 if EMULATED else 20):
        turn = sizes[repeat % 4 :] + sizes[: repeat % 4]
        rows = random_rows(turn, shape.pages, repeat)
        torch.cuda.synchronize()
        model.have_prefixes(rows)
        first = model.run(rows[:2], seed=repeat)
        second = model.run(rows[2:], seed=repeat + 1)
        model.check(first)
        model.check(second)


def test_a_layer_is_written_when_it_says_so() -> None:
    shape = Shape(pages=60 * LARGE)
    model = Model(shape, staging_pages=30 * LARGE)
    row = random_rows([(0, 700 * LARGE)], shape.pages, 2)[0]
    beside = torch.cuda.Stream(DEVICE)
    model.prefill.begin(PrefillRows([row.pages], [row.length], [row.new]), shape.scale)
    for layer in range(shape.layers):
        query = torch.randn(row.new, shape.heads * shape.group, shape.dim, dtype=shape.dtype, device=DEVICE)
        keys, values = (model.new_tokens(row, part).contiguous().to(DEVICE) for part in model.truth[layer])
        model.prefill.attend(layer, query, keys, values)
        beside.wait_event(model.prefill.written(layer))
        done = torch.cuda.Event()
        done.record(beside)
        done.synchronize()
        found = model.tokens(row, model.layers[layer].pool.keys)
        assert torch.equal(found, model.tokens(row, model.truth[layer][0]))
    model.prefill.finish()


def test_a_pass_that_was_left_in_the_middle_does_no_harm() -> None:
    model = Model(Shape(), staging_pages=12)
    rows = random_rows([(40, 70), (0, 33)], 40, 6)
    model.have_prefixes(rows)
    model.prefill.begin(PrefillRows([rows[0].pages], [rows[0].length], [rows[0].new]), 1.0)
    model.check(model.run(rows))


def test_the_staging_is_lent_between_passes_and_never_within_one() -> None:
    model = Model(Shape(), staging_pages=12)
    rows = random_rows([(40, 70), (0, 33)], 40, 6)
    model.have_prefixes(rows)
    for seed in range(3):
        result = model.run(rows, seed=seed)
        lent = model.prefill.lend()
        assert lent is not None and lent.keys.shape[0] == lent.values.shape[0] == 2 * 12 * model.shape.heads
        later(partial(lent.keys.fill_, 7.0))
        later(partial(lent.values.fill_, 7.0))
        model.check(result)
    model.prefill.begin(PrefillRows([rows[0].pages], [rows[0].length], [rows[0].new]), 1.0)
    assert model.prefill.lend() is None


def test_a_pass_without_new_tokens() -> None:
    model = Model(Shape(), staging_pages=12)
    model.check(model.run([Row([], 0, 0)], padding=4))


def test_what_cannot_be_served_says_why() -> None:
    model = Model(Shape(), staging_pages=3)
    with pytest.raises(ValueError, match="row 1 has 4 pages and the staging 3"):
        model.prefill.begin(PrefillRows([[1, 2, 3, 4], [5, 6, 7, 8]], [40, 100], [1, 1]), 1.0)
    with pytest.raises(ValueError, match="the pool has 40"):
        model.prefill.begin(PrefillRows([[1, 40]], [40], [1]), 1.0)
    rows = [Row([1, 2], 40, 40)]
    model.check(model.run(rows))
    with pytest.raises(RuntimeError, match="layer 1 is attended when it is layer 3's turn"):
        model.prefill.attend(1, torch.zeros(1), torch.zeros(1), torch.zeros(1))
