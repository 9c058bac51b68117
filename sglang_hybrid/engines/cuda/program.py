"""What ``CudaEngine`` needs of a policy: a step program, which launches the kernels of a decode step layer by layer.

A step is launched, or recorded in a CUDA graph, as::

    begin_step, then predict and decode for each layer, then end_step

While all running rows fit in device memory, every program attends to whole rows there (``WholeRequests``). A subclass
says what happens when they do not. Only what a policy has need be written: a program without prediction, resident
blocks or counters keeps the defaults.
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
    """What step programs are made from."""

    layers: Sequence[DeviceLayer]
    shape: DeviceShape
    config: HybridConfig
    tuning: Tuning  # per layer, from a profile or from the settings
    holds_whole_requests: bool  # whether steps may hold all of their rows in device memory
    has_logits: bool  # whether `end_step` is called behind the logits
    mailbox: DeviceMailboxClient | None = None  # of the worker; None: there is none
    worker_cores: int = 0
    rates: HostRates | None = None  # of this host, where a profile measured them
    borrow_staging: Callable[[], StagedBlocks | None] = lambda: None  # of prefill, while no pass is under way


@dataclass(frozen=True)
class QueryAhead:
    """A layer whose query is predicted."""

    layer: int
    predictor: DevicePredictor
    scale: float  # of the layer's attention logits


class StepProgram(ABC):
    """Rows of a step, the memory of resident blocks, and what becomes of both.

    Everything is launched with static shapes on persistent buffers, so that a step can be recorded in a CUDA graph.
    """

    loads_initial_blocks: ClassVar[bool] = False  # whether prefill ends with `load_initial_blocks`
    reads_digests: ClassVar[bool] = False  # whether it needs a pool that has them

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        memory: BlockMemory,
        *,
        whole: WholeSteps | None = None,
        handover: Handover | None = None,
    ) -> None:
        """``memory``: used as pages of whole rows while these fit. ``whole``: as for ``StepBuffers``.

        ``handover``: gets what rows leave behind that are held.
        """
        device, dtype = layers[0].digests.digests.device, layers[0].digests.dtype
        self._layers, self._shape = list(layers), shape
        self.step = StepBuffers(shape.rows, shape.max_batch, shape.max_blocks, device, whole=whole)
        self._attention = AttentionBuffers(shape, dtype, layers[0].pool.keys.dtype, device)
        self.refused = torch.zeros(1, dtype=torch.int64, device=device)  # numbers that were out of bounds
        self.dense = WholeRequests(layers, shape, memory, self.step, self._attention, self.refused, handover)
        self.is_dense = False  # whether steps are launched, or recorded, that hold whole rows

    @classmethod
    @abstractmethod
    def create(cls, context: ProgramContext) -> Self:
        """Return the program for settings that the policy's ``cuda_unsupported`` has nothing against."""

    @classmethod
    def layer_codes(cls, config: HybridConfig, pool: KVPool, model: ModelPart | None) -> Sequence[LayerCodes] | None:
        """Return where codes of each layer's keys are and how they are made; None: the policy keeps none.

        Asked once, for the policy that the pool was made for.
        """
        return None

    @property
    @abstractmethod
    def without_whole_requests(self) -> str:
        """What is attended to in steps that do not hold whole rows, for the log."""

    def new_watch(self, context: ProgramContext) -> RatioWatch | None:
        """Return what reads this program's counters while it runs; None where nothing is counted."""
        return None

    def near_tokens(self, config: HybridConfig) -> int:
        """Tokens up to which a row's attention needs nobody else."""
        return config.budget_tokens

    # -- rows --------------------------------------------------------------------------------

    def reset_rows(self, rows: torch.Tensor, prefilled: bool = False) -> None:
        """Forget all state of ``rows`` ``[n]``: a new request took the row, or a request was rewound to its prompt.

        ``prefilled``: their prompts are being computed here, and ``load_initial_blocks`` follows.
        """
        rows = rows.to(torch.int64)
        self.dense.reset_rows(rows)
        self.step.reset_rows(rows, PREFILLED if prefilled else ARRIVED)

    def hold_rows(self, whole: bool, count: int = 0) -> None:
        """Hold whole rows from this step on, or no longer. What is in device memory becomes void.

        ``count``: rows that are loaded for this step; they have to be loaded again. Never recorded.
        """
        self.is_dense = whole
        self.dense.forget_all()

    def load_initial_blocks(self, layer: int, step: Step, query: torch.Tensor, scale: float) -> None:  # noqa: B027
        """Choose and load the first resident blocks of rows by the query of their last prompt token.

        step: these rows as their first decode step will see them, one token longer. query ``[B, query heads, D]``.
        The layer's pages and digests are written.
        """

    # -- a step ------------------------------------------------------------------------------

    def begin_step(self) -> None:  # noqa: B027
        """Before the layers of a step are launched or recorded."""

    def predict(  # noqa: B027
        self,
        queries: Sequence[QueryAhead],
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> None:
        """Begin with layers whose queries the input of the layer that runs now predicts: see ``Engine.ahead``."""

    @abstractmethod
    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One token of each row: query ``[B, query heads, D]``, keys and values ``[B, KV heads, D]``.

        The result is in a buffer that the next layer overwrites.
        """

    def end_step(self) -> None:  # noqa: B027
        """Behind everything that a step computes."""


class SlotProgram(StepProgram):
    """A step program whose rows have slots of their own while they are not held as a whole."""

    def __init__(
        self,
        layers: Sequence[DeviceLayer],
        shape: DeviceShape,
        slots: ResidentSlots,
        *,
        whole: WholeSteps | None = None,
        handover: Handover | None = None,
    ) -> None:
        """``slots``: as ``memory`` of ``StepProgram``.

        ``handover``: of programs that ``hand_over``; the rows of others begin anew when they are held no longer.
        """
        super().__init__(layers, shape, slots, whole=whole, handover=handover)
        self.slots, self.handover = slots, handover

    @property
    def block_bytes(self) -> int:
        """Keys and values of a block."""
        slots = self.slots.keys[0]
        return 2 * slots.shape[3] * slots.shape[4] * slots.itemsize

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
        """Fill the slots of those of the step's rows that go on, from what is held of them."""
