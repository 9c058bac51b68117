"""Reference operations over an FP8 pool compute what they compute over the numbers that its bytes stand for."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import attention_over_blocks, causal_attention, seeded

from sglang_hybrid.memory.digests import CompactDigests, Digests
from sglang_hybrid.memory.sketches import Sketches
from sglang_hybrid.ops import reference, reference_weights
from sglang_hybrid.ops.reference import FP8

PAGES, HEADS, GROUP, T, DIM = 6, 2, 3, 32, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=seeded(seed))


def pools(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    size = (PAGES, HEADS, T, DIM)
    return reference.to_stored(normal(*size, seed=seed), FP8), reference.to_stored(normal(*size, seed=seed + 1), FP8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_is_the_nearest_number_of_fp8_and_never_beyond_the_largest(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8).to(dtype)
    stored = reference.to_stored(every, FP8)
    same = stored.float() == every.float()
    assert (same | every.isnan()).all() and int(every.isnan().sum()) == 2
    given = torch.tensor([449.0, -60000.0, float("inf"), float("nan"), 1.0625, 1.1875, 2**-10, 3 * 2**-10], dtype=dtype)
    expected = torch.tensor([448.0, -448.0, 448.0, float("nan"), 1.0, 1.25, 0.0, 2**-8])
    torch.testing.assert_close(reference.to_stored(given, FP8).float(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_pool_of_another_dtype_stores_what_torch_casts() -> None:
    given = normal(100) * 1000
    assert torch.equal(reference.to_stored(given, torch.bfloat16), given.bfloat16())
    stored = given.to(FP8)
    assert reference.to_stored(stored, FP8) is stored


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_fp8_blocks_equals_softmax_over_what_they_stand_for(dtype: torch.dtype) -> None:
    keys, values = pools()
    query = normal(2, HEADS * GROUP, DIM, seed=3).to(dtype)
    ids = torch.tensor([[[4, 1, -1], [2, 0, 5]], [[3, -1, -1], [-1, -1, -1]]])
    fill = torch.tensor([[[T, 7, 0], [T, T, 1]], [[20, 0, 0], [0, 0, 0]]])
    listed = [[[(4, T), (1, 7)], [(2, T), (0, T), (5, 1)]], [[(3, 20)], []]]
    for pool in (keys, values):
        pool.view(torch.uint8)[1, 0, 7:] = 0x7F  # NaN behind the last token
    out, lse = reference.attend_blocks(query, keys, values, ids, fill, 0.2)
    expected = attention_over_blocks(query, keys.double(), values.double(), listed, 0.2)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-4, atol=1e-5)


def test_weights_and_sums_of_values_are_those_of_what_fp8_stands_for() -> None:
    keys, values = pools()
    query, ids = normal(1, HEADS * GROUP, DIM, seed=3), torch.tensor([[[4, 1], [2, 0]]])
    fill, lse = torch.full_like(ids, T), torch.zeros(1, HEADS * GROUP)
    weights = reference_weights.token_weights(query, keys, ids, fill, 0.1, lse)
    assert torch.equal(weights, reference_weights.token_weights(query, keys.float(), ids, fill, 0.1, lse))
    sums = reference_weights.sum_values(weights, values, ids)
    assert torch.equal(sums, reference_weights.sum_values(weights, values.float(), ids))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_over_fp8_computes_in_the_querys_dtype(dtype: torch.dtype) -> None:
    key, value = (reference.to_stored(normal(HEADS, 40, DIM, seed=seed), FP8) for seed in (5, 6))
    query = normal(9, HEADS * GROUP, DIM, seed=7).to(dtype)
    out = reference.attend_prefill(query, key, value, 0.15)
    assert out.dtype == dtype
    close = 1e-5 if dtype == torch.float32 else 2e-2
    expected = causal_attention(query, key.double(), value.double(), 0.15)
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


def test_digests_and_sketches_are_those_of_the_keys_that_attention_sees() -> None:
    keys, _ = pools()
    pages, filled = torch.tensor([1, 4]), torch.tensor([T, 9])
    keys.view(torch.uint8)[4, :, 9:] = 0x7F  # NaN
    exact = reference.minmax_digest(keys[pages].float(), filled)
    digests = Digests(1, PAGES, HEADS, DIM, FP8, "cpu")
    digests.refresh(0, keys, pages, filled)
    assert torch.equal(digests.of_layer(0)[pages].float(), exact)

    sketches = Sketches(16, 1, PAGES, HEADS, T, "cpu")
    sketches.refresh(0, keys, digests.of_layer(0), pages)
    sketch = sketches.of_layer(0)
    assert torch.equal(sketch.codes[pages], reference.sketch_codes(keys[pages].float(), exact, sketch.channels))

    compact = CompactDigests(sketches, 1, PAGES, HEADS, DIM, "cpu")
    compact.refresh(0, keys, pages, filled)
    assert torch.equal(compact.of_layer(0)[pages], reference.compact_digest(exact, sketch.channels))
