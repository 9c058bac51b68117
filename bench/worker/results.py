"""All results of one benchmark run. The table and the JSON file are made from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.worker.arguments import PROVIDERS
from bench.worker.attention import Rate
from bench.worker.round_trip import RoundTrip


@dataclass(frozen=True)
class Point:
    """One measurement of attention: one cell of the table."""

    dtype: str
    variant: str  # variant of the kernel, or the name of another provider
    threads: int
    blocks: int  # blocks per task
    rows: int
    post_bytes: int
    rate: Rate

    @property
    def is_native(self) -> bool:
        return self.variant not in PROVIDERS


@dataclass
class Results:
    # threads -> GB/s, measured before and after everything else, since machines drift
    read_before: dict[int, float] = field(default_factory=dict)
    read_after: dict[int, float] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    round_trip: RoundTrip | None = None
    notes: list[str] = field(default_factory=list)

    def read(self, threads: int) -> float:
        """Return the highest read bandwidth measured with ``threads`` threads, in GB/s."""
        beside = [point.rate.read for point in self.points if point.threads == threads]
        return max(self.read_before.get(threads, 0.0), self.read_after.get(threads, 0.0), *beside)

    def read_beside(self, point: Point) -> float:
        """Return the read bandwidth of the point's threads in GB/s, measured right before or after the point.

        If there is no such measurement, return the highest one with as many threads.
        """
        return point.rate.read or self.read(point.threads)

    @property
    def host_read(self) -> float:
        """Return the highest read bandwidth measured with any number of threads, in GB/s."""
        return max(self.read(threads) for threads in self.read_before)

    def native_to(self, other: Point) -> float:
        """Return the median rate of the fastest native variant over that of ``other``, a point of another provider."""
        rivals = [
            point.rate.median
            for point in self.points
            if point.is_native
            and (point.dtype, point.threads, point.blocks) == (other.dtype, other.threads, other.blocks)
        ]
        return max(rivals, default=0.0) / other.rate.median
