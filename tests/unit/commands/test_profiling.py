"""Profiling without a model: recordings, the simulation against plain Python and the policy, and what it chooses."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from attention_oracle import seeded, softmax_attention
from decoding import CLOSE, Decoding, Life, Shape, Step, T
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.commands.profile import tune
from sglang_hybrid.commands.profile.recording import RecordingPolicy
from sglang_hybrid.commands.profile.records import LayerRecord
from sglang_hybrid.commands.profile.share_costs import SHARES, LayerCost, ShareCosts
from sglang_hybrid.commands.profile.simulation import Budget, Choice, simulate
from sglang_hybrid.commands.profile.tune import (
    BONUSES,
    INTERVALS,
    block_change,
    choose_bonus,
    choose_interval,
    choose_shares,
)
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.scout.calibration import LayerFit, cosines
from sglang_hybrid.policies.scout.fit_predictor import RANK_PARTS, Calibrator, LayerInputs
from sglang_hybrid.policies.scout.options import ScoutOptions
from sglang_hybrid.policies.scout.policy import ScoutPolicy, Selection
from sglang_hybrid.policies.scout.predictor import QueryPredictor, QueryWeights
from sglang_hybrid.policies.scout.rules import rules_of_scout
from sglang_hybrid.policies.scout.tuning import FIRST_STEPS, beyond_selection, tuning_of
from sglang_hybrid.worker.torch_attention import TorchMisses

SEEDS = st.integers(0, 2**32 - 1)


def some_record(
    seed: int, steps: int, rows: int, heads: int, wobble: float, first: int = 6, opens: float = 0.2
) -> LayerRecord:
    """Return a record of scores that vary around their means by ``wobble``; a row opens a block with chance ``opens``.

    Attention shares come from another draw of the scores, as if from another query.
    """
    random = seeded(seed)
    counts = torch.randint(1, first + 1, (rows,), generator=random) + torch.cat(
        (torch.zeros(1, rows, dtype=torch.int64), (torch.rand(steps - 1, rows, generator=random) < opens).long())
    ).cumsum(0)
    blocks = int(counts.max())
    mean = 2 * torch.randn(rows, heads, blocks, generator=random)

    def scores() -> torch.Tensor:
        beyond = torch.arange(blocks) >= counts[:, :, None, None]
        wobbling = mean + wobble * torch.randn(steps, rows, heads, blocks, generator=random)
        return wobbling.masked_fill(beyond, -torch.inf).log_softmax(dim=3)

    return LayerRecord(scores(), scores(), scores().exp(), counts)


BUDGETS = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 4)).map(
    lambda drawn: Budget(blocks=sum(drawn) + 1, sink=drawn[0], recent=drawn[1])
)
RECORDS = st.builds(
    some_record,
    seed=SEEDS,
    steps=st.integers(1, 25),
    rows=st.integers(1, 3),
    heads=st.integers(1, 2),
    wobble=st.sampled_from([0.0, 0.3, 2.0]),
    first=st.integers(1, 14),
    opens=st.sampled_from([0.0, 0.2, 0.9]),
)
CHOICES = [Choice(bonus, interval) for bonus in (0.0, 0.7, 3.0) for interval in (0, 1, 3, 8)]


# The simulation


def best(scores: dict[int, float], room: int) -> set[int]:
    return set(sorted(scores, key=scores.__getitem__, reverse=True)[:room])


def simulated_in_plain_python(record: LayerRecord, choice: Choice, budget: Budget) -> list[tuple[float, float, float]]:
    """Return CPU ratio, attention missed and change of blocks per step, computed for one row and head at a time."""
    steps, rows, heads, blocks = record.scores.shape
    limit = min(budget.blocks, blocks)
    slots = budget.blocks - budget.sink - budget.recent - 1
    found = [[0.0, 0.0, 0.0] for _ in range(steps)]
    for row in range(rows):
        for head in range(heads):
            resident: set[int] = set()
            before: set[int] = set()
            for step in range(steps):
                count = int(record.counts[step, row])
                always = {p for p in range(count) if p < budget.sink or p >= count - 1 - budget.recent}
                score = dict(enumerate(record.scores[step, row, head, :count].tolist()))
                room = limit - len(always)
                if step == 0:
                    resident = best({p: score[p] for p in set(score) - always}, room)
                elif count > int(record.counts[step - 1, row]):
                    left = count - 1 - budget.recent - 1
                    if left >= budget.sink and slots:
                        worst = sorted(resident, key=score.__getitem__)[: max(0, len(resident) + 1 - slots)]
                        resident = resident - set(worst) | {left}
                real = record.real_scores[step, row, head, :count].tolist()
                earned, wanted = (
                    best({p: of[p] + choice.bonus * (p in resident) for p in set(score) - always}, room)
                    for of in (score, real)
                )
                attended = always | resident | earned
                found[step][0] += len(earned - resident) / budget.blocks
                found[step][1] += 1 - sum(float(record.shares[step, row, head, p]) for p in attended)
                found[step][2] += len((earned | always) - before) / limit
                before = earned | always
                if choice.interval and ((step + 1) % choice.interval == 0 or step < FIRST_STEPS):
                    resident = wanted
    return [tuple(value / (rows * heads) for value in step) for step in found]  # type: ignore[misc]


@settings(max_examples=60)
@given(RECORDS, BUDGETS)
def test_the_simulation_is_what_plain_python_finds_for_every_choice_at_once(
    record: LayerRecord, budget: Budget
) -> None:
    simulated = simulate(record, CHOICES, budget)
    steps = record.scores.shape[0]
    assert simulated.ratio.shape == simulated.missed.shape == (len(CHOICES), steps)
    for number, choice in enumerate(CHOICES):
        expected = torch.tensor(simulated_in_plain_python(record, choice, budget))
        torch.testing.assert_close(simulated.ratio[number], expected[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(simulated.missed[number], expected[:, 1], rtol=0, atol=1e-5)
        # without the first of several steps, at which all blocks are new
        torch.testing.assert_close(simulated.change[number], expected[min(1, steps - 1) :, 2], rtol=0, atol=1e-5)


@settings(max_examples=60)
@given(RECORDS, BUDGETS)
def test_nothing_is_missed_of_rows_within_the_budget(record: LayerRecord, budget: Budget) -> None:
    roomy = Budget(budget.blocks + record.scores.shape[3], budget.sink, budget.recent)
    simulated = simulate(record, CHOICES, roomy)
    assert not simulated.ratio.any()
    torch.testing.assert_close(simulated.missed, torch.zeros_like(simulated.missed), rtol=0, atol=1e-5)


@settings(max_examples=60)
@given(RECORDS, BUDGETS)
def test_without_recall_a_larger_bonus_never_misses_more_blocks(record: LayerRecord, budget: Budget) -> None:
    # without recall residents do not depend on the bonus, which decides only whether other blocks are selected
    ratios = simulate(record, [Choice(bonus, 0) for bonus in BONUSES], budget).ratio
    assert (ratios[1:] <= ratios[:-1] + 1e-6).all()
    assert not simulate(record, [Choice(1e6, interval) for interval in (0, 1, 8)], budget).ratio.any()


# Recordings


class Watched(ScoutPolicy):
    chosen: Selection

    def select(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> Selection:
        self.chosen = super().select(query, cache, batch, scale)
        return self.chosen


SHAPE = Shape(heads=2, group=2, dim=8, value_dim=8)
PLAN = [Life(0, 9 * T - 3, 0, 40), Life(1, 3 * T - 20, 0, 40)]  # both rows open a block, at different steps


def recorded(predicted: bool, seed: int) -> tuple[LayerRecord, Decoding, list[Step]]:
    decoding, policy = Decoding(PLAN, SHAPE, seed), RecordingPolicy()
    steps: list[Step] = []
    decoding.run(policy, steps.append, lambda _: predicted, shuffled=False)
    return policy.record(0), decoding, steps


@pytest.mark.parametrize("predicted", [True, False])
def test_a_recording_decodes_exactly_and_notes_scores_of_the_prediction_and_true_shares(predicted: bool) -> None:
    record, decoding, steps = recorded(predicted, seed=1)
    requests = decoding.requests
    blocks = -(-(PLAN[0].prompt + 40) // T)
    assert record.scores.shape == record.shares.shape == (40, 2, SHAPE.heads, blocks)
    for now, step in enumerate(steps):
        asked = step.queries if step.guesses is None else step.guesses
        for row, length in enumerate(step.lengths):
            count = -(-length // T)
            assert int(record.counts[now, row]) == count
            assert (record.scores[now, row, :, count:] == -torch.inf).all()
            assert not record.shares[now, row, :, count:].any()
            keys, values = (tokens[row][:, :length] for tokens in (requests.row_keys, requests.row_values))
            exact, _ = softmax_attention(step.queries[row], keys, values, SHAPE.scale)
            torch.testing.assert_close(step.out[row].double(), exact, **CLOSE[torch.float32])
            full = (length - 1) // T  # full blocks before the tail: only they have scores
            for head in range(SHAPE.heads):
                own = slice(2 * head, 2 * head + 2)
                weights = torch.softmax(step.queries[row, own].double() @ keys[head].double().T * SHAPE.scale, dim=1)
                shares = torch.stack([w.sum(dim=1) for w in weights.split(T, dim=1)], dim=1).mean(dim=0)
                torch.testing.assert_close(
                    record.shares[now, row, head, :count].double(), shares, **CLOSE[torch.float32]
                )
                estimates = []
                for block in keys[head, : full * T].double().split(T):
                    middle, radius = (block.amax(0) + block.amin(0)) / 2, (block.amax(0) - block.amin(0)) / 2
                    query = asked[row, own].double()
                    estimates.append(query @ middle + reference.DIGEST_SPREAD * query.abs() @ radius)
                scores = torch.softmax(torch.stack(estimates, dim=1) * SHAPE.scale, dim=1).sum(dim=0).log()
                found = record.scores[now, row, head, : len(scores)].double()
                torch.testing.assert_close(found, scores, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("predicted", [True, False], ids=["predicted", "not predicted"])
@pytest.mark.parametrize(
    ("sink", "recent", "slots"),
    [(1, 1, 3), (2, 1, 1), *(pytest.param(*one, marks=pytest.mark.full) for one in ((0, 0, 2), (1, 2, 0)))],
)
@pytest.mark.parametrize("any_block", [False, True], ids=["of the selection", "any block"])
def test_the_simulation_of_a_recording_is_what_the_policy_does(
    predicted: bool, sink: int, recent: int, slots: int, any_block: bool
) -> None:
    share = 0.05
    min_miss_score = math.log(share * SHAPE.group)
    budget = Budget(sink + recent + 1 + slots, sink, recent, min_miss_score, any_block)
    record, _, _ = recorded(predicted, seed=2)
    simulated = simulate(record, CHOICES, budget)
    for number, choice in enumerate(CHOICES):
        options = ScoutOptions(resident_bonus=choice.bonus, recall_interval=choice.interval, min_miss_attention=share)
        config = HybridConfig(
            budget_tokens=budget.blocks * T,
            sink_blocks=sink,
            recent_blocks=recent,
            sections={"scout": options},
        )
        beyond = any_block and beyond_selection(choice.interval)
        tuning = dataclasses.replace(tuning_of(config, layers=1), any_block=(beyond,))
        policy = Watched(config, rules_of_scout(config), TorchMisses(), tuning, rows=2)
        ratios: list[float] = []
        missed: list[float] = []
        policy.on_ratio = lambda _, ratio, seen=ratios: seen.append(ratio)

        def check(_: Step, policy: Watched = policy, missed: list[float] = missed) -> None:
            chosen = torch.cat((policy.chosen.near, policy.chosen.misses), dim=2)
            attended = reference.is_listed(chosen, record.shares.shape[3])
            missed.append(1 - float((record.shares[len(missed)] * attended).sum(dim=2).mean()))

        Decoding(PLAN, SHAPE, seed=2).run(policy, check, lambda _: predicted, shuffled=False)
        assert ratios == pytest.approx(simulated.ratio[number].tolist(), abs=1e-5), choice
        assert missed == pytest.approx(simulated.missed[number].tolist(), abs=1e-4), choice
    assert simulated.ratio.any() == bool(slots), "otherwise there was nothing to compare"


# What it costs to leave misses out


@pytest.mark.parametrize("predicted", [True, False])
@pytest.mark.parametrize(("sink", "recent", "slots"), [(1, 1, 3), (0, 0, 2), (1, 2, 0)])
def test_costs_of_shares_are_what_the_policy_misses_and_how_far_its_output_is_off(
    predicted: bool, sink: int, recent: int, slots: int
) -> None:
    blocks = sink + recent + 1 + slots
    base = HybridConfig(budget_tokens=blocks * T, sink_blocks=sink, recent_blocks=recent)
    projection = torch.randn(12, SHAPE.heads * SHAPE.group * SHAPE.dim, generator=seeded(3))
    costs = ShareCosts(Budget(blocks, sink, recent), SHAPE.group, {0: projection})
    recorder = RecordingPolicy(costs)
    exact: list[Step] = []
    Decoding(PLAN, SHAPE, seed=2).run(recorder, exact.append, lambda _: predicted, shuffled=False)
    cost = costs.of(0)
    # a share of 1 leaves out all misses, so that the predicted query does not influence the policy's output
    for number, share in [*enumerate(SHARES)][-6:]:
        options = ScoutOptions(resident_bonus=0.0, recall_interval=8, min_miss_attention=share)
        config = base.with_section(options)
        rules = dataclasses.replace(rules_of_scout(config), shifts=False, stands_for_all=False)
        tuning = dataclasses.replace(tuning_of(config, layers=1), any_block=(True,))
        policy = ScoutPolicy(config, rules, TorchMisses(), tuning, rows=2)
        ratios: list[float] = []
        moved: list[float] = []

        def watch(_: int, ratio: float, seen: list[float] = ratios) -> None:
            seen.append(ratio)

        policy.on_ratio = watch

        def check(step: Step, moved: list[float] = moved) -> None:
            change = (step.out - exact[len(moved)].out).flatten(1) @ projection.T
            moved.append(float(change.square().sum(dim=1).mean()))

        Decoding(PLAN, SHAPE, seed=2).run(policy, check, lambda _: predicted, shuffled=False)
        assert sum(ratios) / len(ratios) == pytest.approx(float(cost.ratio[number]), abs=1e-6), share
        if share == 1.0 or not predicted:
            assert sum(moved) / len(moved) == pytest.approx(float(cost.moved[number]), rel=1e-3, abs=1e-6), share
    not_sticky = simulate(recorder.record(0), [Choice(0.0, 8)], Budget(blocks, sink, recent)).ratio.mean()
    assert cost.not_sticky == pytest.approx(float(not_sticky), abs=1e-6)
    assert bool(cost.ratio.any()) == bool(slots)


def some_cost(seed: int) -> LayerCost:
    """Return random costs: with a larger share there are fewer misses and the output changes more."""
    less, more = torch.rand(2, len(SHARES), generator=seeded(seed)).unbind(0)
    ratio = less.flip(0).cumsum(0).flip(0) / len(SHARES) * 0.5
    ratio[-1] = 0.0
    return LayerCost(ratio, more.cumsum(0), float(ratio[3]))


@settings(max_examples=40)
@given(st.lists(SEEDS, min_size=1, max_size=6))
def test_shares_leave_no_more_misses_than_allowed_and_no_layer_could_swap_with_another(seeds: list[int]) -> None:
    costs, norms = [some_cost(seed) for seed in seeds], [1.0 + n for n in range(len(seeds))]
    chosen = [SHARES.index(share) for share in choose_shares(costs, norms)]
    allowed = tune._OF_NOT_STICKY * sum(cost.not_sticky for cost in costs)
    ratio = sum(float(cost.ratio[n]) for cost, n in zip(costs, chosen, strict=True))
    moved = sum(float(cost.moved[n]) / norm for cost, norm, n in zip(costs, norms, chosen, strict=True))
    assert ratio <= allowed + 1e-6
    if len(costs) > 3:
        return  # too many combinations to try
    for other in itertools.product(range(len(SHARES)), repeat=len(costs)):
        if sum(float(cost.ratio[n]) for cost, n in zip(costs, other, strict=True)) <= ratio - 1e-6:
            less = sum(float(cost.moved[n]) / norm for cost, norm, n in zip(costs, norms, other, strict=True))
            assert less >= moved - 1e-4


def test_a_layer_whose_output_hardly_moves_has_the_larger_share() -> None:
    number = torch.arange(len(SHARES))
    steady = LayerCost(0.3 * 0.8**number, 1.25**number, not_sticky=0.15)
    moving = LayerCost(steady.ratio, 100 * steady.moved, steady.not_sticky)
    shares = choose_shares([steady, moving], [1.0, 1.0])
    assert shares[0] > shares[1]
    # so has a layer whose output is added to a residual stream of a larger norm
    shares = choose_shares([steady, steady], [100.0, 1.0])
    assert shares[0] > shares[1]


# Choosing


def long_record(seed: int, wobble: float) -> LayerRecord:
    return some_record(seed, steps=64, rows=2, heads=2, wobble=wobble, first=20, opens=0.03)


BUDGET = Budget(blocks=7, sink=1, recent=2)
WOBBLES = st.sampled_from([0.02, 0.1, 0.3, 1.0, 3.0])


def ratios_at(records: Sequence[LayerRecord], bonus: float, intervals: Sequence[int]) -> dict[int, float]:
    choices = [Choice(bonus, interval) for interval in intervals]
    ratios = torch.stack([simulate(r, choices, BUDGET).ratio.mean(dim=1) for r in records]).mean(dim=0)
    return dict(zip(intervals, ratios.tolist(), strict=True))


def missed_at(records: Sequence[LayerRecord], bonuses: Sequence[float]) -> list[float]:
    choices = [Choice(bonus, tune._BONUS_INTERVAL) for bonus in bonuses]
    missed: list[float] = (
        torch.stack([simulate(r, choices, BUDGET).missed.mean(dim=1) for r in records]).mean(dim=0).tolist()
    )
    return missed


@settings(max_examples=20)
@given(st.lists(st.tuples(SEEDS, WOBBLES), min_size=1, max_size=2), st.floats(0.005, 0.6))
def test_an_interval_keeps_the_mean_ratio_under_beta_and_is_the_longest_that_does(
    kinds: list[tuple[int, float]], beta: float
) -> None:
    records = [long_record(*kind) for kind in kinds]
    chosen = choose_interval(records, BUDGET, 0.5, beta)
    assert chosen in INTERVALS
    longer = [interval for interval in INTERVALS if interval > chosen]
    ratios = ratios_at(records, 0.5, [0, chosen, *longer])
    if chosen > 1:
        assert ratios[chosen] < beta
    most = min(tune._MARGIN * beta, tune._OF_NO_RECALL * ratios[0])
    assert all(ratios[interval] > most - 1e-6 for interval in longer)


@settings(max_examples=20)
@given(SEEDS, WOBBLES, st.lists(st.floats(0.001, 1), min_size=2, max_size=5))
def test_a_larger_beta_never_shortens_an_interval(seed: int, wobble: float, betas: list[float]) -> None:
    record = long_record(seed, wobble)
    chosen = [choose_interval([record], BUDGET, 0.0, beta) for beta in sorted(betas)]
    assert chosen == sorted(chosen)


@settings(max_examples=20)
@given(st.lists(st.tuples(SEEDS, WOBBLES), min_size=1, max_size=2))
def test_a_bonus_misses_no_more_than_the_best_blocks_of_every_step_and_the_next_would(
    kinds: list[tuple[int, float]],
) -> None:
    records = [long_record(*kind) for kind in kinds]
    chosen = choose_bonus(records, BUDGET)
    best = Choice(0.0, tune._BONUS_INTERVAL)
    allowed = float(torch.stack([simulate(r, [best], BUDGET).unselected.mean() for r in records]).mean())
    smaller = BONUSES.index(chosen) + 1
    missed = missed_at(records, BONUSES)
    assert all(share <= allowed + 1e-5 for share in missed[:smaller])
    assert all(share > allowed - 1e-5 for share in missed[smaller : smaller + 1])


def test_scores_that_never_change_need_no_recall_and_bear_any_bonus() -> None:
    record = some_record(3, steps=40, rows=2, heads=2, wobble=0.0, first=20, opens=0.0)
    assert choose_interval([record], BUDGET, 0.0, beta=0.01) == INTERVALS[-1]
    assert choose_bonus([record], BUDGET) == BONUSES[-1]
    assert block_change([record], BUDGET) == 0.0


def test_scores_that_always_change_are_recalled_at_every_step_under_a_small_beta() -> None:
    record = some_record(4, steps=40, rows=2, heads=2, wobble=50.0, first=20, opens=0.0)
    assert choose_interval([record], BUDGET, 0.0, beta=0.01) == 1
    assert block_change([record], BUDGET) > 0.2


def test_intervals_and_bonuses_begin_at_what_is_safest() -> None:
    assert BONUSES[0] == 0.0
    assert INTERVALS[0] == 1
    assert list(BONUSES) == sorted(set(BONUSES))
    assert list(INTERVALS) == sorted(set(INTERVALS))


# Calibrating

HIDDEN, HEAD_DIM, WIDTH = 64, 8, 16
RANKS = [round(part * HIDDEN) for part in RANK_PARTS]  # 4, 8, 16, 32


def weights_of_layers(layers: int) -> dict[int, QueryWeights]:
    random = seeded(20)
    return {
        layer: QueryWeights(
            norm=torch.ones(HIDDEN),
            norm_eps=0.0,
            projection=torch.randn(4 * WIDTH, HIDDEN, generator=random) * HIDDEN**-0.5,
            bias=None,
            head_dim=HEAD_DIM,
            head_norm=None,
            head_norm_eps=0.0,
            rotary=torch.zeros(1, HEAD_DIM),
            neox=True,
        )
        for layer in range(layers)
    }


def reflection(rank: int, seed: int = 21) -> torch.Tensor:
    """Return an orthogonal matrix that flips ``rank`` directions. It keeps the rms, so errors are linear."""
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=seeded(seed))).Q[:, :rank]
    reflection: torch.Tensor = torch.eye(HIDDEN) - 2 * basis @ basis.T
    return reflection


def inputs_of_layers(seed: int, ranks: Sequence[int], noise: float = 0.0, tokens: int = 600) -> LayerInputs:
    """Return inputs ``[tokens, HIDDEN]`` by layer: layer i + 1 gets layer i's, with ``ranks[i]`` directions flipped."""
    random = seeded(seed)
    inputs = {0: torch.randn(tokens, HIDDEN, generator=random)}
    for layer, rank in enumerate(ranks):
        changed = inputs[layer] @ reflection(rank, seed=30 + layer)
        inputs[layer + 1] = changed + noise * torch.randn(tokens, HIDDEN, generator=random)
    return inputs


def calibrator(ranks: Sequence[int], noise: float = 0.0) -> Calibrator:
    made = Calibrator(weights_of_layers(len(ranks) + 1))
    for seed in range(3):
        made.add(inputs_of_layers(seed, ranks, noise))
    return made


def test_every_layer_takes_the_smallest_rank_that_keeps_the_gain() -> None:
    turned = [2, 4, 7, 30, 60]
    made = calibrator(turned)
    calibrated = made.calibrate([inputs_of_layers(9, turned)], "auto")
    assert made.layers == list(calibrated) == [1, 2, 3, 4, 5]
    assert [calibrated[layer].rank for layer in made.layers] == [4, 4, 8, 32, HIDDEN]
    for one in calibrated.values():
        assert one.cosine > 0.995
        assert one.cosine_raw < one.cosine - 0.01


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_a_smaller_rank_than_the_chosen_one_would_lose_some_of_the_gain(noise: float) -> None:
    turned = [3, 12, 50]
    made, unseen = calibrator(turned, noise), [inputs_of_layers(seed, turned, noise) for seed in (8, 9)]
    chosen, full = made.calibrate(unseen, "auto"), made.calibrate(unseen, "full")
    for rank in RANKS:
        for layer, one in made.calibrate(unseen, rank).items():
            enough = one.cosine >= full[layer].cosine - 0.002
            assert one.rank == rank
            if rank < chosen[layer].rank:
                assert not enough
            elif rank == chosen[layer].rank:
                assert enough
    for layer, one in chosen.items():
        assert one.cosine_raw == full[layer].cosine_raw < one.cosine


def test_a_rank_that_is_given_is_taken_and_bounded_by_the_hidden_size() -> None:
    made, unseen = calibrator([3]), [inputs_of_layers(9, [3])]
    for asked, taken in ((1, 1), (5, 5), (HIDDEN, HIDDEN), (1000, HIDDEN)):
        one = made.calibrate(unseen, asked)[1]
        assert one.rank == taken
        assert one.correction.right is not None
        assert one.correction.right.shape == (taken, HIDDEN)
    full = made.calibrate(unseen, "full")[1]
    assert full.rank == HIDDEN
    assert full.correction.right is None


def test_corrections_are_stored_in_half_precision_on_the_host() -> None:
    for rank in ("auto", "full", 3):
        correction = calibrator([3]).calibrate([inputs_of_layers(9, [3])], rank)[1].correction
        for part in vars(correction).values():
            assert part is None or (part.dtype, part.device.type) == (torch.float16, "cpu")


def test_progress_is_told_after_every_layer() -> None:
    told = []
    calibrator([3, 3]).calibrate([inputs_of_layers(9, [3, 3])], "full", lambda: told.append(len(told)))
    assert told == [0, 1]


def test_the_penalty_is_chosen_on_text_that_the_fit_has_not_seen() -> None:
    # few tokens and much noise: a fit without penalty would learn the noise
    turned, noise = [6], 1.0
    made = Calibrator(weights_of_layers(2))
    made.add(inputs_of_layers(0, turned, noise, tokens=80))
    unseen = inputs_of_layers(9, turned, noise)
    one = made.calibrate([unseen], "full")[1]
    weights = weights_of_layers(2)[1]
    fit = LayerFit(weights)
    fit.add(*inputs_of_layers(0, turned, noise, tokens=80).values())
    real = QueryPredictor(weights).project(unseen[1])
    without = cosines(real, QueryPredictor(weights, fit.solve(1e-9).full()).project(unseen[0]), HEAD_DIM).mean()
    assert one.cosine > float(without) + 0.005
