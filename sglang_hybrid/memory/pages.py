"""Arithmetic between token slots and pages. SGLang's token index is the host slot."""

from __future__ import annotations

import torch


def touched_pages(slots: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages that a write to ``slots`` reaches, and the number of valid tokens in each page after the write.

    A page is filled front to back, so its highest written slot determines this number.
    """
    pages, owner = torch.unique(slots // page_tokens, return_inverse=True)
    filled = torch.zeros_like(pages).scatter_reduce_(0, owner, slots % page_tokens + 1, "amax")
    return pages, filled


def page_table(req_to_token: torch.Tensor, rows: torch.Tensor, longest: int, page_tokens: int) -> torch.Tensor:
    """Return the pages of each row's sequence, ``[rows, ceil(longest / page_tokens)]``.

    The result is a copy, never a view: the scheduler rewrites ``req_to_token`` while a forward pass runs.
    """
    return req_to_token[rows, :longest:page_tokens].to(torch.int64) // page_tokens


def to_head_major(pool: torch.Tensor, pages: torch.Tensor) -> None:
    """Permute, in place, ``pages`` that were written as ``[token][KV head][dim]`` into the pool's layout.

    pool ``[pages, KV heads, tokens of a page, dim]``. Call this function once for every page that arrives: a second
    call would corrupt the page.
    """
    heads, tokens, dim = pool.shape[1:]
    pool[pages] = pool[pages].view(-1, tokens, heads, dim).transpose(1, 2)
