"""The rank that metrics belong to, as labels that all metrics have."""

from __future__ import annotations

from dataclasses import dataclass

RANK_LABELS = ("replica", "rank")


@dataclass(frozen=True)
class Rank:
    """A rank of tensor parallelism, and the replica of the model that it belongs to."""

    rank: int = 0
    replica: int = 0

    @property
    def labels(self) -> dict[str, str]:
        return dict(zip(RANK_LABELS, (str(self.replica), str(self.rank)), strict=True))
