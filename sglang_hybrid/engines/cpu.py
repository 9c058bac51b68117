"""Engine for hosts without a GPU: native kernels read the host pool in place, in the server's own threads.

A row within the budget attends to its whole context. A longer row attends to the blocks that its real query scores
best, selected again at every step. No query is predicted and no block is posted to a worker: a worker would compute on
the same cores, later. The torch engine is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import LayerCache
from sglang_hybrid.engines.base import Engine, ModelFacts, PrefillBatch, StepBatch
from sglang_hybrid.memory.pages import page_table
from sglang_hybrid.memory.pool import KVPool
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cpu.decoder import BlockSummaries, HostKernels, SelectionRules
from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.policies.full import read_row
from sglang_hybrid.policies.registry import policy_named
from sglang_hybrid.policies.scout.tuning import Tuning

_EVERYTHING = 1 << 30  # number of blocks that no context exceeds


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a forward pass: pages ``[rows, blocks]``, and for each row its tokens and how many of them are new."""

    table: torch.Tensor
    lengths: torch.Tensor
    new_tokens: torch.Tensor


class CpuEngine(Engine):
    name: ClassVar[str] = "cpu"
    may_change: ClassVar[bool] = False

    def __init__(self, config: HybridConfig, pool: KVPool, geometry: Geometry, model: ModelFacts, threads: int) -> None:
        """Create the kernels for ``pool``. Raise NativeError for a shape that the kernels do not support."""
        budget = policy_named(config.policy).native_budget
        assert budget is not None  # engines.choice has checked this
        blocks = budget(config)
        rules = SelectionRules(_EVERYTHING if blocks is None else blocks, config.sink_blocks, config.recent_blocks)
        summaries = [_summaries(pool, layer) for layer in range(pool.layer_num)]
        self.kernels = HostKernels(pool.region.address, geometry, summaries, rules, threads)
        self._pool, self._req_to_token = pool, model.req_to_token
        nothing = torch.empty(0, dtype=torch.int64)
        self._prefill = self._step = self._kernels_have = _Rows(nothing, nothing, nothing)

    def use(self, config: HybridConfig, tuning: Tuning) -> None:
        """Do nothing: this engine keeps the settings of its constructor (see ``may_change``)."""

    def begin_prefill(self, batch: PrefillBatch) -> None:
        table = self._page_table(batch.rows, batch.lengths)
        self._prefill = _Rows(table, torch.tensor(batch.lengths), torch.tensor(batch.new_tokens))

    def prefill(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self._stored(keys), self._stored(values)
        self._kernels_of(self._prefill).store(layer, keys, values)
        cache = self._cache(layer)
        # SGLang may pad a batch beyond its real tokens
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        first = 0
        for row, (length, new) in enumerate(
            zip(self._prefill.lengths.tolist(), self._prefill.new_tokens.tolist(), strict=True)
        ):
            last = first + new
            if new == length:  # the row has no earlier tokens: use these tensors, which equal what the pool stores
                key, value = (tensor[first:last].transpose(0, 1) for tensor in (keys, values))
            else:
                key, value = read_row(cache, self._prefill.table[row], length, query.device)
            out[first:last] = reference.attend_prefill(query[first:last], key, value, scale)
            first = last
        return out

    def begin_step(self, batch: StepBatch) -> None:
        lengths = batch.lengths_on_host.to(torch.int64)
        self._step = _Rows(self._page_table(batch.rows, lengths.tolist()), lengths, torch.ones_like(lengths))

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        keys, values = self._stored(keys), self._stored(values)
        return self._kernels_of(self._step).decode(layer, query, keys, values, scale).to(query.dtype)

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Do nothing: this engine keeps no state of rows, because it selects blocks again at every step."""

    def _stored(self, part: torch.Tensor) -> torch.Tensor:
        return reference.to_stored(part, self._pool.k_buffer[0].dtype)

    def _kernels_of(self, rows: _Rows) -> HostKernels:
        """Return the kernels, set to ``rows``. One layer of a step may prefill some rows and decode others."""
        if rows is not self._kernels_have:
            self.kernels.begin(rows.table, rows.lengths, rows.new_tokens)
            self._kernels_have = rows
        return self.kernels

    def _page_table(self, rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        return page_table(self._req_to_token, rows, max(lengths, default=0), BLOCK_TOKENS)

    def _cache(self, layer: int) -> LayerCache:
        pool = self._pool
        digests = pool.digests.of_layer(layer) if pool.digests else None
        return LayerCache(pool.k_buffer[layer], pool.v_buffer[layer], digests, layer)


def _summaries(pool: KVPool, layer: int) -> BlockSummaries:
    assert pool.digests is not None  # policies with a native budget select by digests
    digests = pool.digests.of_layer(layer)
    if pool.sketches is None:
        return BlockSummaries(digests)
    sketch = pool.sketches.of_layer(layer)
    return BlockSummaries(digests, sketch.codes, sketch.channels)
