"""Policy ``infinigen`` on a GPU: partial keys estimate which tokens matter, and these are fetched one layer ahead.

    scout lane    predicted query -> speculated ranks -> lists of tokens         of the next layer
    gather lane   its tokens: pool -> staged blocks in device memory
    main lane     append -> the new token to its staged block -> attention over staged blocks

Only the GPU attends, with the real query, and only to staged tokens (``policies/infinigen/policy.py`` has the rules).
The tokens of a layer without a predicted query are fetched by its real query, and the layer waits for the copies. All
kernels are launched with static shapes on persistent buffers, so a whole step can be recorded in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.ahead import AheadProgram
from sglang_hybrid.engines.cuda.lanes import Lane
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.program import ProgramContext
from sglang_hybrid.engines.cuda.slots import BlockMemory
from sglang_hybrid.memory.device_capacity import whole_request_blocks
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.memory.pool import KVPool
from sglang_hybrid.ops.cuda.copies import place_tokens
from sglang_hybrid.ops.cuda.digests import DenseTable
from sglang_hybrid.ops.cuda.partial_keys import PartialKeyCodes
from sglang_hybrid.ops.cuda.speculation import (
    SpeculationWorkspace,
    TokenLists,
    choose_tokens,
    gather_tokens,
    speculate,
)
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.whole_requests import attend_pages
from sglang_hybrid.policies.infinigen.options import InfinigenOptions
from sglang_hybrid.policies.registry import ModelPart


@dataclass(frozen=True)
class InfinigenSettings:
    """Settings of policy ``infinigen`` as arguments of the kernels."""

    alpha: float
    by_block: bool  # whether whole blocks are chosen instead of tokens
    budget: int  # staged blocks that hold the chosen tokens of a (row, KV head)

    @classmethod
    def of(cls, config: HybridConfig) -> InfinigenSettings:
        options = config.section(InfinigenOptions)
        return cls(options.alpha, options.unit == "blocks", config.budget_tokens // BLOCK_TOKENS)

    @property
    def limit(self) -> int:
        """Return the maximum number of items (blocks or tokens) that are chosen for a (row, KV head)."""
        return self.budget * (1 if self.by_block else BLOCK_TOKENS)


class StagedTokens:
    """Query and chosen tokens of one layer. Written one layer ahead, so even and odd layers have one instance each."""

    def __init__(
        self, shape: DeviceShape, settings: InfinigenSettings, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._query = torch.zeros(shape.max_batch, shape.heads * shape.group, shape.dim, dtype=dtype, device=device)
        self._lists = TokenLists(shape.max_batch, shape.heads, min(settings.limit, shape.max_blocks), device)
        self._blocks = settings.budget
        of_blocks = (shape.max_batch * settings.budget, shape.heads, BLOCK_TOKENS, shape.dim)
        # zeros, because tokens that were never written are multiplied by a weight of 0, and garbage may be NaN
        self._keys, self._values = (torch.zeros(of_blocks, dtype=dtype, device=device) for _ in range(2))

    def query(self, count: int) -> torch.Tensor:
        return self._query[:count]

    def blocks(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return staged keys and values of the first ``count`` rows: ``[count * budget, KV heads, 32, head_dim]``."""
        return self._keys[: count * self._blocks], self._values[: count * self._blocks]

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def lists(self, count: int) -> TokenLists:
        return self._lists.of_batch(count)


class DeviceInfinigen(AheadProgram):
    """Step program of policy ``infinigen``: staged tokens of the rows, and the order of kernels."""

    def __init__(
        self, layers: Sequence[DeviceLayer], shape: DeviceShape, settings: InfinigenSettings, blocks_per_row: int
    ) -> None:
        """Allocate device memory for ``blocks_per_row`` blocks per row, shared by all rows; 0: rows are never held.

        Raise ValueError if the pool keeps no partial keys.
        """
        device, dtype = layers[0].digests.digests.device, layers[0].digests.dtype
        memory = BlockMemory(len(layers), shape.rows, shape.heads, blocks_per_row, shape.dim, dtype, device)
        super().__init__(layers, shape, memory)
        # a budget above the maximum context needs no more memory than the context
        settings = replace(settings, budget=min(settings.budget, shape.max_blocks))
        self._settings = settings
        self._partial = [_partial_keys(layer) for layer in layers]
        self._staged = [StagedTokens(shape, settings, dtype, device) for _ in range(2)]
        # one workspace for all layers, because only the scout lane uses it
        self._speculation = SpeculationWorkspace(
            shape.max_batch, shape.heads, shape.max_blocks, by_block=settings.by_block, device=device
        )
        # staged blocks as rows of attend_pages: entry b has ``budget`` blocks from b * budget on
        pages = torch.arange(shape.max_batch * settings.budget, dtype=torch.int32, device=device)
        self._staged_pages = pages.view(shape.max_batch, settings.budget)
        self._entries = torch.arange(shape.max_batch, dtype=torch.int32, device=device)
        self._held = torch.full((shape.max_batch,), settings.budget, dtype=torch.int32, device=device)
        # chosen tokens of each layer, summed over all steps and KV heads
        self.counted = torch.zeros(len(layers), 1, dtype=torch.int64, device=device)
        self._scout, self._gather = Lane(device), Lane(device)
        self._ahead: set[int] = set()  # layers of this step whose tokens are fetched by a predicted query

    @classmethod
    def create(cls, context: ProgramContext) -> Self:
        blocks = whole_request_blocks(context.config) if context.holds_whole_requests else 0
        return cls(context.layers, context.shape, InfinigenSettings.of(context.config), blocks)

    @classmethod
    def layer_codes(cls, config: HybridConfig, pool: KVPool, model: ModelPart | None) -> list[PartialKeyCodes]:
        assert pool.codes is not None and isinstance(pool.codes.encoder, PartialKeys)  # the policy declares them
        codes, encoder = pool.codes, pool.codes.encoder
        return [
            PartialKeyCodes(codes.of_layer(layer), encoder.basis(layer), encoder.dtype)
            for layer in range(pool.layer_num)
        ]

    @property
    def without_whole_requests(self) -> str:
        return f"tokens are selected, {self._settings.budget * BLOCK_TOKENS} of each at most"

    # -- lanes -------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._ahead.clear()

    def query_ahead(self, layer: int, count: int) -> torch.Tensor:
        return self._staged[layer % 2].query(count)

    def ahead(self, layer: int, count: int, scale: float) -> None:
        self._fetch(layer, self.query_ahead(layer, count), scale)
        self._ahead.add(layer)

    # -- one layer ---------------------------------------------------------------------------

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.is_dense:
            return self.dense.decode(layer, query, keys, values, scale)
        if layer not in self._ahead:
            with self.scout_lane():
                self._fetch(layer, query, scale)
        self.dense.store(layer, keys, values)  # writes to the pool and to partial keys only, because no row is held
        count, staged = query.shape[0], self._staged[layer % 2]
        lists, blocks = staged.lists(count), staged.blocks(count)
        self._gather.wait_for(layer)
        place_tokens(keys, values, lists.places, *blocks, refused=self.refused)
        return attend_pages(
            query, *blocks, self._table(count), self._staged_rows(layer % 2, count), scale,
            workspace=self._attention.attending(count), out=self._attention.out(count),
        )  # fmt: skip

    def _fetch(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Choose a layer's tokens and start to copy them. The scout lane must be the current stream."""
        count, settings, of_layer = query.shape[0], self._settings, self._layers[layer]
        step, staged, workspace = self.step.of_batch(count), self._staged[layer % 2], self._workspace(count)
        lists = staged.lists(count)
        speculate(query, self._partial[layer], step, scale, settings.alpha, workspace)
        choose_tokens(step, settings.limit, workspace, lists, settings.budget, counted=self.counted[layer])
        with self._gather.fork():
            gather_tokens(
                of_layer.pool, lists, *staged.blocks(count), active_rows=step.active_rows, refused=self.refused
            )
            self._gather.mark(layer)

    @functools.cache  # noqa: B019 (lives as long as the backend)
    def _workspace(self, count: int) -> SpeculationWorkspace:
        return self._speculation.of_batch(count)

    @functools.cache  # noqa: B019
    def _table(self, count: int) -> DenseTable:
        pages = count * self._settings.budget
        return DenseTable(self._staged_pages[:count], self._held[:count], pages)

    @functools.cache  # noqa: B019
    def _staged_rows(self, parity: int, count: int) -> Step:
        """Return a step whose rows are the staged tokens of each entry. Its page table, the pool's, is not read."""
        tokens = self._staged[parity].lists(count).tokens
        return Step(self.step.of_batch(count).page_table, tokens, self._entries[:count], self.step.active_rows)


def _partial_keys(layer: DeviceLayer) -> PartialKeyCodes:
    if not isinstance(layer.codes, PartialKeyCodes):
        raise ValueError("policy infinigen needs a pool that keeps partial keys: start with policy=infinigen")
    return layer.codes
