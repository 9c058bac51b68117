"""Watching numbers that a device counted some steps ago: miss ratios, recall intervals, and what served misses."""

from __future__ import annotations

import pytest
import torch

from sglang_hybrid.config import load_config
from sglang_hybrid.engines.cuda.settings import PathRates, scout_tuning
from sglang_hybrid.engines.cuda.watch import DeviceWatch, RatioWatch, schedule_of
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.ops.cuda.mailbox import COUNTS
from sglang_hybrid.ops.cuda.structs import OUTCOMES, TOTALS, WAIT_BOUNDS
from sglang_hybrid.policies.scout.recall import RecallSchedule
from sglang_hybrid.policies.scout.tuning import tuning_of

LAYERS, PER_ROW = 2, 100


class Scout:
    """Stand-in for the step program of policy scout, whose counters a watch reads and whose settings it changes."""

    block_bytes = 1000

    def __init__(self) -> None:
        self.counted = torch.zeros(LAYERS, len(TOTALS), dtype=torch.int64)
        self.intervals: list[int] = []
        self.shares: list[list[float]] = []

    def count(self, of_layers: list[list[int]]) -> None:
        """Add to each layer's totals, in the order of TOTALS: misses, recalled blocks, then perhaps others."""
        new = torch.tensor(of_layers)
        self.counted[:, : new.shape[1]] += new

    def set_intervals(self, intervals: list[int]) -> None:
        self.intervals = list(intervals)

    def set_gather_shares(self, shares: list[float]) -> None:
        self.shares.append(shares)


class Late:
    """Counters whose numbers arrive one look later, like a copy from a device."""

    def __init__(self, counted: torch.Tensor) -> None:
        self._counted = counted
        self._taken: torch.Tensor | None = None
        self.seconds = 1e-6

    def look(self) -> torch.Tensor | None:
        taken, self._taken = self._taken, None
        return taken

    def begin(self) -> None:
        self._taken = self._counted.clone()

    @property
    def is_looking(self) -> bool:
        return self._taken is not None


def watch_of(scout: Scout, mailbox: torch.Tensor | None = None, rates: PathRates | None = None) -> DeviceWatch:
    schedule = RecallSchedule([8, 8], 0.12, True)
    return DeviceWatch(scout, schedule, PER_ROW, mailbox, rates, counters=Late)  # type: ignore[arg-type]


def test_ratios_are_misses_over_what_rows_beyond_the_budget_may_hold() -> None:
    scout = Scout()
    watch = watch_of(scout)
    seen: list[tuple[int, float]] = []
    watch.on_ratio = lambda layer, ratio: seen.append((layer, ratio))
    for _ in range(32):
        scout.count([[30, 0], [60, 0]])  # misses of 3 rows in one step
        watch.step(3)
    assert seen == [(0, 0.1), (1, 0.2)]  # ratios of the first 16 steps; later numbers have not arrived


def test_a_ratio_above_the_band_shortens_an_interval() -> None:
    scout = Scout()
    watch = watch_of(scout)
    for _ in range(80):
        scout.count([[60, 0], [3, 0]])
        watch.step(3)
    assert scout.intervals[0] < 8 == scout.intervals[1]


def test_rows_within_the_budget_say_nothing() -> None:
    watch = watch_of(scout := Scout())
    for _ in range(80):
        watch.step(0)
    assert scout.intervals == [] and scout.shares == []


def test_what_became_of_rows_is_told_once() -> None:
    mailbox = torch.zeros(COUNTS, dtype=torch.int64)
    watch = watch_of(Scout(), mailbox)
    told: list[tuple[str, int]] = []

    class Metrics:
        def served(self, by: str, rows: int) -> None:
            told.append((by, rows))

    watch.metrics = Metrics()  # type: ignore[assignment]
    mailbox[OUTCOMES.index("served")], mailbox[OUTCOMES.index("late")] = 40, 2
    for _ in range(96):
        watch.step(1)
    assert told == [("worker", 40), ("device-late", 2)]


def read_after_steps(watch: DeviceWatch) -> Readings:
    for _ in range(32):
        watch.step(3)
    return watch.readings()


def test_readings_are_what_the_device_had_counted_at_the_last_look() -> None:
    watch = watch_of(scout := Scout())
    assert watch.readings().selected_blocks == 0
    scout.count([[30, 5, 10, 200, 160], [20, 5, 0, 200, 180]])
    read = read_after_steps(watch)
    assert (read.selected_blocks, read.resident_blocks, read.recalled_blocks) == (400, 340, 10)
    assert read.block_bytes == 1000 and read.recall_intervals == (8, 8)


def test_without_a_worker_the_device_reads_what_it_does_not_gather() -> None:
    watch = watch_of(scout := Scout())
    scout.count([[30, 0, 10], [20, 0, 5]])
    read = read_after_steps(watch)
    assert read.miss_blocks == {"gather": 15, "device": 35} and read.waits is None


def test_blocks_that_the_worker_does_not_serve_are_read_by_the_device() -> None:
    mailbox = torch.zeros(COUNTS, dtype=torch.int64)
    watch = watch_of(scout := Scout(), mailbox)
    scout.count([[30, 0, 10], [30, 0, 10]])
    for outcome, blocks in (("served", 25), ("late", 7), ("refused", 2), ("withheld", 6)):
        mailbox[len(OUTCOMES) + OUTCOMES.index(outcome)] = blocks
    waits = mailbox[2 * len(OUTCOMES) :]
    waits[0], waits[3], waits[-1] = 5, 2, 800_000  # ns
    read = read_after_steps(watch)
    assert read.miss_blocks == {"gather": 20, "worker": 25, "device": 15}
    assert read.waits is not None and read.waits.total == 0.0008
    assert read.waits.counts == (5, 0, 0, 2, *[0] * (len(WAIT_BOUNDS) - 3))


def test_as_much_is_gathered_as_pcie_hides_beside_recalls() -> None:
    rates = PathRates(gathers=50e9, computes=100e9)
    # in 0.35 ms of a layer of 1 ms, 17.5 MB are gathered
    assert rates.gather_share(missed=17.5e6, recalled=0, layer_seconds=1e-3) == 1.0
    assert rates.gather_share(missed=50e6, recalled=0, layer_seconds=1e-3) == pytest.approx(0.35)
    assert rates.gather_share(missed=50e6, recalled=7.5e6, layer_seconds=1e-3) == pytest.approx(0.2)
    assert rates.gather_share(missed=50e6, recalled=30e6, layer_seconds=1e-3) == 0.0


def test_of_nothing_all_is_gathered_so_that_the_first_miss_is() -> None:
    assert PathRates(50e9, 100e9).gather_share(missed=0, recalled=0, layer_seconds=1e-3) == 1.0


def test_where_the_worker_is_late_both_ways_end_at_the_same_time() -> None:
    rates = PathRates(gathers=50e9, computes=100e9)
    for recalled in (0.0, 10e6):
        share = rates.gather_share(missed=190e6, recalled=recalled, layer_seconds=1e-3)
        gathering, computing = (share * 190e6 + recalled) / 50e9, (1 - share) * 190e6 / 100e9
        assert abs(gathering - computing) < 1e-9


def test_recalls_that_fill_the_link_leave_nothing_to_gather() -> None:
    assert PathRates(50e9, 100e9).gather_share(missed=90e6, recalled=100e6, layer_seconds=1e-3) == 0.0


def test_a_share_follows_what_is_missed() -> None:
    scout = Scout()
    watch = watch_of(scout, rates=PathRates(gathers=1.0, computes=1.0))  # so slow that nothing is hidden
    for _ in range(32):
        scout.count([[100, 20], [100, 100]])
        watch.step(3)
    assert scout.shares == [[0.4, 0.0]]  # 0.4 * 100 + 20 blocks over PCIe, 60 computed; 100 over PCIe, 100 computed


def test_a_share_follows_the_rate_at_which_blocks_were_gathered() -> None:
    scout = Scout()
    watch = watch_of(scout, rates=PathRates(gathers=1e18, computes=1e18))
    for _ in range(48):  # 100 kB of 200 kB missed in a layer, in 100 us: 1 GB/s
        scout.count([[200, 50, 100, 0, 0, 100_000]] * LAYERS)
        watch.step(3)
    # a layer takes 1e-6 / 16 / 2 s, in 0.35 of which 1 GB/s brings 11 bytes; the worker computes the others in time
    assert scout.shares[-1] == pytest.approx([0.35 * 1e-6 / 16 / LAYERS * 1e9 / 200e3] * LAYERS)


def test_recalls_aim_at_what_the_worker_computes_in_time() -> None:
    rates = PathRates(gathers=50e9, computes=100e9)
    # in 0.6 ms of a layer of 1 ms, the worker computes 60 MB, of budgets of 600 MB
    assert rates.target_ratio(600e6, 1e-3) == pytest.approx(0.1)
    assert rates.target_ratio(1e12, 1e-3) == 0.03
    assert rates.target_ratio(1e6, 1e-3) == 0.25


@pytest.mark.parametrize("follows", [False, True])
def test_a_fast_host_recalls_less_often(follows: bool) -> None:
    scout, schedule = Scout(), RecallSchedule([8, 8], 0.12, True)
    rates = PathRates(gathers=1.0, computes=1e18)
    watch = DeviceWatch(
        scout, schedule, PER_ROW, None, rates, gathers=False, follows_host=follows, counters=Late  # type: ignore[arg-type]
    )  # fmt: skip
    for _ in range(80):
        scout.count([[45, 0], [45, 0]])  # a ratio of 0.15
        watch.step(3)
    assert schedule.beta == (0.25 if follows else 0.12)
    assert scout.shares == []
    assert (scout.intervals == []) == follows  # 0.15 is within the band of 0.25 and above 0.12


@pytest.mark.parametrize("gathers", [False, True])
def test_intervals_stay_where_misses_are_gathered(gathers: bool) -> None:
    schedule = schedule_of(tuning_of(load_config(None, ["scout.recall_adapt=true"]), 2), gathers=gathers)
    intervals = list(schedule.intervals)
    for _ in range(200):
        schedule.observe(0, 1.0)
    assert (schedule.intervals == intervals) == gathers


@pytest.mark.parametrize(
    ("settings", "has_profile", "intervals"),
    [
        ([], False, (32, 32)),
        (["scout.cpu_share=0.5"], False, (32, 32)),
        (["scout.cpu_share=1"], False, (8, 8)),  # nothing is copied between recalls
        (["scout.recall_interval=5"], False, (5, 5)),
        ([], True, (8, 8)),  # what the profile says
    ],
)
def test_recalls_are_rarer_where_misses_are_copied_to_the_device(
    settings: list[str], has_profile: bool, intervals: tuple[int, ...]
) -> None:
    config = load_config(None, settings)
    assert scout_tuning(config, tuning_of(config, 2), has_profile).intervals == intervals


def test_a_program_without_recalls_tells_its_ratios_alone() -> None:
    counted = torch.zeros(2, 1, dtype=torch.int64)
    watch = RatioWatch(counted, PER_ROW, None, counters=Late)  # type: ignore[arg-type]
    told: list[tuple[int, float]] = []
    watch.on_ratio = lambda layer, ratio: told.append((layer, ratio))
    for _ in range(64):
        watch.step(longer_rows=2)
        counted += torch.tensor([[PER_ROW], [PER_ROW // 2]])  # misses of both rows together
    assert {layer: ratio for layer, ratio in told} == {0: 0.5, 1: 0.25}
