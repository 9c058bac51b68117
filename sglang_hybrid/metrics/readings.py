"""Counters and state that an engine reports for metrics, read a few times a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang_hybrid.metrics.distribution import Distribution


@dataclass(frozen=True)
class Readings:
    """Values that an engine reports. None: the engine does not know the value.

    Blocks are those of one layer and one KV head. Counts start when the engine starts.
    """

    selected_blocks: int | None = None  # without blocks that are always attended
    resident_blocks: int | None = None  # of the selected blocks
    recall_intervals: tuple[int, ...] | None = None  # of each layer, at present
    miss_blocks: Mapping[str, int] | None = None  # by path, see table.PATHS
    recalled_blocks: int | None = None  # blocks that recalls copied
    block_bytes: int = 0  # keys and values of a block
    waits: Distribution | None = None  # seconds that decode steps waited for the worker
    slots: int | None = None  # blocks that fit in device memory
    slots_used: int = 0  # by the rows of the last step
    holds_whole_requests: bool | None = None


class ServedBlocks:
    """Counts missed blocks by the path on which they were attended (``table.PATHS``)."""

    def __init__(self, *paths: str) -> None:
        """``paths`` are reported as 0 before a block has taken them."""
        self.by_path = dict.fromkeys(paths, 0)

    def add(self, path: str, blocks: int) -> None:
        self.by_path[path] = self.by_path.get(path, 0) + blocks
