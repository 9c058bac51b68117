"""Predicted queries against the formula in float64, and their calibration against regression by definition."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch
from attention_oracle import Tolerance, seeded
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.ops import reference
from sglang_hybrid.policies.scout.calibration import FullCorrection, LayerFit, cosines
from sglang_hybrid.policies.scout.predictor import Correction, QueryPredictor, QueryWeights

SEEDS = st.integers(0, 2**32 - 1)
CLOSE: Tolerance = {"rtol": 1e-4, "atol": 2e-5}
HIDDEN, HEADS, HEAD_DIM, POSITIONS = 24, 3, 8, 40
WIDTH = HEADS * HEAD_DIM


def some_weights(
    random: torch.Generator,
    *,
    bias: bool = True,
    head_norm: bool = False,
    rotary_dim: int = HEAD_DIM,
    neox: bool = True,
) -> QueryWeights:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    angles = torch.arange(POSITIONS)[:, None] * 0.7 ** torch.arange(rotary_dim // 2)
    return QueryWeights(
        norm=1 + 0.3 * normal(HIDDEN),
        norm_eps=1e-3,  # large enough to be noticed
        projection=normal(WIDTH, HIDDEN) * HIDDEN**-0.5,
        bias=normal(WIDTH) if bias else None,
        head_dim=HEAD_DIM,
        head_norm=1 + 0.3 * normal(HEAD_DIM) if head_norm else None,
        head_norm_eps=1e-2 if head_norm else 0.0,
        rotary=torch.cat((angles.cos(), angles.sin()), dim=1),
        neox=neox,
    )


def some_correction(random: torch.Generator, rank: int | None) -> Correction:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    if rank is None:
        return Correction(normal(WIDTH, HIDDEN), None, normal(WIDTH))
    return Correction(normal(WIDTH, rank), normal(rank, HIDDEN), normal(WIDTH))


def norm_by_definition(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().sum() / len(x) + eps).sqrt()


def query_by_definition(
    weights: QueryWeights, correction: Correction | None, token: torch.Tensor, position: int
) -> torch.Tensor:
    """Return one token's predicted query in float64, rotated pair by pair of channels: ``[heads, head_dim]``."""
    unit = norm_by_definition(token.double(), weights.norm_eps)
    query = weights.projection.double() @ (unit * weights.norm.double())
    if weights.bias is not None:
        query = query + weights.bias.double()
    if correction is not None:
        matrix = correction.left.double()
        if correction.right is not None:
            matrix = matrix @ correction.right.double()
        query = query + matrix @ unit + correction.bias.double()
    heads = query.view(HEADS, HEAD_DIM)
    if weights.head_norm is not None:
        heads = torch.stack([norm_by_definition(h, weights.head_norm_eps) for h in heads]) * weights.head_norm.double()
    half = weights.rotary.shape[1] // 2
    turned = heads.clone()
    for pair in range(half):
        cos, sin = (weights.rotary[position, i].double() for i in (pair, half + pair))
        a, b = (pair, pair + half) if weights.neox else (2 * pair, 2 * pair + 1)
        turned[:, a] = heads[:, a] * cos - heads[:, b] * sin
        turned[:, b] = heads[:, b] * cos + heads[:, a] * sin
    return turned


@pytest.mark.parametrize("rank", ["raw", 1, 5, None], ids=["raw", "rank 1", "rank 5", "full"])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "neighbours"])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2], ids=["all channels turn", "half of them do"])
@pytest.mark.parametrize("head_norm", [True, False], ids=["head norm", "no head norm"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@settings(max_examples=3)
@given(seed=SEEDS, tokens=st.integers(1, 5))
def test_a_predicted_query_is_the_formula(
    rank: Literal["raw"] | int | None, neox: bool, rotary_dim: int, head_norm: bool, bias: bool, seed: int, tokens: int
) -> None:
    random = seeded(seed)
    weights = some_weights(random, bias=bias, head_norm=head_norm, rotary_dim=rotary_dim, neox=neox)
    correction = None if rank == "raw" else some_correction(random, rank)
    inputs = 2 * torch.randn(tokens, HIDDEN, generator=random)
    positions = torch.randint(0, POSITIONS, (tokens,), generator=random)
    query = QueryPredictor(weights, correction).query(inputs, positions)
    expected = [query_by_definition(weights, correction, x, p) for x, p in zip(inputs, positions.tolist(), strict=True)]
    assert query.shape == (tokens, HEADS, HEAD_DIM)
    torch.testing.assert_close(query.double(), torch.stack(expected), **CLOSE)


@given(SEEDS, st.booleans())
def test_a_full_correction_that_is_merged_into_the_projection_equals_one_that_is_not(seed: int, bias: bool) -> None:
    random = seeded(seed)
    weights = some_weights(random, bias=bias)
    full = some_correction(random, None)
    # the product of the matrix and the identity takes the path of low-rank corrections
    unmerged = Correction(full.left, torch.eye(HIDDEN), full.bias)
    inputs = torch.randn(4, HIDDEN, generator=random)
    torch.testing.assert_close(
        QueryPredictor(weights, full).project(inputs), QueryPredictor(weights, unmerged).project(inputs), **CLOSE
    )


def test_merging_leaves_the_models_weights_alone() -> None:
    random = seeded(1)
    weights = some_weights(random)
    before = {name: value.clone() for name, value in vars(weights).items() if isinstance(value, torch.Tensor)}
    predictor = QueryPredictor(weights, some_correction(random, None))
    predictor.query(torch.randn(2, HIDDEN, generator=random), torch.tensor([0, 1]))
    for name, value in before.items():
        assert torch.equal(getattr(weights, name), value)


def test_the_size_of_the_input_does_not_matter_beyond_the_norms_epsilon() -> None:
    random = seeded(2)
    weights = dataclasses.replace(some_weights(random), norm_eps=0.0)
    inputs, positions = torch.randn(3, HIDDEN, generator=random), torch.tensor([0, 1, 2])
    for correction in (None, some_correction(random, 4), some_correction(random, None)):
        predictor = QueryPredictor(weights, correction)
        torch.testing.assert_close(predictor.query(100 * inputs, positions), predictor.query(inputs, positions))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", ["raw", 4, None])
def test_a_query_has_the_models_dtype_and_is_the_formula_within_its_rounding(
    dtype: torch.dtype, rank: Literal["raw"] | int | None
) -> None:
    random = seeded(3)
    plain = some_weights(random, head_norm=True)
    halved: dict[str, Any] = {
        name: value.to(dtype) for name, value in vars(plain).items() if isinstance(value, torch.Tensor)
    }
    weights = dataclasses.replace(plain, **halved | {"rotary": plain.rotary})
    correction = None if rank == "raw" else some_correction(random, rank).to("cpu", dtype)
    inputs = torch.randn(3, HIDDEN, generator=random).to(dtype)
    query = QueryPredictor(weights, correction).query(inputs, torch.tensor([4, 5, 6]))
    assert query.dtype == dtype
    expected = [query_by_definition(weights, correction, inputs[i], p) for i, p in enumerate((4, 5, 6))]
    torch.testing.assert_close(query.double(), torch.stack(expected), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("rank", [3, None])
def test_a_correction_moves_as_a_whole(rank: int | None) -> None:
    correction = some_correction(seeded(4), rank)
    moved = correction.to("cpu", torch.float16)
    for before, after in zip(vars(correction).values(), vars(moved).values(), strict=True):
        assert (before is None) == (after is None)
        if after is not None:
            assert torch.equal(after, before.half())


# Calibration


@dataclasses.dataclass(frozen=True)
class Text:
    """Inputs of a layer (``own``) and of the layer before it (``before``) for the same tokens, ``[tokens, HIDDEN]``."""

    weights: QueryWeights
    before: torch.Tensor
    own: torch.Tensor

    def unit(self) -> torch.Tensor:
        return reference.rms_unit(self.before, self.weights.norm_eps).double()

    def wrong(self) -> torch.Tensor:
        """Return the error of the raw prediction, real minus predicted, in float64."""
        raw = QueryPredictor(self.weights)
        return (raw.project(self.own) - raw.project(self.before)).double()

    def fit(self, pieces: int = 1) -> LayerFit:
        fit = LayerFit(self.weights)
        for before, own in zip(self.before.chunk(pieces), self.own.chunk(pieces), strict=True):
            fit.add(before, own)
        return fit

    def left(self, correction: Correction | None) -> float:
        """Return the mean square of a prediction's error."""
        real, predicted = QueryPredictor(self.weights), QueryPredictor(self.weights, correction)
        return float((real.project(self.own) - predicted.project(self.before)).double().square().mean())


def some_text(seed: int, tokens: int = 400) -> Text:
    """Return inputs with channels of very different sizes, and a layer that adds a linear and a random part."""
    random = seeded(seed)
    weights = some_weights(random)
    mixing = torch.randn(HIDDEN, HIDDEN, generator=random)
    before = torch.randn(tokens, HIDDEN, generator=random) * torch.linspace(0.1, 3, HIDDEN)
    noise = torch.randn(tokens, HIDDEN, generator=random)
    return Text(weights, before, before + 0.3 * before @ mixing + 0.3 * noise + 0.5)


def known_linear_text(seed: int, tokens: int = 400) -> tuple[Text, torch.Tensor]:
    """Return a text whose raw error is exactly linear in the unit inputs, and the matrix of that linear map."""
    random = seeded(seed)
    weights = dataclasses.replace(some_weights(random), norm_eps=0.0)
    # an orthogonal change leaves the rms as it is, so that the layer's own norm is linear too
    turned = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=random)).Q
    before = torch.randn(tokens, HIDDEN, generator=random)
    return Text(weights, before, before @ turned.T), weights.projection * weights.norm @ (turned - torch.eye(HIDDEN))


@given(SEEDS)
@settings(max_examples=20)
def test_a_fit_recovers_a_known_linear_map(seed: int) -> None:
    text, matrix = known_linear_text(seed)
    found = text.fit().solve(penalty=1e-9)
    torch.testing.assert_close(found.matrix, matrix, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.bias, torch.zeros(WIDTH), rtol=1e-3, atol=1e-3)
    assert text.left(found.full()) < 1e-5 * text.left(None)


@given(SEEDS, st.sampled_from([1e-3, 1e-1, 10.0]))
@settings(max_examples=20)
def test_a_fit_is_ridge_regression_of_the_raw_error(seed: int, penalty: float) -> None:
    text = some_text(seed)
    found = text.fit().solve(penalty)
    # at the minimum of |error|^2 + lambda |matrix|^2 the gradient is 0
    unit, left = text.unit(), text.wrong() - text.unit() @ found.matrix.double().T - found.bias.double()
    strength = penalty * float(unit.square().sum(dim=0).mean())
    pull = left.T @ unit - strength * found.matrix.double()
    size = (text.wrong().T @ unit).abs().max()
    assert float(pull.abs().max() / size) < 1e-4
    assert float(left.sum(dim=0).abs().max() / text.wrong().abs().sum(dim=0).max()) < 1e-4, "constants are free"


def test_sums_over_pieces_of_a_text_fit_as_the_whole_does() -> None:
    text = some_text(seed=6)
    whole, pieces = text.fit(), text.fit(pieces=7)
    assert whole.tokens == pieces.tokens == 400
    a, b = whole.solve(1e-2), pieces.solve(1e-2)
    torch.testing.assert_close(a.matrix, b.matrix, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(a.inputs, b.inputs, rtol=1e-4, atol=1e-5)


def test_a_huge_penalty_leaves_the_raw_prediction_and_a_constant() -> None:
    text = some_text(seed=7)
    found = text.fit().solve(penalty=1e9)
    assert float(found.matrix.abs().max()) < 1e-6
    torch.testing.assert_close(found.bias.double(), text.wrong().mean(dim=0), rtol=1e-3, atol=1e-4)


def test_a_larger_penalty_shrinks_the_correction_and_fits_its_own_text_less() -> None:
    text = some_text(seed=8)
    found = [text.fit().solve(penalty) for penalty in (1e-4, 1e-2, 1.0, 100.0)]
    sizes = [float(one.matrix.norm()) for one in found]
    lefts = [text.left(one.full()) for one in found]
    assert sizes == sorted(sizes, reverse=True)
    assert lefts == sorted(lefts)
    assert lefts[0] < text.left(None)


@given(SEEDS)
@settings(max_examples=20)
def test_full_rank_is_the_full_correction(seed: int) -> None:
    text = some_text(seed)
    found = text.fit().solve(1e-3)
    thin, full = found.low_rank(min(WIDTH, HIDDEN)), found.full()
    assert thin.right is not None
    torch.testing.assert_close(thin.left @ thin.right, full.left, rtol=1e-3, atol=1e-4)
    assert torch.equal(thin.bias, full.bias)


def mean_square_on(inputs: torch.Tensor, matrix: torch.Tensor) -> float:
    """Return the mean square of matrix @ x over inputs x whose second moment is ``inputs``."""
    return float((matrix.double() @ inputs @ matrix.double().T).trace())


@given(SEEDS, st.integers(1, 12))
@settings(max_examples=40)
def test_a_low_rank_is_the_best_of_its_rank_on_the_inputs(seed: int, rank: int) -> None:
    found = some_text(seed).fit().solve(1e-3)
    thin = found.low_rank(rank)
    assert thin.right is not None
    assert (thin.left.shape, thin.right.shape) == ((WIDTH, rank), (rank, HIDDEN))
    lost = mean_square_on(found.inputs, found.matrix - thin.left @ thin.right)
    # Eckart-Young: no approximation of matrix @ root of the inputs loses less than its smaller singular values
    root = torch.linalg.cholesky(found.inputs + 1e-12 * torch.eye(HIDDEN))
    values = torch.linalg.svdvals(found.matrix.double() @ root)
    least = float(values[rank:].square().sum())
    assert lost <= least * (1 + 1e-4) + 1e-7

    # the best approximation of the matrix alone loses more, because it ignores the inputs
    left, sizes, right = torch.linalg.svd(found.matrix.double(), full_matrices=False)
    of_matrix = left[:, :rank] * sizes[:rank] @ right[:rank]
    assert lost <= mean_square_on(found.inputs, found.matrix - of_matrix) * (1 + 1e-4)


def test_more_rank_loses_less() -> None:
    text = some_text(seed=9)
    found = text.fit().solve(1e-3)
    lefts = [text.left(found.low_rank(rank)) for rank in (1, 2, 4, 8, 16, 24)]
    assert lefts == sorted(lefts, reverse=True)
    assert lefts[-1] == pytest.approx(text.left(found.full()), rel=1e-3)


def test_a_correction_of_nothing_has_rank_enough_at_one() -> None:
    nothing = FullCorrection(torch.zeros(WIDTH, HIDDEN), torch.zeros(WIDTH), torch.eye(HIDDEN, dtype=torch.float64))
    thin = nothing.low_rank(1)
    assert thin.right is not None
    assert not (thin.left @ thin.right).any()


# Cosines


@given(SEEDS, st.integers(1, 6))
def test_cosines_are_those_of_every_head_of_every_token(seed: int, tokens: int) -> None:
    random = seeded(seed)
    real, predicted = (torch.randn(tokens, WIDTH, generator=random) for _ in range(2))
    found = cosines(real, predicted, HEAD_DIM)
    assert found.shape == (tokens, HEADS)
    for token in range(tokens):
        for head in range(HEADS):
            channels = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            a, b = real[token, channels].double(), predicted[token, channels].double()
            assert float(found[token, head]) == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-5)


def test_cosines_of_equal_opposite_and_rotated_queries() -> None:
    random = seeded(10)
    weights = some_weights(random)
    real, other = (torch.randn(2, WIDTH, generator=random) for _ in range(2))
    ones = torch.ones(2, HEADS)
    torch.testing.assert_close(cosines(real, 3 * real, HEAD_DIM), ones)
    torch.testing.assert_close(cosines(real, -real, HEAD_DIM), -ones)
    predictor, positions = QueryPredictor(weights), torch.tensor([3, 30])
    turned, other_turned = (predictor.finish(x, positions).flatten(1) for x in (real, other))
    torch.testing.assert_close(cosines(turned, other_turned, HEAD_DIM), cosines(real, other, HEAD_DIM), **CLOSE)
