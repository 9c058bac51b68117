"""Data types that engines, policies and miss servers share: layer cache, decode step, block list, partial attention."""

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
    values: torch.Tensor  # as keys, with the dim of values
    digests: torch.Tensor | None  # [pages, KV heads, 2, head_dim] or compact, on the model's device; None if not kept
    layer: int = 0  # layer's index in this rank's pool
    sketch: LayerSketch | None = None  # some channels of every key, on the model's device; None if not kept
    codes: torch.Tensor | None = None  # [pages, KV heads, block tokens, bytes], codes of single keys; None if not kept

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[2]

    def estimates(self, query: torch.Tensor, pages: torch.Tensor, spread: float, scale: float) -> torch.Tensor:
        """Estimate the logits of blocks, by digests and the sketch if there is one: ``[rows, KV heads, group, N]``.

        pages ``[rows, N]``, the same for all KV heads, or ``[rows, KV heads, N]``, without ``NO_BLOCK``. ``spread`` is
        used without a sketch, ``scale`` with one; see ``reference.digest_logits`` and ``reference.sketch_logits``.
        """
        assert self.digests is not None  # a policy that estimates declares that it needs digests
        digests = _of_blocks(self.digests, pages)
        if self.sketch is None:
            return reference.digest_logits(query, digests, spread)
        codes = _of_blocks(self.sketch.codes, pages)
        return reference.sketch_logits(query, digests, codes, self.sketch.channels, scale)


def _of_blocks(table: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Look up pages, as in ``estimates``, in a table ``[all pages, KV heads, ...]`` -> ``[rows, N, KV heads, ...]``."""
    if pages.dim() == 3:
        return reference.gather_blocks(table, pages).transpose(1, 2)
    # index_select copies whole pages, much faster than ``table[pages]``
    return table.index_select(0, pages.flatten()).view(*pages.shape, *table.shape[1:])


@dataclass(frozen=True)
class DecodeBatch:
    """Rows of one decode step, the same for all layers. Tensors are on the model's device."""

    page_table: torch.Tensor  # [rows, blocks of the longest row], page of each block
    lengths: torch.Tensor  # [rows], tokens of each row, with the new one
    lengths_on_host: list[int]  # the same numbers as ``lengths``
    rows: torch.Tensor  # [rows], SGLang's number of each row, which a request keeps from step to step
    rows_on_host: list[int]  # the same numbers as ``rows``
    step: int = 0  # number of the decode step, by which partial results are matched to their step

    def block_counts(self, block_tokens: int) -> torch.Tensor:
        """Return the number of blocks of each row, with the tail: ``[rows]``."""
        return -(-self.lengths // block_tokens)

    def part(self, which: torch.Tensor) -> DecodeBatch:
        """Return the rows at indices ``which``. The result is for selection only: its lists on the host are empty."""
        return DecodeBatch(self.page_table[which], self.lengths[which], [], self.rows[which], [], self.step)


@dataclass(frozen=True)
class BlockList:
    """Blocks to attend to, per (row, KV head)."""

    ids: torch.Tensor  # [rows, KV heads, n], pages; reference.NO_BLOCK where a list is shorter
    fill: torch.Tensor  # [rows, KV heads, n], number of tokens in each block
    masks: torch.Tensor | None = None  # [rows, KV heads, n] int32, bit t: token t is attended to; None: all tokens are
