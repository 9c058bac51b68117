"""A whole engine on the GPU: prompts and answers of two requests under every policy that has a CUDA program.

The settings of each policy leave out nothing, so attention must be plain softmax over all tokens. The parts of the
engine have tests of their own; these tests check that the parts work together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded
from selection_cases import later

from sglang_hybrid.config import HybridConfig, load_config
from sglang_hybrid.engines.base import ModelFacts, PrefillBatch, StepBatch
from sglang_hybrid.engines.cuda.engine import CudaEngine, unsupported_reason
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import code_bytes, is_compact
from sglang_hybrid.memory.digests import CompactDigests, Digests
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.memory.sketches import Sketches
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.structs import TOTALS
from sglang_hybrid.policies.registry import PolicyError, policy_named
from sglang_hybrid.policies.scout.tuning import tuning_of
from sglang_hybrid.protocol.region import SharedRegion

LAYERS, HEADS, GROUP, DIM, PAGES, CONTEXT = 2, 2, 2, 64, 24, 256
SCALE = 0.9 * DIM**-0.5
DTYPE = torch.bfloat16  # the model's dtype
PROMPTS, STEPS = [70, 33], 3
LOSSLESS = {
    "full": [],
    "scout": [f"budget_tokens={CONTEXT}"],
    "scoutattention": [f"budget_tokens={CONTEXT}"],
    "hgca": [f"hgca.window_tokens={CONTEXT}"],
    "hcattention": ["hcattention.tau=1"],
    "infinigen": [f"budget_tokens={CONTEXT}", "infinigen.alpha=1000"],
}


class Pool:
    """Stand-in for the pool that the adapter for SGLang creates for a policy; does not need SGLang."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype) -> None:
        shape = (PAGES, HEADS, BLOCK_TOKENS, DIM)
        size = torch.Size(shape).numel() * dtype.itemsize
        self.region = SharedRegion(SharedRegion.size_for(*[size] * 2 * LAYERS))
        self.k_buffer, self.v_buffer = (
            [self.region.take(shape, dtype).fill_(torch.nan) for _ in range(LAYERS)] for _ in range(2)
        )
        self.head_num, self.head_dim, self.v_head_dim, self.layer_num = HEADS, DIM, DIM, LAYERS
        self.dtype, self.device = dtype, DEVICE
        self.digests: Digests | CompactDigests | None = None
        self.sketches: Sketches | None = None
        self.codes: KeyCodes | None = None
        if policy_named(config.policy).needs.digests:
            channels = config.sketch_channels
            self.sketches = Sketches(channels, LAYERS, PAGES, HEADS, BLOCK_TOKENS, DEVICE) if channels else None
            of_digests = (LAYERS, PAGES, HEADS, DIM)
            if self.sketches and is_compact(config.digest_dtype, channels, DIM, "cuda"):
                self.digests = CompactDigests(self.sketches, *of_digests, DEVICE)
            else:
                self.digests = Digests(*of_digests, DTYPE, DEVICE)
        if of_key := code_bytes(config, KVShape(LAYERS, HEADS, DIM, DIM, dtype.itemsize)):
            self.codes = KeyCodes(of_key, LAYERS, PAGES, HEADS, BLOCK_TOKENS, DEVICE)
            if policy_named(config.policy).needs.skew:
                bases = [torch.eye(DIM, device=DEVICE).expand(HEADS, -1, -1)] * LAYERS
                self.codes.use(PartialKeys(bases, of_key // DTYPE.itemsize, DTYPE))

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        raise AssertionError("on a GPU kernels write the pool")


class Requests:
    """Random queries, keys and values of requests in rows 1 and 2, with pages in random order."""

    def __init__(self, settings: list[str], pool_dtype: torch.dtype = DTYPE, key_scale: float = 1.0) -> None:
        """Create an engine. ``key_scale``: factor of layer 1's scale, as if its keys were stored divided by it."""
        self.pool_dtype, self.scales = pool_dtype, [SCALE, SCALE * key_scale]
        config = load_config(None, settings)
        random = seeded(5)
        self.rows = torch.tensor([1, 2], device=DEVICE)
        self.lengths = list(PROMPTS)
        pages = (1 + torch.randperm(PAGES - 1, generator=random))[: 2 * (CONTEXT // BLOCK_TOKENS)].view(2, -1)
        tokens = pages.repeat_interleave(BLOCK_TOKENS, dim=1) * BLOCK_TOKENS + torch.arange(CONTEXT) % BLOCK_TOKENS
        self.req_to_token = torch.zeros(4, CONTEXT, dtype=torch.int32)
        self.req_to_token[1:3] = tokens
        self.req_to_token = self.req_to_token.to(DEVICE)
        of_tokens = (LAYERS, 2, CONTEXT)
        self.query = torch.randn(*of_tokens, HEADS * GROUP, DIM, generator=random).to(DTYPE)
        self.keys, self.values = torch.randn(2, *of_tokens, HEADS, DIM, generator=random).to(DTYPE)
        largest = torch.stack([part.float().abs().amax(dim=(1, 2)) for part in (self.keys, self.values)], dim=1)
        steps = [reference.with_reciprocals(of_layer.to(DEVICE)) for of_layer in largest / reference.CODE_MOST]
        facts = ModelFacts(self.req_to_token, GROUP, DTYPE, SCALE, cuda_graphs=True, code_steps=steps)
        pool: Any = Pool(config, pool_dtype)
        self.engine = CudaEngine(config, tuning_of(config, LAYERS), None, pool, facts, None)

    def slots(self, row: int, first: int, last: int) -> torch.Tensor:
        return self.req_to_token[1 + row, first:last].to(torch.int64)

    def prefill(self) -> None:
        slots = torch.cat([self.slots(row, 0, length) for row, length in enumerate(self.lengths)])
        self.engine.begin_prefill(PrefillBatch(self.rows, self.lengths, self.lengths, slots))
        outs = []
        for layer in range(LAYERS):
            query, keys, values = (
                torch.cat([part[layer, row, :length] for row, length in enumerate(self.lengths)]).to(DEVICE)
                for part in (self.query, self.keys, self.values)
            )
            outs.append(self.engine.prefill(layer, query, keys, values, self.scales[layer]))
        torch.cuda.synchronize()
        for layer, out in enumerate(outs):
            for row, found in enumerate(out[: sum(self.lengths)].cpu().split(self.lengths)):
                self.compare(found, layer, row, 0)

    def decode(self) -> None:
        """Decode one token of each request and compare the outputs with the reference."""
        self.lengths = [length + 1 for length in self.lengths]
        lengths = torch.tensor(self.lengths)
        slots = torch.cat([self.slots(row, length - 1, length) for row, length in enumerate(self.lengths)])
        self.engine.begin_step(StepBatch(self.rows, lengths.to(DEVICE), lengths, slots))
        for layer in range(LAYERS):
            query, keys, values = (
                torch.stack([part[layer, row, length - 1] for row, length in enumerate(self.lengths)]).to(DEVICE)
                for part in (self.query, self.keys, self.values)
            )
            out = self.engine.decode(layer, query, keys, values, self.scales[layer])
            torch.cuda.synchronize()  # layers share the memory of their outputs
            for row, length in enumerate(self.lengths):
                self.compare(out[row][None].cpu(), layer, row, length - 1)

    def hold(self, whole: bool) -> None:
        """Hold whole rows from the next step on, or no longer, as if other requests had left or arrived."""
        mode, program = self.engine._whole_requests, self.engine.program
        assert mode is not None
        mode.pages, mode._left = program.dense.pages if whole else 0, float("-inf")
        # in emulation, forget_all must run after the kernels that were launched before it
        allocator = program.dense._allocator
        allocator.forget_all = lambda: later(partial(type(allocator).forget_all, allocator))  # type: ignore[method-assign]

    def compare(self, found: torch.Tensor, layer: int, row: int, first: int) -> None:
        """Assert that ``found`` is exact attention of a row's tokens from ``first`` on."""
        length = self.lengths[row]
        keys, values = (
            reference.to_stored(part[layer, row, :length], self.pool_dtype).transpose(0, 1).float()
            for part in (self.keys, self.values)
        )
        query = self.query[layer, row, first:length].float()
        expected = reference.attend_prefill(query, keys, values, self.scales[layer])
        torch.testing.assert_close(found.float().view_as(expected), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("whole", ["never", "auto"])
@pytest.mark.parametrize("policy", LOSSLESS)
def test_requests_are_answered_by_plain_attention_where_nothing_is_left_out(policy: str, whole: str) -> None:
    requests = Requests([f"policy={policy}", f"whole_requests={whole}", "worker=none", *LOSSLESS[policy]])
    requests.prefill()
    for _ in range(STEPS):
        requests.decode()
    assert int(requests.engine.program.refused) == 0


CODES = "scout.slot_dtype=int8"


@pytest.mark.parametrize(
    ("policy", "pool_dtype", "more"),
    [(policy, DTYPE, []) for policy in LOSSLESS if policy != "hcattention"]  # it holds no whole rows
    + [("scout", DTYPE, [CODES]), ("scout", reference.FP8, []), ("scout", reference.FP8, [CODES])],
)
def test_answers_stay_the_same_when_whole_requests_end_and_come_back(
    policy: str, pool_dtype: torch.dtype, more: list[str]
) -> None:
    settings = [f"policy={policy}", "whole_requests=auto", "worker=none", *LOSSLESS[policy], *more]
    requests = Requests(settings, pool_dtype)
    program: Any = requests.engine.program
    requests.prefill()
    for step in range(9):
        whole = step % 4 < 2
        requests.hold(whole)
        requests.decode()
        assert program.is_dense == whole
        if not whole:
            begins = program.step.begins(2).cpu().tolist()
            # only hgca loads its window anew; under other policies rows go on, or nothing is ever resident
            assert begins == [int(step % 4 == 2 and policy == "hgca")] * 2
        if policy in ("scout", "scoutattention"):
            assert not program.counted[:, TOTALS.index("misses")].any()
    assert int(program.refused) == 0


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        (["policy=full"], "never"),
        (["policy=scout", f"budget_tokens={CONTEXT}"], "never"),
        (["policy=scout", f"budget_tokens={CONTEXT}"], "auto"),
        (["policy=scoutattention", f"budget_tokens={CONTEXT}", "digest_dtype=model"], "never"),
    ],
)
def test_requests_over_fp8_are_answered_by_attention_to_what_is_stored(settings: list[str], whole: str) -> None:
    """Prefill must use the stored FP8 values too, though it gets new tokens before they are rounded."""
    requests = Requests([*settings, f"whole_requests={whole}", "worker=none"], reference.FP8, key_scale=2.0)
    requests.prefill()
    for _ in range(STEPS):
        requests.decode()
    assert int(requests.engine.program.refused) == 0
    hgca = requests.engine.unsupported_reason(load_config(None, ["policy=hgca"]))
    assert hgca is not None and "FP8" in hgca


def test_slots_of_codes_show_in_the_readings_and_need_steps() -> None:
    requests = Requests([f"budget_tokens={CONTEXT}", "worker=none", CODES])
    program: Any = requests.engine.program
    assert program.slots.keys[0].dtype == torch.uint8
    row = CONTEXT // BLOCK_TOKENS
    assert program.dense.pages == 4 * row // 2  # a page has 16 bits, so four rows of slots hold half as many pages
    for whole, total in ((True, program.dense.pages), (False, 4 * row)):
        program.is_dense = whole
        assert requests.engine.readings().slots == total
    requests.engine._layers = [replace(layer, steps=None) for layer in requests.engine._layers]
    config = load_config(None, ["budget_tokens=128", "worker=none", CODES])
    with pytest.raises(PolicyError, match="slot_dtype=int8"):
        requests.engine.use(config, tuning_of(config, LAYERS))


@pytest.mark.parametrize("policy", ["hgca", "hcattention", "infinigen"])
def test_other_policies_are_refused_over_fp8_with_those_that_can_have_it(policy: str) -> None:
    config = load_config(None, [f"policy={policy}"])
    pool: Any = SimpleNamespace(device="cuda:0", dtype=reference.FP8, head_dim=DIM, v_head_dim=DIM)
    facts = ModelFacts(torch.zeros(4, CONTEXT), GROUP, DTYPE, SCALE, cuda_graphs=True)
    said = unsupported_reason(config, pool, facts)
    assert said is not None and f"policy={policy} over an FP8 KV cache" in said and "scout" in said
    pool.dtype = DTYPE
    assert unsupported_reason(config, pool, facts) is None
