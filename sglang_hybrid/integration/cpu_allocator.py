"""SGLang's page allocator with its two Triton kernels in torch, for hosts without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive


class CpuPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """Allocates pages with SGLang's bookkeeping, in torch. None means out of pages: then nothing was allocated."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
        **_later: Any,
    ) -> torch.Tensor | None:
        needed = int((_pages(seq_lens_cpu, self.page_size) - _pages(prefix_lens_cpu, self.page_size)).sum())
        if not self._have(needed):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device)
        self.free_pages = self.free_pages[needed:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor, **_later: Any
    ) -> torch.Tensor | None:
        starts_page = (seq_lens - 1) % self.page_size == 0
        needed = int(starts_page.sum())
        if not self._have(needed):
            return None
        slots = last_loc.to(torch.int64) + 1
        slots[starts_page] = self.free_pages[:needed] * self.page_size
        self.free_pages = self.free_pages[needed:]
        return slots

    def _have(self, pages: int) -> bool:
        if pages > len(self.free_pages):
            self.merge_and_sort_free()
        return pages <= len(self.free_pages)


def _pages(tokens: torch.Tensor, page_tokens: int) -> torch.Tensor:
    return -(-tokens // page_tokens)
