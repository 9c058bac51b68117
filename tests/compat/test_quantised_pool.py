"""A host pool in FP8: what the pool stores, and the torch engine's attention over it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.config import load_config
from sglang_hybrid.engines.base import ModelFacts, PrefillBatch, StepBatch
from sglang_hybrid.engines.torch import TorchEngine
from sglang_hybrid.integration import pools
from sglang_hybrid.integration.attention_backend import HybridAttnBackend
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.kv_scales import KVScales, scales_of
from sglang_hybrid.ops.reference import FP8

HEADS, GROUP, DIM, T = 2, 3, 64, 32
SCALE = DIM**-0.5


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostKVPool]:
    monkeypatch.setenv("SGLANG_HYBRID_CONFIG", "")
    monkeypatch.setenv("SGLANG_HYBRID_SET", "[]")
    made = HostKVPool(
        320, page_size=T, dtype=FP8, head_num=HEADS, head_dim=DIM, layer_num=2, device="cpu", enable_memory_saver=False
    )
    yield made
    made.region.close()


def normal(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_a_pool_stores_one_byte_for_a_number_and_digests_of_what_it_stores(pool: HostKVPool) -> None:
    keys, values = (normal(40, HEADS, DIM, seed=seed) * 300 for seed in (1, 2))
    pool.store(1, torch.arange(T, T + 40), keys, values)
    stored = pool.k_buffer[1][1:3].transpose(1, 2).flatten(0, 1)[:40]
    assert stored.dtype == FP8 and pool.k_buffer[0].nbytes == pool.k_buffer[0].numel()
    assert torch.equal(stored.float(), keys.clamp(-448, 448).to(FP8).float())
    assert pool.digests is not None
    of_first = stored[:T].float()
    expected = torch.stack((of_first.amax(dim=0), of_first.amin(dim=0)), dim=1)
    assert torch.equal(pool.digests.of_layer(1)[1].float(), expected)


def test_a_copy_of_tokens_comes_back_as_it_was(pool: HostKVPool) -> None:
    slots = torch.arange(T, T + 40)
    pool.store(0, slots, normal(40, HEADS, DIM, seed=1), normal(40, HEADS, DIM, seed=2))
    copies = pool.get_cpu_copy(slots)
    pool.load_cpu_copy(copies, slots + 3 * T)
    assert torch.equal(pool.k_buffer[0][4].view(torch.uint8), pool.k_buffer[0][1].view(torch.uint8))
    assert pool.digests is not None
    assert torch.equal(pool.digests.of_layer(0)[4].view(torch.uint8), pool.digests.of_layer(0)[1].view(torch.uint8))


def test_sglang_may_store_what_it_cast_itself(pool: HostKVPool) -> None:
    layer: Any = SimpleNamespace(layer_id=0)
    keys, values = normal(3, HEADS, DIM, seed=1), normal(3, HEADS, DIM, seed=2)
    pool.set_kv_buffer(layer, torch.arange(T, T + 3), keys.clone(), values.clone())
    assert torch.equal(pool.k_buffer[0][1, :, :3].transpose(0, 1).float(), keys.to(FP8).float())


def test_the_torch_engine_attends_to_what_the_pool_stands_for(pool: HostKVPool) -> None:
    tokens = 71
    keys, values = (normal(tokens, HEADS, DIM, seed=seed) for seed in (1, 2))
    query = normal(tokens, HEADS * GROUP, DIM, seed=3)
    table = torch.arange(T, T + 128, dtype=torch.int32)[None].repeat(2, 1)
    model = ModelFacts(
        req_to_token=table, group=GROUP, dtype=torch.float32, scale=SCALE, cuda_graphs=False, logits=None,
        one_batch=True, admits_pages=False,
    )  # fmt: skip
    engine = TorchEngine(load_config(None, ["prediction=none", "worker=none"]), pool, model, None)
    slots, row, last = torch.arange(T, T + tokens), torch.tensor([1]), tokens - 1
    engine.begin_prefill(PrefillBatch(rows=row, lengths=[last], new_tokens=[last], slots=slots[:last]))
    prefilled = engine.prefill(0, query[:last], keys[:last], values[:last], SCALE)
    lengths = torch.tensor([tokens])
    engine.begin_step(StepBatch(rows=row, lengths=lengths, lengths_on_host=lengths, slots=slots[last:]))
    decoded = engine.decode(0, query[last:], keys[last:], values[last:], SCALE)

    read_keys, read_values = (part.to(FP8).float().transpose(0, 1)[None] for part in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], read_keys, read_values, is_causal=True, scale=SCALE, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(torch.cat((prefilled, decoded)), expected, rtol=1e-4, atol=1e-5)


def test_a_layer_with_scales_attends_to_what_its_scaled_numbers_stand_for(pool: HostKVPool) -> None:
    """Keys and values are far above 448, the largest FP8 number; division by their scales makes them fit."""
    keys, values = normal(1, HEADS * DIM, seed=1) * 2000, normal(1, HEADS * DIM, seed=2) * 1000
    query, scales = normal(1, HEADS * GROUP * DIM, seed=3), KVScales(16.0, 5.0)
    backend: Any = object.__new__(HybridAttnBackend)
    taken: list[Any] = []

    def decode(*parts: Any) -> torch.Tensor:
        taken.append(parts)
        return torch.ones_like(query).view(1, -1, DIM)

    backend._pool, backend._split, backend.engine = pool, None, SimpleNamespace(decode=decode)
    layer: Any = SimpleNamespace(
        layer_id=1, tp_q_head_num=HEADS * GROUP, tp_k_head_num=HEADS, tp_v_head_num=HEADS, qk_head_dim=DIM,
        v_head_dim=DIM, scaling=SCALE, k_scale_float=scales.keys, v_scale_float=scales.values,
    )  # fmt: skip
    out = backend.forward_decode(query, keys, values, layer, None)
    ((number, asked, stored_keys, stored_values, scale),) = taken
    assert number == 1 and scale == SCALE * scales.keys and (out == scales.values).all()
    assert torch.equal(asked.flatten(1), query)
    assert torch.equal(stored_keys.flatten(1), keys / scales.keys)
    assert torch.equal(stored_values.flatten(1), values / scales.values)


@pytest.mark.parametrize(("backend", "device", "seen"), [("hybrid", "cpu", torch.uint8), ("triton", "cpu", FP8)])
def test_sglang_does_not_see_fp8_where_it_would_refuse_what_this_backend_reads(
    backend: str, device: str, seen: torch.dtype
) -> None:
    """With backend hybrid, SGLang's own check sees uint8. Afterwards the dtype is FP8 again, even if SGLang raises."""
    configurator: Any = SimpleNamespace(
        kv_cache_dtype=FP8, device=device, server_args=SimpleNamespace(attention_backend=backend)
    )

    def sglang_configures(configurator: Any, *, pre_model_load_memory: int) -> None:
        assert configurator.kv_cache_dtype == seen and pre_model_load_memory == 5
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        pools.configure(sglang_configures, configurator, pre_model_load_memory=5)
    assert configurator.kv_cache_dtype == FP8


def test_the_host_pool_is_made_without_sglangs_quantisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostKVPool, "model_dtype", None)  # and restored afterwards
    configurator: Any = SimpleNamespace(
        server_args=SimpleNamespace(attention_backend="hybrid"), model_config=SimpleNamespace(dtype=torch.float16)
    )
    made = pools.build_kv_pool(lambda _, **given: given, configurator, mha_pool_class=object, quant_method="fp8")
    assert made == {"mha_pool_class": HostKVPool} and HostKVPool.model_dtype == torch.float16


@pytest.mark.parametrize(("device", "dtype"), [("cpu", FP8), ("cuda:0", torch.bfloat16)])
def test_digests_have_a_dtype_that_the_devices_kernels_multiply_by_queries(
    pool: HostKVPool, monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(HostKVPool, "model_dtype", torch.bfloat16)
    monkeypatch.setattr(pool, "device", device)
    assert pool._digest_dtype() == dtype
    monkeypatch.setattr(pool, "dtype", torch.float16)  # nothing is quantised
    assert pool._digest_dtype() == torch.float16


def test_scales_of_a_checkpoint_count_over_a_quantised_pool_only() -> None:
    attention = SimpleNamespace(k_scale_float=0.5, v_scale_float=2.0)
    assert scales_of(attention, FP8) == KVScales(0.5, 2.0)
    assert scales_of(attention, torch.bfloat16) == KVScales(1.0, 1.0)
    assert scales_of(SimpleNamespace(k_scale_float=None, v_scale_float=None), FP8) == KVScales(1.0, 1.0)
