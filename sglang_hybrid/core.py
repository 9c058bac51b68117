"""The nouns that everybody passes around: a layer's cache, a decode step, lists of blocks, partial attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_hybrid.memory.sketches import LayerSketch
from sglang_hybrid.ops import reference

Partial = tuple[torch.Tensor, torch.Tensor]  # output [rows, query heads, head_dim] and LSE [rows, query heads], float32


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the KV cache: host pool and digests."""

    keys: torch.Tensor  # [pages, KV heads, block tokens, head_dim], host memory
    values: torch.Tensor  # likewise
    digests: torch.Tensor | None  # [pages, KV heads, 2, head_dim] or compact, on the model's device, if kept
    layer: int = 0  # of this rank's pool
    sketch: LayerSketch | None = None  # some channels of every key, on the model's device
    codes: torch.Tensor | None = None  # [pages, KV heads, block tokens, bytes] of single keys, if kept

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[2]

    def estimates(self, query: torch.Tensor, pages: torch.Tensor, spread: float, scale: float) -> torch.Tensor:
        """What digests, and the sketch if there is one, tell of blocks: ``[rows, KV heads, group, N]``.

        pages ``[rows, N]`` for all KV heads alike, or ``[rows, KV heads, N]``; not ``NO_BLOCK``.
        """
        assert self.digests is not None  # a policy that estimates declares that it needs digests
        digests = _of_blocks(self.digests, pages)
        if self.sketch is None:
            return reference.digest_logits(query, digests, spread)
        codes = _of_blocks(self.sketch.codes, pages)
        return reference.sketch_logits(query, digests, codes, self.sketch.channels, scale)


def _of_blocks(table: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """table ``[all pages, KV heads, ...]``, pages as for ``estimates`` -> ``[rows, N, KV heads, ...]``."""
    if pages.dim() == 3:
        return reference.gather_blocks(table, pages).transpose(1, 2)
    # one index along whole pages: torch copies that much faster than what ``table[pages]`` selects
    return table.index_select(0, pages.flatten()).view(*pages.shape, *table.shape[1:])


@dataclass(frozen=True)
class DecodeBatch:
    """One decode step, the same for all its layers. Tensors are on the model's device."""

    page_table: torch.Tensor  # [rows, blocks of the longest row], page of each block
    lengths: torch.Tensor  # [rows], tokens of each row, the new one included
    lengths_on_host: list[int]
    rows: torch.Tensor  # [rows], SGLang's number of each row: whose it stays from step to step
    rows_on_host: list[int]
    step: int = 0  # counts decode steps: which one a partial result belongs to

    def block_counts(self, block_tokens: int) -> torch.Tensor:
        """Blocks of each row, the last one being the tail."""
        return -(-self.lengths // block_tokens)

    def part(self, which: torch.Tensor) -> DecodeBatch:
        """Some rows of the batch, by index. For looking at them only: it has no lists on the host."""
        return DecodeBatch(self.page_table[which], self.lengths[which], [], self.rows[which], [], self.step)


@dataclass(frozen=True)
class BlockList:
    """Blocks to attend, per (row, KV head)."""

    ids: torch.Tensor  # [rows, KV heads, n] pages, reference.NO_BLOCK where the list is shorter
    fill: torch.Tensor  # [rows, KV heads, n] tokens in each
    masks: torch.Tensor | None = None  # [rows, KV heads, n] int32, bit t: token t is attended; None: all of ``fill``
