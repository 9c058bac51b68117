"""Codes of single keys are updated when keys are written, and a page's memory includes them."""

from dataclasses import replace

import pytest
import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import page_bytes
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.policies import registry

PAGES, HEADS, DIM = 5, 2, 8


class FirstChannels:
    """An encoder whose code is the first two channels of a key in float16, plus the number of the layer."""

    def encode(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        return (keys[..., :2] + layer).half().contiguous().view(torch.uint8)


def test_codes_of_written_pages_follow_their_keys_and_others_stay() -> None:
    keys = torch.randn(PAGES, HEADS, BLOCK_TOKENS, DIM)
    codes = KeyCodes(4, 3, PAGES, HEADS, BLOCK_TOKENS, "cpu")
    codes.use(FirstChannels())
    codes.refresh(1, keys, torch.tensor([3, 0]))
    seen = codes.of_layer(1).view(torch.float16)
    assert torch.equal(seen[[3, 0]], (keys[[3, 0]][..., :2] + 1).half())
    assert not seen[[1, 2, 4]].any() and not codes.of_layer(0).any()


def test_without_an_encoder_nothing_is_encoded() -> None:
    codes = KeyCodes(4, 1, PAGES, HEADS, BLOCK_TOKENS, "cpu")
    codes.refresh(0, torch.randn(PAGES, HEADS, BLOCK_TOKENS, DIM), torch.arange(PAGES))
    assert not codes.of_layer(0).any()


def test_a_page_takes_the_memory_of_its_codes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = HybridConfig(), KVShape(layers=3, kv_heads=HEADS, key_dim=64, value_dim=64, itemsize=2)
    plain = page_bytes(config, shape, "cuda")
    assert plain.codes == 0
    policy = registry.policy_named(config.policy)
    coded = replace(policy, code_bytes=lambda _config, _shape: 20)
    monkeypatch.setitem(registry._policies, config.policy, coded)
    with_codes = page_bytes(config, shape, "cuda")
    assert with_codes.codes == 3 * HEADS * BLOCK_TOKENS * 20
    assert with_codes.total == plain.total + with_codes.codes
