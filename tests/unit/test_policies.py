"""Decode policies and chunked prefill over a paged host pool, against softmax attention over each row's tokens."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from attention_oracle import attention_over_blocks, causal_attention, seeded, softmax_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.backend import HybridAttention, PrefillBatch
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.memory.digests import Digests
from sglang_hybrid.memory.pages import page_table, touched_pages
from sglang_hybrid.misses.reference import ReferenceMisses
from sglang_hybrid.ops.reference import NO_BLOCK
from sglang_hybrid.policies import create_policy
from sglang_hybrid.policies.base import DecodeBatch, LayerCache
from sglang_hybrid.policies.full import FullPolicy
from sglang_hybrid.policies.scout import ScoutPolicy

T = 32  # tokens per block
SEEDS = st.integers(0, 2**32 - 1)
HEADS = st.integers(1, 3)
GROUP = st.integers(1, 5)
DIM = st.sampled_from([8, 16])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# one token, both sides of a block boundary, and some blocks: rows of very different lengths in one batch
LENGTHS = st.one_of(st.sampled_from([1, 2, 31, 32, 33, 64, 65]), st.integers(1, 12 * T))
SEVERAL_LENGTHS = st.lists(LENGTHS, min_size=1, max_size=4)
# computed in float32, rounded to the query's dtype at the end
CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@dataclass(frozen=True)
class Shape:
    heads: int
    group: int
    dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return 1.2 * self.dim**-0.5  # not what torch would take by default


SHAPES = st.builds(Shape, heads=HEADS, group=GROUP, dim=DIM, value_dim=DIM, dtype=DTYPES)


class Requests:
    """Rows with random keys, values and queries, and a host pool that they are written to bit by bit.

    Everything that no token was written to is NaN: in the pool, and in the digests. Pages are
    in random order, and a row's table goes on with other rows' pages beyond the row's end.
    """

    def __init__(self, lengths: list[int], shape: Shape, seed: int, digest: str = "minmax") -> None:
        random, self.shape, self.lengths = seeded(seed), shape, lengths
        heads, longest = shape.heads, max(lengths)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random).to(shape.dtype)

        self.row_keys = [normal(heads, n, shape.dim) for n in lengths]
        self.row_values = [normal(heads, n, shape.value_dim) for n in lengths]
        self.row_queries = [self._as_part_of_qkv(normal, n) for n in lengths]

        counts = [-(-n // T) for n in lengths]
        pages = 1 + torch.randperm(sum(counts) + 2, generator=random)  # page 0 is for padding, two stay unused
        table = pages[torch.randint(0, len(pages), (len(lengths), -(-longest // T)), generator=random)]
        for row, own in enumerate(pages[: sum(counts)].split(counts)):
            table[row, : len(own)] = own
        self._req_to_token = (table[:, :, None] * T + torch.arange(T)).flatten(1).to(torch.int32)

        nan = float("nan")
        self._digests = Digests(digest, 1, len(pages) + 1, heads, shape.dim, shape.dtype, "cpu")
        self._digests.of_layer(0).fill_(nan)
        self.cache = LayerCache(
            torch.full((len(pages) + 1, heads, T, shape.dim), nan, dtype=shape.dtype),
            torch.full((len(pages) + 1, heads, T, shape.value_dim), nan, dtype=shape.dtype),
            self._digests.of_layer(0),
        )

    def _as_part_of_qkv(self, normal, tokens: int) -> torch.Tensor:
        """Queries ``[n, H * G, D]`` as a model makes them: one slice of a wider projection."""
        width = self.shape.heads * self.shape.group * self.shape.dim
        return normal(tokens, width + 24)[:, :width].unflatten(1, (-1, self.shape.dim))

    def write(self, row: int, first: int, last: int) -> None:
        """Put the row's tokens ``first`` to ``last`` into the pool, as the KV pool does."""
        slots = self._req_to_token[row, first:last].to(torch.int64)
        self.cache.keys[slots // T, :, slots % T] = self.row_keys[row][:, first:last].transpose(0, 1)
        self.cache.values[slots // T, :, slots % T] = self.row_values[row][:, first:last].transpose(0, 1)
        self._digests.refresh(0, self.cache.keys, *touched_pages(slots, T))

    def write_all(self) -> None:
        for row, length in enumerate(self.lengths):
            self.write(row, 0, length)

    def table(self, rows: list[int], longest: int) -> torch.Tensor:
        return page_table(self._req_to_token, torch.tensor(rows), longest, T)

    def decode_batch(self) -> DecodeBatch:
        everyone = list(range(len(self.lengths)))
        return DecodeBatch(self.table(everyone, max(self.lengths)), torch.tensor(self.lengths), self.lengths)

    def last_queries(self) -> torch.Tensor:
        return torch.stack([queries[-1] for queries in self.row_queries])

    def full_attention(self) -> torch.Tensor:
        """Of the last token of each row."""
        rows = zip(self.last_queries(), self.row_keys, self.row_values, strict=True)
        return torch.stack([softmax_attention(*row, self.shape.scale)[0] for row in rows])

    def assert_close(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        assert out.dtype == self.shape.dtype
        torch.testing.assert_close(out.double(), expected, **CLOSE[self.shape.dtype])


def test_the_configuration_names_the_policy():
    assert isinstance(create_policy(HybridConfig(policy="full")), FullPolicy)
    assert isinstance(create_policy(HybridConfig(policy="scout")), ScoutPolicy)


# Decode within the budget


@pytest.mark.parametrize(
    "config",
    [
        HybridConfig(policy="full"),
        HybridConfig(policy="scout", budget_tokens=12 * T),
        HybridConfig(policy="scout", budget_tokens=20 * T, sink_blocks=0, recent_blocks=0),
        HybridConfig(policy="scout", budget_tokens=12 * T, sink_blocks=4, recent_blocks=7, digest="mean"),
    ],
    ids=["full", "scout", "scout without always-in blocks", "scout with mean digests"],
)
@settings(max_examples=40)
@given(lengths=SEVERAL_LENGTHS, shape=SHAPES, seed=SEEDS)
def test_a_budget_that_holds_the_context_gives_full_attention(
    config: HybridConfig, lengths: list[int], shape: Shape, seed: int
):
    requests = Requests(lengths, shape, seed, config.digest)
    requests.write_all()
    out = create_policy(config).decode(requests.last_queries(), requests.cache, requests.decode_batch(), shape.scale)
    requests.assert_close(out, requests.full_attention())


# Decode with a budget below the context


def best_positions(requests: Requests, config: HybridConfig, row: int, head: int) -> tuple[set[int], set[int]]:
    """Blocks that are always in, and those that earned it, from the row's tokens: no digest, no table."""
    group, blocks = requests.shape.group, requests.row_keys[row][head].double().split(T)
    queries = requests.last_queries()[row, head * group : (head + 1) * group].double()
    if config.digest == "minmax":
        middles = torch.stack([(b.amax(dim=0) + b.amin(dim=0)) / 2 for b in blocks])
        radii = torch.stack([(b.amax(dim=0) - b.amin(dim=0)) / 2 for b in blocks])
        estimates = queries @ middles.T + config.digest_spread * queries.abs() @ radii.T
    else:
        estimates = queries @ torch.stack([b.mean(dim=0) for b in blocks]).T
    shares = torch.softmax(estimates * requests.shape.scale, dim=1).sum(dim=0)
    newest = len(blocks) - 1 - config.recent_blocks
    always = {p for p in range(len(blocks)) if p >= newest or p < config.sink_blocks}
    others = sorted(set(range(len(blocks))) - always, key=lambda p: float(shares[p]), reverse=True)
    return always, set(others[: config.budget_tokens // T - len(always)])


@st.composite
def small_budgets(draw: st.DrawFn, digest: str) -> HybridConfig:
    sink, recent = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    blocks = sink + recent + 1 + draw(st.integers(0, 3))
    return HybridConfig(
        budget_tokens=blocks * T,
        sink_blocks=sink,
        recent_blocks=recent,
        digest=digest,
        digest_spread=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


@st.composite
def overflowing_requests(draw: st.DrawFn) -> tuple[HybridConfig, Requests]:
    """At least one row is longer than the budget; short ones may be beside it."""
    digest = draw(st.sampled_from(["minmax", "mean"]))
    # a mean is rounded to the pool's dtype: only in float32 does that leave the order of the blocks alone
    shape = draw(SHAPES if digest == "minmax" else SHAPES.map(lambda s: Shape(s.heads, s.group, s.dim, s.value_dim)))
    config = draw(small_budgets(digest))
    lengths = [config.budget_tokens + draw(st.integers(1, 6 * T)), *draw(st.lists(LENGTHS, max_size=3))]
    requests = Requests(draw(st.permutations(lengths)), shape, draw(SEEDS), digest)
    requests.write_all()
    return config, requests


@given(overflowing_requests())
def test_scout_is_softmax_over_exactly_the_blocks_within_the_budget(case: tuple[HybridConfig, Requests]):
    config, requests = case
    table, blocks = requests.decode_batch().page_table, []
    for row, length in enumerate(requests.lengths):
        blocks.append([])
        for head in range(requests.shape.heads):
            always, earned = best_positions(requests, config, row, head)
            blocks[row].append([(int(table[row, p]), min(T, length - p * T)) for p in sorted(always | earned)])
    expected, _ = attention_over_blocks(
        requests.last_queries(), requests.cache.keys, requests.cache.values, blocks, requests.shape.scale
    )
    out = ScoutPolicy(config, ReferenceMisses()).decode(
        requests.last_queries(), requests.cache, requests.decode_batch(), requests.shape.scale
    )
    requests.assert_close(out, expected)


@given(overflowing_requests())
def test_scout_tells_the_blocks_that_are_always_in_from_those_that_earned_it(case: tuple[HybridConfig, Requests]):
    config, requests = case
    batch = requests.decode_batch()
    policy = ScoutPolicy(config, ReferenceMisses())
    lists = policy.select(requests.last_queries(), requests.cache, batch, requests.shape.scale)
    for row, length in enumerate(requests.lengths):
        for head in range(requests.shape.heads):
            for found, positions in zip(lists, best_positions(requests, config, row, head), strict=True):
                pages, fill = found.ids[row, head].tolist(), found.fill[row, head].tolist()
                expected = [(int(batch.page_table[row, p]), min(T, length - p * T)) for p in sorted(positions)]
                assert list(zip(pages, fill, strict=True)) == expected + [(NO_BLOCK, 0)] * (len(pages) - len(expected))


# Prefill


@st.composite
def chunks(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """The row's tokens cut at arbitrary points."""
    cuts = draw(st.sets(st.integers(1, length), max_size=3))
    edges = sorted(cuts | {0, length})
    return list(itertools.pairwise(edges))


SHORT_LENGTHS = st.lists(st.one_of(st.sampled_from([1, 32, 33, 64]), st.integers(1, 70)), min_size=1, max_size=3)


def prefill(requests: Requests, attention: HybridAttention, spans: dict[int, tuple[int, int]]) -> list[torch.Tensor]:
    """One step: write the spans' tokens, then attend with their queries. The outputs of each row."""
    for row, span in spans.items():
        requests.write(row, *span)
    lengths, new = [last for _, last in spans.values()], [last - first for first, last in spans.values()]
    batch = PrefillBatch(requests.table(list(spans), max(lengths)), lengths, new)
    query = torch.cat([requests.row_queries[row][first:last] for row, (first, last) in spans.items()])
    return list(attention.prefill(query, requests.cache, batch, requests.shape.scale).split(new))


def causal(requests: Requests, row: int) -> torch.Tensor:
    return causal_attention(
        requests.row_queries[row], requests.row_keys[row], requests.row_values[row], requests.shape.scale
    )


@settings(max_examples=40)
@given(lengths=SHORT_LENGTHS, shape=SHAPES, seed=SEEDS, data=st.data())
def test_prefill_in_chunks_is_causal_softmax_over_the_whole_row(
    lengths: list[int], shape: Shape, seed: int, data: st.DataObject
):
    requests, attention = Requests(lengths, shape, seed), HybridAttention(HybridConfig())
    left = [data.draw(chunks(length)) for length in lengths]
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(left):
        # rows come in any combination, some pause while others go on
        waiting = [row for row, spans in enumerate(left) if spans]
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        parts = prefill(requests, attention, {row: left[row].pop(0) for row in chosen})
        for row, part in zip(chosen, parts, strict=True):
            outputs[row].append(part)
    for row, parts in enumerate(outputs):
        requests.assert_close(torch.cat(parts), causal(requests, row))


@pytest.mark.parametrize("policy", ["full", "scout"])
@settings(max_examples=15)
@given(prompts=SHORT_LENGTHS, shape=SHAPES, seed=SEEDS, steps=st.integers(1, 5))
def test_prefill_and_then_decode_is_causal_softmax_over_the_whole_row(
    policy: str, prompts: list[int], shape: Shape, seed: int, steps: int
):
    requests = Requests([n + steps for n in prompts], shape, seed)
    attention = HybridAttention(HybridConfig(policy=policy, budget_tokens=4 * T))
    rows = range(len(prompts))
    outputs = [[part] for part in prefill(requests, attention, {row: (0, prompts[row]) for row in rows})]
    for step in range(1, steps + 1):
        now = [n + step for n in prompts]
        for row in rows:
            requests.write(row, now[row] - 1, now[row])
        batch = DecodeBatch(requests.table(list(rows), max(now)), torch.tensor(now), now)
        query = torch.stack([requests.row_queries[row][now[row] - 1] for row in rows])
        out = attention.decode(query, requests.cache, batch, shape.scale)
        for row in rows:
            outputs[row].append(out[row : row + 1])
    for row in rows:
        requests.assert_close(torch.cat(outputs[row]), causal(requests, row))
