"""What was measured, as one object: the table and the JSON file are views of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.worker.arguments import PROVIDERS
from bench.worker.attention import Rate
from bench.worker.round_trip import RoundTrip


@dataclass(frozen=True)
class Point:
    """One cell of the table."""

    dtype: str
    variant: str  # of the kernel, or the name of another provider
    threads: int
    blocks: int  # per task
    rows: int
    post_bytes: int
    rate: Rate

    @property
    def is_native(self) -> bool:
        return self.variant not in PROVIDERS


@dataclass
class Results:
    # threads -> GB/s, before and after everything else: machines drift
    read_before: dict[int, float] = field(default_factory=dict)
    read_after: dict[int, float] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    round_trip: RoundTrip | None = None
    notes: list[str] = field(default_factory=list)

    def read(self, threads: int) -> float:
        """What ``threads`` threads can read, in GB/s."""
        beside = [point.rate.read for point in self.points if point.threads == threads]
        return max(self.read_before.get(threads, 0.0), self.read_after.get(threads, 0.0), *beside)

    def read_beside(self, point: Point) -> float:
        """What the point's threads read next to it in time, or at all where that was not measured, in GB/s."""
        return point.rate.read or self.read(point.threads)

    @property
    def host_read(self) -> float:
        """What any number of threads can read, in GB/s."""
        return max(self.read(threads) for threads in self.read_before)

    def native_to(self, other: Point) -> float:
        """How many times as fast as this measurement of another provider the fastest native variant is."""
        rivals = [
            point.rate.median
            for point in self.points
            if point.is_native
            and (point.dtype, point.threads, point.blocks) == (other.dtype, other.threads, other.blocks)
        ]
        return max(rivals, default=0.0) / other.rate.median
