"""Policy ``infinigen``: InfiniGen (OSDI 2024). Tokens that matter are fetched one layer ahead; the GPU alone attends.

A few columns of every key, in a basis in which few columns carry most of the products (``skew``), are on the model's
device. A layer's input predicts the next layer's query. The products of this query with those columns are speculated
logits, which select tokens (``selection``). The real query attends to these tokens and to the token that is decoded.

Differences from the paper:

- The query heads of a group share the selected tokens of their KV head, and a basis.
- The columns are chosen once per model and not for each prompt, because requests share pages of a common prefix.
- The first layer selects by its real query, which its own input gives. The paper's first layer attends to everything.
- The number of tokens is averaged over the KV heads of one row, so that answers do not depend on other requests.
- ``budget_tokens`` is the limit, not a share of the context. No token is ever evicted: host memory holds all tokens,
  and requests that do not fit wait.
"""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import BlockList, DecodeBatch, LayerCache
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import DecodePolicy
from sglang_hybrid.policies.infinigen import selection
from sglang_hybrid.policies.infinigen.options import InfinigenOptions
from sglang_hybrid.policies.registry import PolicyContext


def create(context: PolicyContext) -> InfinigenPolicy:
    """Create the policy. Raise ValueError if the pool keeps no partial keys."""
    encoder = context.codes.encoder if context.codes else None
    if not isinstance(encoder, PartialKeys):
        raise ValueError("policy infinigen needs a pool that keeps partial keys: start with policy=infinigen")
    return InfinigenPolicy(context.config, encoder)


class InfinigenPolicy(DecodePolicy):
    def __init__(self, config: HybridConfig, partial: PartialKeys) -> None:
        options = config.section(InfinigenOptions)
        self._alpha, self._by_block = options.alpha, options.unit == "blocks"
        self._limit = config.budget_tokens // (BLOCK_TOKENS if self._by_block else 1)
        self._partial = partial
        self._ahead: dict[int, BlockList] = {}

    def begin_step(self, batch: DecodeBatch) -> None:
        self._ahead.clear()

    def ahead(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> None:
        self._ahead[cache.layer] = self.select(query, cache, batch, scale)

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        chosen = self._ahead.pop(cache.layer, None) or self.select(query, cache, batch, scale)
        out, _ = reference.attend_blocks(
            query, cache.keys, cache.values, chosen.ids, chosen.fill, scale, masks=chosen.masks
        )
        return out.to(query.dtype)

    def select(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> BlockList:
        """Return the blocks and tokens that a layer attends to, selected by a real or a predicted query."""
        tokens = cache.block_tokens
        below = selection.below_best(self._speculate(query, cache, batch, scale), batch.lengths)
        if self._by_block:
            below = selection.best_of_blocks(below, tokens)
            chosen = selection.choose(below, batch.block_counts(tokens), self._alpha, self._limit)
            return selection.list_of_blocks(chosen, batch, tokens)
        chosen = selection.choose(below, batch.lengths, self._alpha, self._limit)
        return selection.list_of_tokens(chosen, batch, tokens)

    def _speculate(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        """Return speculated logits ``[B, H, G, tokens]``, from the columns that are kept."""
        assert cache.codes is not None
        pages = batch.page_table
        codes = cache.codes.index_select(0, pages.flatten()).view(*pages.shape, *cache.codes.shape[1:])
        keys = self._partial.decode(codes).float()  # [B, N, H, T, columns]
        asked = self._partial.queries(cache.layer, query)
        return torch.einsum("bhgc,bnhtc->bhgnt", asked, keys).flatten(3) * scale
