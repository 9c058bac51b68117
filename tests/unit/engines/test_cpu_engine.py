"""Native decode on a host without a GPU, against the reference operations and softmax attention in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TypedDict

import pytest
import torch
from attention_oracle import Tolerance, causal_attention, seeded, softmax_attention

from sglang_hybrid.config import HybridConfig, load_config
from sglang_hybrid.engines.base import ModelFacts, PrefillBatch, StepBatch
from sglang_hybrid.engines.choice import unsupported_by_cpu_engine
from sglang_hybrid.engines.cpu import CpuEngine
from sglang_hybrid.engines.first_steps import SplitStep
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cpu.dtypes import code_of
from sglang_hybrid.ops.cpu.library import NativeError
from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.protocol.region import SharedRegion

T = 32
NO_SLOTS = torch.empty(0, dtype=torch.int64)  # the native engine takes slots from its page table
CLOSE: dict[torch.dtype, Tolerance] = {
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


class Rows:
    """Requests in a pool of two layers. Only the engine writes and decodes them."""

    def __init__(
        self,
        lengths: list[int],
        heads: int = 2,
        group: int = 3,
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
        channels: int = 32,
        seed: int = 0,
        threads: int = 2,
        **settings: object,
    ) -> None:
        random = seeded(seed)
        self.lengths, self.dtype, self.scale = lengths, dtype, 1.2 * dim**-0.5
        self.stored = stored = reference.FP8 if fp8 else dtype  # dtype of the pool

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random).to(dtype)

        # queries, keys and values are slices of one wider projection, as in a model
        width = (group + 2) * heads * dim
        self.projected = [normal(length, width) * 1.5 for length in lengths]
        self.parts = (group * heads * dim, heads * dim, heads * dim)
        self.dim = dim

        counts = [-(-length // T) for length in lengths]
        pages = sum(counts) + 2
        order = 1 + torch.randperm(pages - 1, generator=random)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        for row, own in enumerate(order[: sum(counts)].split(counts)):
            self.table[row, : len(own)] = own

        shape = (pages, heads, T, dim)
        size = torch.Size(shape).numel() * stored.itemsize
        self.region = SharedRegion(SharedRegion.size_for(size, size, size, size))
        self.keys = [self.region.take(shape, stored).fill_(float("nan")) for _ in range(2)]
        self.values = [self.region.take(shape, stored).fill_(float("nan")) for _ in range(2)]
        geometry = Geometry(
            rows=len(lengths), kv_heads=heads, group=group, head_dim=dim, dtype=code_of(stored, dtype),
            max_blocks=64, layers=2, pages=pages, keys=0, values=self.values[0].data_ptr() - self.region.address,
            layer_stride=self.keys[1].data_ptr() - self.keys[0].data_ptr(), pool_bytes=self.region.size,
        )  # fmt: skip
        self.digests = [torch.zeros(pages, heads, 2, dim, dtype=stored) for _ in range(2)]
        self.channels = torch.stack([torch.randperm(dim, generator=random)[:channels] for _ in range(heads)])
        self.codes = torch.zeros(2, pages, heads, T, channels // 2, dtype=torch.uint8)
        pool = SimpleNamespace(
            k_buffer=self.keys, v_buffer=self.values, region=self.region, layer_num=2,
            digests=SimpleNamespace(of_layer=self.digests.__getitem__),
            sketches=SimpleNamespace(of_layer=self.sketch) if channels else None,
        )  # fmt: skip
        # token indices of rows as in SGLang's table; the engine reads one index of every page
        self.req_to_token = (self.table.repeat_interleave(T, dim=1) * T).to(torch.int32)
        model = ModelFacts(self.req_to_token, group, dtype, self.scale, cuda_graphs=False)
        self.config = HybridConfig(**{"sketch_channels": channels, **settings})  # type: ignore[arg-type]
        self.engine = CpuEngine(self.config, pool, geometry, model, threads)

    def sketch(self, layer: int) -> SimpleNamespace:
        return SimpleNamespace(codes=self.codes[layer], channels=self.channels)

    def of(self, row: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, keys and values of a row's tokens, ``[tokens, heads, dim]``, rounded as the pool does."""
        query, keys, values = (
            part.unflatten(1, (-1, self.dim)) for part in self.projected[row][first:last].split(self.parts, dim=1)
        )
        if self.stored == self.dtype:  # without rounding, keys and values stay slices
            return query, keys, values
        return query, *(part.to(self.stored).to(self.dtype) for part in (keys, values))

    def write(self, layer: int = 1) -> None:
        """Store all tokens but the last of each row, without attention, which takes minutes in 16 bits on some CPUs."""
        which = [row for row, length in enumerate(self.lengths) if length > 1]
        before = torch.tensor([self.lengths[row] - 1 for row in which])
        self.engine.kernels.begin(self.table[which], before, before)
        parts = [self.of(row, 0, self.lengths[row] - 1) for row in which]
        _, keys, values = (torch.cat(side) for side in zip(*parts, strict=True))
        self.engine.kernels.store(layer, keys.to(self.stored), values.to(self.stored))

    def prefill(self, layer: int = 1, chunks: int = 1) -> list[torch.Tensor]:
        """Prefill all tokens but the last of each row, in ``chunks``. Return the last chunk's output of each row."""
        out: list[torch.Tensor] = []
        for chunk in range(chunks):
            spans = [((n - 1) * chunk // chunks, (n - 1) * (chunk + 1) // chunks) for n in self.lengths]
            which = [row for row, (first, last) in enumerate(spans) if first < last]
            new = [spans[row][1] - spans[row][0] for row in which]
            lengths = [spans[row][1] for row in which]
            self.engine.begin_prefill(PrefillBatch(torch.tensor(which), lengths, new, NO_SLOTS))
            parts = [self.of(row, *spans[row]) for row in which]
            query, keys, values = (torch.cat(side) for side in zip(*parts, strict=True))
            out = list(self.engine.prefill(layer, query, keys, values, self.scale).split(new))
        return out

    def decode(self, layer: int = 1, rows: list[int] | None = None) -> torch.Tensor:
        """Decode the last token of each row, and return the output of its attention."""
        which = list(range(len(self.lengths))) if rows is None else rows
        lengths = torch.tensor([self.lengths[row] for row in which])
        self.engine.begin_step(StepBatch(torch.tensor(which), lengths, lengths, NO_SLOTS))
        parts = [self.of(row, self.lengths[row] - 1, self.lengths[row]) for row in which]
        query, keys, values = (torch.cat(side) for side in zip(*parts, strict=True))
        return self.engine.decode(layer, query, keys, values, self.scale)

    def query(self) -> torch.Tensor:
        return torch.cat([self.of(row, n - 1, n)[0] for row, n in enumerate(self.lengths)])

    def by_definition(self) -> torch.Tensor:
        rows = []
        for row, length in enumerate(self.lengths):
            query, keys, values = self.of(row, 0, length)
            rows.append(softmax_attention(query[-1], keys.transpose(0, 1), values.transpose(0, 1), self.scale)[0])
        return torch.stack(rows)

    def by_selection(self, layer: int = 1) -> torch.Tensor:
        """Select and attend by the reference operations, over the present content of the pool. Return the output."""
        lengths, query = torch.tensor(self.lengths), self.query()
        counts = -(-lengths // T)
        digests = self.digests[layer][self.table]
        if self.config.sketch_channels:
            codes = self.codes[layer][self.table]
            logits = reference.sketch_logits(query, digests, codes, self.channels, self.scale)
        else:
            logits = reference.digest_logits(query, digests, reference.DIGEST_SPREAD)
        scores = reference.block_scores(reference.without_tail(logits, counts), counts, self.scale)
        budget = self.config.budget_tokens // T
        chosen = reference.select_blocks(scores, counts, budget, self.config.sink_blocks, self.config.recent_blocks)
        ids = reference.block_ids(chosen, self.table)
        fill = reference.block_fill(chosen, lengths, T)
        return reference.attend_blocks(query, self.keys[layer], self.values[layer], ids, fill, self.scale)[0]


class Shape(TypedDict):
    heads: int
    group: int
    dim: int


SHAPES: list[Shape] = [
    {"heads": 2, "group": 3, "dim": 64},
    {"heads": 3, "group": 1, "dim": 96},
    {"heads": 1, "group": 5, "dim": 128},
    {"heads": 2, "group": 16, "dim": 64},
    {"heads": 1, "group": 2, "dim": 256},
]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['heads']}x{s['group']}x{s['dim']}")
def test_a_context_within_the_budget_is_attended_as_a_whole(shape: Shape, dtype: torch.dtype) -> None:
    rows = Rows([1, 2, 31, 32, 33, 700, 2047, 2048], **shape, dtype=dtype)
    rows.write()
    torch.testing.assert_close(rows.decode().double(), rows.by_definition(), **CLOSE[dtype])


@pytest.mark.parametrize("channels", [32, 0, 16, 64])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['heads']}x{s['group']}x{s['dim']}")
def test_a_longer_one_attends_to_what_the_reference_selects(shape: Shape, dtype: torch.dtype, channels: int) -> None:
    rows = Rows([200, 257, 999, 1500], **shape, dtype=dtype, channels=channels, budget_tokens=256)
    rows.write()
    out = rows.decode()
    torch.testing.assert_close(out.float(), rows.by_selection(), **CLOSE[dtype])
    assert (out.double() - rows.by_definition()).abs().max() > 10 * CLOSE[dtype]["atol"], "nothing was left out"


def test_a_row_in_its_first_step_attends_to_everything_beside_others() -> None:
    rows = Rows([200, 999, 1500], budget_tokens=256)
    rows.write()
    lengths = torch.tensor(rows.lengths)
    split = SplitStep(StepBatch(torch.arange(3), lengths, lengths, torch.zeros(3)), first=[1], others=[0, 2])
    split.begin(rows.engine)
    parts = [rows.of(row, n - 1, n) for row, n in enumerate(rows.lengths)]
    query, keys, values = (torch.cat(side) for side in zip(*parts, strict=True))
    out = split.attend(rows.engine, 1, query, keys, values, rows.scale)
    torch.testing.assert_close(out[[0, 2]].float(), rows.by_selection()[[0, 2]], **CLOSE[torch.float32])
    torch.testing.assert_close(out[1].double(), rows.by_definition()[1], **CLOSE[torch.float32])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=lambda s: f"{s['heads']}x{s['group']}x{s['dim']}")
@pytest.mark.parametrize("channels", [32, 0])
def test_fp8_is_attended_and_selected_as_the_numbers_that_it_stands_for(
    shape: Shape, dtype: torch.dtype, channels: int
) -> None:
    rows = Rows([1, 33, 64, 700], **shape, dtype=dtype, fp8=True)
    rows.write()
    torch.testing.assert_close(rows.decode().double(), rows.by_definition(), **CLOSE[dtype])
    rows = Rows([200, 999], **shape, dtype=dtype, fp8=True, channels=channels, budget_tokens=256)
    rows.write()
    torch.testing.assert_close(rows.decode().float(), rows.by_selection(), **CLOSE[dtype])


def test_policy_full_selects_nothing() -> None:
    rows = Rows([999, 1500], budget_tokens=256, policy="full")
    rows.write()
    torch.testing.assert_close(rows.decode().double(), rows.by_definition(), **CLOSE[torch.float32])


@pytest.mark.parametrize(
    ("dtype", "chunks", "fp8"),
    [
        *((dtype, 0, False) for dtype in CLOSE),
        (torch.float32, 1, False),
        (torch.float32, 3, False),
        (torch.float32, 3, True),
        (torch.bfloat16, 0, True),
    ],
)
def test_digests_and_sketches_are_the_reference_ones_to_the_bit(dtype: torch.dtype, chunks: int, fp8: bool) -> None:
    rows = Rows([1, 40, 64, 333], dtype=dtype, dim=128, fp8=fp8)
    if chunks:
        rows.prefill(chunks=chunks)
    else:
        rows.write()
    rows.decode()
    for row, length in enumerate(rows.lengths):
        count = -(-length // T)
        pages = rows.table[row, :count]
        filled = (length - T * torch.arange(count)).clamp(max=T)
        keys = rows.keys[1][pages]
        digests = reference.minmax_digest(keys, filled)
        torch.testing.assert_close(rows.digests[1][pages].float(), digests.float(), rtol=0, atol=0)
        codes = reference.sketch_codes(keys, digests, rows.channels)
        counted = torch.arange(T) < filled[:, None]  # codes behind the last token do not matter
        assert torch.equal(rows.codes[1][pages].transpose(1, 2)[counted], codes.transpose(1, 2)[counted])
    assert not rows.digests[0].float().any(), "another layer was written"


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_prefill_is_causal_attention_over_all_tokens_so_far(chunks: int, fp8: bool) -> None:
    rows = Rows([2, 33, 300], fp8=fp8)
    for row, out in enumerate(rows.prefill(chunks=chunks)):
        query, keys, values = rows.of(row, 0, rows.lengths[row] - 1)
        expected = causal_attention(query, keys.transpose(0, 1), values.transpose(0, 1), rows.scale)
        torch.testing.assert_close(out.double(), expected[len(expected) - len(out) :], **CLOSE[torch.float32])


@pytest.mark.parametrize("openmp", [True, False])
def test_threads_and_company_change_no_bit(openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openmp:
        monkeypatch.setattr("sglang_hybrid.ops.cpu.decoder.gomp_parallel", lambda: None)
    alone = Rows([900, 1500, 200], threads=1, budget_tokens=512)
    alone.write()
    expected = torch.cat([alone.decode(rows=[row]) for row in range(3)])
    together = Rows([900, 1500, 200], threads=4, budget_tokens=512)
    together.write()
    for _ in range(20):
        assert torch.equal(together.decode(), expected)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_page_of_nan_is_not_selected_and_poisons_nothing(fp8: bool) -> None:
    rows = Rows([1500], budget_tokens=256, fp8=fp8)
    rows.write()
    damaged = rows.table[0, 20]
    rows.keys[1][damaged] = float("nan")
    rows.engine.kernels.summarise(1, damaged[None], torch.tensor([T]))
    assert rows.decode().isfinite().all()


def test_summaries_of_pages_that_somebody_else_wrote() -> None:
    rows = Rows([300])
    rows.write()
    before = rows.digests[1].clone(), rows.codes[1].clone()
    rows.digests[1].zero_()
    rows.codes[1].zero_()
    filled = torch.full((10,), T)
    filled[-1] = 299 - 9 * T
    rows.engine.kernels.summarise(1, rows.table[0], filled)
    assert torch.equal(rows.digests[1], before[0])
    assert torch.equal(rows.codes[1], before[1])


def test_pages_and_lengths_that_cannot_be_are_refused() -> None:
    rows = Rows([100])

    def begin(table: torch.Tensor, lengths: torch.Tensor) -> None:
        rows.engine.kernels.begin(table, lengths, torch.ones_like(lengths))

    with pytest.raises(NativeError, match="page 1000 is not in the pool"):
        begin(torch.tensor([[1000, 1, 2, 3]]), torch.tensor([100]))
    with pytest.raises(NativeError, match="page -1 is not in the pool"):
        begin(torch.tensor([[1, 2, 3, -1]]), torch.tensor([100]))
    with pytest.raises(NativeError, match="more tokens than pages"):
        begin(torch.tensor([[1, 2, 3]]), torch.tensor([100]))
    with pytest.raises(NativeError, match="1 to 32"):
        rows.engine.kernels.summarise(0, torch.tensor([1]), torch.tensor([33]))
    with pytest.raises(NativeError, match="no such layer"):
        rows.decode(layer=2)


@pytest.mark.parametrize(
    "setting",
    ["prediction=raw", "scout.resident_tokens=0", "worker=start", "scout.resident_bonus=2.0"],
)
def test_settings_that_describe_a_gpu_are_left_to_torch(setting: str) -> None:
    assert unsupported_by_cpu_engine(HybridConfig(), 64) is None
    assert unsupported_by_cpu_engine(load_config(None, [setting]), 64) == setting
    assert unsupported_by_cpu_engine(load_config(None, [setting, "policy=full"]), 64) is None


def test_a_sketch_that_the_native_loops_do_not_have_is_left_to_torch() -> None:
    config = HybridConfig(sketch_channels=24)
    assert unsupported_by_cpu_engine(config, 64) == "a sketch of 24 channels is not a multiple of 16"


def test_tensors_of_another_dtype_than_the_pool_are_refused() -> None:
    rows = Rows([100])
    rows.write()
    rows.projected = [projected.bfloat16() for projected in rows.projected]
    with pytest.raises(ValueError, match=r"for torch\.float32, not torch\.bfloat16"):
        rows.decode()
