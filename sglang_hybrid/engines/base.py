"""Interface between the adapter for SGLang and the engines that compute attention.

The adapter translates batches and calls, for each forward pass::

    begin_prefill, then prefill for each layer            new tokens of prompts
    begin_step, then ahead and decode for each layer      one new token of each row

For an engine without ``knows_first_steps``, one step may need both for different rows (see ``first_steps``): then
begin_step is called before begin_prefill, and for each layer prefill before decode.

An engine executes this in torch, by native CPU kernels or by CUDA graphs. It works on tensors, pages and rows, and does
not depend on SGLang.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.policies.registry import ModelPart
from sglang_hybrid.policies.scout.predictor import Correction, QueryWeights
from sglang_hybrid.policies.scout.tuning import Tuning

RatioWatcher = Callable[[int, float], None]  # gets a layer and its CPU compute ratio, which the policy defines


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the served model that an engine needs."""

    req_to_token: torch.Tensor  # [rows, longest context], token index of each token: its slot in the host pool
    group: int  # query heads per KV head
    dtype: torch.dtype
    scale: float | None  # factor of attention logits; None if layers have different factors
    cuda_graphs: bool  # whether CUDA graphs are enabled
    logits: torch.nn.Module | None = None  # the last module of a step; None if the model has none
    one_batch: bool = True  # no other batch runs between two steps of a batch
    admits_pages: bool = False  # a prefill instance of disaggregation writes pages into the pool
    part: ModelPart | None = None  # identity of the model, and KV heads of this rank; None: unknown
    code_steps: Sequence[torch.Tensor] | None = None  # of each layer [4, KV heads, D]: of codes in slots; None: unknown


@dataclass(frozen=True)
class PrefillBatch:
    """Rows whose prompts get new tokens in a prefill pass."""

    rows: torch.Tensor  # [B], SGLang's number of each row
    lengths: list[int]  # tokens of each row, with the new ones
    new_tokens: list[int]  # number of new tokens of each row
    slots: torch.Tensor  # [T], slot in the host pool of each new token; may be padded, like the tensors of layers


@dataclass(frozen=True)
class StepBatch:
    """Rows that decode one token each."""

    rows: torch.Tensor  # [B], SGLang's number of each row
    lengths: torch.Tensor  # [B], tokens of each row, with the new one
    lengths_on_host: torch.Tensor  # [B], the same numbers in host memory
    slots: torch.Tensor  # [B], slot in the host pool of each new token
    padding: int = 0  # number of rows at the end that are padding, not requests
    is_recorded: bool = False  # a CUDA graph is being recorded: no row is a request


@dataclass(frozen=True)
class LayerPrediction:
    """Weights that compute one layer's query from the input of the layer before. The first layer uses its own input."""

    weights: QueryWeights
    correction: Correction | None  # None: the query is not corrected
    scale: float  # factor of the layer's attention logits


class Engine(ABC):
    """Executes attention for all layers of one model runner. Layers are numbered from 0, like the pool's buffers."""

    name: ClassVar[str]  # name in metrics and documentation
    reports_ratio: ClassVar[bool] = False  # whether watchers of ``watch_ratio`` are called
    predicts: ClassVar[bool] = False  # whether `ahead` has an effect
    may_change: ClassVar[bool] = True  # whether `use` may be called again with other settings
    knows_first_steps: ClassVar[bool] = False  # whether `decode` itself does what ``first_steps`` describes
    holds_weights: ClassVar[bool] = False  # whether predictors keep copies of weights that cannot be replaced

    def unsupported_reason(self, config: HybridConfig) -> str | None:
        """Return why `use` does not support these settings, in words, or None if it does."""
        return None

    @abstractmethod
    def use(self, config: HybridConfig, tuning: Tuning) -> None:
        """Decode by these settings from now on. State of decoding rows is reset; CUDA graphs must be recorded again."""

    # -- prediction --------------------------------------------------------------------------

    def set_predictors(self, predictions: Mapping[int, LayerPrediction]) -> None:  # noqa: B027
        """Replace the predictors. Afterwards ``ahead`` may be called for the layers in ``predictions`` only."""

    def ahead(  # noqa: B027
        self, layers: Sequence[int], hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        """Predict the queries of ``layers`` from the input of the layer about to run, and start work on ``layers``.

        The input is ``hidden + residual``, each ``[B, hidden size]``. The layer changes both tensors in place after
        this call.
        """

    # -- forward passes ----------------------------------------------------------------------

    @abstractmethod
    def begin_prefill(self, batch: PrefillBatch) -> None:
        """Prepare for the layers of a prefill pass, and reset the state of the batch's rows."""

    @abstractmethod
    def prefill(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store keys and values ``[T, KV heads, dim]``, then attend: query and result are ``[T, query heads, dim]``."""

    @abstractmethod
    def begin_step(self, batch: StepBatch) -> None:
        """Prepare for the layers of a decode step. Copy what the layers read: the caller may reuse the batch."""

    @abstractmethod
    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store keys and values ``[B, KV heads, dim]``, then attend: query and result are ``[B, query heads, dim]``."""

    @abstractmethod
    def reset_rows(self, rows: torch.Tensor) -> None:
        """Forget all state of ``rows``: a new request took the row, or a request was rewound to its prompt."""

    # -- CUDA graphs -------------------------------------------------------------------------

    @property
    def graph_variant(self) -> str:
        """Return the variant of the recorded graph that the current step needs. Empty means the plain variant."""
        return ""

    def graph_variants(self, batch_size: int) -> list[str]:
        """Return all variants that steps of a batch size may need: a graph is recorded for each."""
        return [""]

    @contextlib.contextmanager
    def recording(self, variant: str) -> Iterator[None]:
        """Make all steps within this context run as ``variant``, so that its graph can be recorded."""
        yield

    # -- observation -------------------------------------------------------------------------

    def watch_ratio(self, watcher: RatioWatcher | None) -> None:  # noqa: B027
        """Call ``watcher`` with every layer's CPU compute ratio from now on. None ends the calls."""

    def readings(self) -> Readings:
        """Return this engine's counters, for metrics. Waits for a device only if every step of the engine does."""
        return Readings()

    def describe_worker(self) -> dict[str, Any] | None:
        """Return a description of the worker that computes misses, for display, or None without a worker."""
        return None
