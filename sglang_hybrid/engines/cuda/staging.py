"""Staging: pages in device memory over which a layer's prefill attends, and copies between them and the host pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.ops.cuda.copies import copy_runs, gather_blocks, scatter_blocks
from sglang_hybrid.ops.cuda.digests import HostPool

# An estimate, to be measured by bench/cuda_prefill.py: a copy engine's command takes one to two microseconds, in which
# the link moves some 64 KiB. Copy engines get longer runs. A kernel copies shorter runs faster, but takes processors
# from attention.
ENGINE_RUN_BYTES = 128 << 10


class Staging:
    """Keys and values ``[pages, H, 32, D]`` in the pool's layout, and events by which streams take turns with them."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.loaded = torch.cuda.Event()  # cached prefixes are in the staging
        self.placed = torch.cuda.Event()  # new tokens are in the staging too
        self.attended = torch.cuda.Event()  # the main stream has finished reading
        self.returned = torch.cuda.Event()  # new tokens are written back to the pool


@dataclass(frozen=True)
class Transfer:
    """A copy between slots ``first`` to ``last`` of a staging and their pages of the pool, in either direction."""

    first: int
    last: int  # exclusive
    runs: torch.Tensor  # [n, 3] in host memory: first page, first slot, number of pages
    pages: torch.Tensor  # [last - first, H, 1] int32 on the device
    by_engine: bool  # whether copy engines copy, or a kernel

    def load(self, pool: HostPool, to: Staging, refused: torch.Tensor) -> None:
        """Copy pages of the pool to the staging, on the current stream. ``refused`` counts blocks out of bounds."""
        if self.first == self.last:
            return
        if self.by_engine:
            copy_runs(pool.region, pool.keys, pool.values, self.runs, to.keys, to.values, to_pool=False)
        else:
            slots = self._slots(to)
            gather_blocks(pool.region, pool.keys, pool.values, self.pages, *slots, refused=refused)

    def write_back(self, pool: HostPool, staging: Staging, refused: torch.Tensor) -> None:
        """Copy staged pages to the pool, on the current stream. ``refused`` counts blocks out of bounds."""
        if self.first == self.last:
            return
        if self.by_engine:
            copy_runs(pool.region, pool.keys, pool.values, self.runs, staging.keys, staging.values, to_pool=True)
        else:
            slots = self._slots(staging)
            scatter_blocks(pool.region, pool.keys, pool.values, self.pages, *slots, refused=refused)

    def _slots(self, staging: Staging) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(part[self.first : self.last].unsqueeze(2) for part in (staging.keys, staging.values))  # type: ignore[return-value]


def runs_of(pages: torch.Tensor, first_slot: int) -> torch.Tensor:
    """Return ``pages`` ``[n]``, of the slots from ``first_slot`` on, as runs ``[m, 3]``: page, slot, page count."""
    if not len(pages):
        return torch.empty(0, 3, dtype=torch.int32)
    begins = torch.cat((torch.tensor([True]), pages[1:] != pages[:-1] + 1)).nonzero().flatten()
    ends = torch.cat((begins[1:], torch.tensor([len(pages)])))
    return torch.stack((pages[begins], begins + first_slot, ends - begins), dim=1).int().contiguous()


def suits_engine(pages: int, runs: int, page_bytes: int) -> bool:
    """Return True if copy engines are expected to copy ``pages`` pages in ``runs`` runs better than a kernel."""
    return pages * page_bytes >= runs * ENGINE_RUN_BYTES
