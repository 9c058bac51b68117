"""Policy hgca against the paper's Algorithms 1 and 2, token by token in float64, and against full attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from attention_oracle import softmax_attention
from decoding import CLOSE, Decoding, Life, Requests, Shape, Step, T
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.config import ConfigError, HybridConfig, load_config
from sglang_hybrid.core import BlockList, LayerCache
from sglang_hybrid.engines.torch import TorchAttention
from sglang_hybrid.memory.prompt_queries import PromptQueries
from sglang_hybrid.ops import reference_salience
from sglang_hybrid.ops.reference import NO_BLOCK
from sglang_hybrid.policies.full import FullPolicy
from sglang_hybrid.policies.hgca.options import HgcaOptions
from sglang_hybrid.policies.hgca.policy import HgcaPolicy
from sglang_hybrid.policies.hgca.rows import RowEntries
from sglang_hybrid.policies.hgca.window import Window, ring_positions
from sglang_hybrid.worker.miss_server import PendingAttention
from sglang_hybrid.worker.torch_attention import TorchMisses

SHAPE = Shape(heads=2, group=3, dim=8, value_dim=8)


class RecordedMisses(TorchMisses):
    def __init__(self) -> None:
        self.blocks: BlockList | None = None
        self.wakes = 0

    def post(
        self, query: torch.Tensor, cache: LayerCache, blocks: BlockList, scale: float, step: int
    ) -> PendingAttention:
        self.blocks = blocks
        return super().post(query, cache, blocks, scale, step)

    def wake(self) -> None:
        self.wakes += 1


# -- the paper's algorithms, one (request, KV head) at a time ---------------------------------


@dataclass
class Cache:
    """State that Algorithm 1 keeps for one KV head of one request. A token is its index in the request."""

    window: list[int] = field(default_factory=list)  # KV_gpu
    host: list[int] = field(default_factory=list)  # KV_cpu
    contextual: set[int] = field(default_factory=set)  # KV_ctx
    maw: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # A_maw, of the tokens of the window


class PlainHgca:
    """The algorithms as the paper's text describes them, with an l_max that may grow with the request."""

    def __init__(self, options: HgcaOptions, decoding: Decoding) -> None:
        self._options, self._decoding = options, decoding
        self._caches: dict[tuple[int, int], Cache] = {}

    def longest_window(self, tokens: int) -> int:
        """Return l_max: the window's number of blocks times the size of a block."""
        blocks = math.ceil(Fraction(str(self._options.window_ratio)) * math.ceil(Fraction(tokens, T)))
        return T * max(self._options.window_tokens // T, blocks)

    def _evicted(self, cache: Cache) -> list[int]:
        """Evict by line 11 until one more token fits in the window. Return the evicted tokens."""
        total = len(cache.host) + len(cache.window)
        over = len(cache.window) + 1 - self.longest_window(total + 1)
        count = max(0, math.ceil(over / T)) * T
        evicted, cache.window = cache.window[:count], cache.window[count:]
        return evicted

    def weights(self, request: int, head: int, query: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """Return the softmax over these tokens for each query head of the group: ``[group, tokens]``."""
        shape = self._decoding.requests.shape
        keys = self._decoding.requests.row_keys[request][head, tokens].double()
        group = query.unflatten(0, (shape.heads, shape.group))[head].double()
        return torch.softmax(group @ keys.T * shape.scale, dim=1)

    def append(self, request: int, head: int, prompt: int, query: torch.Tensor) -> None:
        """Add ``prompt`` tokens. Evicted tokens are re-evaluated with the whole host side (lines 19 to 22)."""
        cache = self._caches[request, head] = Cache(window=list(range(prompt)))
        cache.host = self._evicted(cache)
        if cache.host:
            weights = self.weights(request, head, query, cache.host).amax(dim=0)
            self._select(cache, cache.host, weights, self._options.beta / len(cache.host))
        cache.maw = self.weights(request, head, query, cache.window).amax(dim=0)

    def decode(self, request: int, head: int, token: int, query: torch.Tensor) -> tuple[set[int], set[int]]:
        """Decode one token. Return the attended tokens of the window, and those of the contextual set."""
        cache = self._caches[request, head]
        cache.window.append(token)
        attended = set(cache.window), set(cache.contextual)
        alpha, weights = self._options.alpha, self.weights(request, head, query, cache.window).amax(dim=0)
        cache.maw = (1 - alpha) * torch.nn.functional.pad(cache.maw, (0, 1)) + alpha * weights
        size = len(cache.window)
        evicted = self._evicted(cache)
        if evicted:
            averages, cache.maw = cache.maw.split((len(evicted), len(cache.maw) - len(evicted)))
            self._select(cache, evicted, averages, self._options.beta / size)
        cache.host += evicted
        return attended

    def _select(self, cache: Cache, tokens: list[int], weights: torch.Tensor, least: float) -> None:
        # the policy computes in float32: its rounding must not decide whether a token is selected
        assert least == 0 or (weights / least - 1).abs().min() > 1e-5
        cache.contextual |= {one for one, weight in zip(tokens, weights, strict=True) if weight > least}

    def output(self, request: int, head: int, query: torch.Tensor, tokens: set[int]) -> torch.Tensor:
        """Attend with one softmax over the tokens of the window and of the contextual set."""
        listed = sorted(tokens)
        values = self._decoding.requests.row_values[request][head, listed].double()
        return self.weights(request, head, query, listed) @ values


def posted_tokens(decoding: Decoding, misses: RecordedMisses, step: Step, row: int, head: int) -> set[int]:
    """Return the tokens of a posted list, as indices in their request."""
    assert misses.blocks is not None and misses.blocks.masks is not None
    table = decoding.requests.table([step.requests[row]], step.lengths[row])[0].tolist()
    ids, masks = misses.blocks.ids[row, head].tolist(), misses.blocks.masks[row, head].tolist()
    fill = misses.blocks.fill[row, head].tolist()
    listed = [page for page in ids if page != NO_BLOCK]
    assert ids == listed + [NO_BLOCK] * (len(ids) - len(listed))
    assert all(fill[i] == T and masks[i] != 0 for i in range(len(listed)))
    return {
        table.index(page) * T + t for page, mask in zip(listed, masks, strict=False) for t in range(T) if mask >> t & 1
    }


LIVES = [
    Life(0, 3 * T + 7, 0, 110),  # longer than the window from the beginning
    Life(1, 20, 3, 110),  # fits in the window at first
    Life(2, 5 * T, 10, 40),  # its first step opens a block
    Life(2, 4 * T + 31, 60, 50),  # another request under the same row number
]


@pytest.mark.parametrize("from_prompts", [True, False], ids=["prompts are known", "prompts came from elsewhere"])
@pytest.mark.parametrize(
    "options",
    [
        HgcaOptions(window_tokens=2 * T),
        HgcaOptions(window_tokens=3 * T, alpha=0.4, beta=0.5),
        HgcaOptions(window_tokens=2 * T, window_ratio=0.5, alpha=0.05),
        HgcaOptions(window_tokens=2 * T, window_ratio=0.75, beta=1.5),
        HgcaOptions(window_tokens=2 * T, alpha=1.0),
    ],
    ids=["two blocks", "three blocks, low beta", "half", "three quarters, high beta", "last weight"],
)
def test_decoding_follows_the_papers_algorithms_token_by_token(options: HgcaOptions, from_prompts: bool) -> None:
    decoding, misses = Decoding(LIVES, SHAPE, seed=7), RecordedMisses()
    prompts = PromptQueries(3)
    policy = HgcaPolicy(options, misses, prompts)
    ratios: list[float] = []
    policy.on_ratio = lambda _layer, ratio: ratios.append(ratio)
    plain = PlainHgca(options, decoding)
    salient = dropped = 0

    def check(step: Step) -> None:
        nonlocal salient, dropped
        shares = []
        for row, (request, length) in enumerate(zip(step.requests, step.lengths, strict=True)):
            query = step.queries[row]
            for head in range(SHAPE.heads):
                if step.fresh[row]:
                    asked = decoding.prompt_query(request) if from_prompts else query
                    plain.append(request, head, length - 1, asked)
                window, contextual = plain.decode(request, head, length - 1, query)
                assert posted_tokens(decoding, misses, step, row, head) == contextual
                expected = plain.output(request, head, query, window | contextual)
                out = step.out[row].unflatten(0, (SHAPE.heads, -1))[head]
                torch.testing.assert_close(out.double(), expected, **CLOSE[torch.float32])
                salient += len(contextual)
                dropped += length - len(window) - len(contextual)
                shares.append(len(contextual) / len(window))
        assert ratios.pop() == pytest.approx(sum(shares) / len(shares), abs=1e-6)

    decoding.run(policy, check, lambda _: False, prompts if from_prompts else None)
    assert salient > 1000 and dropped > 1000


# -- exact settings ----------------------------------------------------------------------------

EXACT = [
    HgcaOptions(window_tokens=16 * T),
    HgcaOptions(window_tokens=2 * T, window_ratio=1.0),
    HgcaOptions(window_tokens=2 * T, beta=0.0),
    HgcaOptions(window_tokens=2 * T, window_ratio=0.25, beta=0.0),
]


@pytest.mark.parametrize("options", EXACT, ids=["a large window", "ratio 1", "beta 0", "beta 0 and a ratio"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_above_the_context_or_a_beta_of_0_gives_full_attention(
    options: HgcaOptions, dtype: torch.dtype
) -> None:
    shape = Shape(heads=2, group=3, dim=8, value_dim=8, dtype=dtype)
    decoding, misses = Decoding(LIVES, shape, seed=3), RecordedMisses()
    requests, full = decoding.requests, FullPolicy()

    def check(step: Step) -> None:
        batch = requests.decode_batch(step.requests, step.lengths)
        exact = full.decode(step.queries, requests.cache, batch, shape.scale)
        requests.assert_close(step.out, exact.double())
        for row, (request, length) in enumerate(zip(step.requests, step.lengths, strict=True)):
            keys, values = (tokens[request][:, :length] for tokens in (requests.row_keys, requests.row_values))
            requests.assert_close(step.out[row], softmax_attention(step.queries[row], keys, values, shape.scale)[0])

    decoding.run(HgcaPolicy(options, misses, PromptQueries(3)), check, lambda _: False)
    assert (misses.wakes > 0) == (options.beta == 0)


def test_a_beta_of_0_takes_tokens_whose_weight_is_too_small_for_float32() -> None:
    requests = Requests([4 * T], SHAPE, seed=1)
    requests.row_keys[0][:, : 2 * T] *= -1000
    requests.write_all()
    misses = RecordedMisses()
    policy, batch = (
        HgcaPolicy(HgcaOptions(window_tokens=2 * T, beta=0.0), misses, PromptQueries(1)),
        requests.decode_batch(),
    )
    policy.begin_step(batch)
    policy.decode(requests.last_queries(), requests.cache, batch, SHAPE.scale)
    assert misses.blocks is not None and misses.blocks.masks is not None
    assert (misses.blocks.masks == -1).all() and misses.blocks.masks.shape == (1, 2, 2)


# -- rows --------------------------------------------------------------------------------------


def outputs_of(policy: HgcaPolicy, requests: Requests, rows: list[tuple[int, int]], lengths: list[int]) -> torch.Tensor:
    """Decode one step of (request, row number) pairs at these lengths. Return the outputs."""
    which, numbers = [request for request, _ in rows], [number for _, number in rows]
    batch = requests.decode_batch(which, lengths, numbers)
    queries = torch.stack([requests.row_queries[r][n - 1] for r, n in zip(which, lengths, strict=True)])
    policy.begin_step(batch)
    return policy.decode(queries, requests.cache, batch, requests.shape.scale)


def test_rows_that_share_pages_decode_as_they_do_alone() -> None:
    requests = Requests([12 * T], SHAPE, seed=5)
    requests.write_all()

    def new() -> HgcaPolicy:
        return HgcaPolicy(HgcaOptions(window_tokens=2 * T), TorchMisses(), PromptQueries(3))

    together, short, long = new(), new(), new()
    for step in range(2 * T):
        lengths = [5 * T + 3 + step, 8 * T + 20 + step]
        both = outputs_of(together, requests, [(0, 1), (0, 2)], lengths)
        torch.testing.assert_close(both[:1], outputs_of(short, requests, [(0, 1)], lengths[:1]))
        torch.testing.assert_close(both[1:], outputs_of(long, requests, [(0, 2)], lengths[1:]))


@pytest.mark.parametrize("how", ["reset", "another length"])
def test_a_row_that_starts_anew_decodes_as_if_it_had_never_been_there(how: str) -> None:
    requests = Requests([10 * T, 10 * T], SHAPE, seed=6)
    requests.write_all()
    used, new = (HgcaPolicy(HgcaOptions(window_tokens=2 * T), TorchMisses(), PromptQueries(2)) for _ in range(2))
    for step in range(40):
        outputs_of(used, requests, [(0, 0), (1, 1)], [5 * T + step, 6 * T + step])
    if how == "reset":
        used.reset_rows([1])
    first = 6 * T + 40 if how == "reset" else 4 * T
    for step in range(40):
        lengths = [5 * T + 40 + step, first + step]
        both = outputs_of(used, requests, [(0, 0), (0, 1)], lengths)
        torch.testing.assert_close(both[1:], outputs_of(new, requests, [(0, 1)], lengths[1:]))


def test_state_is_kept_for_rows_that_run_and_not_for_all_row_numbers() -> None:
    entries = RowEntries()
    for step in range(5000):  # two rows run at a time; after ten steps, rows with other numbers follow
        number = step // 10
        taken, fresh = entries.take([2 * number, 2 * number + 1], [step, step])
        assert len(set(taken)) == 2 and bool(fresh) == (step % 10 == 0)
    assert entries.capacity <= 32


def test_rows_that_run_keep_their_entries_however_many_come_and_go() -> None:
    entries = RowEntries()
    mine, fresh = entries.take([7], [10])
    assert fresh == [0]
    for step in range(1, 300):
        others = [1000 + step, 2000 + step]
        taken, fresh = entries.take([others[0], 7, others[1]], [5, 10 + step, 9])
        assert taken[1] == mine[0] and len(set(taken)) == 3 and fresh == [0, 2]


# -- parts -------------------------------------------------------------------------------------


@given(
    least=st.integers(2, 9),
    percent=st.integers(0, 100),
    count=st.integers(1, 400),
)
def test_no_block_returns_to_a_window_and_the_ring_has_a_slot_for_each(least: int, percent: int, count: int) -> None:
    window = Window(least, Fraction(percent, 100))
    first, slots = window.first(count), window.slots(count)
    assert first == max(0, count - max(least, math.ceil(percent * count / 100 - 1e-9)))
    assert 0 <= window.first(count + 1) - first <= 1
    positions = ring_positions(torch.tensor([first]), torch.tensor([count]), slots)[0]
    assert sorted(p for p in positions.tolist() if p != NO_BLOCK) == list(range(first, count))
    for slot, position in enumerate(positions.tolist()):
        if position != NO_BLOCK:
            assert int(window.slot_of(torch.tensor(position))) == slot


def test_every_bit_of_a_mask_stands_for_its_token() -> None:
    weights = torch.zeros(1, 1, T, T)
    for t in range(T):
        weights[0, 0, t, t] = 0.5  # in block t
    masks = reference_salience.salient_masks(weights, torch.tensor([0.4]))
    assert masks.dtype == torch.int32
    assert [mask & 0xFFFFFFFF for mask in masks[0, 0].tolist()] == [1 << t for t in range(T)]
    assert (reference_salience.salient_masks(weights, torch.tensor([0.5])) == 0).all()  # weights must exceed 0.5


def test_blocks_without_salient_tokens_are_not_listed() -> None:
    masks = torch.tensor([[[0, 5, 0, -1], [0, 0, 0, 0]], [[1, 0, 0, 0], [2, 3, 4, 0]]], dtype=torch.int32)
    positions, listed = reference_salience.list_masks(masks)
    assert positions.tolist() == [[[1, 3, -1], [-1, -1, -1]], [[0, -1, -1], [0, 1, 2]]]
    assert listed.tolist() == [[[5, -1, 0], [0, 0, 0]], [[1, 0, 0], [2, 3, 4]]]
    assert reference_salience.list_masks(masks[:, :, :1] * 0)[0].shape == (2, 2, 0)


# -- settings ----------------------------------------------------------------------------------


def test_settings_name_the_policy_and_its_window() -> None:
    config = load_config(None, ["policy=hgca", "hgca.window_tokens=128", "hgca.window_ratio=0.5", "hgca.beta=0.25"])
    options = HgcaOptions(window_tokens=128, window_ratio=0.5, beta=0.25)
    assert config.section(HgcaOptions) == options
    assert isinstance(TorchAttention(config, rows=1, layers=1).policy, HgcaPolicy)
    assert HybridConfig(policy="hgca").section(HgcaOptions) == HgcaOptions(window_tokens=4096, window_ratio=0, beta=1)


@pytest.mark.parametrize("given", ["window_tokens=100", "window_tokens=32", "window_ratio=1.5", "alpha=0", "beta=-1"])
def test_settings_out_of_range_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=given.partition("=")[0]):
        load_config(None, ["policy=hgca", f"hgca.{given}"])
