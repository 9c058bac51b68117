"""Every kernel variant of this machine against softmax attention in float64, on random shapes."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace

import pytest
import torch
from attention_oracle import seeded
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.ops.cpu import NativeError, library, variants
from sglang_hybrid.ops.cpu.dtypes import code_of
from sglang_hybrid.ops.cpu.library import checked
from sglang_hybrid.ops.cpu.structs import DTYPES, BlockAttention
from sglang_hybrid.ops.reference import FP8, to_stored

T = 32
PAGES = 24
# Accepted relative error of an output vector, and accepted absolute error of its LSE. Float32 rounds large logits by
# more than that: both limits then grow by ROUNDING times the sum of a logit's absolute terms.
RELATIVE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
LSE = 1e-3
ROUNDING = 2e-6


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype  # of the query, and of the pool unless ``fp8``
    dim: int
    group: int
    heads: int
    count: int
    last_fill: int
    magnitude: float  # of keys
    seed: int
    fp8: bool = False  # whether the pool is FP8

    @property
    def pool(self) -> torch.dtype:
        return FP8 if self.fp8 else self.dtype


CASES = st.builds(
    Case,
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    dim=st.sampled_from([64, 96, 128, 256]),
    group=st.integers(1, 16),
    heads=st.integers(1, 3),
    count=st.integers(0, 20),
    last_fill=st.integers(1, T),
    magnitude=st.sampled_from([0.1, 1.0, 1.0, 30.0, 1000.0]),
    seed=st.integers(0, 2**32 - 1),
    fp8=st.booleans(),
)


class Problem:
    """A block list of one KV head, and a pool in which everything that must not be read is NaN."""

    def __init__(self, case: Case) -> None:
        random, self.case = seeded(case.seed), case

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random)

        self.query = normal(case.group, case.dim).to(case.dtype)
        self.pages = torch.randint(0, PAGES, (case.count,), generator=random)
        self.head = int(torch.randint(0, case.heads, (1,), generator=random))
        self.keys = to_stored(normal(PAGES, case.heads, T, case.dim) * case.magnitude, case.pool)
        self.values = to_stored(normal(PAGES, case.heads, T, case.dim), case.pool)
        if case.count:
            self.pages[-1] = PAGES - 1  # the page's rest is NaN, so only the last block may be there
            self.pages[:-1] %= PAGES - 1
        unused = [page for page in range(PAGES) if page not in self.pages.tolist()]
        for pool in (self.keys, self.values):
            pool[unused] = torch.nan
            pool[:, [h for h in range(case.heads) if h != self.head]] = torch.nan
            pool[PAGES - 1, :, case.last_fill :] = torch.nan
        self.scale = case.dim**-0.5

    def tokens(self, pool: torch.Tensor) -> torch.Tensor:
        rows = pool[self.pages, self.head].flatten(0, 1).double()
        return rows[: len(rows) - T + self.case.last_fill] if len(rows) else rows

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.query.double() @ self.tokens(self.keys).T * self.scale
        return logits.softmax(dim=1) @ self.tokens(self.values), logits.logsumexp(dim=1)

    def largest_sum_of_terms(self) -> float:
        """Return the largest sum of absolute products of any logit: rounding errors of logits are relative to that."""
        terms = self.query.double().abs() @ self.tokens(self.keys).abs().T * self.scale
        return float(terms.max())

    def attend(self, variant: str, masks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        out = torch.full((case.group, case.dim), 7.0)
        lse = torch.full((case.group,), 7.0)
        pages = (ctypes.c_uint32 * max(1, case.count))(*self.pages.tolist())
        block = T * case.dim * case.pool.itemsize
        task = BlockAttention(
            query=self.query.data_ptr(),
            keys=self.keys.data_ptr() + self.head * block,
            values=self.values.data_ptr() + self.head * block,
            page_stride=case.heads * block,
            pages=pages,
            masks=None if masks is None else (ctypes.c_uint32 * max(1, case.count))(*masks.tolist()),
            count=case.count,
            last_fill=case.last_fill,
            group=case.group,
            head_dim=case.dim,
            dtype=code_of(case.pool, case.dtype),
            scale=self.scale,
            out=ctypes.cast(out.data_ptr(), ctypes.POINTER(ctypes.c_float)),
            lse=ctypes.cast(lse.data_ptr(), ctypes.POINTER(ctypes.c_float)),
        )
        checked(library().sh_attend, ctypes.byref(task), variant.encode())
        return out, lse


@pytest.mark.parametrize("variant", variants())
@given(case=CASES)
@settings(max_examples=120, deadline=None)
def test_attention_over_blocks_equals_softmax_attention(variant: str, case: Case) -> None:
    problem = Problem(case)
    out, lse = problem.attend(variant)
    if case.count == 0:
        assert lse.tolist() == [-math.inf] * case.group
        assert (out == 7.0).all(), "an empty list writes no output"
        return
    expected, expected_lse = problem.expected()
    assert out.isfinite().all() and lse.isfinite().all()
    rounding = ROUNDING * problem.largest_sum_of_terms() if case.magnitude > 1 else 0.0
    assert (lse.double() - expected_lse).abs().max() < LSE + rounding
    error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < RELATIVE[case.dtype] + rounding


@pytest.mark.parametrize("variant", variants())
@given(case=CASES, whole=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_only_tokens_whose_bit_is_set_are_attended(variant: str, case: Case, whole: float) -> None:
    """Tokens without a bit are NaN, also between tokens with one. In a share ``whole`` of blocks all bits are set."""
    case = replace(case, magnitude=1.0)
    problem, random = Problem(case), seeded(case.seed + 1)
    masks = torch.randint(0, 2**32, (PAGES,), generator=random)
    masks[torch.rand(PAGES, generator=random) < whole] = 2**32 - 1
    counts = (masks[:, None] >> torch.arange(T) & 1).bool()
    for pool in (problem.keys, problem.values):
        page, token = (~counts).nonzero(as_tuple=True)  # torch has no masked_fill for FP8
        pool[page, :, token] = torch.nan
    out, lse = problem.attend(variant, masks[problem.pages])
    kept = counts[problem.pages].flatten()[: len(problem.tokens(problem.keys))]
    if not kept.any():
        assert lse.tolist() == [-math.inf] * case.group and (out == 7.0).all()
        return
    logits = problem.query.double() @ problem.tokens(problem.keys)[kept].T * problem.scale
    expected = logits.softmax(dim=1) @ problem.tokens(problem.values)[kept]
    assert (lse.double() - logits.logsumexp(dim=1)).abs().max() < LSE
    assert ((out.double() - expected).norm(dim=1) / expected.norm(dim=1)).max() < RELATIVE[case.dtype]


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_number_of_fp8_is_read_as_torch_reads_it(variant: str, dtype: torch.dtype) -> None:
    """The list has a single token, so the output is that token's value."""
    problem = Problem(Case(dtype, 128, 2, 1, 1, 1, 1.0, 5, fp8=True))
    for first in (0, 128):
        numbers = torch.arange(first, first + 128, dtype=torch.uint8).view(FP8)
        problem.values[problem.pages[0], 0, 0] = numbers
        out, _ = problem.attend(variant)
        expected = numbers.float().expand_as(out)
        if variant == "amx":  # with AMX a NaN makes its neighbour NaN
            out, expected = out[:, :126], expected[:, :126]
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        problem.values[problem.pages[0], 0, 0] = 0.0
        problem.keys[problem.pages[0], 0, 0] = 0.0
        for channel, number in enumerate(numbers.float().tolist()):
            problem.query.zero_()
            problem.query[:, channel] = 1.0
            problem.keys[problem.pages[0], 0, 0, channel] = number
            _, lse = problem.attend(variant)
            problem.keys[problem.pages[0], 0, 0, channel] = 0.0
            assert math.isnan(number) or lse[0] == pytest.approx(number * problem.scale, rel=1e-6)


@pytest.mark.parametrize("variant", variants())
def test_one_key_far_above_all_others_takes_everything(variant: str) -> None:
    case = Case(torch.bfloat16, 128, 5, 1, 3, 20, 1.0, 3)
    problem = Problem(case)
    problem.keys[problem.pages[1], 0, 5] = problem.query[0] * 100
    problem.query[:] = problem.query[0]
    out, lse = problem.attend(variant)
    assert lse.isfinite().all()
    torch.testing.assert_close(out, problem.values[problem.pages[1], 0, 5].float().expand_as(out), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("variant", variants())
def test_the_same_input_gives_the_same_bits(variant: str) -> None:
    problem = Problem(Case(torch.bfloat16, 128, 8, 2, 9, 17, 1.0, 1))
    first, again = problem.attend(variant), problem.attend(variant)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_fastest_variant_is_used_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> str:
        name: str = library().sh_variant_name(DTYPES["bfloat16"], 128, None).decode()
        return name

    assert chosen() == variants()[0]
    monkeypatch.setenv("SGLANG_HYBRID_CPU_VARIANT", "portable")
    assert chosen() == "portable"
    monkeypatch.setenv("SGLANG_HYBRID_CPU_VARIANT", "vax")
    assert library().sh_variant_name(DTYPES["bfloat16"], 128, None) is None


def test_a_variant_or_shape_that_does_not_exist_is_an_error_in_words() -> None:
    problem = Problem(Case(torch.float32, 64, 1, 1, 1, 32, 1.0, 1))
    with pytest.raises(NativeError, match="no such kernel"):
        problem.attend("vax")
