"""The reference operations against their definitions: brute force, and softmax attention in float64."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from attention_oracle import Tolerance, attention_over_blocks, causal_attention, seeded
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_hybrid.ops import reference
from sglang_hybrid.ops.reference import NO_BLOCK

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
GARBAGE = st.sampled_from([float("nan"), float("inf"), float("-inf")])
SEEDS = st.integers(0, 2**32 - 1)
ROWS = st.integers(1, 4)
HEADS = st.integers(1, 4)
GROUP = st.integers(1, 5)
DIM = st.sampled_from([8, 16, 64])
BLOCK_TOKENS = st.sampled_from([1, 4, 8, 32])
BLOCKS = st.integers(1, 12)
SCALES = st.sampled_from([0.125, 0.3, 0.5])

# For inputs of any dtype and computation in float32: only float32's rounding differs from float64.
CLOSE: Tolerance = {"rtol": 1e-4, "atol": 2e-5}
# For results that are rounded to the input's dtype.
ROUNDED: dict[torch.dtype, Tolerance] = {
    torch.float32: CLOSE,
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    integer = {2: torch.int16, 4: torch.int32}[actual.itemsize]
    assert torch.equal(actual.view(integer), expected.view(integer))


# Prediction


@given(SEEDS, st.lists(st.integers(1, 4), max_size=2), DIM, DTYPES, st.sampled_from([0.0, 1e-6, 0.1]))
def test_rms_unit_divides_by_the_root_of_the_mean_square(
    seed: int, shape: list[int], dim: int, dtype: torch.dtype, eps: float
) -> None:
    x = (3 * torch.randn(*shape, dim, generator=seeded(seed))).to(dtype)
    unit = reference.rms_unit(x, eps)
    assert (unit.dtype, unit.shape) == (torch.float32, x.shape)
    expected = x.double() / (x.double().square().mean(dim=-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(unit.double(), expected, **CLOSE)


def test_rms_unit_of_zeros_is_zero_and_of_large_half_precision_inputs_is_finite() -> None:
    assert not reference.rms_unit(torch.zeros(2, 8), 1e-6).any()
    # squares of these inputs exceed float16
    assert torch.equal(reference.rms_unit(torch.full((1, 8), 6e4, dtype=torch.float16), 1e-6), torch.ones(1, 8))


@dataclass(frozen=True)
class Rotation:
    heads: torch.Tensor  # [n, heads, D]
    angles: torch.Tensor  # [n, R / 2]
    neox: bool

    def rotate(self) -> torch.Tensor:
        return reference.rotate(self.heads, torch.cat((self.angles.cos(), self.angles.sin()), dim=1), self.neox)

    def pair(self, number: int) -> tuple[int, int]:
        half = self.angles.shape[1]
        return (number, number + half) if self.neox else (2 * number, 2 * number + 1)


@st.composite
def rotations(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype] = DTYPES) -> Rotation:
    tokens, heads, dim, random = draw(ROWS), draw(HEADS), draw(DIM), seeded(draw(SEEDS))
    pairs = draw(st.sampled_from([1, dim // 4, dim // 2]))  # some of the channels rotate, or all of them
    content = torch.randn(tokens, heads, dim, generator=random).to(draw(dtypes))
    return Rotation(content, 10 * torch.randn(tokens, pairs, generator=random), draw(st.booleans()))


@given(rotations())
def test_rotation_turns_each_pair_of_channels_as_a_complex_number_and_leaves_the_rest(case: Rotation) -> None:
    rotated = case.rotate()
    assert rotated.dtype == case.heads.dtype
    expected = case.heads.double()
    for number in range(case.angles.shape[1]):
        a, b = case.pair(number)
        before = torch.complex(case.heads[..., a].double(), case.heads[..., b].double())
        angle = case.angles[:, number].double()[:, None]
        after = before * torch.polar(torch.ones_like(angle), angle)
        expected[..., a], expected[..., b] = after.real, after.imag
    torch.testing.assert_close(rotated.double(), expected, **ROUNDED[case.heads.dtype])
    untouched = slice(2 * case.angles.shape[1], None)
    assert torch.equal(rotated[..., untouched], case.heads[..., untouched])


@given(rotations(st.just(torch.float32)))
def test_rotation_keeps_lengths_and_is_undone_by_the_opposite_one(case: Rotation) -> None:
    rotated = case.rotate()
    torch.testing.assert_close(rotated.norm(dim=2), case.heads.norm(dim=2), **CLOSE)
    torch.testing.assert_close(Rotation(rotated, -case.angles, case.neox).rotate(), case.heads, **CLOSE)


@given(rotations())
def test_rotation_leaves_its_input_alone(case: Rotation) -> None:
    before = case.heads.clone()
    case.rotate()
    assert torch.equal(case.heads, before)


# Digests


@dataclass(frozen=True)
class Pages:
    keys: torch.Tensor  # [n, H, T, D], garbage beyond filled
    filled: torch.Tensor  # [n]

    def of(self, page: int) -> torch.Tensor:
        """Return the keys of a page up to its fill, ``[H, filled, D]``."""
        return self.keys[page, :, : int(self.filled[page])]


@st.composite
def partly_filled_pages(draw: st.DrawFn) -> Pages:
    pages, tokens, random = draw(BLOCKS), draw(BLOCK_TOKENS), seeded(draw(SEEDS))
    keys = torch.randn(pages, draw(HEADS), tokens, draw(DIM), generator=random).to(draw(DTYPES))
    filled = torch.randint(1, tokens + 1, (pages,), generator=random)
    beyond = torch.arange(tokens) >= filled[:, None]
    return Pages(keys.masked_fill(beyond[:, None, :, None], draw(GARBAGE)), filled)


@given(partly_filled_pages())
def test_the_minmax_digest_is_the_maximum_then_the_minimum_of_the_keys_that_count(pages: Pages) -> None:
    digest = reference.minmax_digest(pages.keys, pages.filled)
    assert digest.dtype == pages.keys.dtype
    for page, built in enumerate(digest):
        assert torch.equal(built[:, 0], pages.of(page).amax(dim=1))
        assert torch.equal(built[:, 1], pages.of(page).amin(dim=1))


@dataclass(frozen=True)
class Scored:
    query: torch.Tensor  # [B, H * G, D]
    keys: torch.Tensor  # [B, N, H, T, D]
    filled: torch.Tensor  # [B, N]

    def digests(self, build: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        built: torch.Tensor = build(self.keys.flatten(0, 1), self.filled.flatten()).unflatten(0, self.filled.shape)
        return built

    def each_query_and_block(self) -> Iterator[tuple[tuple[int, int, int], torch.Tensor, torch.Tensor]]:
        """Yield (row, KV head, block), the head's G queries and the block's keys, in float64."""
        rows, blocks, heads, _, dim = self.keys.shape
        queries = self.query.double().reshape(rows, heads, -1, dim)
        for row in range(rows):
            for head in range(heads):
                for block in range(blocks):
                    keys = self.keys[row, block, head, : int(self.filled[row, block])].double()
                    yield (row, head, block), queries[row, head], keys


@st.composite
def queries_and_blocks(draw: st.DrawFn) -> Scored:
    rows, heads, group, dim, tokens = (draw(s) for s in (ROWS, HEADS, GROUP, DIM, BLOCK_TOKENS))
    blocks, dtype, random = draw(BLOCKS), draw(DTYPES), seeded(draw(SEEDS))
    return Scored(
        query=torch.randn(rows, heads * group, dim, generator=random).to(dtype),
        keys=torch.randn(rows, blocks, heads, tokens, dim, generator=random).to(dtype),
        filled=torch.randint(1, tokens + 1, (rows, blocks), generator=random),
    )


SPREADS = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(queries_and_blocks(), SPREADS)
def test_a_minmax_estimate_is_the_middle_plus_the_spread_times_what_the_rest_can_add(
    case: Scored, spread: float
) -> None:
    logits = reference.digest_logits(case.query, case.digests(reference.minmax_digest), spread)
    expected = torch.empty_like(logits, dtype=torch.float64)
    for (row, head, block), queries, keys in case.each_query_and_block():
        middle, radius = (keys.amax(dim=0) + keys.amin(dim=0)) / 2, (keys.amax(dim=0) - keys.amin(dim=0)) / 2
        expected[row, head, :, block] = queries @ middle + spread * queries.abs() @ radius
    torch.testing.assert_close(logits.double(), expected, **CLOSE)


@given(queries_and_blocks())
def test_no_token_of_a_block_beats_the_minmax_estimate_with_full_spread(case: Scored) -> None:
    logits = reference.digest_logits(case.query, case.digests(reference.minmax_digest), spread=1.0)
    for (row, head, block), queries, keys in case.each_query_and_block():
        best = (queries @ keys.T).amax(dim=1)
        assert (logits[row, head, :, block] >= best - 1e-4 * (1 + best.abs())).all()
        if len(keys) == 1:  # one token: nothing to overestimate
            torch.testing.assert_close(logits[row, head, :, block].double(), best, **CLOSE)


def some_channels(heads: int, dim: int, part: float, seed: int) -> torch.Tensor:
    orders = [torch.randperm(dim, generator=seeded(seed + head)) for head in range(heads)]
    return torch.stack(orders)[:, : round(part * dim) // 2 * 2]


def sketched(block: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Return a block's keys ``[tokens, D]`` as its digest and sketch represent them, in float64."""
    told = ((block.amax(dim=0) + block.amin(dim=0)) / 2).repeat(block.shape[0], 1)
    for channel in channels.tolist():
        keys = block[:, channel].tolist()
        lowest = min(keys)
        width = (max(keys) - lowest) / 16
        sixteenths = [int((key - lowest) / width) if width else 0 for key in keys]
        told[:, channel] = torch.tensor([lowest + (min(n, 15) + 0.5) * width for n in sixteenths], dtype=told.dtype)
    return told


@settings(max_examples=25)
@given(queries_and_blocks(), st.sampled_from([0.0, 0.25, 1.0]), SCALES, SEEDS)
def test_a_sketch_gives_each_token_its_own_logit_in_its_channels_and_the_middle_in_the_others(
    case: Scored, part: float, scale: float, seed: int
) -> None:
    whole = Scored(case.query, case.keys, torch.full_like(case.filled, case.keys.shape[3]))
    channels = some_channels(case.keys.shape[2], case.keys.shape[4], part, seed)
    digests = whole.digests(reference.minmax_digest)
    codes = reference.sketch_codes(case.keys.flatten(0, 1), digests.flatten(0, 1), channels)
    codes = codes.unflatten(0, case.keys.shape[:2])
    logits = reference.sketch_logits(case.query, digests, codes, channels, scale)
    expected = torch.empty_like(logits, dtype=torch.float64)
    width = torch.zeros_like(expected)
    for (row, head, block), queries, keys in whole.each_query_and_block():
        told = sketched(keys, channels[head])
        expected[row, head, :, block] = torch.logsumexp(queries @ told.T * scale, dim=1) / scale
        steps = (keys.amax(dim=0) - keys.amin(dim=0))[channels[head]] / 16
        width[row, head, :, block] = queries[:, channels[head]].abs() @ steps
    # a key on the border of two sixteenths may be rounded to either
    close = torch.isclose(logits.double(), expected, **CLOSE)
    assert close.float().mean() > 0.95
    assert ((logits.double() - expected).abs() <= width + 1e-3)[~close].all()


def test_codes_of_a_channel_without_a_range_and_of_what_no_token_was_written_to_do_no_harm() -> None:
    keys = torch.randn(1, 1, 4, 6, generator=seeded(3))
    keys[..., 2] = 0.7
    digests = reference.minmax_digest(keys, torch.tensor([3]))
    keys[:, :, 3] = float("nan")  # values behind the last token must not matter
    channels = torch.tensor([[2, 5, 0, 1]])
    codes = reference.sketch_codes(keys, digests, channels)
    query = torch.randn(1, 2, 6, generator=seeded(4))
    logits = reference.sketch_logits(query, digests[None], codes[None], channels, 0.5)
    assert logits.isfinite().all()


@pytest.mark.parametrize(("rows", "blocks"), [(2, 0), (0, 3), (1, 1)])
def test_lists_without_blocks_and_batches_without_rows_have_estimates_too(rows: int, blocks: int) -> None:
    query, digests = torch.randn(rows, 6, 8), torch.randn(rows, blocks, 3, 2, 8)
    codes, channels = torch.zeros(rows, blocks, 3, 32, 2, dtype=torch.uint8), torch.arange(4).expand(3, -1)
    logits = reference.sketch_logits(query, digests, codes, channels, 0.5)
    assert logits.shape == reference.digest_logits(query, digests, 0.5).shape == (rows, 3, 2, blocks)
    shift = reference.lse_shift(logits, logits, torch.ones(rows, 3, blocks, dtype=torch.bool), 0.5)
    assert torch.equal(shift, torch.zeros(rows, 6))


@given(queries_and_blocks(), SCALES, SEEDS)
def test_a_shift_is_the_difference_of_the_estimated_masses_of_the_list(case: Scored, scale: float, seed: int) -> None:
    digests = case.digests(reference.minmax_digest)
    real = reference.digest_logits(case.query, digests, 0.0)
    ahead = real + torch.randn(real.shape, generator=seeded(seed))
    listed = torch.rand(real.shape[0], real.shape[1], real.shape[3], generator=seeded(seed)) < 0.5
    shift = reference.lse_shift(real, ahead, listed, scale).view(real.shape[:3])
    for row, head, query in itertools.product(*map(range, real.shape[:3])):
        here = listed[row, head]
        if not here.any():
            assert float(shift[row, head, query]) == 0.0
            continue
        masses = [torch.logsumexp(e[row, head, query, here].double() * scale, dim=0) for e in (real, ahead)]
        assert float(shift[row, head, query]) == pytest.approx(float(masses[0] - masses[1]), rel=1e-3, abs=1e-3)


def test_a_shift_makes_up_for_a_predicted_query_of_the_wrong_length() -> None:
    """One half of a row is attended with a query that is too long: the shift corrects the weight of that half."""
    keys, values = (torch.randn(2, 1, 8, 16, generator=seeded(seed)) for seed in (5, 6))
    query = torch.randn(1, 2, 16, generator=seeded(7))
    ids = torch.tensor([[[0], [1]]]).transpose(0, 1).unsqueeze(2)  # two lists of one block
    fill = torch.full((1, 1, 1), 8)
    whole, _ = reference.attend_blocks(query, keys, values, torch.tensor([[[0, 1]]]), fill.expand(1, 1, 2), 0.5)
    near = reference.attend_blocks(query, keys, values, ids[0, 0].view(1, 1, 1), fill, 0.5)
    ahead, lse = reference.attend_blocks(query * 1.5, keys, values, ids[1, 0].view(1, 1, 1), fill, 0.5)
    digests = reference.minmax_digest(keys, torch.full((2,), 8))[None]
    channels = torch.arange(16)[None]
    codes = reference.sketch_codes(keys, digests[0], channels)[None]
    real, early = (reference.sketch_logits(q, digests, codes, channels, 0.5)[..., 1:] for q in (query, query * 1.5))
    shifted = lse + reference.lse_shift(real, early, torch.ones(1, 1, 1, dtype=torch.bool), 0.5)
    errors = [float((reference.merge(*near, ahead, one)[0] - whole).norm()) for one in (lse, shifted)]
    assert errors[1] < 0.7 * errors[0]


@given(queries_and_blocks(), SEEDS)
def test_a_score_is_the_log_of_the_attention_that_the_group_is_estimated_to_give(case: Scored, seed: int) -> None:
    logits = reference.digest_logits(case.query, case.digests(reference.minmax_digest), spread=0.5)
    counts = torch.randint(1, logits.shape[3] + 1, (logits.shape[0],), generator=seeded(seed))
    scores = reference.block_scores(logits, counts, scale=0.125)
    for row, count in enumerate(counts.tolist()):
        shares = torch.softmax(logits[row, :, :, :count].double() * 0.125, dim=-1).sum(dim=1)
        torch.testing.assert_close(scores[row, :, :count].double(), shares.log(), **CLOSE)
        assert (scores[row, :, count:] == -torch.inf).all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
@given(case=queries_and_blocks(), data=st.data())
def test_a_page_with_garbage_scores_lowest_and_only_for_its_own_kv_head(
    garbage: float, case: Scored, data: st.DataObject
) -> None:
    rows, blocks, heads, _, dim = case.keys.shape
    row, block, head, channel = (data.draw(st.integers(0, n - 1)) for n in (rows, blocks, heads, dim))

    def scores() -> torch.Tensor:
        logits = reference.digest_logits(case.query, case.digests(reference.minmax_digest), spread=0.5)
        return reference.block_scores(logits, torch.full((rows,), blocks), scale=0.125)

    clean = scores()
    case.keys[row, block, head, 0, channel] = garbage
    found = scores()
    assert found.isfinite().all()
    others = torch.arange(blocks) != block
    assert (found[row, head, block] < found[row, head, others]).all()
    unharmed = torch.ones(rows, heads, dtype=torch.bool)
    unharmed[row, head] = False
    assert torch.equal(found[unharmed], clean[unharmed])


# Selection


@dataclass(frozen=True)
class Selection:
    scores: torch.Tensor  # [B, H, N]
    counts: torch.Tensor  # [B]
    limit: int
    sink: int
    recent: int

    def chosen(self) -> torch.Tensor:
        return reference.select_blocks(self.scores, self.counts, self.limit, self.sink, self.recent)

    def forced(self, row: int) -> set[int]:
        """Return the blocks of a row that are always selected: the tail, the recent blocks before it, and the sink."""
        tail = int(self.counts[row]) - 1
        return {p for p in range(tail + 1) if p == tail or tail - self.recent <= p < tail or p < self.sink}


@st.composite
def selections(draw: st.DrawFn, distinct: bool = True) -> Selection:
    rows, heads, blocks, random = draw(ROWS), draw(HEADS), draw(BLOCKS), seeded(draw(SEEDS))
    if distinct:
        scores = torch.stack([torch.randperm(blocks, generator=random) for _ in range(rows * heads)]).float() - 5
    else:
        scores = torch.randint(0, 3, (rows * heads, blocks), generator=random).float()
    sink, recent = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return Selection(
        scores=scores.view(rows, heads, blocks),
        counts=torch.tensor([draw(st.integers(1, blocks)) for _ in range(rows)]),
        limit=draw(st.integers(sink + recent + 1, sink + recent + 8)),
        sink=sink,
        recent=recent,
    )


def real(positions: torch.Tensor) -> list[int]:
    return [p for p in positions.tolist() if p != NO_BLOCK]


@given(selections())
def test_selection_is_what_is_always_in_and_then_the_best_scores(case: Selection) -> None:
    chosen = case.chosen()
    for row, count in enumerate(case.counts.tolist()):
        forced = case.forced(row)
        for head, scores in enumerate(case.scores[row].tolist()):
            rest = sorted(set(range(count)) - forced, key=lambda p: scores[p], reverse=True)
            expected = sorted(forced | set(rest[: case.limit - len(forced)]))
            assert real(chosen[row, head]) == expected


@pytest.mark.parametrize("distinct", [True, False], ids=["distinct scores", "many ties"])
@given(data=st.data())
def test_a_selection_is_ascending_within_the_row_and_as_long_as_the_limit_allows(
    distinct: bool, data: st.DataObject
) -> None:
    case = data.draw(selections(distinct))
    rows, heads, blocks = case.scores.shape
    chosen = case.chosen()
    assert chosen.shape == (rows, heads, min(case.limit, blocks))
    for row, count in enumerate(case.counts.tolist()):
        for head in range(heads):
            positions = real(chosen[row, head])
            assert len(positions) == min(case.limit, count)
            assert positions == sorted(set(positions))
            assert chosen[row, head, : len(positions)].tolist() == positions, "NO_BLOCK comes last"
            assert all(0 <= p < count for p in positions)
            assert case.forced(row) <= set(positions)


@given(selections(distinct=False))
def test_among_equal_scores_any_block_will_do_but_no_better_one_is_left_out(case: Selection) -> None:
    chosen = case.chosen()
    for row, count in enumerate(case.counts.tolist()):
        for head, scores in enumerate(case.scores[row].tolist()):
            earned = set(real(chosen[row, head])) - case.forced(row)
            left = set(range(count)) - earned - case.forced(row)
            assert not earned or not left or min(scores[p] for p in earned) >= max(scores[p] for p in left)


@given(selections())
def test_a_limit_that_holds_the_row_takes_every_block(case: Selection) -> None:
    all_in = Selection(case.scores, case.counts, int(case.counts.max()), case.sink, case.recent)
    for row, count in enumerate(case.counts.tolist()):
        for positions in all_in.chosen()[row]:
            assert real(positions) == list(range(count))


def scores_with_odd_pages(value: float, pages: list[int]) -> torch.Tensor:
    """Return scores of one row of 8 blocks and one KV head. One key of each page in ``pages`` is all ``value``."""
    random = seeded(3)
    keys = torch.randn(8, 1, 4, 8, generator=random)
    keys[pages, :, 1] = value
    digests = reference.minmax_digest(keys, torch.full((8,), 4))
    logits = reference.digest_logits(torch.randn(1, 2, 8, generator=random).abs(), digests[None], spread=0.5)
    return reference.block_scores(logits, torch.tensor([8]), scale=0.125)


def test_a_page_with_a_nan_is_not_selected_while_there_are_others() -> None:
    for page in range(7):  # block 7, the tail, is always selected
        scores = scores_with_odd_pages(float("nan"), [page])
        chosen = reference.select_blocks(scores, torch.tensor([8]), limit=7, sink=0, recent=0)
        assert real(chosen[0, 0]) == [p for p in range(8) if p != page]


def test_pages_with_infinite_keys_cannot_displace_what_is_always_in() -> None:
    scores = scores_with_odd_pages(float("inf"), [1, 2, 3, 4])
    chosen = reference.select_blocks(scores, torch.tensor([8]), limit=4, sink=1, recent=2)
    assert real(chosen[0, 0]) == [0, 5, 6, 7]


def test_a_limit_that_holds_the_row_takes_every_block_even_one_with_a_nan() -> None:
    for page in range(4):
        scores = scores_with_odd_pages(float("nan"), [page])
        chosen = reference.select_blocks(scores, torch.tensor([4]), limit=4, sink=0, recent=0)
        assert real(chosen[0, 0]) == [0, 1, 2, 3]


@given(selections(), st.integers(-6, 8), st.integers(0, 6), st.data())
def test_blocks_that_are_worth_it_are_those_with_the_score_that_are_not_here(
    case: Selection, least: int, limit: int, data: st.DataObject
) -> None:
    resident = torch.rand(case.scores.shape, generator=seeded(data.draw(SEEDS))) < 0.3
    found = reference.blocks_worth(case.scores, resident, case.counts, float(least), limit, case.sink, case.recent)
    assert found.shape == (*case.scores.shape[:2], min(limit, case.scores.shape[2]))
    for row, count in enumerate(case.counts.tolist()):
        for head in range(case.scores.shape[1]):
            scores, here = case.scores[row, head].tolist(), resident[row, head].tolist()
            worth = [p for p in range(count) if p not in case.forced(row) and not here[p] and scores[p] >= least]
            best = sorted(worth, key=scores.__getitem__, reverse=True)[:limit]
            assert real(found[row, head]) == sorted(best)


def test_a_page_with_a_nan_is_never_worth_it() -> None:
    scores = scores_with_odd_pages(float("nan"), [2, 3])
    none = torch.zeros(scores.shape, dtype=torch.bool)
    found = reference.blocks_worth(scores, none, torch.tensor([8]), -1e9, limit=8, sink=0, recent=0)
    assert real(found[0, 0]) == [0, 1, 4, 5, 6]


@given(selections())
def test_is_forced_tells_tail_recent_and_sink_from_the_rest(case: Selection) -> None:
    chosen = case.chosen()
    forced = reference.is_forced(chosen, case.counts, case.sink, case.recent)
    for row in range(len(case.counts)):
        for positions, flags in zip(chosen[row], forced[row], strict=True):
            expected = [p in case.forced(row) for p in positions.tolist()]
            assert flags.tolist() == expected


@given(selections(), st.integers(0, 14))
def test_is_listed_tells_which_positions_are_in_the_list(case: Selection, blocks: int) -> None:
    chosen = case.chosen()
    listed = reference.is_listed(chosen, blocks)
    assert listed.shape == (*chosen.shape[:2], blocks)
    for row in range(len(case.counts)):
        for positions, flags in zip(chosen[row].tolist(), listed[row].tolist(), strict=True):
            assert flags == [p in positions for p in range(blocks)]


def test_is_listed_ignores_order_repetition_empty_places_and_what_lies_beyond() -> None:
    positions = torch.tensor([[[3, NO_BLOCK, 0, 3, 7], [NO_BLOCK] * 5]])
    assert reference.is_listed(positions, 5).tolist() == [[[True, False, False, True, False], [False] * 5]]
    assert not reference.is_listed(positions[..., :0], 5).any()


@given(selections(), SEEDS)
def test_split_gives_each_block_to_one_side_and_keeps_its_place(case: Selection, seed: int) -> None:
    chosen = case.chosen()
    first = torch.rand(chosen.shape, generator=seeded(seed)) < 0.5
    before = chosen.clone()
    left, right = reference.split(chosen, first)
    assert torch.equal(left, torch.where(first, chosen, NO_BLOCK))
    assert torch.equal(right, torch.where(first, NO_BLOCK, chosen))
    assert torch.equal(chosen, before)


@given(selections(), SEEDS)
def test_block_ids_looks_positions_up_in_each_rows_own_page_table(case: Selection, seed: int) -> None:
    rows, _, blocks = case.scores.shape
    table = torch.randperm(1000, generator=seeded(seed))[: rows * blocks].view(rows, blocks)
    chosen = case.chosen()
    ids = reference.block_ids(chosen, table)
    for row in range(rows):
        for positions, pages in zip(chosen[row].tolist(), ids[row].tolist(), strict=True):
            assert pages == [NO_BLOCK if p == NO_BLOCK else int(table[row, p]) for p in positions]


@given(selections(), BLOCK_TOKENS, SEEDS)
def test_block_fill_counts_the_tokens_of_each_listed_block(case: Selection, block_tokens: int, seed: int) -> None:
    in_tail = torch.randint(1, block_tokens + 1, case.counts.shape, generator=seeded(seed))
    lengths = (case.counts - 1) * block_tokens + in_tail
    chosen = case.chosen()
    fill = reference.block_fill(chosen, lengths, block_tokens)
    for row, length in enumerate(lengths.tolist()):
        tokens = [len(range(length)[p * block_tokens : (p + 1) * block_tokens]) for p in range(int(case.counts[row]))]
        for positions, counted in zip(chosen[row].tolist(), fill[row].tolist(), strict=True):
            assert counted == [0 if p == NO_BLOCK else tokens[p] for p in positions]


# Attention over blocks


@dataclass(frozen=True)
class BlockAttention:
    query: torch.Tensor
    keys: torch.Tensor  # pools: garbage wherever no token is listed
    values: torch.Tensor
    ids: torch.Tensor
    fill: torch.Tensor
    scale: float

    def attend(self, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        listed = self.ids if ids is None else ids
        fill = self.fill.masked_fill(listed == NO_BLOCK, 0)
        return reference.attend_blocks(self.query, self.keys, self.values, listed, fill, self.scale)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        listed = torch.stack((self.ids, self.fill), dim=-1).tolist()
        blocks = [[[(page, n) for page, n in pairs if page != NO_BLOCK] for pairs in row] for row in listed]
        return attention_over_blocks(self.query, self.keys, self.values, blocks, self.scale)


@st.composite
def block_attentions(draw: st.DrawFn) -> BlockAttention:
    """Draw lists with holes and partly filled blocks. Each row has pages of its own, shuffled per KV head."""
    rows, heads, group, dim, tokens = (draw(s) for s in (ROWS, HEADS, GROUP, DIM, BLOCK_TOKENS))
    value_dim, listed, dtype, garbage = draw(DIM), draw(BLOCKS), draw(DTYPES), draw(GARBAGE)
    presence, random = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])), seeded(draw(SEEDS))

    def order() -> torch.Tensor:
        return torch.randperm(listed, generator=random)

    ids = torch.stack([order() * rows + row for row in range(rows) for _ in range(heads)]).view(rows, heads, listed)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=random) >= presence, NO_BLOCK)
    fill = torch.randint(1, tokens + 1, ids.shape, generator=random).masked_fill(ids == NO_BLOCK, 0)

    counted = torch.zeros(rows * listed + 1, heads, tokens, dtype=torch.bool)  # the last page is for NO_BLOCK
    counted[ids, torch.arange(heads)[:, None]] = torch.arange(tokens) < fill[..., None]
    counted[-1] = False

    def pool(width: int) -> torch.Tensor:
        content = torch.randn(*counted.shape, width, generator=random).to(dtype)
        return content.masked_fill(~counted[..., None], garbage)

    query = torch.randn(rows, heads * group, dim, generator=random).to(dtype)
    return BlockAttention(query, pool(dim), pool(value_dim), ids, fill, scale=draw(SCALES))


@given(block_attentions())
def test_attention_over_blocks_is_softmax_over_the_tokens_in_them(case: BlockAttention) -> None:
    out, lse = case.attend()
    expected_out, expected_lse = case.expected()
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)


@pytest.mark.parametrize("listed", [0, 3])
def test_a_list_without_blocks_gives_output_zero_and_lse_minus_infinity(listed: int) -> None:
    pool = torch.full((4, 2, 8, 16), float("nan"))
    ids = torch.full((3, 2, listed), NO_BLOCK)
    out, lse = reference.attend_blocks(torch.ones(3, 6, 16), pool, pool, ids, torch.zeros_like(ids), 0.25)
    assert torch.equal(out, torch.zeros(3, 6, 16))
    assert torch.equal(lse, torch.full((3, 6), -torch.inf))


@given(block_attentions(), st.sampled_from([1e2, 1e4]))
def test_keys_of_large_magnitude_give_a_mix_of_values_and_no_nan(case: BlockAttention, magnitude: float) -> None:
    large = BlockAttention(case.query, case.keys * magnitude, case.values, case.ids, case.fill, case.scale)
    out, lse = large.attend()
    _, expected_lse = large.expected()
    assert out.isfinite().all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4 * magnitude)
    highest = case.values.float().nan_to_num(0, 0, 0).abs().max()
    assert out.abs().max() <= highest * (1 + 1e-4), "weights are positive and add up to 1"


def one_token(logit: float, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.full((1, 1, 1, 1), logit), torch.full((1, 1, 1, 1), value)
    first, one = torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.int64)
    return reference.attend_blocks(torch.ones(1, 1, 1), keys, values, first, one, 1.0)


def test_the_lse_of_one_token_is_its_logit_in_natural_logarithm() -> None:
    out, lse = one_token(logit=2.0, value=7.0)
    assert lse.item() == 2.0  # 2.885 in FlashInfer's log2 units
    assert out.item() == 7.0


def test_the_scale_is_part_of_the_logit() -> None:
    query, pool = torch.full((1, 1, 4), 3.0), torch.ones(1, 1, 1, 4)
    first, one = torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.int64)
    _, lse = reference.attend_blocks(query, pool, pool, first, one, 0.5)
    assert lse.item() == 6.0


# Merge


@dataclass(frozen=True)
class Partial:
    out: torch.Tensor
    lse: torch.Tensor


@st.composite
def partials(draw: st.DrawFn) -> tuple[Partial, Partial, torch.Tensor]:
    """Draw two sides of a merge, and a mask of entries; tests use the mask to choose which side is empty."""
    rows, heads, dim, random = draw(ROWS), draw(HEADS), draw(DIM), seeded(draw(SEEDS))
    sides = [
        Partial(
            torch.randn(rows, heads, dim, generator=random),
            torch.randn(rows, heads, generator=random) * draw(st.sampled_from([1.0, 30.0, 1e4])),
        )
        for _ in range(2)
    ]
    return sides[0], sides[1], torch.rand(rows, heads, generator=random) < 0.5


def emptied(side: Partial, where: torch.Tensor, left_over: float) -> Partial:
    return Partial(side.out.masked_fill(where[..., None], left_over), side.lse.masked_fill(where, -torch.inf))


@given(partials(), st.sampled_from([0.0, 5.0, float("nan"), float("inf")]))
def test_merging_an_empty_side_returns_the_other_sides_bits(
    sides: tuple[Partial, Partial, torch.Tensor], left: float
) -> None:
    a, b, mask = sides
    # where the mask is set the first side is empty, elsewhere the second: every entry has one empty side
    empty_a, empty_b = emptied(a, mask, left), emptied(b, ~mask, left)
    out, lse = reference.merge(empty_a.out, empty_a.lse, empty_b.out, empty_b.lse)
    assert_same_bits(out, torch.where(mask[..., None], b.out, a.out))
    assert_same_bits(lse, torch.where(mask, b.lse, a.lse))


@pytest.mark.parametrize("empty_first", [True, False])
def test_merging_an_empty_side_keeps_a_negative_zero(empty_first: bool) -> None:
    full = (torch.tensor([[-0.0, 1.0]]), torch.tensor([0.5]))
    empty = (torch.zeros(1, 2), torch.tensor([-torch.inf]))
    out, _ = reference.merge(*empty, *full) if empty_first else reference.merge(*full, *empty)
    assert_same_bits(out, full[0])


@given(partials(), st.sampled_from([0.0, float("nan")]))
def test_merging_two_empty_sides_is_empty(sides: tuple[Partial, Partial, torch.Tensor], left: float) -> None:
    a, b, mask = sides
    everywhere = torch.ones_like(mask)
    empty_a, empty_b = emptied(a, everywhere, left), emptied(b, everywhere, left)
    out, lse = reference.merge(empty_a.out, empty_a.lse, empty_b.out, empty_b.lse)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_merge_reads_and_returns_natural_logarithms() -> None:
    # weights e^ln3 : e^0 are 3 : 1; read as log2 they would be 2^ln3 = 2.14 : 1
    out, lse = reference.merge(*one_token(1.0986122886681098, value=8.0), *one_token(0.0, value=4.0))
    assert out.item() == pytest.approx(7.0, rel=1e-6)
    assert lse.item() == pytest.approx(1.3862943611198906, rel=1e-6)  # ln 4


def test_merge_of_sides_far_apart_is_the_heavier_one() -> None:
    for far in (1e3, 1e6, 1e30):
        out, lse = reference.merge(*one_token(far, value=8.0), *one_token(-far, value=4.0))
        assert (out.item(), lse.item()) == (8.0, torch.tensor(far).item())


@given(block_attentions(), SEEDS, st.booleans())
def test_any_split_in_three_parts_merges_to_one_softmax_over_the_union(
    case: BlockAttention, seed: int, right_first: bool
) -> None:
    part = torch.randint(0, 3, case.ids.shape, generator=seeded(seed))
    resident, on_cpu, gathered = (case.attend(case.ids.masked_fill(part != i, NO_BLOCK)) for i in range(3))
    if right_first:
        out, lse = reference.merge(*resident, *reference.merge(*on_cpu, *gathered))
    else:
        out, lse = reference.merge(*reference.merge(*resident, *on_cpu), *gathered)
    expected_out, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected_out, **CLOSE)
    torch.testing.assert_close(lse.double(), expected_lse, **CLOSE)


# Prefill


def assert_prefill_is_causal_softmax(
    new: int, total: int, tile: int, heads: int, group: int, dims: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    random = seeded(seed)
    query = torch.randn(new, heads * group, dims[0], generator=random).to(dtype)
    key = torch.randn(heads, total, dims[0], generator=random).to(dtype)
    value = torch.randn(heads, total, dims[1], generator=random).to(dtype)
    scale = 0.3  # differs from the default of torch's function
    out = reference.attend_prefill(query, key, value, scale, tile)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), causal_attention(query, key, value, scale), **ROUNDED[dtype])


@example(total=1, before=0, tile=512, heads=1, group=1, dims=(8, 8), dtype=torch.float32, seed=0)
@example(total=40, before=40, tile=512, heads=2, group=3, dims=(8, 8), dtype=torch.float32, seed=0)
@given(
    total=st.integers(1, 40),
    before=st.integers(0, 40),
    tile=st.sampled_from([1, 3, 16, 512]),
    heads=HEADS,
    group=GROUP,
    dims=st.tuples(DIM, DIM),
    dtype=DTYPES,
    seed=SEEDS,
)
def test_prefill_is_causal_softmax(
    total: int, before: int, tile: int, heads: int, group: int, dims: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    before = min(before, total - 1)
    assert_prefill_is_causal_softmax(total - before, total, tile, heads, group, dims, dtype, seed)


@pytest.mark.parametrize("before", [0, 1, 8, 13])
@pytest.mark.parametrize("new", [1, 7, 8, 9, 16, 17])
def test_prefill_is_exact_on_both_sides_of_a_tile_boundary(new: int, before: int) -> None:
    assert_prefill_is_causal_softmax(new, before + new, 8, 2, 3, (16, 16), torch.float32, seed=new)


def test_prefill_with_the_default_tile_spans_several_tiles() -> None:
    assert_prefill_is_causal_softmax(520, 530, 512, 1, 1, (8, 8), torch.float32, seed=1)
