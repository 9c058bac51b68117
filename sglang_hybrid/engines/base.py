"""The seam between SGLang's adapter and everything that computes.

An adapter translates batches and calls, for each forward pass::

    begin_prefill, then prefill for each layer            new tokens of prompts
    begin_step, then ahead and decode for each layer      one new token of each row

or, for an engine that does not know of first steps (``first_steps``), both for different rows of a step: begin_step
before begin_prefill, and for each layer prefill before decode.

An engine says how that is executed: in torch, by native CPU kernels, by CUDA graphs. It knows tensors, pages and rows,
and nothing of SGLang.
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

RatioWatcher = Callable[[int, float], None]  # layer, share of its blocks that the CPU computed


@dataclass(frozen=True)
class ModelFacts:
    """What an engine has to know about the model that it serves."""

    req_to_token: torch.Tensor  # [rows, longest context], SGLang's token index of each token: the host slot
    group: int  # query heads per KV head
    dtype: torch.dtype
    scale: float | None  # factor of attention logits; None where layers differ
    cuda_graphs: bool
    logits: torch.nn.Module | None = None  # the last module that a step runs, where there is one
    one_batch: bool = True  # no other batch runs between two steps of this one
    admits_pages: bool = False  # a prefill instance writes pages into the pool
    part: ModelPart | None = None  # which model, and which of its KV heads; None: nobody knows


@dataclass(frozen=True)
class PrefillBatch:
    """Rows that bring new tokens of their prompts."""

    rows: torch.Tensor  # [B], SGLang's number of each row
    lengths: list[int]  # tokens of each row, the new ones included
    new_tokens: list[int]  # of each row
    slots: torch.Tensor  # [T], host slot of each new token; padded perhaps, as the tensors of layers are


@dataclass(frozen=True)
class StepBatch:
    """Rows that decode one token each."""

    rows: torch.Tensor  # [B], SGLang's number of each row
    lengths: torch.Tensor  # [B], tokens of each row, the new one included
    lengths_on_host: torch.Tensor  # [B], the same in host memory
    slots: torch.Tensor  # [B], host slot of each new token
    padding: int = 0  # rows at the end that are no requests
    is_recorded: bool = False  # a CUDA graph is being recorded: there are no requests


@dataclass(frozen=True)
class LayerPrediction:
    """What predicts one layer's query from the input of the layer before."""

    weights: QueryWeights
    correction: Correction | None
    scale: float  # of the layer's attention logits


class Engine(ABC):
    """Attention of all layers of one model runner. Layers are numbered from 0, as the pool's buffers are."""

    name: ClassVar[str]  # as people know it
    reports_ratio: ClassVar[bool] = False  # whether some blocks are computed by a CPU worker
    predicts: ClassVar[bool] = False  # whether `ahead` does anything
    may_change: ClassVar[bool] = True  # whether `use` may be called again with other settings
    knows_first_steps: ClassVar[bool] = False  # whether `decode` attends to everything in first steps, if asked
    holds_weights: ClassVar[bool] = False  # whether predictors keep copies of weights that cannot be replaced

    def unsupported_reason(self, config: HybridConfig) -> str | None:
        """Return why `use` cannot have these settings, in words."""
        return None

    @abstractmethod
    def use(self, config: HybridConfig, tuning: Tuning) -> None:
        """Decode by these settings from now on. Rows that are decoding start anew; graphs have to be recorded anew."""

    # -- prediction --------------------------------------------------------------------------

    def set_predictors(self, predictions: Mapping[int, LayerPrediction]) -> None:  # noqa: B027
        """Predict the queries of these layers from now on. ``ahead`` is called for no others."""

    def ahead(  # noqa: B027
        self, layers: Sequence[int], hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        """Begin with layers whose queries the input of the layer that runs now predicts.

        The input is ``hidden + residual``, ``[B, hidden size]`` each. The layer changes both in place afterwards.
        """

    # -- forward passes ----------------------------------------------------------------------

    @abstractmethod
    def begin_prefill(self, batch: PrefillBatch) -> None:
        """Prepare for the layers of a prefill pass. The batch's rows start anew."""

    @abstractmethod
    def prefill(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store keys and values ``[T, KV heads, dim]`` and attend: query and result ``[T, query heads, dim]``."""

    @abstractmethod
    def begin_step(self, batch: StepBatch) -> None:
        """Prepare for the layers of a decode step. Copies what the layers read: the caller may reuse the batch."""

    @abstractmethod
    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store keys and values ``[B, KV heads, dim]`` and attend: query and result ``[B, query heads, dim]``."""

    @abstractmethod
    def reset_rows(self, rows: torch.Tensor) -> None:
        """Forget all state of ``rows``: a new request took the row, or a request was rewound to its prompt."""

    # -- CUDA graphs -------------------------------------------------------------------------

    @property
    def graph_variant(self) -> str:
        """Which recorded graph the step that begins needs, beside its batch size. Empty: the plain one."""
        return ""

    def graph_variants(self, batch_size: int) -> list[str]:
        """All variants that may be needed for a batch size."""
        return [""]

    @contextlib.contextmanager
    def recording(self, variant: str) -> Iterator[None]:
        """Within this context steps are of one variant."""
        yield

    # -- observation -------------------------------------------------------------------------

    def watch_ratio(self, watcher: RatioWatcher | None) -> None:  # noqa: B027
        """Call ``watcher`` with every layer's CPU compute ratio from now on."""

    def readings(self) -> Readings:
        """What this engine counts, for metrics. Waits for no device, except where every step does."""
        return Readings()

    def describe_worker(self) -> dict[str, Any] | None:
        """The worker that computes misses, for people. None: there is none."""
        return None
