"""When rows are held in device memory as a whole, and how much of them otherwise."""

from __future__ import annotations

from sglang_hybrid.gpu.budgets import Level
from sglang_hybrid.gpu.room import Room

MB = 10**6


def room() -> Room:
    return Room(pages=100, block_bytes=10 * MB)  # a block takes 0.2 ms to load


def test_rows_are_held_until_they_do_not_fit() -> None:
    held = room()
    assert held.look([32 * 99, 1], now=0)
    assert held.look([32 * 99, 32], now=1)
    assert not held.look([32 * 99, 33], now=2)


def test_rows_come_back_when_loading_them_is_a_small_part_of_the_time() -> None:
    held = room()
    assert not held.look([32 * 101], now=10)
    assert not held.look([32 * 50], now=10.05)  # loading takes 10 ms
    assert held.look([32 * 50], now=10.11)


def test_rows_that_would_leave_soon_do_not_come_back() -> None:
    held = room()
    assert not held.look([32 * 101], now=0)
    assert not held.look([32 * 96], now=1000)
    assert held.look([32 * 95], now=1000)


def test_a_server_that_selects_goes_on_doing_so_while_it_is_full() -> None:
    held = room()
    assert not any(held.look([32 * 60, 32 * 60], now) for now in range(100))


def level() -> Level:
    return Level([65, 32, 16], row_bytes=100 * MB)  # four times that of 16 rows takes 128 ms to load


def test_few_rows_have_the_largest_budget_at_once() -> None:
    assert level().look(16, now=0) == 2
    assert level().look(17, now=0) == 1
    assert level().look(64, now=0) == 0


def test_budgets_shrink_as_rows_arrive_and_grow_when_loading_pays() -> None:
    budgets = level()
    assert [budgets.look(rows, now) for rows, now in ((16, 0.0), (17, 0.1), (33, 0.2))] == [2, 1, 0]
    assert budgets.look(16, now=1.0) == 0
    assert budgets.look(16, now=1.5) == 2
    assert budgets.look(5, now=1.6) == 2


def test_more_rows_than_any_level_has_are_of_level_0() -> None:
    assert level().look(100, now=0) == 0
