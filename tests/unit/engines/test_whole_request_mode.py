"""Decisions of ``WholeRequestMode``: when to hold whole rows in device memory."""

from __future__ import annotations

from sglang_hybrid.engines.cuda.whole_request_mode import WholeRequestMode

MB = 10**6


def room() -> WholeRequestMode:
    return WholeRequestMode(pages=100, block_bytes=10 * MB)  # a block takes 0.2 ms to load


def test_rows_are_held_until_they_do_not_fit() -> None:
    held = room()
    assert held.decide([32 * 99, 1], now=0)
    assert held.decide([32 * 99, 32], now=1)
    assert not held.decide([32 * 99, 33], now=2)


def test_rows_come_back_when_loading_them_is_a_small_part_of_the_time() -> None:
    held = room()
    assert not held.decide([32 * 101], now=10)
    assert not held.decide([32 * 50], now=10.05)  # loading takes 10 ms
    assert held.decide([32 * 50], now=10.11)


def test_rows_that_would_leave_soon_do_not_come_back() -> None:
    held = room()
    assert not held.decide([32 * 101], now=0)
    assert not held.decide([32 * 96], now=1000)
    assert held.decide([32 * 95], now=1000)


def test_a_server_that_selects_goes_on_doing_so_while_it_is_full() -> None:
    held = room()
    assert not any(held.decide([32 * 60, 32 * 60], now) for now in range(100))
