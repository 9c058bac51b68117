"""Overwrites freed pages of the KV pool with NaN, so that any later read of a freed page shows in the answers."""

from __future__ import annotations

from typing import Any

import torch


def spoil(allocator: Any, pool: Any) -> None:
    """Overwrite with NaN, from now on, all pages of ``pool`` that are returned to ``allocator``."""
    free = allocator.free

    def free_and_spoil(slots: torch.Tensor) -> None:
        free(slots)
        if slots.numel():
            pool.wait_for_device()
            pages = torch.unique(slots // allocator.page_size).to("cpu", torch.int64)
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[pages] = torch.nan

    allocator.free = free_and_spoil
