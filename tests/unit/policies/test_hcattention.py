"""Policy hcattention against the paper's equations in float64, token by token; its codebook files; its memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from attention_oracle import seeded
from decoding import CLOSE, Requests, Shape, T
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig, load_config
from sglang_hybrid.engines.torch import TorchAttention
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import page_bytes
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.policies.hcattention.codebook_facts import CodebookError, CodebookFacts, code_bytes, describe
from sglang_hybrid.policies.hcattention.codebooks import Codebooks, load_codebooks
from sglang_hybrid.policies.hcattention.options import HCAttentionOptions
from sglang_hybrid.policies.hcattention.policy import HCAttention
from sglang_hybrid.policies.registry import ModelPart, PolicyError
from sglang_hybrid.policies.scout.profile_facts import ModelIdentity

SEEDS = st.integers(0, 2**32 - 1)
SHAPE = Shape(heads=2, group=3, dim=8, value_dim=6)
LENGTHS = [1, T, 2 * T + 5]


def identity(shape: Shape, layers: int = 1) -> ModelIdentity:
    return ModelIdentity(
        architecture="LlamaForCausalLM",
        layers=layers,
        hidden=48,
        query_heads=shape.heads * shape.group,
        kv_heads=shape.heads,
        head_dim=shape.dim,
        weights=[1.0, 0.5],
    )


def some_codebooks(
    shape: Shape, groups: int, centroids: int, shared: bool, seed: int = 0, layers: int = 1
) -> Codebooks:
    facts = CodebookFacts(model=identity(shape, layers), groups=groups, centroids=centroids, shared=shared)
    size = (shape.heads, 1 if shared else groups, centroids, shape.dim // groups)
    random = seeded(seed)
    # on a grid, so that rounding does not decide which of two centroids is nearer to a key
    return Codebooks(facts, [(4 * torch.randn(size, generator=random)).round().half() / 4 for _ in range(layers)])


# -- the paper, in plain Python ----------------------------------------------------------------------------------------


def quantised(keys: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Return Q(K): each part of keys ``[n, D]`` is replaced by the nearest centroid of ``[groups, C, D / groups]``."""
    parts = keys.double().unflatten(1, (codebook.shape[0], -1)).unbind(1)
    nearest = [
        table.double()[(part[:, None] - table.double()).square().sum(dim=2).argmin(dim=1)]
        for part, table in zip(parts, codebook, strict=True)
    ]
    return torch.cat(nearest, dim=1)


def evicted(weights: list[float], tau: float) -> list[float]:
    """Apply equation 4: keep the k* largest weights, the fewest that sum to ``tau``, and set the others to 0."""
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept, total = set(), 0.0
    for token in order:
        if total >= tau * sum(weights):
            break
        kept.add(token)
        total += weights[token]
    return [weight if token in kept else 0.0 for token, weight in enumerate(weights)]


def attention_of_paper(
    requests: Requests, codebooks: Codebooks | None, tau: float, renormalise: bool = True
) -> torch.Tensor:
    """Compute the paper's equations 2 to 5, one row, query head and token at a time."""
    shape, rows = requests.shape, []
    for query, keys, values in zip(requests.last_queries(), requests.row_keys, requests.row_values, strict=True):
        heads = []
        for number, q in enumerate(query.double()):
            head = number // shape.group
            of_head = keys[head].double()
            if codebooks is not None:
                table = codebooks.layers[0][head].expand(codebooks.facts.groups, -1, -1)
                of_head = quantised(keys[head], table)
            logits = (of_head @ q * shape.scale).tolist()
            sizes = [math.exp(logit - max(logits)) for logit in logits]
            weights = evicted([size / sum(sizes) for size in sizes], tau)
            total = sum(weights) if renormalise else 1.0
            heads.append(torch.tensor(weights, dtype=torch.float64) / total @ values[head].double())
        rows.append(torch.stack(heads))
    return torch.stack(rows)


class Decoded:
    """One decode step of all rows by policy hcattention, over a pool with codes as a server writes them."""

    def __init__(self, requests: Requests, codebook: Path | None, tau: float, renormalise: bool = True) -> None:
        options = HCAttentionOptions(tau=tau, codebook=str(codebook or "none"), renormalise=renormalise)
        config = HybridConfig(policy="hcattention", sections={"hcattention": options})
        cache, shape = requests.cache, requests.shape
        kv_shape = KVShape(1, shape.heads, shape.dim, shape.value_dim, shape.dtype.itemsize)
        self.codes = KeyCodes(code_bytes(config, kv_shape), 1, cache.keys.shape[0], shape.heads, T, "cpu")
        part = ModelPart(lambda: identity(shape), slice(None))
        self.attention = TorchAttention(config, len(requests.lengths), 1, codes=self.codes, model=part)
        requests.write_all()
        self.codes.refresh(0, cache.keys, torch.arange(cache.keys.shape[0]))
        self.shares: list[float] = []
        self.attention.policy.on_ratio = lambda _layer, share: self.shares.append(share)
        batch = requests.decode_batch()
        self.attention.begin_decode(batch)
        self.out = self.attention.decode(
            requests.last_queries(), replace(cache, codes=self.codes.of_layer(0)), batch, shape.scale
        )


@settings(max_examples=10)
@given(SEEDS, st.sampled_from([2, 4, 8]), st.sampled_from([3, 300]), st.booleans(), st.sampled_from([0.3, 0.9, 1.0]))
def test_a_step_is_what_the_papers_equations_give(
    tmp_path_factory: pytest.TempPathFactory, seed: int, groups: int, centroids: int, shared: bool, tau: float
) -> None:
    requests = Requests(LENGTHS, SHAPE, seed)
    codebooks = some_codebooks(SHAPE, groups, centroids, shared, seed)
    file = tmp_path_factory.mktemp("codebooks") / "some.safetensors"
    codebooks.save(file)
    requests.assert_close(Decoded(requests, file, tau).out, attention_of_paper(requests, codebooks, tau))


@settings(max_examples=10)
@given(SEEDS, st.sampled_from([0.3, 0.9]), st.booleans())
def test_with_whole_keys_only_tokens_beyond_the_mass_are_left_out(seed: int, tau: float, renormalise: bool) -> None:
    requests = Requests(LENGTHS, SHAPE, seed)
    decoded = Decoded(requests, None, tau, renormalise)
    requests.assert_close(decoded.out, attention_of_paper(requests, None, tau, renormalise))
    assert 0 < decoded.shares[0] < 1


@pytest.mark.parametrize("dtype", CLOSE)
def test_whole_keys_and_all_of_the_mass_are_full_attention(dtype: torch.dtype) -> None:
    requests = Requests([*LENGTHS, 9 * T + 17], replace(SHAPE, dtype=dtype), seed=5)
    decoded = Decoded(requests, None, tau=1.0)
    requests.assert_close(decoded.out, requests.full_attention())


def test_weights_that_are_not_renormalised_add_up_to_the_mass_that_is_kept() -> None:
    requests = Requests([3 * T], SHAPE, seed=1)
    for values in requests.row_values:
        values.fill_(1.0)
    out = Decoded(requests, None, tau=0.5, renormalise=False).out
    assert (out >= 0.5 - 1e-5).all() and (out < 0.9).all()
    torch.testing.assert_close(Decoded(requests, None, tau=0.5).out, torch.ones_like(out))


def test_equal_weights_are_kept_in_the_order_of_their_tokens() -> None:
    requests = Requests([2 * T], SHAPE, seed=2)
    for keys, values in zip(requests.row_keys, requests.row_values, strict=True):
        keys.zero_()
        values.copy_(torch.arange(2.0 * T)[None, :, None].expand_as(values))
    out = Decoded(requests, None, tau=0.25).out
    torch.testing.assert_close(out, torch.full_like(out, sum(range(T // 2)) / (T // 2)))


# -- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("centroids", "index"), [(256, torch.uint8), (257, torch.int16), (8192, torch.int16)])
def test_an_index_takes_one_byte_up_to_256_centroids_and_two_above(centroids: int, index: torch.dtype) -> None:
    codebooks = some_codebooks(SHAPE, 4, centroids, shared=True)
    codebooks.layers[0][:, 0, -1] = 100.0  # this centroid is far from all others
    keys = codebooks.part(slice(None), "cpu")
    codes = keys.encode(0, torch.full((1, SHAPE.heads, 1, SHAPE.dim), 90.0))
    assert codes.dtype == torch.uint8 and codes.shape == (1, SHAPE.heads, 1, codebooks.facts.code_bytes)
    assert codebooks.facts.code_bytes == 4 * index.itemsize
    assert (keys.indices(codes) == centroids - 1).all()


def test_keys_are_encoded_alike_one_by_one_and_by_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_hybrid.policies.hcattention import codebooks as module

    keys = torch.randn(5, SHAPE.heads, T, SHAPE.dim, generator=seeded(3))
    encoder = some_codebooks(SHAPE, 4, 50, shared=False).part(slice(None), "cpu")
    whole = encoder.encode(0, keys)
    monkeypatch.setattr(module, "_AT_A_TIME", 1)
    assert torch.equal(encoder.encode(0, keys), whole)
    codes = KeyCodes(4, 1, 5, SHAPE.heads, T, "cpu")
    codes.use(encoder)
    pages, offsets = torch.tensor([4, 4, 1]), torch.tensor([0, 1, T - 1])
    codes.write(0, pages, offsets, keys[pages, :, offsets])
    assert torch.equal(codes.of_layer(0)[pages, :, offsets], whole[pages, :, offsets])
    assert codes.of_layer(0).count_nonzero() <= 3 * SHAPE.heads * 4


def test_a_rank_has_the_codebooks_of_its_own_heads(tmp_path: Path) -> None:
    whole = some_codebooks(SHAPE, 2, 20, shared=False, layers=2)
    whole.save(tmp_path / "file")
    part = load_codebooks(tmp_path / "file").part(slice(1, 2), "cpu")
    for layer in range(2):
        assert torch.equal(part.tables(layer), whole.layers[layer][1:2].float())
    keys = torch.randn(3, 2, 1, SHAPE.dim, generator=seeded(0))
    assert torch.equal(part.encode(1, keys[:, 1:]), whole.part(slice(None), "cpu").encode(1, keys)[:, 1:])


# -- files -------------------------------------------------------------------------------------------------------------


def policy_of(codebook: Path | str, model: ModelIdentity) -> HCAttention:
    config = load_config(None, ["policy=hcattention", f"hcattention.codebook={codebook}"])
    codes = KeyCodes(4, 1, 2, SHAPE.heads, T, "cpu")
    made = TorchAttention(config, 1, 1, codes=codes, model=ModelPart(lambda: model, slice(None))).policy
    assert isinstance(made, HCAttention)
    return made


def test_codebooks_of_another_model_are_refused_with_both_values(tmp_path: Path) -> None:
    file = tmp_path / "file"
    some_codebooks(SHAPE, 4, 16, shared=True).save(file)
    policy_of(file, identity(SHAPE))
    other = msgspec.structs.replace(identity(SHAPE), hidden=64)
    with pytest.raises(
        CodebookError, match=rf"hcattention.codebook={file}: made for .* hidden: codebooks 48, served 64"
    ):
        policy_of(file, other)
    with pytest.raises(CodebookError, match=r"norms have 1\.0000, served 3\.0000; sglang-hybrid profile --codebook"):
        policy_of(file, msgspec.structs.replace(identity(SHAPE), weights=[3.0, 0.5]))


def test_files_that_are_no_codebooks_are_refused(tmp_path: Path) -> None:
    garbage, bare, short = tmp_path / "garbage", tmp_path / "bare", tmp_path / "short"
    garbage.write_bytes(b"\xff" * 64)
    save_file({"a": torch.zeros(1)}, bare)
    codebooks = some_codebooks(SHAPE, 4, 16, shared=True)
    Codebooks(codebooks.facts, [codebooks.layers[0][:, :, :3]]).save(short)
    cases = [
        (tmp_path / "gone", "no such file"),
        (garbage, "cannot be read"),
        (bare, "holds no"),
        (short, "damaged"),
    ]
    for file, reason in cases:
        with pytest.raises(CodebookError, match=reason):
            policy_of(file, identity(SHAPE))


def test_a_pool_without_codes_is_refused() -> None:
    with pytest.raises(PolicyError, match="set policy=hcattention from the start"):
        TorchAttention(HybridConfig(policy="hcattention"), 1, 1)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "groups", "centroids", "percent"),
    [(128, None, 0, 50.0), (128, 64, 8192, 25.0), (128, 32, 8192, 12.5), (64, 32, 4096, 25.0), (64, 32, 256, 12.5)],
)
def test_the_device_holds_the_percentage_of_the_kv_cache_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int, groups: int | None, centroids: int, percent: float
) -> None:
    """Table 1a of the paper: 50 % with whole keys, 25 % and 12.5 % with 64 and 32 groups of 128 channels."""
    from sglang_hybrid.integration.host_kv_pool import HostKVPool

    shape = Shape(heads=2, group=1, dim=head_dim, value_dim=head_dim, dtype=torch.bfloat16)
    given = ["policy=hcattention"]
    if groups:
        some_codebooks(shape, groups, centroids, shared=True, layers=3).save(tmp_path / "file")
        given.append(f"hcattention.codebook={tmp_path / 'file'}")
    config = load_config(None, given)
    kv_shape = KVShape(layers=3, kv_heads=2, key_dim=head_dim, value_dim=head_dim, itemsize=2)
    told = 100 * page_bytes(config, kv_shape, "cuda").total / (BLOCK_TOKENS * kv_shape.bytes_per_token)
    assert told == percent
    assert f" {percent:g} % of " in describe(config)

    monkeypatch.setenv("SGLANG_HYBRID_CONFIG", "")
    monkeypatch.setenv("SGLANG_HYBRID_SET", json.dumps(given))
    pool = HostKVPool(
        320, page_size=T, dtype=torch.bfloat16, head_num=2, head_dim=head_dim, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    assert pool.digests is None and pool.sketches is None and pool.codes is not None
    cached = sum(buffer.nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
    assert 100 * pool.codes.nbytes / cached == percent


def test_codebooks_for_another_head_dim_are_refused_before_there_is_a_pool(tmp_path: Path) -> None:
    some_codebooks(SHAPE, 4, 16, shared=True).save(tmp_path / "file")
    config = load_config(None, ["policy=hcattention", f"hcattention.codebook={tmp_path / 'file'}"])
    with pytest.raises(CodebookError, match="head_dim: codebooks 8, served 128"):
        code_bytes(config, KVShape(layers=1, kv_heads=2, key_dim=128, value_dim=128, itemsize=2))
