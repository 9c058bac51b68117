"""Layers of CUDA step programs: codes of keys, also if the pool has no digests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import load_config
from sglang_hybrid.engines.cuda.engine import _digests, _program_of
from sglang_hybrid.engines.cuda.hcattention import DeviceHCAttention
from sglang_hybrid.engines.cuda.infinigen import DeviceInfinigen
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.ops.cuda.key_codes import QuantisedCodes
from sglang_hybrid.ops.cuda.partial_keys import PartialKeyCodes

LAYERS, PAGES, HEADS, DIM, COLUMNS = 2, 5, 2, 64, 16


def pool_of(code_bytes: int) -> Any:
    """Return a pool as created for policies that need codes of keys and no digests: infinigen and hcattention."""
    keys = [torch.zeros(PAGES, HEADS, BLOCK_TOKENS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    codes = KeyCodes(code_bytes, LAYERS, PAGES, HEADS, BLOCK_TOKENS, "cpu")
    return SimpleNamespace(
        codes=codes, digests=None, sketches=None, k_buffer=keys, layer_num=LAYERS, head_dim=DIM, device="cpu",
        dtype=torch.bfloat16,
    )  # fmt: skip


def test_infinigen_has_the_partial_keys_of_a_pool_without_digests() -> None:
    pool = pool_of(2 * COLUMNS)
    pool.codes.use(PartialKeys([torch.eye(DIM).expand(HEADS, -1, -1)] * LAYERS, COLUMNS, torch.bfloat16))
    program = _program_of(load_config(None, ["policy=infinigen"]))
    assert program is DeviceInfinigen
    codes = program.layer_codes(load_config(None, ["policy=infinigen"]), pool, None)
    assert codes is not None and len(codes) == LAYERS
    for layer, one in enumerate(codes):
        assert isinstance(one, PartialKeyCodes) and (one.heads, one.dim) == (HEADS, DIM)
        assert one.codes.data_ptr() == pool.codes.of_layer(layer).data_ptr()
        assert one.basis is pool.codes.encoder.basis(layer)  # the same tensor, because bases are replaced in place


def test_hcattention_without_a_codebook_keeps_whole_keys() -> None:
    pool, config = pool_of(2 * DIM), load_config(None, ["policy=hcattention"])
    program = _program_of(config)
    assert program is DeviceHCAttention
    codes = program.layer_codes(config, pool, None)
    assert codes is not None and all(isinstance(one, QuantisedCodes) and one.centroids is None for one in codes)
    assert [one.dim for one in codes] == [DIM] * LAYERS


@pytest.mark.parametrize("policy", ["full", "scout", "hgca"])
def test_others_keep_none(policy: str) -> None:
    config = load_config(None, [f"policy={policy}"])
    assert _program_of(config).layer_codes(config, pool_of(0), None) is None


def test_a_pool_without_digests_still_tells_the_keys_shape() -> None:
    digests = _digests(pool_of(0), 0, torch.bfloat16)
    assert digests.is_none and (digests.heads, digests.dim, digests.dtype) == (HEADS, DIM, torch.bfloat16)
