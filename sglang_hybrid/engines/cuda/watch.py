"""Counters of a GPU server for metrics and log, and controllers that adapt recall intervals and gather shares to them.

Nothing here waits for the device, so the numbers are some steps old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from sglang_hybrid.engines.cuda.counters import Counters
from sglang_hybrid.engines.cuda.gather_rate import GatherRate
from sglang_hybrid.engines.cuda.settings import PathRates
from sglang_hybrid.metrics import WorkerMetrics
from sglang_hybrid.metrics.distribution import Distribution
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.ops.cuda.mailbox import COUNTS, MailboxCounts
from sglang_hybrid.ops.cuda.structs import TOTALS
from sglang_hybrid.policies.scout.recall import RecallSchedule
from sglang_hybrid.policies.scout.tuning import Tuning
from sglang_hybrid.worker.fallback_log import FallbackLog

_LOOK_STEPS = 16
# outcome of a posted row -> label in SGLang's metrics; rows without misses are not reported
_BY = {"late": "device-late", "damaged": "device-damaged", "refused": "device-damaged", "withheld": "device-no-worker"}
_WHY = {"device-late": "late", "device-damaged": "damaged", "device-no-worker": "no-worker"}


class Watched(Protocol):
    """Interface of a step program that misses and recalls blocks, for ``DeviceWatch``."""

    counted: torch.Tensor  # [layers, TOTALS]: blocks so far, in device memory

    @property
    def block_bytes(self) -> int: ...

    def set_intervals(self, intervals: Sequence[int]) -> None: ...

    def set_gather_shares(self, shares: Sequence[float]) -> None: ...


class RatioWatch:
    """Reports CPU compute ratios and which side served rows, from the counters of a step program and the mailbox."""

    def __init__(
        self,
        counted: torch.Tensor,
        per_row: int,
        mailbox: torch.Tensor | None,
        block_bytes: int = 0,
        counters: Callable[[torch.Tensor], Counters] = Counters,
    ) -> None:
        """``counted`` ``[layers, n]``: counters in device memory; column 0 is the work whose ratio is reported.

        ``per_row``: amount of this work, per row and step and over all KV heads, that makes a ratio of 1. ``mailbox``:
        counts of the mailbox, in device memory; None: no worker. ``block_bytes``: bytes of a block's keys and values.
        """
        self._per_row, self._block_bytes = per_row, block_bytes
        self._counted = counters(counted)
        self._mailbox = counters(mailbox) if mailbox is not None else None
        self._seen_counted = torch.zeros_like(counted, device="cpu")
        self._seen_mailbox = MailboxCounts.of([0] * COUNTS)
        self._steps = self._rows = self._looked_steps = self._looked_rows = 0
        self._log = FallbackLog("were read from host memory by the GPU")
        self.metrics: WorkerMetrics | None = None
        self.on_ratio: Callable[[int, float], None] | None = None  # gets a layer and its CPU compute ratio

    def step(self, longer_rows: int) -> None:
        """Count a decode step before it is launched, and process counters that arrived. Called before every step.

        ``longer_rows``: rows that are long enough to need the worker or the host pool.
        """
        self._steps += 1
        self._rows += longer_rows
        if self._steps % _LOOK_STEPS:
            return
        self._look()
        if not self._counted.is_looking:
            self._looked_steps, self._looked_rows = self._steps, self._rows
            self._counted.begin()
            if self._mailbox:
                self._mailbox.begin()

    def _look(self) -> None:
        if (counted := self._counted.look()) is not None:
            new, self._seen_counted = counted - self._seen_counted, counted
            steps, rows = self._looked_steps, self._looked_rows
            self._steps, self._rows = self._steps - steps, self._rows - rows
            if rows:
                self._observe(new, rows, steps)
        if self._mailbox and (numbers := self._mailbox.look()) is not None:
            before, self._seen_mailbox = self._seen_mailbox, MailboxCounts.of(numbers.tolist())
            self._tell_outcomes({by: rows - before.rows[by] for by, rows in self._seen_mailbox.rows.items()})

    def readings(self) -> Readings:
        """Return the counters as of the last copy that arrived."""
        if not self._mailbox:
            return Readings()
        return Readings(miss_blocks=self._posted_blocks(), block_bytes=self._block_bytes, waits=self._waits())

    def _posted_blocks(self) -> dict[str, int]:
        """Return the posted blocks by path. The GPU reads the blocks that the worker did not serve."""
        blocks = self._seen_mailbox.blocks
        return {"worker": blocks["served"], "device": sum(blocks.values()) - blocks["served"]}

    def _waits(self) -> Distribution:
        return Distribution(self._seen_mailbox.waits, self._seen_mailbox.waited_s)

    def _observe(self, new: torch.Tensor, rows: int, steps: int) -> None:
        """Process ``new`` counts of ``steps`` steps. ``rows``: sum of the rows of these steps."""
        self._tell_ratios((new[:, 0].double() / (rows * self._per_row)).tolist(), steps)

    def _tell_ratios(self, ratios: list[float], steps: int) -> None:
        if self.on_ratio:
            for layer, ratio in enumerate(ratios):
                self.on_ratio(layer, ratio)

    def _tell_outcomes(self, rows: dict[str, int]) -> None:
        if self.metrics and rows["served"]:
            self.metrics.served("worker", rows["served"])
        for outcome, by in _BY.items():
            if rows[outcome]:
                self._log.note(_WHY[by], rows[outcome])
                if self.metrics:
                    self.metrics.served(by, rows[outcome])


def schedule_of(tuning: Tuning, *, gathers: bool) -> RecallSchedule:
    """Return the schedule of recalls. Where misses are gathered (``gathers``) its intervals do not adapt.

    A gathered block becomes resident at once. Recalls at shorter intervals would take PCIe from the gathers, and leave
    as many misses ("Recall intervals" in docs/measurements.md).
    """
    return RecallSchedule(tuning.intervals, tuning.beta, tuning.adapt and not gathers)


class DeviceWatch(RatioWatch):
    """Watch of policies with recalls: also adapts recall intervals and gather shares to the counters."""

    def __init__(
        self,
        scout: Watched,
        recall: RecallSchedule,
        blocks_per_row: int,
        mailbox: torch.Tensor | None,
        rates: PathRates | None,
        *,
        gathers: bool = True,
        follows_host: bool = False,
        counters: Callable[[torch.Tensor], Counters] = Counters,
    ) -> None:
        """``blocks_per_row``: budget in blocks, over all KV heads. ``mailbox``: its counts, in device memory.

        ``rates``: rates of this host; None: nothing adapts to them. ``gathers``: adapt the share of misses that is
        gathered to the misses and recalls. ``follows_host``: aim recalls at what the worker computes in time.
        """
        super().__init__(scout.counted, blocks_per_row, mailbox, scout.block_bytes, counters)
        self._gathers, self._follows_host = gathers, follows_host
        self._gather_rate = GatherRate(rates.gathers if rates else 0.0)
        self._scout, self._recall, self._rates = scout, recall, rates

    def readings(self) -> Readings:
        total = dict(zip(TOTALS, self._seen_counted.sum(dim=0).tolist(), strict=True))
        # the GPU reads misses that are neither gathered nor served by the worker
        paths = {"gather": total["gathered"], "device": total["misses"] - total["gathered"]}
        if self._mailbox:
            paths |= self._posted_blocks()
        return Readings(
            selected_blocks=total["selected"],
            resident_blocks=total["resident"],
            recall_intervals=tuple(self._recall.intervals),
            miss_blocks=paths,
            recalled_blocks=total["recalled"],
            block_bytes=self._block_bytes,
            waits=self._waits() if self._mailbox else None,
        )

    def _observe(self, new: torch.Tensor, rows: int, steps: int) -> None:
        self._aim(rows / steps, steps)
        super()._observe(new, rows, steps)
        self._measure(new)
        self._balance(new[:, :2].double() / steps, steps)

    def _tell_ratios(self, ratios: list[float], steps: int) -> None:
        before = list(self._recall.intervals)
        for layer, ratio in enumerate(ratios):
            self._recall.observe(layer, ratio, steps)
        super()._tell_ratios(ratios, steps)
        if self._recall.intervals != before:
            self._scout.set_intervals(self._recall.intervals)

    def _aim(self, rows: float, steps: int) -> None:
        """Set the target CPU compute ratio of recalls. ``rows``: mean number of rows per step that may miss."""
        seconds = self._counted.seconds
        if self._follows_host and self._rates and seconds is not None:
            layer_seconds = seconds / steps / len(self._recall.intervals)
            self._recall.beta = self._rates.target_ratio(rows * self._per_row * self._scout.block_bytes, layer_seconds)

    def _measure(self, new: torch.Tensor) -> None:
        """Measure the rate of gathers."""
        total = dict(zip(TOTALS, new.sum(dim=0).tolist(), strict=True))
        self._gather_rate.observe(total["gathered"] * self._scout.block_bytes, total["gather_ns"] / 1e9)

    def _balance(self, blocks: torch.Tensor, steps: int) -> None:
        """Set the gather shares. ``blocks`` ``[layers, 2]``: blocks that each layer misses and recalls per step."""
        # Time on the device, because the host may run ahead of it. Pauses count too, so a device that has time gathers
        # more blocks itself.
        seconds = self._counted.seconds
        if self._gathers and self._rates and blocks[:, 0].any() and seconds is not None:
            layer_seconds = seconds / steps / len(self._recall.intervals)
            rates = replace(self._rates, gathers=self._gather_rate.rate)
            moved = blocks * self._scout.block_bytes
            if self._gather_rate.is_measured:
                moved[:, 1] = 0  # what recalls take from gathers is in the rate
            self._scout.set_gather_shares(
                [rates.gather_share(missed, recalled, layer_seconds) for missed, recalled in moved.tolist()]
            )
