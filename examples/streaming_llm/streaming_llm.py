"""Policy ``streaming_llm``: every row attends to its first blocks and to its last ones (Xiao et al., 2023)."""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.base import DecodePolicy
from sglang_hybrid.policies.registry import PolicyContext, register_policy


class StreamingLLM(DecodePolicy):
    """Attends to ``sink`` blocks at the beginning and ``window`` blocks at the end of each row."""

    def __init__(self, sink: int, window: int) -> None:
        self._sink, self._window = sink, window

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        counts = batch.block_counts(cache.block_tokens)[:, None]
        sink = torch.arange(self._sink, device=counts.device).expand(counts.shape[0], -1)
        window = counts - self._window + torch.arange(self._window, device=counts.device)
        listed = torch.cat((sink < counts, window >= self._sink), dim=1)
        positions = torch.cat((sink, window), dim=1).masked_fill(~listed, reference.NO_BLOCK)
        positions = positions[:, None].expand(-1, cache.keys.shape[1], -1)
        ids = reference.block_ids(positions, batch.page_table)
        fill = reference.block_fill(positions, batch.lengths, cache.block_tokens)
        out, _ = reference.attend_blocks(query, cache.keys, cache.values, ids, fill, scale)
        return out.to(query.dtype)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of this policy: ``--hybrid streaming_llm.window_tokens=512``."""

    sink_blocks: Annotated[int, Meta(ge=0, description="Blocks at the start of a request.")] = 1
    window_tokens: Annotated[
        int, Meta(ge=BLOCK_TOKENS, description="Tokens at the end of a request, in whole blocks.")
    ] = 1024


@register_policy(
    "streaming_llm", description="the first and the last tokens of a request are attended to", settings=Options
)
def create(context: PolicyContext) -> StreamingLLM:
    options = context.config.section(Options)
    return StreamingLLM(options.sink_blocks, options.window_tokens // BLOCK_TOKENS)
