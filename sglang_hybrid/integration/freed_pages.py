"""Pages that are given back become NaN, so that whoever still reads one gives itself away. For chaos runs."""

from __future__ import annotations

from typing import Any

import torch


def spoil(allocator: Any, pool: Any) -> None:
    """From now on, all pages that ``allocator`` gets back."""
    free = allocator.free

    def free_and_spoil(slots: torch.Tensor) -> None:
        free(slots)
        if slots.numel():
            pool.spoil(torch.unique(slots // allocator.page_size))

    allocator.free = free_and_spoil
