"""Policies over an FP8 pool, against softmax attention over the numbers that the pool's bytes stand for."""

from __future__ import annotations

import pytest
import torch
from decoding import Requests, Shape

from sglang_hybrid.config import load_config
from sglang_hybrid.engines.torch import PagedPrefill, TorchAttention
from sglang_hybrid.ops.reference import FP8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["full", "scout", "hgca"])
def test_a_policy_decodes_over_fp8_as_over_dequantised_keys_and_values(policy: str, dtype: torch.dtype) -> None:
    shape = Shape(heads=2, group=3, dim=64, value_dim=64, dtype=dtype, pool_dtype=FP8)
    requests = Requests([300, 33, 64, 1], shape, seed=4)
    attention = TorchAttention(load_config(None, [f"policy={policy}", "budget_tokens=2048"]), rows=4, layers=1)
    for row, length in enumerate(requests.lengths):
        requests.write(row, 0, length)
        prompt = PagedPrefill(requests.table([row], length), torch.tensor([row]), [length], [length])
        attention.prefill(requests.row_queries[row], requests.cache, prompt, shape.scale)
    batch = requests.decode_batch()
    attention.begin_decode(batch)
    out = attention.decode(requests.last_queries(), requests.cache, batch, shape.scale)
    requests.assert_close(out, requests.full_attention())


def test_selection_sees_the_keys_that_attention_sees() -> None:
    """By its FP8 keys one block has all of the attention, so a budget of few blocks must include that block."""
    shape = Shape(heads=1, group=2, dim=64, value_dim=64, pool_dtype=FP8)
    requests = Requests([T * 40 for T in (32,)], shape, seed=5)
    requests.row_queries[0][-1] = requests.row_queries[0][-1, :1]  # both query heads are equal
    requests.row_keys[0][0, 11 * 32 + 3] = (requests.row_queries[0][-1, 0] * 4).to(FP8).float()
    requests.write_all()
    config = load_config(None, ["budget_tokens=256", "prediction=none", "worker=none"])
    attention = TorchAttention(config, rows=1, layers=1)
    batch = requests.decode_batch()
    attention.begin_decode(batch)
    out = attention.decode(requests.last_queries(), requests.cache, batch, shape.scale)
    requests.assert_close(out, requests.full_attention())
