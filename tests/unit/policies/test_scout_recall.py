"""The steps in which layers recall: fixed intervals, staggered starts, and the controller that follows live traffic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.scout.recall import RecallSchedule
from sglang_hybrid.policies.scout.tuning import DEFAULT_BONUS, DEFAULT_INTERVAL, DEFAULT_MISS_SHARE, tuning_of

BETA, LONGEST = 0.12, 256
INTERVALS = st.lists(st.integers(0, 20), min_size=1, max_size=12)
RATIOS = st.floats(0, 1)


def due(schedule: RecallSchedule, layer: int, steps: int) -> list[int]:
    """Return those of a row's first ``steps`` steps in which the layer recalls."""
    counted = torch.arange(1, steps + 1)
    return counted[schedule.due(layer, counted)].tolist()


def observe(schedule: RecallSchedule, ratio: float, steps: int) -> None:
    for _ in range(steps):
        for layer in range(len(schedule.intervals)):
            schedule.observe(layer, ratio)


@given(INTERVALS)
def test_a_layer_recalls_once_per_interval_and_never_if_it_is_zero(intervals: list[int]) -> None:
    schedule = RecallSchedule(intervals, BETA, adapt=False)
    for layer, interval in enumerate(intervals):
        steps = due(schedule, layer, 70)
        if interval == 0:
            assert steps == []
        else:
            assert 1 <= steps[0] <= interval
            assert steps == list(range(steps[0], 71, interval))


@given(st.integers(1, 16), st.integers(1, 40))
def test_layers_with_the_same_interval_spread_evenly_over_its_steps(interval: int, layers: int) -> None:
    schedule = RecallSchedule([interval] * layers, BETA, adapt=False)
    of_layers = [due(schedule, layer, 3 * interval) for layer in range(layers)]
    sizes = [sum(step in steps for steps in of_layers) for step in range(1, 3 * interval + 1)]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == 3 * layers


def test_the_first_layer_recalls_when_its_first_interval_is_over() -> None:
    assert due(RecallSchedule([4], BETA, adapt=False), 0, 12) == [4, 8, 12]
    assert due(RecallSchedule([1], BETA, adapt=False), 0, 3) == [1, 2, 3]


def test_rows_are_told_apart() -> None:
    answer = RecallSchedule([4, 4], BETA, adapt=False).due(1, torch.tensor([7, 1, 8, 3]))
    assert answer.dtype == torch.bool
    assert answer.tolist() == [True, False, False, True]


# The controller


@given(INTERVALS, st.lists(RATIOS, max_size=200))
def test_without_adaptation_no_ratio_changes_an_interval(intervals: list[int], ratios: list[float]) -> None:
    schedule = RecallSchedule(intervals, BETA, adapt=False)
    assert not schedule.adapts
    for ratio in ratios:
        observe(schedule, ratio, 1)
    assert schedule.intervals == intervals


@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=4), st.lists(RATIOS, max_size=20), st.floats(0.01, 1))
def test_intervals_stay_between_one_and_what_they_were(intervals: list[int], ratios: list[float], beta: float) -> None:
    schedule = RecallSchedule(intervals, beta, adapt=True)
    for ratio in ratios:
        for _ in range(100):
            observe(schedule, ratio, 1)
            assert all(1 <= now <= first for now, first in zip(schedule.intervals, intervals, strict=True))


@settings(max_examples=30)
@given(st.integers(1, LONGEST), st.floats(1.01, 8))
def test_a_ratio_above_beta_shortens_the_interval_down_to_every_step(interval: int, times: float) -> None:
    schedule = RecallSchedule([interval], BETA, adapt=True)
    seen = [interval]
    for _ in range(100):
        observe(schedule, min(1.0, times * BETA), 40)
        seen.append(schedule.intervals[0])
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 1


@settings(max_examples=30)
@given(st.integers(1, LONGEST), st.floats(0, 0.49))
def test_a_ratio_far_below_beta_lengthens_the_interval_up_to_what_it_was(interval: int, times: float) -> None:
    schedule = RecallSchedule([interval], BETA, adapt=True)
    schedule.intervals[0] = 1  # as after a while with many misses
    seen = [1]
    for _ in range(120):
        observe(schedule, times * BETA, 40)
        seen.append(schedule.intervals[0])
    assert seen == sorted(seen)
    assert seen[-1] == interval


@settings(max_examples=30)
@given(st.integers(1, LONGEST), st.floats(0.51, 0.99))
def test_a_ratio_in_the_band_leaves_the_interval_alone(interval: int, times: float) -> None:
    schedule = RecallSchedule([interval], BETA, adapt=True)
    observe(schedule, times * BETA, 1200)
    assert schedule.intervals == [interval]


@pytest.mark.parametrize(("interval", "steps"), [(2, 32), (8, 32), (16, 32), (20, 40), (100, 200)])
def test_an_interval_is_judged_after_a_while_and_after_at_least_two_recalls(interval: int, steps: int) -> None:
    schedule = RecallSchedule([interval], BETA, adapt=True)
    observe(schedule, 1.0, steps - 1)
    assert schedule.intervals == [interval]
    observe(schedule, 1.0, 1)
    assert schedule.intervals[0] < interval


def test_what_is_held_against_beta_is_the_mean_and_what_was_judged_is_forgotten() -> None:
    schedule = RecallSchedule([4], BETA, adapt=True)
    for _ in range(8):
        for ratio in (0.0, 0.1, 0.11, 0.35):  # their mean is 0.14; most of them are below beta
            observe(schedule, ratio, 1)
    assert schedule.intervals == [2]
    observe(schedule, 0.11, 32)
    assert schedule.intervals == [2]


def test_layers_are_controlled_one_by_one_and_one_that_never_recalls_stays_so() -> None:
    schedule = RecallSchedule([4, 4, 0], BETA, adapt=True)
    for _ in range(200):
        for layer, ratio in enumerate((1.0, 0.0, 1.0)):
            schedule.observe(layer, ratio)
    assert schedule.intervals[0] == 1
    assert schedule.intervals[1] == 4
    assert schedule.intervals[2] == 0


def test_layers_that_all_never_recall_need_no_ratios() -> None:
    assert not RecallSchedule([0, 0], BETA, adapt=True).adapts


# Tuning of recalls and misses by settings and by a profile


def scouting(**options: object) -> HybridConfig:
    return HybridConfig(sections={"scout": options})


class SomeProfile:
    bonus = (0.5, 2.0)
    intervals = (3, 16)
    miss_shares: tuple[float, ...] = (0.004, 0.0005)


def test_without_a_profile_there_are_defaults() -> None:
    tuning = tuning_of(HybridConfig(), layers=2)
    assert tuning.bonus == (DEFAULT_BONUS,) * 2
    assert tuning.intervals == (DEFAULT_INTERVAL,) * 2
    assert (tuning.beta, tuning.adapt, tuning.follows_host) == (0.12, True, True)
    assert (tuning.miss_shares, tuning.any_block) == ((DEFAULT_MISS_SHARE,) * 2, (False, False))


def test_a_profile_tunes_each_layer() -> None:
    tuning = tuning_of(scouting(target_cpu_ratio=0.2), 2, SomeProfile())
    assert (tuning.bonus, tuning.intervals) == ((0.5, 2.0), (3, 16))
    assert (tuning.beta, tuning.adapt, tuning.follows_host) == (0.2, True, False)
    assert (tuning.miss_shares, tuning.any_block) == ((0.004, 0.0005), (True, True))


def test_a_layer_that_recalls_at_every_step_misses_nothing_beyond_its_selection() -> None:
    class Often(SomeProfile):
        intervals = (1, 16)

    assert tuning_of(HybridConfig(), 2, Often()).any_block == (False, True)
    assert tuning_of(scouting(recall_interval=8), 2, Often()).any_block == (True, True)


def test_a_profile_without_shares_has_the_default_ones() -> None:
    class Older(SomeProfile):
        miss_shares = ()

    tuning = tuning_of(HybridConfig(), 2, Older())
    assert (tuning.miss_shares, tuning.any_block) == ((DEFAULT_MISS_SHARE,) * 2, (False, False))


@pytest.mark.parametrize("profile", [None, SomeProfile()])
def test_settings_win_over_a_profile_and_a_fixed_interval_is_meant_to_stay(profile: SomeProfile | None) -> None:
    tuning = tuning_of(scouting(resident_bonus=0, recall_interval=0), 2, profile)
    assert (tuning.bonus, tuning.intervals, tuning.adapt) == ((0.0, 0.0), (0, 0), False)
    for share in (0.0, 0.002):
        tuning = tuning_of(scouting(min_miss_attention=share), 2, profile)
        assert (tuning.miss_shares, tuning.any_block) == ((share, share), (False, False))
    assert not tuning_of(scouting(recall_adapt=False), 2, profile).adapt
