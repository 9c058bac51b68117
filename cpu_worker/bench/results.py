"""What was measured, as one object: the table and the JSON file are views of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpu_worker.bench.attention import Rate
from cpu_worker.bench.round_trip import RoundTrip

TORCH = "torch"


@dataclass(frozen=True)
class Point:
    """One cell of the table."""

    dtype: str
    variant: str  # of the kernel, or "torch"
    threads: int
    blocks: int  # per task
    rows: int
    post_bytes: int
    rate: Rate


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
        return max(measured.get(threads, 0.0) for measured in (self.read_before, self.read_after))

    @property
    def host_read(self) -> float:
        """What any number of threads can read, in GB/s."""
        return max(self.read(threads) for threads in self.read_before)

    def native_to_torch(self, torch: Point) -> float:
        """How many times as fast as this measurement of torch the fastest native variant is."""
        rivals = [
            point.rate.median
            for point in self.points
            if point.variant != TORCH
            and (point.dtype, point.threads, point.blocks) == (torch.dtype, torch.threads, torch.blocks)
        ]
        return max(rivals, default=0.0) / torch.rate.median
