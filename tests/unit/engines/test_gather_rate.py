"""The rate of gathers: an estimate, then what was measured, and more again while nothing is gathered."""

from __future__ import annotations

import pytest

from sglang_hybrid.engines.cuda.gather_rate import GatherRate


def test_the_first_measurement_replaces_the_estimate_and_later_ones_move_it() -> None:
    rate = GatherRate(50e9)
    assert (rate.rate, rate.is_measured) == (50e9, False)
    rate.observe(10e6, 1e-3)
    assert rate.rate == pytest.approx(10e9) and rate.is_measured
    rate.observe(20e6, 1e-3)
    assert rate.rate == pytest.approx(15e9)


def test_without_gathers_the_rate_returns_to_the_estimate_so_that_they_are_tried_again() -> None:
    rate = GatherRate(50e9)
    rate.observe(0, 0)
    assert (rate.rate, rate.is_measured) == (50e9, False)
    rate.observe(1e6, 1e-3)
    for _ in range(30):
        rate.observe(0, 1e-6)  # a launch with an empty list takes time, too
    assert rate.rate == 50e9
