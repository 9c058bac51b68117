"""Step programs: the part of a policy that ``CudaEngine`` runs. One launches a decode step's kernels layer by layer.

A step is launched, or recorded in a CUDA graph, as::

    begin_step, then predict and decode for each layer, then end_step

While all running rows fit in device memory, every program attends to whole rows there (``WholeRequests``). A subclass
defines what happens when they do not fit. A program without prediction, resident blocks or counters keeps the default
methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.buffers import AttentionBuffers
from sglang_hybrid.engines.cuda.handover import Handover
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.predictor import DevicePredictor
from sglang_hybrid.engines.cuda.settings import WholeSteps
from sglang_hybrid.engines.cuda.slots import BlockMemory, ResidentSlots
from sglang_hybrid.engines.cuda.step import ARRIVED, PREFILLED, StepBuffers
from sglang_hybrid.engines.cuda.watch import RatioWatch
from sglang_hybrid.engines.cuda.whole_requests import WholeRequests
from sglang_hybrid.memory.pool import KVPool
from sglang_hybrid.ops.cuda.key_codes import LayerCodes
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.whole_requests import StagedBlocks
from sglang_hybrid.policies.registry import ModelPart
from sglang_hybrid.policies.scout.profile import HostRates
from sglang_hybrid.policies.scout.tuning import Tuning


@dataclass(frozen=True)
class ProgramContext:
    """The arguments from which a step program is created."""

    layers: Sequence[DeviceLayer]
    shape: DeviceShape
    config: HybridConfig
    tuning: Tuning  # per layer, from a profile or from the settings
    holds_whole_requests: bool  # whether steps may hold all of their rows in device memory
    has_logits: bool  # whether `end_step` is called behind the logits
    mailbox: DeviceMailboxClient | None = None  # of the worker; None: no worker
    worker_cores: int = 0
    rates: HostRates | None = None  # of this host; None: no profile measured them
    borrow_staging: Callable[[], StagedBlocks | None] = lambda: None  # staging of prefill; None while a pass runs


@dataclass(frozen=True)
class QueryAhead:
    """A layer whose query is predicted, and its predictor."""

    layer: int
    predictor: DevicePredictor
    scale: float  # of the layer's attention logits


class StepProgram(ABC):
    """Launches the kernels of a policy's decode steps, and owns the rows of a step and the memory of resident blocks.

    All kernels are launched with static shapes on persistent buffers, so that a step can be recorded in a CUDA graph.
    """

    loads_initial_blocks: ClassVar[bool] = False  # whether prefill ends with `load_initial_blocks`
    reads_digests: ClassVar[bool] = False  # whether the program needs a pool with digests

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        memory: BlockMemory,
        *,
        whole: WholeSteps | None = None,
        handover: Handover | None = None,
    ) -> None:
        """``memory``: used as pages of whole rows while all rows fit. ``whole``: as for ``StepBuffers``.

        ``handover``: gets the last queries of whole rows; None: they are not kept.
        """
        device, dtype = layers[0].digests.digests.device, layers[0].digests.dtype
        self._layers, self._shape = list(layers), shape
        self.step = StepBuffers(shape.rows, shape.max_batch, shape.max_blocks, device, whole=whole)
        self._attention = AttentionBuffers(shape, dtype, memory.keys[0].dtype, device)
        self.refused = torch.zeros(1, dtype=torch.int64, device=device)  # page and slot numbers that were out of bounds
        self.dense = WholeRequests(layers, shape, memory, self.step, self._attention, self.refused, handover)
        self.is_dense = False  # whether the steps that are launched or recorded hold whole rows

    @classmethod
    @abstractmethod
    def create(cls, context: ProgramContext) -> Self:
        """Create the program. The policy's ``cuda_unsupported`` must have returned None for the settings."""

    @classmethod
    def layer_codes(cls, config: HybridConfig, pool: KVPool, model: ModelPart | None) -> Sequence[LayerCodes] | None:
        """Return the codes of each layer's keys, with their encoder; None: the policy keeps no codes.

        Called once, for the policy for which the pool was made.
        """
        return None

    @property
    @abstractmethod
    def without_whole_requests(self) -> str:
        """Return what steps attend to that do not hold whole rows, in words for the log."""

    def new_watch(self, context: ProgramContext) -> RatioWatch | None:
        """Return the watch that reads this program's counters while steps run; None: the program counts nothing."""
        return None

    def near_tokens(self, config: HybridConfig) -> int:
        """Return the number of tokens up to which a row's attention needs neither the worker nor the host pool."""
        return config.budget_tokens

    @property
    def blocks_per_row(self) -> int:
        """Return the blocks of a row that device memory holds while whole rows are not held."""
        return self.dense.pages // self._shape.rows

    # -- rows --------------------------------------------------------------------------------

    def reset_rows(self, rows: torch.Tensor, prefilled: bool = False) -> None:
        """Forget all state of ``rows`` ``[n]``: a new request took the row, or a request was rewound to its prompt.

        ``prefilled``: this server computes the prompts of the rows, and ``load_initial_blocks`` follows.
        """
        rows = rows.to(torch.int64)
        self.dense.reset_rows(rows)
        self.step.reset_rows(rows, PREFILLED if prefilled else ARRIVED)

    def hold_rows(self, whole: bool, count: int = 0) -> None:
        """Start or stop holding whole rows, from this step on. All blocks in device memory become void.

        ``count``: rows that ``step.load`` has loaded for this step; the caller has to load them again. Must not be
        called while a CUDA graph is recorded.
        """
        self.is_dense = whole
        self.dense.forget_all()

    def load_initial_blocks(self, layer: int, step: Step, query: torch.Tensor, scale: float) -> None:  # noqa: B027
        """Select and load the first resident blocks of rows, by ``query`` of their last prompt tokens.

        ``step``: the rows as in their first decode step, one token longer. ``query``: ``[B, query heads, D]``.
        Called when the layer's pages and digests are written.
        """

    # -- a step ------------------------------------------------------------------------------

    def begin_step(self) -> None:  # noqa: B027
        """Prepare for a step. Called before the layers of the step are launched or recorded."""

    def predict(  # noqa: B027
        self,
        queries: Sequence[QueryAhead],
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> None:
        """Predict queries from the input of the layer about to run, and start their layers: see ``Engine.ahead``."""

    @abstractmethod
    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Store and attend one token of each row: query ``[B, query heads, D]``, keys and values ``[B, KV heads, D]``.

        The result, shaped like the query, is in a buffer that the next layer overwrites.
        """

    def end_step(self) -> None:  # noqa: B027
        """End a step. Called after everything that the step computes was launched."""


class SlotProgram(StepProgram):
    """A step program in which each row has its own slots for resident blocks, while whole rows are not held."""

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        slots: ResidentSlots,
        *,
        whole: WholeSteps | None = None,
        handover: Handover | None = None,
    ) -> None:
        """``slots``: also the ``memory`` of ``StepProgram``.

        ``handover``: for programs that implement ``hand_over``. Without it, rows restart with empty slots when whole
        rows are no longer held.
        """
        super().__init__(layers, shape, slots, whole=whole, handover=handover)
        self.slots, self.handover = slots, handover

    @property
    def blocks_per_row(self) -> int:
        return self.slots.keys[0].shape[2]

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block's keys and values in the pool, of one layer and KV head."""
        keys = self._layers[0].pool.keys
        return 2 * keys[0, 0].numel() * keys.itemsize

    def reset_rows(self, rows: torch.Tensor, prefilled: bool = False) -> None:
        rows = rows.to(torch.int64)
        super().reset_rows(rows, prefilled)
        self.slots.forget(rows)
        if self.handover:
            self.handover.reset_rows(rows)

    def hold_rows(self, whole: bool, count: int = 0) -> None:
        ends = self.is_dense and count > 0
        if ends:
            self.dense.digest_tails(count)
        if not whole:
            handover = self.handover if ends else None
            self.slots.forget_all()
            self.step.let_rows_go(count, handover)
            if handover:
                self.hand_over(count, handover)
        super().hold_rows(whole, count)

    def hand_over(self, count: int, handover: Handover) -> None:
        """Fill the slots of the step's rows that go on, from their pages in device memory. Default: do nothing."""
