"""The least attention of a miss follows what the host has time for."""

from __future__ import annotations

import pytest

from sglang_hybrid.policies.scout.miss_shares import HIGHEST, LOWEST, MissShares

TARGET = 0.2


def followed(start: float, missed_at: float, looks: int = 60) -> tuple[float, float]:
    """Share and ratio where a layer misses ``TARGET`` at the share ``missed_at``, and more with a lower one."""
    shares = MissShares([start], adapt=True)
    for _ in range(looks):
        ratio = min(1.0, TARGET * missed_at / shares.shares[0])
        shares.observe(0, ratio, TARGET)
    return shares.shares[0], ratio


@pytest.mark.parametrize("start", [LOWEST, 0.008, HIGHEST])
@pytest.mark.parametrize("missed_at", [0.0015, 0.004, 0.015])
def test_a_layer_misses_what_there_is_time_for(start: float, missed_at: float) -> None:
    share, ratio = followed(start, missed_at)
    assert 0.75 * TARGET <= ratio <= TARGET
    assert LOWEST < share < HIGHEST


def test_shares_stay_within_their_limits() -> None:
    assert followed(0.008, missed_at=1e-6)[0] == LOWEST
    assert followed(0.008, missed_at=1.0)[0] == HIGHEST


def test_layers_are_independent() -> None:
    shares = MissShares([0.008, 0.008], adapt=True)
    shares.observe(0, 0.01, TARGET)
    assert shares.shares[0] < 0.008 == shares.shares[1]


def test_recalls_are_asked_for_when_shares_can_do_no_more() -> None:
    shares = MissShares([0.008], adapt=True)
    assert not shares.leaves_to_recalls(0)
    for _ in range(10):
        shares.observe(0, 1.0, TARGET)
    assert shares.leaves_to_recalls(0)


def test_fixed_shares_stay() -> None:
    shares = MissShares([0.004], adapt=False)
    shares.observe(0, 1.0, TARGET)
    assert shares.shares == [0.004] and shares.leaves_to_recalls(0)
