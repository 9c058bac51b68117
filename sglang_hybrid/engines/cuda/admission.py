"""Admission of pages that a prefill instance wrote: the GPU converts them to the pool's layout and digests them.

    as written  [token][KV head][head_dim]        SGLang's layout of a page
    as kept     [KV head][token][head_dim]        so that a block is one run

The pages are copied over PCIe and back on a separate stream. A prompt of 32k tokens takes tens of milliseconds this
way, and seconds by torch on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.ops.cuda.copies import gather_blocks, scatter_blocks

_PAGES_AT_A_TIME = 256  # pages of one layer that are converted together


class PageAdmission:
    def __init__(
        self, layers: Sequence[DeviceLayer], heads: int, dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate device memory for four times ``_PAGES_AT_A_TIME`` pages of one layer's keys."""
        self._layers, self._heads, self._dim, self._device = list(layers), heads, dim, torch.device(device)
        shape = (_PAGES_AT_A_TIME, heads, 1, BLOCK_TOKENS, dim)
        self._written = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
        self._kept = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]

    def admit(self, pages: torch.Tensor, filled: torch.Tensor) -> None:
        """Convert and digest ``pages`` ``[n]``, and wait until this is done.

        Of each page the first ``filled`` ``[n]`` tokens are valid. Both tensors are in host memory.
        """
        # wait for all steps in flight: one of them may write the last token of the pages' previous owner
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for some, full in zip(pages.split(_PAGES_AT_A_TIME), filled.split(_PAGES_AT_A_TIME), strict=True):
                on_device = some.to(self._device, torch.int32)
                listed = on_device[:, None, None].expand(-1, self._heads, 1).contiguous()
                tokens = full.to(self._device, torch.int32)
                for layer in self._layers:
                    self._admit_layer(layer, on_device, listed, tokens)
            self._stream.synchronize()

    def _admit_layer(self, layer: DeviceLayer, pages: torch.Tensor, listed: torch.Tensor, tokens: torch.Tensor) -> None:
        count, pool = len(pages), layer.pool
        written, kept = ([part[:count] for part in parts] for parts in (self._written, self._kept))
        # copies whole pages, whatever the order of tokens and heads inside
        gather_blocks(pool.region, pool.keys, pool.values, listed, *written)
        for source, target in zip(written, kept, strict=True):
            as_written = source.view(count, BLOCK_TOKENS, self._heads, self._dim)
            as_kept = target.view(count, self._heads, BLOCK_TOKENS, self._dim)
            # the transpose moves units of eight bytes, whatever the dtype
            as_kept.view(torch.int64).copy_(as_written.view(torch.int64).transpose(1, 2))
        layer.summarise(kept[0].squeeze(2), pages, tokens)
        scatter_blocks(pool.region, pool.keys, pool.values, listed, *kept)
