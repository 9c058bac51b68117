"""Policy infinigen against the equations of InfiniGen, one token at a time in float64."""

import dataclasses

import pytest
import torch
from attention_oracle import seeded, softmax_attention
from decoding import CLOSE, Decoding, Life, Requests, Shape, Step, T
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import BlockList, DecodeBatch, LayerCache
from sglang_hybrid.engines.torch import TorchAttention
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.full import FullPolicy
from sglang_hybrid.policies.infinigen import selection
from sglang_hybrid.policies.infinigen.options import InfinigenOptions, partial_columns
from sglang_hybrid.policies.infinigen.policy import InfinigenPolicy
from sglang_hybrid.policies.infinigen.skew import SkewSample, skew_of
from sglang_hybrid.policies.registry import calibrates_at_start, prediction_of

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.one_of(st.sampled_from([1, 2, 31, 32, 33, 64, 65]), st.integers(1, 12 * T))
SHAPES = st.builds(
    Shape,
    heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([8, 16]),
    value_dim=st.sampled_from([8, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
UNITS = st.sampled_from(["tokens", "blocks"])
EVERYTHING = 1e9


def orthogonal(heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    basis: torch.Tensor = torch.linalg.qr(torch.randn(heads, dim, dim, generator=seeded(seed))).Q
    return basis


def configured(budget: int = 2048, **options: object) -> HybridConfig:
    return HybridConfig(
        policy="infinigen", sections={"infinigen": options}, budget_tokens=budget, sink_blocks=0, recent_blocks=0
    )


class CodedRequests(Requests):
    """Requests with partial keys in a random basis. Partial keys of tokens that were not written are NaN too."""

    def __init__(self, lengths: list[int], shape: Shape, seed: int, ratio: float = 0.5) -> None:
        super().__init__(lengths, shape, seed)
        self.columns = partial_columns(ratio, shape.dim)
        self.basis = orthogonal(shape.heads, shape.dim, seed)
        self.codes = KeyCodes(2 * self.columns, 1, self.cache.keys.shape[0], shape.heads, T, "cpu")
        self.partial = PartialKeys([self.basis], self.columns, torch.bfloat16)
        self.codes.use(self.partial)
        self.codes.refresh(0, self.cache.keys, torch.arange(self.cache.keys.shape[0]))
        self.cache: LayerCache = dataclasses.replace(self.cache, codes=self.codes.of_layer(0))

    def write(self, row: int, first: int, last: int) -> None:
        super().write(row, first, last)
        self.codes.refresh(0, self.cache.keys, self._req_to_token[row, first:last].long().unique() // T)

    def policy(self, config: HybridConfig) -> InfinigenPolicy:
        policy = TorchAttention(config, rows=8, layers=1, codes=self.codes).policy
        assert isinstance(policy, InfinigenPolicy)
        return policy

    def speculated(self, row: int, query: torch.Tensor, length: int) -> torch.Tensor:
        """Return logits ``[KV heads, group, length - 1]`` in float64, from the paper's equation."""
        slots = self._req_to_token[row, : length - 1].long()
        keys = self.partial.decode(self.codes.of_layer(0))[slots // T, :, slots % T].double().transpose(0, 1)
        queries = query.double().unflatten(0, (self.shape.heads, -1)) @ self.basis[:, :, : self.columns].double()
        logits: torch.Tensor = queries @ keys.transpose(1, 2) * self.shape.scale
        return logits


def selected(logits: torch.Tensor, alpha: float, limit: int) -> list[list[int]]:
    """Return the tokens that the paper selects for each KV head, without the newest token.

    ``logits`` is ``[KV heads, group, n]``. Cases with logits that float32 cannot tell apart are discarded.
    """
    if logits.shape[2] == 0:
        return [[] for _ in logits]
    below = (logits - logits.amax(dim=2, keepdim=True)).amax(dim=1)
    counts = [sum(float(one) > -alpha for one in head) for head in below]
    number = min(sum(counts) // len(counts), limit - 1)
    ranked = below.sort(dim=1, descending=True)
    assume(float((below + alpha).abs().min()) > 1e-4)
    assume(all(number in (0, len(one)) or one[number - 1] - one[number] > 1e-4 for one in ranked.values))
    return [sorted(head[:number].tolist()) for head in ranked.indices]


def tokens_of(listed: BlockList, batch: DecodeBatch, row: int, head: int) -> list[int]:
    """Return the positions in the row of the tokens that are listed for a KV head."""
    counted = reference.is_counted(listed.fill, T, listed.masks)[row, head]
    blocks = -(-batch.lengths_on_host[row] // T)
    place = {int(page): number for number, page in enumerate(batch.page_table[row, :blocks].tolist())}
    pages = listed.ids[row, head].tolist()
    return sorted(T * place[page] + t for page, bits in zip(pages, counted, strict=True) if page >= 0
                  for t in bits.nonzero()[:, 0].tolist())  # fmt: skip


def last_token(policy: InfinigenPolicy, requests: Requests) -> torch.Tensor:
    requests.write_all()
    batch = requests.decode_batch()
    policy.begin_step(batch)
    return policy.decode(requests.last_queries(), requests.cache, batch, requests.shape.scale)


# -- the skew ----------------------------------------------------------------------------------------------------------


def test_skewed_queries_and_keys_have_the_same_products() -> None:
    random = seeded(1)
    queries, keys = (torch.randn(3, n, 16, generator=random, dtype=torch.float64) for n in (50, 20))
    skew = skew_of(queries, keys)
    torch.testing.assert_close((queries @ skew) @ (keys @ skew).transpose(1, 2), queries @ keys.transpose(1, 2))


def test_the_skew_has_the_singular_vectors_of_the_queries_in_the_order_of_their_sizes() -> None:
    random = seeded(2)
    queries, keys = (torch.randn(2, n, 8, generator=random, dtype=torch.float64) for n in (40, 30))
    skew = skew_of(queries, keys)
    for head in range(2):
        vectors = torch.linalg.svd(queries[head]).Vh.T
        # the same directions: each column is one of the singular vectors, or its opposite
        assert torch.allclose((vectors.T @ skew[head]).abs().sort(dim=0).values[-1], torch.ones(8).double())
        sizes = (queries[head] @ skew[head]).abs().mean(dim=0) + (keys[head] @ skew[head]).abs().mean(dim=0)
        assert sizes.tolist() == sorted(sizes.tolist(), reverse=True)


def test_few_columns_of_skewed_keys_tell_more_than_as_many_channels() -> None:
    random = seeded(3)
    # queries have a few directions, as in trained models
    directions = torch.randn(4, 32, generator=random)
    queries = torch.randn(300, 2, 4, generator=random) @ directions + 0.1 * torch.randn(300, 2, 32, generator=random)
    keys = torch.randn(300, 1, 32, generator=random)
    sample = SkewSample()
    sample.add(queries[:200], keys[:200])
    skew = sample.skew()
    assert torch.allclose(skew[0].T @ skew[0], torch.eye(32), atol=1e-5)
    unseen, exact = queries[200:].flatten(0, 1), queries[200:].flatten(0, 1) @ keys[:, 0].T

    def error(basis: torch.Tensor) -> float:
        return float(((unseen @ basis[:, :8]) @ (keys[:, 0] @ basis[:, :8]).T - exact).norm() / exact.norm())

    assert error(skew[0]) < 0.3 < error(torch.eye(32))


def test_a_text_that_is_shorter_than_the_head_has_a_skew_too() -> None:
    sample = SkewSample()
    sample.add(torch.randn(3, 2, 16), torch.randn(3, 1, 16))
    assert torch.allclose(sample.skew()[0].T @ sample.skew()[0], torch.eye(16), atol=1e-5)


@pytest.mark.parametrize(("ratio", "dim", "columns"), [(0.3, 64, 20), (0.3, 128, 40), (1, 64, 64), (0.01, 64, 4)])
def test_a_share_of_the_columns_is_kept(ratio: float, dim: int, columns: int) -> None:
    assert partial_columns(ratio, dim) == columns


def test_partial_keys_are_the_first_columns_in_the_basis_and_partial_queries_too() -> None:
    basis, keys = orthogonal(2, 16), torch.randn(5, 2, T, 16)
    partial = PartialKeys([basis], 8, torch.float16)
    kept = partial.decode(partial.encode(0, keys))
    assert kept.shape == (5, 2, T, 8)
    torch.testing.assert_close(kept.float(), keys @ basis[:, :, :8], rtol=1e-3, atol=1e-3)
    queries = torch.randn(3, 6, 16)
    expected = queries.view(3, 2, 3, 16) @ basis[:, :, :8]
    torch.testing.assert_close(partial.queries(0, queries), expected)


def test_all_columns_have_the_products_of_queries_and_keys() -> None:
    partial = PartialKeys([torch.eye(16).expand(2, -1, -1)], 16, torch.float16)
    held, basis = partial.basis(0), orthogonal(2, 16)
    partial.choose([basis])
    assert torch.equal(held, basis)
    keys, queries = torch.randn(1, 2, T, 16), torch.randn(1, 4, 16)
    kept = partial.decode(partial.encode(0, keys)).float()
    logits = torch.einsum("bhgc,bhtc->bhgt", partial.queries(0, queries), kept)
    torch.testing.assert_close(logits, queries.view(1, 2, 2, 16) @ keys.transpose(2, 3), rtol=1e-2, atol=1e-2)


# -- selection ---------------------------------------------------------------------------------------------------------


def test_all_heads_get_as_many_tokens_as_they_want_on_average() -> None:
    # two KV heads with one query head each
    logits = torch.tensor([[[0.0, -1.0, -9.0, -9.5]], [[3.0, 2.9, 2.8, 2.7]]])[None]
    below = selection.below_best(torch.nn.functional.pad(logits, (0, 1)), torch.tensor([5]))
    chosen = selection.choose(below, torch.tensor([5]), alpha=4.0, limit=100)
    # the heads want 2 and 4 tokens, so that each gets its best 3, and the newest
    assert chosen[0].tolist() == [[True, True, True, False, True], [True, True, True, False, True]]
    limited = selection.choose(below, torch.tensor([5]), alpha=4.0, limit=2)
    assert limited[0].tolist() == [[True, False, False, False, True]] * 2


def test_every_query_head_of_a_group_compares_with_its_own_best() -> None:
    logits = torch.tensor([[[[100.0, 1.0, 50.0], [0.0, 5.0, 1.5]]]])
    below = selection.below_best(torch.nn.functional.pad(logits, (0, 1)), torch.tensor([4]))
    assert below[0, 0, :3].tolist() == [0.0, 0.0, -3.5]
    assert below[0, 0, 3] == -torch.inf


def test_the_limit_holds_with_the_newest_token_for_rows_of_any_length() -> None:
    below = torch.randn(3, 2, 64, generator=seeded(4)).clamp(max=0)
    lengths = torch.tensor([1, 40, 64])
    chosen = selection.choose(below.masked_fill(torch.arange(64) >= lengths[:, None, None], -torch.inf), lengths, 9, 32)
    assert chosen.sum(dim=2).tolist() == [[1, 1], [32, 32], [32, 32]]
    assert all(chosen[row, :, length - 1].all() for row, length in enumerate(lengths.tolist()))


@settings(max_examples=60)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    shape=SHAPES,
    alpha=st.sampled_from([0.5, 2.0, 4.0]),
    budget=st.sampled_from([T, 3 * T]),
    seed=SEEDS,
)
def test_the_tokens_of_the_papers_equations_are_attended(
    lengths: list[int], shape: Shape, alpha: float, budget: int, seed: int
) -> None:
    requests = CodedRequests(lengths, shape, seed)
    requests.write_all()
    batch, query = requests.decode_batch(), requests.last_queries()
    policy = requests.policy(configured(budget, alpha=alpha))
    listed = policy.select(query, requests.cache, batch, shape.scale)
    out = policy.decode(query, requests.cache, batch, shape.scale)
    for row, length in enumerate(lengths):
        logits = requests.speculated(row, query[row], length)
        for head, expected in enumerate(selected(logits, alpha, budget)):
            found = tokens_of(listed, batch, row, head)
            assert found == [*expected, length - 1]
            assert len(found) <= budget
            keys, values = (rows[row][head : head + 1, found] for rows in (requests.row_keys, requests.row_values))
            asked = query[row].unflatten(0, (shape.heads, -1))[head]
            attended = out[row].unflatten(0, (shape.heads, -1))[head].double()
            torch.testing.assert_close(
                attended, softmax_attention(asked, keys, values, shape.scale)[0], **CLOSE[shape.dtype]
            )


def test_blocks_are_chosen_by_their_best_token() -> None:
    shape = Shape(heads=2, group=2, dim=16, value_dim=16)
    length, budget, alpha = 9 * T + 5, 4 * T, 3.0
    requests = CodedRequests([length], shape, seed=5)
    requests.write_all()
    batch, query = requests.decode_batch(), requests.last_queries()
    listed = requests.policy(configured(budget, alpha=alpha, unit="blocks")).select(
        query, requests.cache, batch, shape.scale
    )
    logits = requests.speculated(0, query[0], length)
    below = (logits - logits.amax(dim=2, keepdim=True)).amax(dim=1)
    best = below[:, : 9 * T].unflatten(1, (9, T)).amax(dim=2)
    number = min(int((best > -alpha).sum()) // 2, budget // T - 1)
    for head in range(2):
        blocks = {token // T for token in tokens_of(listed, batch, 0, head)}
        assert blocks == {*best[head].topk(number).indices.tolist(), 9}
    assert listed.masks is None


# -- decode ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=4), shape=SHAPES, unit=UNITS, seed=SEEDS)
def test_with_a_budget_that_holds_the_context_and_a_large_alpha_attention_is_full(
    lengths: list[int], shape: Shape, unit: str, seed: int
) -> None:
    requests = CodedRequests(lengths, shape, seed)
    out = last_token(requests.policy(configured(13 * T, alpha=EVERYTHING, unit=unit)), requests)
    requests.assert_close(out, requests.full_attention())
    full = FullPolicy().decode(requests.last_queries(), requests.cache, requests.decode_batch(), shape.scale)
    torch.testing.assert_close(out, full, **CLOSE[shape.dtype])


@pytest.mark.parametrize("unit", ["tokens", "blocks"])
def test_selection_is_by_the_predicted_query_and_attention_by_the_real_one(unit: str) -> None:
    shape, budget = Shape(heads=2, group=2, dim=16, value_dim=16), 2 * T
    plan = [Life(number=3, prompt=5 * T - 2, first=0, steps=5), Life(number=1, prompt=70, first=1, steps=40)]
    decoding = Decoding(plan, shape, seed=6)
    requests = decoding.requests = CodedRequests([life.prompt + life.steps for life in plan], shape, seed=6)
    policy = requests.policy(configured(budget, unit=unit))
    seen = []

    def check(step: Step) -> None:
        batch = requests.decode_batch(step.requests, step.lengths)
        asked = step.queries if step.guesses is None else step.guesses
        listed = policy.select(asked, requests.cache, batch, shape.scale)
        for row, request in enumerate(step.requests):
            for head in range(shape.heads):
                tokens = tokens_of(listed, batch, row, head)
                keys, values = (of[request][head : head + 1, tokens] for of in (requests.row_keys, requests.row_values))
                query = step.queries[row].unflatten(0, (shape.heads, -1))[head]
                expected = softmax_attention(query, keys, values, shape.scale)[0]
                found = step.out[row].unflatten(0, (shape.heads, -1))[head].double()
                torch.testing.assert_close(found, expected, **CLOSE[shape.dtype])
                seen.append(len(tokens))

    decoding.run(policy, check, predicted=lambda step: step % 3 != 2)
    assert max(seen) <= budget


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_pool_without_partial_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="start with policy=infinigen"):
        TorchAttention(configured(), rows=1, layers=1)


def test_prediction_is_raw_unless_it_is_named_and_the_skew_is_calibrated_where_servers_calibrate() -> None:
    default = configured()
    assert default.section(InfinigenOptions).unit == "tokens"
    assert prediction_of(default, is_calibrated=True) == "raw"
    assert calibrates_at_start(default, on_gpu=True)
    assert not calibrates_at_start(default, on_gpu=False)
    for prediction in ("none", "raw", "calibrated"):
        asked = HybridConfig(policy="infinigen", profile="auto", prediction=prediction)
        assert calibrates_at_start(asked, on_gpu=False)
        assert prediction_of(asked, is_calibrated=True) == prediction
    assert not calibrates_at_start(HybridConfig(policy="infinigen", profile="none"), on_gpu=True)
