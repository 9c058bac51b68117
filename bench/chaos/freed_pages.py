"""Pages that are given back become NaN, so that whoever still reads one gives itself away."""

from __future__ import annotations

from typing import Any

import torch


def spoil(allocator: Any, pool: Any) -> None:
    """From now on, spoil all pages that ``allocator`` gets back."""
    free = allocator.free

    def free_and_spoil(slots: torch.Tensor) -> None:
        free(slots)
        if slots.numel():
            pool.wait_for_device()
            pages = torch.unique(slots // allocator.page_size).to("cpu", torch.int64)
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[pages] = torch.nan

    allocator.free = free_and_spoil
