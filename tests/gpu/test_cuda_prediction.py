"""Predicted queries on the GPU, against ``QueryPredictor``."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cuda_cases import DEVICE, seeded
from selection_cases import numbers

from sglang_hybrid.engines.cuda.predictor import DevicePredictor, PredictionBuffers
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.predictor import finish_queries, unit_rms
from sglang_hybrid.policies.scout.predictor import Correction, QueryPredictor, QueryWeights

UNTOUCHED = 77.0
EPS = 1e-6
STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # value of the last bit, relative to a number


def random_values(*shape: int, seed: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=seeded(seed)) * size).to(DEVICE, dtype)


def assert_rounded_alike(found: torch.Tensor, expected: torch.Tensor, steps: float = 1.0) -> None:
    """Assert equality up to ``steps`` last bits; few values may differ, those on the border between two roundings."""
    step = STEP[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=steps * step, atol=steps * step / 16)
    assert int((found != expected).sum()) <= 1 + 0.02 * found.numel()


# -- norms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 576, 4096, 5120, 16384])
def test_rows_are_divided_by_their_root_mean_square(width: int, dtype: torch.dtype) -> None:
    batch = 3
    hidden = random_values(batch, width + 8, seed=1, dtype=dtype)[:, :width]  # gaps between rows
    residual = random_values(batch, width, seed=2, dtype=dtype, size=9.0)
    gain = random_values(width, seed=3, dtype=dtype)
    for added in (None, residual):
        x = hidden if added is None else hidden + added
        expected = reference.rms_unit(x, EPS).to(dtype)
        unit, normed = torch.full((2, batch, width), UNTOUCHED, dtype=dtype, device=DEVICE).unbind(0)
        unit_rms(hidden, added, EPS, unit=unit, normed=normed, gain=gain)
        assert_rounded_alike(unit, expected)
        assert torch.equal(normed, unit * gain)
        alone = torch.full_like(unit, UNTOUCHED)
        unit_rms(hidden, added, EPS, unit=alone)
        assert torch.equal(alone, unit)
        alone.fill_(UNTOUCHED)
        unit_rms(hidden, added, EPS, normed=alone, gain=gain)
        assert torch.equal(alone, normed)


def test_rows_that_are_not_active_are_left_alone() -> None:
    hidden = random_values(4, 64, seed=1, dtype=torch.bfloat16)
    unit = torch.full_like(hidden, UNTOUCHED)
    unit_rms(hidden, None, EPS, unit=unit, active_rows=numbers(2))
    assert (unit[:2] != UNTOUCHED).all() and (unit[2:] == UNTOUCHED).all()
    heads = torch.full((4, 1, 64), UNTOUCHED, dtype=torch.bfloat16, device=DEVICE)
    rotary, positions = torch.ones(9, 64, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    finish_queries(hidden, rotary, positions, heads, neox=True, active_rows=numbers(3))
    assert (heads[:3] != UNTOUCHED).all() and (heads[3:] == UNTOUCHED).all()


def test_rows_of_zeros_and_damaged_rows_harm_no_other() -> None:
    hidden = random_values(3, 128, seed=1, dtype=torch.bfloat16)
    hidden[0], hidden[1, 5] = 0, torch.nan
    unit = torch.empty_like(hidden)
    unit_rms(hidden, None, EPS, unit=unit)
    assert not unit[0].any() and unit[1].isnan().all()
    assert_rounded_alike(unit[2:], reference.rms_unit(hidden[2:], EPS).to(hidden.dtype))


def test_rows_that_do_not_fit_are_refused_with_their_name() -> None:
    hidden = random_values(2, 64, seed=1, dtype=torch.bfloat16)
    for rows, residual, sentence in (
        (hidden.float(), None, "hidden is .* of torch.float32"),
        (hidden, hidden[:1], "residual is"),
        (hidden[:, ::2], None, "rows of hidden must be contiguous"),
        (hidden[:, :60], None, "must be a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=sentence):
            unit_rms(rows, residual, EPS, unit=hidden)
    with pytest.raises(ValueError, match="a gain normed"):
        unit_rms(hidden, None, EPS, gain=hidden[0])


# -- heads -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    heads: int
    dim: int
    rotated: int
    neox: bool = True
    norm: bool = False
    dtype: torch.dtype = torch.bfloat16
    rotary: torch.dtype = torch.float32


HEADS = [
    Heads(1, 64, 64),
    Heads(9, 64, 64, rotary=torch.bfloat16),
    Heads(40, 128, 128, norm=True),
    Heads(5, 128, 64, neox=False),
    Heads(3, 96, 96, neox=False, norm=True, rotary=torch.bfloat16),
    Heads(16, 128, 128, norm=True, dtype=torch.float16, rotary=torch.float16),
    Heads(7, 64, 32, dtype=torch.float16),
    Heads(2, 256, 64, norm=True),
    Heads(6, 80, 20),
]


def rotary_table(positions: int, rotated: int, dtype: torch.dtype) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] / 1000 ** (torch.arange(rotated // 2) * 2 / rotated)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE, dtype)


def random_weights(shape: Heads, hidden: int, bias: bool, seed: int = 0) -> QueryWeights:
    width = shape.heads * shape.dim
    return QueryWeights(
        norm=random_values(hidden, seed=seed, dtype=shape.dtype) + 1,
        norm_eps=EPS,
        projection=random_values(width, hidden, seed=seed + 1, dtype=shape.dtype, size=hidden**-0.5),
        bias=random_values(width, seed=seed + 2, dtype=shape.dtype, size=3.0) if bias else None,
        head_dim=shape.dim,
        head_norm=random_values(shape.dim, seed=seed + 3, dtype=shape.dtype) + 1 if shape.norm else None,
        head_norm_eps=1e-5,
        rotary=rotary_table(300, shape.rotated, shape.rotary),
        neox=shape.neox,
    )


@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_heads_are_normed_and_rotated_as_the_predictor_does(shape: Heads, batch: int) -> None:
    weights = random_weights(shape, 16, bias=False)
    projected = random_values(batch, shape.heads * shape.dim, seed=4, dtype=shape.dtype, size=3.0)
    addend = random_values(batch, shape.heads * shape.dim, seed=5, dtype=shape.dtype)
    bias = random_values(shape.heads * shape.dim, seed=6)
    positions = torch.randint(0, 300, (batch,), generator=seeded(7)).to(DEVICE)
    positions[0] = 299
    gain = None if weights.head_norm is None else weights.head_norm.float()
    for more, total in (
        ({}, projected),
        ({"addend": addend}, projected + addend),
        ({"addend": addend, "bias": bias}, (projected.float() + addend.float() + bias).to(shape.dtype)),
    ):
        out = torch.full((batch, shape.heads, shape.dim), UNTOUCHED, dtype=shape.dtype, device=DEVICE)
        finish_queries(
            projected, weights.rotary, positions, out, neox=shape.neox, head_norm=gain, head_norm_eps=1e-5, **more
        )
        expected = QueryPredictor(weights).finish(total, positions)
        if shape.norm:
            assert_rounded_alike(out, expected, steps=2)
        else:
            assert torch.equal(out, expected)


def test_positions_beyond_the_table_are_not_read() -> None:
    projected = random_values(3, 64, seed=1, dtype=torch.bfloat16)
    table = rotary_table(8, 64, torch.float32)
    out = torch.empty(3, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    finish_queries(projected, table, torch.tensor([7, 8, -1], device=DEVICE), out, neox=True)
    near = torch.empty_like(out)
    finish_queries(projected, table, torch.tensor([7, 7, 0], device=DEVICE), near, neox=True)
    assert torch.equal(out, near)


# -- predictors ------------------------------------------------------------------------------


def corrections(weights: QueryWeights, rank: int) -> list[Correction | None]:
    width, hidden = weights.projection.shape
    dtype = weights.projection.dtype
    bias = random_values(width, seed=11, dtype=dtype)
    left = random_values(width, rank, seed=12, dtype=dtype, size=rank**-0.5)
    right = random_values(rank, hidden, seed=13, dtype=dtype, size=hidden**-0.5)
    full = random_values(width, hidden, seed=14, dtype=dtype, size=hidden**-0.5)
    return [None, Correction(left, right, bias), Correction(full, None, bias)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [HEADS[0], HEADS[2], HEADS[3], HEADS[5]], ids=str)
def test_a_predictor_gives_the_queries_of_the_reference(shape: Heads, bias: bool) -> None:
    hidden_size, batch = 320, 6
    weights = random_weights(shape, hidden_size, bias)
    positions = torch.randint(0, 300, (batch,), generator=seeded(1)).to(DEVICE)
    hidden = random_values(batch, hidden_size, seed=2, dtype=shape.dtype)
    residual = random_values(batch, hidden_size, seed=3, dtype=shape.dtype, size=4.0)
    width = shape.heads * shape.dim
    shared = PredictionBuffers(9, hidden_size, width, 24, shape.dtype, DEVICE)
    for correction in corrections(weights, 24):
        for buffers in (None, shared):
            predictor = DevicePredictor(weights, correction, max_batch=9, buffers=buffers)
            for added in (None, residual):
                x = hidden if added is None else hidden + added
                expected = QueryPredictor(weights, correction).query(x, positions)
                out = torch.full_like(expected, UNTOUCHED)
                assert predictor.query(hidden, added, positions, out) is out
                # values are about 3 and were rounded several times
                torch.testing.assert_close(out.float(), expected.float(), atol=6 * STEP[shape.dtype], rtol=0.02)
                near = torch.nn.functional.cosine_similarity(out.float(), expected.float(), dim=-1)
                assert (near > 1 - 1e-4).all()


def test_a_prediction_in_a_graph_is_split_between_two_streams() -> None:
    if DEVICE != "cuda":
        return  # the emulation has no streams, and torch's GEMMs run only on CUDA
    shape, hidden_size, batch = HEADS[2], 640, 7
    weights = random_weights(shape, hidden_size, bias=True)
    correction = corrections(weights, 32)[1]
    predictor, expected = DevicePredictor(weights, correction, max_batch=8), QueryPredictor(weights, correction)
    hidden, residual = torch.zeros(2, batch, hidden_size, dtype=shape.dtype, device=DEVICE).unbind(0)
    positions = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    out = torch.zeros(batch, shape.heads, shape.dim, dtype=shape.dtype, device=DEVICE)
    side, active = torch.cuda.Stream(), numbers(batch)

    def step() -> None:
        main = torch.cuda.current_stream()
        predictor.prepare(hidden, residual, active_rows=active)
        side.wait_stream(main)
        hidden.mul_(0)  # overwrites the input, as the layer's norm does
        with torch.cuda.stream(side):
            predictor.finish(positions, out, active_rows=active)
        main.wait_stream(side)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(5):
        inputs = random_values(batch, hidden_size, seed=seed, dtype=shape.dtype)
        residual.copy_(random_values(batch, hidden_size, seed=seed + 50, dtype=shape.dtype))
        hidden.copy_(inputs)
        positions.copy_(torch.randint(0, 300, (batch,), generator=seeded(seed)))
        out.fill_(UNTOUCHED)
        rows = seed + 2
        active.fill_(rows)
        graph.replay()
        wanted = expected.query(inputs + residual, positions)[:rows]
        torch.testing.assert_close(out[:rows].float(), wanted.float(), atol=6 * STEP[shape.dtype], rtol=0.02)
        assert (out[rows:] == UNTOUCHED).all()
