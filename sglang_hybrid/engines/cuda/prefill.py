"""Exact prefill on the GPU, with the KV cache in host memory.

FlashInfer attends over pages in two staging buffers, which take turns. A turn is one group of rows (usually all rows)
in one layer::

    load stream        pages of prefixes: pool -> staging            one turn ahead
    main stream        new tokens -> staging, digests and codes of their pages, attention
    write-back stream  pages with new tokens: staging -> pool        beside attention and what follows it

The host never waits in ``attend``. Events order the work of the streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.engines.cuda.layers import DeviceLayer
from sglang_hybrid.engines.cuda.row_groups import PrefillRows, RowGroup, group_rows
from sglang_hybrid.engines.cuda.staging import Staging, Transfer, runs_of, suits_engine
from sglang_hybrid.memory.device_capacity import WORKSPACE_BYTES
from sglang_hybrid.ops.cuda.copies import place_tokens
from sglang_hybrid.ops.cuda.tensors import HALVES, pools_for
from sglang_hybrid.ops.cuda.whole_requests import StagedBlocks

__all__ = ["DevicePrefill", "PrefillRows"]


@dataclass(frozen=True)
class _Group:
    """A group of rows: its indices on the device, its transfers, and FlashInfer's plan for the group."""

    tokens: slice
    places: torch.Tensor
    written_pages: torch.Tensor
    filled: torch.Tensor
    loads: Transfer
    write_backs: Transfer
    attention: Any


class DevicePrefill:
    """Prefill of all layers of a model: ``begin`` a pass, ``attend`` layer by layer, ``finish``."""

    def __init__(
        self,
        layers: list[DeviceLayer],
        staging_pages: int,
        query_heads: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        workspace: torch.Tensor | None = None,
        flashinfer_backend: str = "auto",
    ) -> None:
        """Allocate two stagings of ``staging_pages`` pages each, which must hold the longest context.

        ``dtype``: of the model. Pages are staged in the pool's dtype, so new tokens are attended as they are stored.
        ``workspace``: FlashInfer's workspace; None: allocate one. Raise ValueError if pools and model do not fit.
        """
        shape, pool_dtype = layers[0].pool.keys.shape, layers[0].pool.keys.dtype
        if dtype not in HALVES or pool_dtype not in pools_for(dtype):
            raise ValueError(f"a pool of {pool_dtype} cannot be attended by a model in {dtype}")
        for layer in layers:
            for part in (layer.pool.keys, layer.pool.values):
                if part.shape != shape or part.dtype != pool_dtype:
                    raise ValueError(
                        f"a pool is {tuple(part.shape)} of {part.dtype}, not {tuple(shape)} of {pool_dtype}"
                    )
        self._layers = layers
        self._pages, self._heads, _, self._dim = shape
        self._query_heads, self._dtype, self._pool_dtype = query_heads, dtype, pool_dtype
        self._device = torch.device(device)
        if query_heads % self._heads:
            raise ValueError(f"{query_heads} query heads cannot share {self._heads} KV heads")
        self._staging_pages = staging_pages
        both = (2, staging_pages, self._heads, BLOCK_TOKENS, self._dim)
        keys, values = (torch.zeros(both, dtype=pool_dtype, device=device) for _ in range(2))
        self._staging = [Staging(*parts) for parts in zip(keys, values, strict=True)]
        self._blocks = StagedBlocks(*(part.view(-1, BLOCK_TOKENS, self._dim) for part in (keys, values)))
        self._backend = flashinfer_backend
        self._workspace = workspace
        if workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: list[Any] = []  # FlashInfer's, one for each group
        self._load, self._write_back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._planned = torch.cuda.Event()
        self._written = [torch.cuda.Event() for _ in layers]
        self._groups: list[_Group] = []
        self._next_layer = 0
        self._scale = 0.0  # factor of attention logits in this pass
        self._refused = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, batch: PrefillRows, scale: float) -> None:
        """Plan a pass and start to load the pages of its first layer, after everything launched on the current stream.

        ``scale``: factor of the attention logits, unless a layer has another one.

        Raise ValueError for rows that cannot be served, before any state has changed.
        """
        groups = group_rows(batch, self._staging_pages, self._pages)
        self.finish()  # a pass that was abandoned in the middle
        # FlashInfer copies plans to the device through its own pinned memory, so the copies of the last plans must be
        # done. They are, unless the host is a whole pass ahead of the device.
        self._planned.synchronize()
        self._groups, self._scale = self._on_device(groups, scale), scale
        main = torch.cuda.current_stream()
        self._planned.record(main)
        self._load.wait_stream(main)
        self._next_layer = 0
        self._load_turn(0)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """Store and attend the new tokens: query ``[T, Hq, D]``, key and value ``[T, H, D]`` -> ``[T, Hq, D]``.

        Layers must be called in order. T may exceed the number of new tokens; the result is 0 for the excess.
        ``scale``: factor of this layer's logits, if it differs from that of the pass.
        """
        if layer != self._next_layer:
            raise RuntimeError(f"layer {layer} is attended when it is layer {self._next_layer}'s turn")
        self._next_layer += 1
        tokens = self._groups[-1].tokens.stop if self._groups else 0
        if query.shape[0] < tokens:
            raise ValueError(f"the rows have {tokens} new tokens, queries are {tuple(query.shape)}")
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[tokens:].zero_()
        for index, group in enumerate(self._groups):
            turn = layer * len(self._groups) + index
            if turn + 1 < len(self._layers) * len(self._groups):
                self._load_turn(turn + 1)
            self._attend_group(turn, group, query, key, value, scale, out)
        self._written[layer].record(self._write_back)
        return out

    def written(self, layer: int) -> torch.cuda.Event:
        """Return the event after which pool and digests have the layer's new tokens. Call after ``attend``."""
        return self._written[layer]

    def finish(self) -> None:
        """Make the current stream wait until the pool has all new tokens."""
        main = torch.cuda.current_stream()
        main.wait_stream(self._load)
        main.wait_stream(self._write_back)

    def lend(self) -> StagedBlocks | None:
        """Lend both stagings to the main stream until the next pass begins. Return None in the middle of a pass."""
        if self._groups and self._next_layer < len(self._layers):
            return None
        self.finish()
        return self._blocks

    def refused(self) -> int:
        """Return how many blocks and tokens kernels skipped as out of bounds; should be 0. Wait for the device."""
        return int(self._refused)

    def _load_turn(self, turn: int) -> None:
        if not self._groups:
            return
        layer, index = divmod(turn, len(self._groups))
        staging = self._staging[turn % 2]
        self._load.wait_event(staging.attended)
        self._load.wait_event(staging.returned)
        with torch.cuda.stream(self._load):
            self._groups[index].loads.load(self._layers[layer].pool, staging, self._refused)
        staging.loaded.record(self._load)

    def _attend_group(
        self,
        turn: int,
        group: _Group,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        out: torch.Tensor,
    ) -> None:
        layer, staging = self._layers[turn // len(self._groups)], self._staging[turn % 2]
        main = torch.cuda.current_stream()
        # loading waits until the staging is free, even if no page is loaded
        main.wait_event(staging.loaded)
        new_keys, new_values = (_tokens_contiguous(part[group.tokens]) for part in (key, value))
        place_tokens(new_keys, new_values, group.places, staging.keys, staging.values, refused=self._refused)
        count = group.filled.shape[0]
        layer.summarise(staging.keys[:count], group.written_pages, group.filled)
        staging.placed.record(main)

        self._write_back.wait_event(staging.placed)
        with torch.cuda.stream(self._write_back):
            group.write_backs.write_back(layer.pool, staging, self._refused)
        staging.returned.record(self._write_back)

        # FlashInfer multiplies the planned scale by the scale of keys
        of_keys = {} if scale in (None, self._scale) else {"k_scale": scale / self._scale}
        group.attention.run(query[group.tokens], (staging.keys, staging.values), out=out[group.tokens], **of_keys)
        staging.attended.record(main)

    def _on_device(self, groups: list[RowGroup], scale: float) -> list[_Group]:
        """Copy the indices of all groups to the device in one copy, then make FlashInfer's plans."""
        parts = [
            part
            for group in groups
            for part in (
                group.places,
                group.filled,
                group.pages[: group.written],
                group.page_slots,
                group.pages.repeat_interleave(self._heads),
            )
        ]
        if not parts:
            return []
        together = torch.cat(parts).pin_memory().to(self._device, non_blocking=True)
        there = iter(together.split([len(part) for part in parts]))
        made = []
        for index, group in enumerate(groups):
            places, filled, written_pages, page_slots, pages = (next(there) for _ in range(5))
            pages = pages.view(-1, self._heads, 1)
            attention = self._wrapper(index)
            attention.plan(
                group.query_starts,
                group.page_starts,
                page_slots,
                group.last_page_tokens,
                self._query_heads,
                self._heads,
                self._dim,
                BLOCK_TOKENS,
                causal=True,
                sm_scale=scale,
                q_data_type=self._dtype,
                kv_data_type=self._pool_dtype,
            )
            loads = self._transfer(group, pages, group.loaded, len(group.pages))
            write_backs = self._transfer(group, pages, 0, group.written)
            tokens = slice(group.first_token, group.last_token)
            made.append(_Group(tokens, places, written_pages, filled, loads, write_backs, attention))
        return made

    def _transfer(self, group: RowGroup, pages: torch.Tensor, first: int, last: int) -> Transfer:
        runs = runs_of(group.pages[first:last], first)
        page_bytes = self._heads * BLOCK_TOKENS * self._dim * self._pool_dtype.itemsize
        return Transfer(first, last, runs, pages[first:last], suits_engine(last - first, len(runs), page_bytes))

    def _wrapper(self, index: int) -> Any:
        # imported here, so that this module can be imported without FlashInfer
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        while len(self._wrappers) <= index:
            self._wrappers.append(
                BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND", backend=self._backend)
            )
        return self._wrappers[index]


def _tokens_contiguous(part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` as ``place_tokens`` requires it: a slice of a fused projection as it is, other views copied."""
    is_fine = part.stride()[1:] == (part.shape[2], 1) and part.stride(0) % 8 == 0 and part.data_ptr() % 16 == 0
    return part if is_fine else part.contiguous()
