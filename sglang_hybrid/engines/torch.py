"""Engine in plain torch for any device. It specifies the other engines, and serves what they do not support."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.engines.base import (
    Engine,
    LayerPrediction,
    ModelFacts,
    PrefillBatch,
    RatioWatcher,
    StepBatch,
)
from sglang_hybrid.memory.digests import CompactDigests
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.memory.pages import page_table
from sglang_hybrid.memory.pool import KVPool
from sglang_hybrid.memory.prompt_queries import PromptQueries
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.full import read_row
from sglang_hybrid.policies.registry import ModelPart, PolicyContext, policy_named
from sglang_hybrid.policies.scout.predictor import QueryPredictor
from sglang_hybrid.policies.scout.tuning import Tuning, tuning_of
from sglang_hybrid.worker.miss_server import MissServer
from sglang_hybrid.worker.torch_attention import TorchMisses


@dataclass(frozen=True)
class PagedPrefill:
    """Rows of one prefill pass, with their pages."""

    page_table: torch.Tensor  # [rows, blocks of the longest row], page of each block
    rows: torch.Tensor  # [rows], SGLang's number of each row
    lengths: list[int]  # tokens of each row, with the new ones
    new_tokens: list[int]  # number of new tokens of each row


class TorchAttention:
    """Attention of all layers: exact in prefill, by the configured policy in decode."""

    def __init__(
        self,
        config: HybridConfig,
        rows: int,
        layers: int,
        misses: MissServer | None = None,
        codes: KeyCodes | None = None,
        model: ModelPart | None = None,
    ) -> None:
        """Prepare for at most ``rows`` requests at a time and ``layers`` layers. ``codes`` belong to the pool's keys.

        Raise PolicyError, as ``use`` does, if the policy cannot serve this model by its settings.
        """
        self._rows = rows
        self._layers = layers
        self.misses = misses or TorchMisses()
        self._codes = codes
        self._model = model
        self._prompts = PromptQueries(rows)
        self.use(config)

    def use(self, config: HybridConfig, tuning: Tuning | None = None) -> None:
        """Decode by these settings from now on, and reset all rows. Raise PolicyError as the constructor does."""
        self.config = config
        tuning = tuning or tuning_of(config, self._layers)
        context = PolicyContext(
            config, self._rows, self._layers, self.misses, self._prompts, tuning, self._codes, self._model
        )
        self.policy = policy_named(config.policy).create(context)
        self.policy.reset_rows(list(range(self._rows)))

    def reset_rows(self, rows: list[int]) -> None:
        """Forget all state of ``rows``: a new request took the row, or a request was rewound to its prompt."""
        self.policy.reset_rows(rows)

    def prefill(self, query: torch.Tensor, cache: LayerCache, batch: PagedPrefill, scale: float) -> torch.Tensor:
        """Attend exactly: query ``[new tokens of all rows, query heads, head_dim]`` -> the same with the value's dim.

        K and V of the new tokens must be in the cache already. One row of one layer is read from the host at a time, so
        that device memory holds at most one context of one layer.
        """
        out = query.new_empty(query.shape[0], query.shape[1], cache.values.shape[3])
        last_tokens = torch.tensor(batch.new_tokens, device=query.device).cumsum(0) - 1
        self._prompts.store(cache.layer, batch.rows, query[last_tokens])
        first = 0
        for row, (length, new) in enumerate(zip(batch.lengths, batch.new_tokens, strict=True)):
            last = first + new
            key, value = read_row(cache, batch.page_table[row], length, query.device)
            out[first:last] = reference.attend_prefill(query[first:last], key, value, scale)
            first = last
        return out

    def begin_decode(self, batch: DecodeBatch) -> None:
        """Prepare for the layers of a decode step."""
        self.policy.begin_step(batch)

    def ahead(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> None:
        """Start a layer with its predicted query, while the layer before it is running."""
        self.policy.ahead(query, cache, batch, scale)

    def decode(self, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float) -> torch.Tensor:
        """Attend by the policy: query ``[rows, query heads, head_dim]`` -> ``[rows, query heads, value dim]``."""
        return self.policy.decode(query, cache, batch, scale)


class TorchEngine(Engine):
    """Engine that runs ``TorchAttention`` over a server's host pool."""

    name: ClassVar[str] = "torch"
    reports_ratio: ClassVar[bool] = True
    predicts: ClassVar[bool] = True

    def __init__(self, config: HybridConfig, pool: KVPool, model: ModelFacts, misses: MissServer | None) -> None:
        """Create the engine. ``misses`` computes the misses of the policy; None: they are computed in plain torch."""
        self._config, self._pool, self._req_to_token = config, pool, model.req_to_token
        rows = model.req_to_token.shape[0]
        self.attention = TorchAttention(config, rows, pool.layer_num, misses, pool.codes, model.part)
        self._predictors: dict[int, tuple[QueryPredictor, float]] = {}
        self._watcher: RatioWatcher | None = None
        nothing = torch.empty(0, dtype=torch.int64)
        self._prefill_slots = self._step_slots = nothing
        self._prefill = PagedPrefill(nothing, nothing, [], [])
        self._step = DecodeBatch(nothing, nothing, [], nothing, [])
        self._steps = 0

    def use(self, config: HybridConfig, tuning: Tuning) -> None:
        self._config = config
        self.attention.use(config, tuning)
        self.watch_ratio(self._watcher)

    def set_predictors(self, predictions: Mapping[int, LayerPrediction]) -> None:
        self._predictors = {
            layer: (QueryPredictor(given.weights, given.correction), given.scale)
            for layer, given in predictions.items()
        }

    def ahead(
        self, layers: Sequence[int], hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        inputs = hidden if residual is None else hidden + residual
        for layer in layers:
            predictor, scale = self._predictors[layer]
            query = predictor.query(inputs, positions)[: len(self._step.lengths_on_host)]
            self.attention.ahead(query, self._cache(layer), self._step, scale)

    def begin_prefill(self, batch: PrefillBatch) -> None:
        self._prefill_slots = batch.slots
        rows = batch.rows.to(torch.int64)
        self._prefill = PagedPrefill(self._table(rows, batch.lengths), rows, batch.lengths, batch.new_tokens)
        self.attention.reset_rows(rows.tolist())

    def prefill(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self._pool.store(layer, self._prefill_slots, keys, values)
        new = sum(self._prefill.new_tokens)  # SGLang may pad the batch beyond its real tokens
        out = query.new_zeros(query.shape[0], query.shape[1], values.shape[2])
        out[:new] = self.attention.prefill(query[:new], self._cache(layer), self._prefill, scale)
        return out

    def begin_step(self, batch: StepBatch) -> None:
        self._step_slots = batch.slots
        self._steps += 1
        rows, lengths = batch.rows.to(torch.int64), batch.lengths_on_host.tolist()
        on_host = rows.tolist()  # waits for a GPU; policies need the rows on the host to see rows come and go
        table = self._table(rows, lengths)
        self._step = DecodeBatch(table, batch.lengths.to(torch.int64), lengths, rows, on_host, self._steps)
        self.attention.begin_decode(self._step)

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self._pool.store(layer, self._step_slots, keys, values)
        return self.attention.decode(query, self._cache(layer), self._step, scale)

    def reset_rows(self, rows: torch.Tensor) -> None:
        self.attention.reset_rows(rows.tolist())

    def watch_ratio(self, watcher: RatioWatcher | None) -> None:
        self._watcher = self.attention.policy.on_ratio = watcher

    def readings(self) -> Readings:
        read, misses = self.attention.policy.readings(), self.attention.misses
        if not misses.served.by_path:  # a policy without misses
            return read
        keys, values = self._pool.k_buffer[0], self._pool.v_buffer[0]
        return dataclasses.replace(
            read,
            miss_blocks=dict(misses.served.by_path),
            block_bytes=sum(part.shape[2] * part.shape[3] * part.itemsize for part in (keys, values)),
            waits=misses.waits,
        )

    def describe_worker(self) -> dict[str, Any] | None:
        return self.attention.misses.describe_worker()

    def _table(self, rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return page_table(self._req_to_token, rows, max(lengths, default=0), BLOCK_TOKENS)

    def _cache(self, layer: int) -> LayerCache:
        pool = self._pool
        # compact digests cannot be used without sketches
        wanted = self._config.sketch_channels > 0 or isinstance(pool.digests, CompactDigests)
        sketch = pool.sketches.of_layer(layer) if pool.sketches and wanted else None
        codes = pool.codes.of_layer(layer) if pool.codes else None
        digests = pool.digests.of_layer(layer) if pool.digests else None
        return LayerCache(pool.k_buffer[layer], pool.v_buffer[layer], digests, layer, sketch, codes)
