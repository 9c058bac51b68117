"""Places of rows on the GPU."""

from __future__ import annotations

import torch
from cuda_cases import seeded
from selection_cases import DEVICE

from sglang_hybrid.cuda.digests import Step
from sglang_hybrid.cuda.places import Places

ROWS, LAYERS, HEADS, SLOTS = 40, 2, 3, 5


def places_of(count: int) -> Places:
    return Places(ROWS, torch.full((LAYERS, count, HEADS, SLOTS), 9, dtype=torch.int32, device=DEVICE))


def placed(places: Places, lengths: dict[int, int], refused: torch.Tensor | None = None) -> dict[int, tuple[int, bool]]:
    """Of each row: its place, and whether it is new there. One entry is padding."""
    batch = len(lengths) + 1
    row_of = torch.tensor([*lengths, 0], dtype=torch.int32, device=DEVICE)
    of_step = torch.tensor([*lengths.values(), 1], dtype=torch.int32, device=DEVICE)
    active = torch.tensor([len(lengths)], dtype=torch.int32, device=DEVICE)
    step = Step(torch.zeros(batch, 4, dtype=torch.int32, device=DEVICE), of_step, row_of, active)
    begins = torch.full((batch,), 7, dtype=torch.int32, device=DEVICE)
    places.place_rows(step, begins, refused)
    torch.cuda.synchronize()
    found, new = step.row_of.tolist(), begins.tolist()
    assert (found[-1], new[-1]) == (-1, 0), "padding has no place"
    taken = [place for place in found if place >= 0]
    assert len(set(taken)) == len(taken) and all(place < places.count for place in taken)
    for place, length in zip(found, lengths.values(), strict=False):
        assert place < 0 or int(places.lengths[place]) == length
    return {row: (place, bool(is_new)) for row, place, is_new in zip(lengths, found, new, strict=False)}


def test_rows_keep_their_places_and_others_get_those_of_rows_that_left() -> None:
    places = places_of(3)
    first = placed(places, {11: 100, 7: 50})
    assert all(is_new for _, is_new in first.values())
    assert int(places.first_lengths[first[11][0]]) == 100
    assert (places._positions[:, [place for place, _ in first.values()]] == -1).all()
    places._positions.fill_(5)

    second = placed(places, {7: 51, 30: 9, 11: 101})
    assert second[7] == (first[7][0], False) and second[11] == (first[11][0], False) and second[30][1]
    assert int(places.first_lengths[first[11][0]]) == 100, "the first step is remembered"
    of_new = places._positions[:, second[30][0]]
    assert (of_new == -1).all() and int((places._positions == -1).sum()) == of_new.numel()

    third = placed(places, {2: 40, 30: 10})
    assert third[30] == (second[30][0], False) and third[2][1]
    assert placed(places, {11: 103})[11][1], "a row that was away is new, its place may have been another's"


def test_a_row_of_another_request_begins_anew() -> None:
    places = places_of(2)
    placed(places, {4: 10, 5: 20})
    places.rows_begin(torch.tensor([4], device=DEVICE))
    found = placed(places, {4: 3, 5: 21})
    assert found[4][1] and not found[5][1]
    places.forget_all()
    assert all(is_new for _, is_new in placed(places, {4: 4, 5: 22}).values())


def test_rows_that_find_no_place_are_counted() -> None:
    places, refused = places_of(2), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found = placed(places, {4: 10, 5: 20, 6: 30}, refused)
    assert sorted(place for place, _ in found.values()) == [-1, 0, 1] and int(refused) == 1


def test_random_traffic_loses_no_place() -> None:
    random, places, rows, before = seeded(1), places_of(6), {}, {}
    for _ in range(40):
        rows = {row: length + 1 for row, length in rows.items() if torch.rand((), generator=random) > 0.2}
        while len(rows) < int(torch.randint(1, 7, (), generator=random)):
            row = int(torch.randint(1, ROWS, (), generator=random))
            rows[row] = int(torch.randint(1, 90, (), generator=random))
            places.rows_begin(torch.tensor([row], device=DEVICE))
            before.pop(row, None)
        found = placed(places, rows)
        for row, (place, is_new) in found.items():
            assert place >= 0 and (is_new or before[row] == place)
            assert not is_new or row not in before
        before = {row: place for row, (place, _) in found.items()}
