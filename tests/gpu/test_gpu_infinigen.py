"""Policy ``infinigen`` on the GPU, without SGLang, compared with the torch policy, with and without prediction."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE
from test_gpu_scout import DIM, DTYPE, HEADS, LAYERS, MAX_BLOCKS, SCALE, Decoding

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.engines.cuda.infinigen import DeviceInfinigen, InfinigenSettings
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.engines.cuda.program import ProgramContext
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.ops.cuda.partial_keys import PartialKeyCodes
from sglang_hybrid.policies.infinigen.options import InfinigenOptions
from sglang_hybrid.policies.infinigen.policy import InfinigenPolicy
from sglang_hybrid.policies.scout.tuning import tuning_of

Unit = Literal["tokens", "blocks"]
ON_GPU = DEVICE == "cuda"
STEPS = 70 if ON_GPU else 3
COLUMNS = 20
EVERYTHING = 1e9


class InfinigenDecoding(Decoding):
    """``Decoding`` with the same prompts, the CUDA program of policy ``infinigen``, and the torch policy."""

    def __init__(self, options: InfinigenOptions, budget: int = 128, blocks_per_row: int = 0) -> None:
        self.blocks_per_row = blocks_per_row
        config = HybridConfig(policy="infinigen", budget_tokens=budget, sink_blocks=0, recent_blocks=0)
        self.config = config.with_section(options)
        super().__init__(budget=MAX_BLOCKS, interval=0)
        self.predicted = torch.zeros_like(self.query)
        self.policy = InfinigenPolicy(self.config, self.partial)

    def program(self, layers: list[DeviceLayer], *_of_scout: object) -> DeviceInfinigen:
        bases = [torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=self.random)).Q for _ in layers]
        self.partial = PartialKeys(bases, COLUMNS, DTYPE)
        self.codes = [self.partial.encode(layer, keys).to(DEVICE) for layer, keys in enumerate(self.keys)]
        coded = [
            dataclasses.replace(layer, codes=partial)
            for layer, partial in zip(layers, map(self.layer_keys, range(LAYERS)), strict=True)
        ]
        settings = InfinigenSettings.of(self.config)
        return DeviceInfinigen(coded, self.shape, settings, self.blocks_per_row)

    def layer_keys(self, layer: int) -> PartialKeyCodes:
        return PartialKeyCodes(self.codes[layer], self.partial.basis(layer).to(DEVICE), DTYPE)

    def next_tokens(self) -> None:
        super().next_tokens()
        noise = torch.randn(self.query.shape, generator=self.random).to(DEVICE, DTYPE)
        self.predicted.copy_(self.query + 0.2 * noise)

    def batch(self) -> DecodeBatch:
        lengths, rows = self.lengths.tolist(), self.rows.tolist()
        return DecodeBatch(self.pages, self.lengths.clone(), lengths, self.rows.cpu(), rows)

    def expected_of_policy(self, layer: int, predicts: bool) -> torch.Tensor:
        """Return the torch policy's output for this step. The step's tokens are in the pool."""
        batch, codes = self.batch(), self.codes[layer].cpu()
        cache = LayerCache(self.keys[layer].float(), self.values[layer].float(), None, layer, None, codes)
        self.policy.begin_step(batch)
        if predicts:
            self.policy.ahead(self.predicted[layer, :-1].cpu().float(), cache, batch, SCALE)
        return self.policy.decode(self.query[layer, :-1].cpu().float(), cache, batch, SCALE)

    def check(self, predicts: bool) -> None:
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            found = self.out[layer, :-1].cpu().float()
            torch.testing.assert_close(found, self.expected_of_policy(layer, predicts), rtol=2e-2, atol=2e-2)
        self.check_codes()
        assert int(self.scout.refused) == 0

    def check_exact(self) -> None:
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            found = self.out[layer, :-1].cpu().float()
            torch.testing.assert_close(found, self.expected(layer, everything=True), rtol=2e-2, atol=2e-2)
        self.check_codes()

    def check_codes(self) -> None:
        """Assert that the partial keys of all tokens in the pool are those of their keys."""
        for layer, keys in enumerate(self.keys):
            expected = self.partial.decode(self.partial.encode(layer, keys)).float()
            found = self.partial.decode(self.codes[layer].cpu()).float()
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recorded", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("predicts", [True, False], ids=["predicted", "real"])
@pytest.mark.parametrize("unit", ["tokens", "blocks"])
def test_decoding_is_the_torch_policys(unit: Unit, predicts: bool, recorded: bool) -> None:
    decoding = InfinigenDecoding(InfinigenOptions(alpha=2.0, unit=unit))
    decoding.scout.reset_rows(decoding.rows)
    for _ in decoding.steps(predicts, recorded):
        decoding.check(predicts)
    tokens = decoding.scout._staged[0].lists(len(decoding.rows)).tokens.tolist()
    assert min(tokens) > 1 and max(tokens) <= 128
    assert int(decoding.scout.counted.sum()) > 0


@pytest.mark.parametrize("unit", ["tokens", "blocks"])
def test_a_budget_above_the_context_and_a_large_alpha_are_exact(unit: Unit) -> None:
    decoding = InfinigenDecoding(InfinigenOptions(alpha=EVERYTHING, unit=unit), budget=2 * MAX_BLOCKS * BLOCK_TOKENS)
    decoding.scout.reset_rows(decoding.rows)
    for _ in range(2):
        decoding.next_tokens()
        decoding.run(predicts=True)
        decoding.check_exact()


def test_rows_move_to_whole_requests_and_back() -> None:
    decoding = InfinigenDecoding(
        InfinigenOptions(alpha=2.0), blocks_per_row=8
    )  # memory for 72 blocks, of which 64 are needed
    decoding.scout.reset_rows(decoding.rows)
    for whole in (True, False, True, False):
        decoding.scout.hold_rows(whole, count=decoding.query.shape[1])
        for _ in range(2):
            decoding.next_tokens()
            if whole:
                decoding.scout.dense.begin_step(decoding.query.shape[1], decoding.lengths.tolist())
            decoding.run(predicts=not whole)
            if whole:
                decoding.check_exact()
            else:
                decoding.check(predicts=True)


def test_a_pool_without_partial_keys_is_refused() -> None:
    decoding = InfinigenDecoding(InfinigenOptions())
    bare = [dataclasses.replace(layer, codes=None) for layer in decoding.scout._layers]
    config = decoding.config
    context = ProgramContext(bare, decoding.shape, config, tuning_of(config, LAYERS), True, False)
    with pytest.raises(ValueError, match="start with policy=infinigen"):
        DeviceInfinigen.create(context)


def test_buffers_are_those_of_the_settings() -> None:
    decoding = InfinigenDecoding(InfinigenOptions())
    context = ProgramContext(
        decoding.scout._layers, decoding.shape, decoding.config, tuning_of(decoding.config, LAYERS), True, False
    )
    made = DeviceInfinigen.create(context)
    assert made.dense.pages == decoding.shape.rows * 128 // BLOCK_TOKENS
    assert "128 of each" in made.without_whole_requests
    assert math.prod(made._staged[0].blocks(3)[0].shape) == 3 * 128 * HEADS * DIM
