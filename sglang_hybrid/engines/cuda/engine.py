"""The CUDA engine: runs a policy's step program in CUDA graphs, prefill by FlashInfer, and posts to the CPU worker."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.base import (
    Engine,
    LayerPrediction,
    ModelFacts,
    PrefillBatch,
    RatioWatcher,
    StepBatch,
)
from sglang_hybrid.engines.cuda.admission import PageAdmission
from sglang_hybrid.engines.cuda.lanes import Lane
from sglang_hybrid.engines.cuda.layers import DeviceLayer, DeviceShape
from sglang_hybrid.engines.cuda.predictor import DevicePredictor, PredictionBuffers
from sglang_hybrid.engines.cuda.prefill import DevicePrefill, PrefillRows
from sglang_hybrid.engines.cuda.program import ProgramContext, QueryAhead, StepProgram
from sglang_hybrid.engines.cuda.settings import unsupported_model, unsupported_over_fp8, unsupported_settings
from sglang_hybrid.engines.cuda.watch import RatioWatch
from sglang_hybrid.engines.cuda.whole_request_mode import WholeRequestMode
from sglang_hybrid.memory.digests import CompactDigests
from sglang_hybrid.memory.pages import page_table
from sglang_hybrid.memory.pool import KVPool
from sglang_hybrid.metrics import WorkerMetrics
from sglang_hybrid.metrics.readings import Readings
from sglang_hybrid.ops.cpu.structs import Geometry
from sglang_hybrid.ops.cuda import CudaError
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests
from sglang_hybrid.ops.cuda.host_memory import RegisteredRegion
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.tensors import HALVES, pools_for
from sglang_hybrid.ops.reference import FP8
from sglang_hybrid.policies.registry import PolicyError, keeps_codes_in_slots, policy_named
from sglang_hybrid.policies.scout.profile import HostRates
from sglang_hybrid.policies.scout.tuning import Tuning
from sglang_hybrid.worker.connection import WorkerConnection
from sglang_hybrid.worker.supervisor import Supervisor

logger = logging.getLogger("sglang.srt.hybrid")


# Time in which an idle worker polls before it sleeps. A GPU cannot wake a worker that sleeps. The host wakes it before
# every step, which the host launches one step ahead. So the worker has to stay awake for two steps, even long ones: a
# worker that sleeps finds the next post only 0.1 s later.
WORKER_SPIN_US = 200_000


def unsupported_reason(config: HybridConfig, pool: KVPool, model: ModelFacts) -> str | None:
    """Return why the CUDA kernels cannot serve this model with these settings, in words; None if they can."""
    if torch.device(pool.device).type != "cuda":
        return "the model is not on a GPU"
    if why := unsupported_settings(config):  # such settings also disabled CUDA graphs: return the cause
        return why
    if not model.cuda_graphs:
        return "CUDA graphs are off"
    if model.scale is None:
        return "layers that scale attention differently"
    if pool.dtype == FP8 and (why := unsupported_over_fp8(config.policy)):
        return why
    if model.dtype not in HALVES or pool.dtype not in pools_for(model.dtype):
        return f"a model in {model.dtype} with a KV cache of {pool.dtype}"
    return unsupported_model(pool.head_dim, pool.v_head_dim, model.group, pool.dtype.itemsize)


_WHOLE_REQUESTS = "dense"  # graph variant of steps that hold all of their rows in device memory


class CudaEngine(Engine):
    """Engine that decodes with CUDA kernels. One instance per model runner on a GPU."""

    name: ClassVar[str] = "cuda"
    reports_ratio: ClassVar[bool] = True
    predicts: ClassVar[bool] = True
    knows_first_steps: ClassVar[bool] = True
    holds_weights: ClassVar[bool] = True

    def __init__(
        self,
        config: HybridConfig,
        tuning: Tuning,
        rates: HostRates | None,
        pool: KVPool,
        model: ModelFacts,
        worker: tuple[Supervisor, WorkerMetrics, Geometry] | None,
    ) -> None:
        """``worker``: a worker that is attached; None: the GPU reads all misses from the host pool."""
        assert model.scale is not None  # unsupported_reason checks this first
        self._req_to_token = model.req_to_token
        self._is_fp8 = pool.dtype == FP8
        self._shape = DeviceShape(
            rows=model.req_to_token.shape[0],
            max_batch=model.req_to_token.shape[0],
            max_blocks=-(-model.req_to_token.shape[1] // BLOCK_TOKENS),
            heads=pool.head_num,
            group=model.group,
            dim=pool.head_dim,
            pool_pages=pool.k_buffer[0].shape[0],
        )
        region = RegisteredRegion(pool.region)
        codes = _program_of(config).layer_codes(config, pool, model.part)
        self._layers = [
            DeviceLayer(
                HostPool(region, keys, values),
                _digests(pool, layer, model.dtype),
                codes[layer] if codes else None,
                model.code_steps[layer] if model.code_steps else None,
            )
            for layer, (keys, values) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True))
        ]
        self.admission: PageAdmission | None = None
        if model.admits_pages:
            self.admission = PageAdmission(self._layers, pool.head_num, pool.head_dim, pool.dtype, pool.device)
        self._arrived: list[torch.Tensor] = []  # rows to reset at the beginning of the next step
        self._lengths: list[int] = []  # tokens of each row of the last step
        self._supervisor: Supervisor | None = None
        self._link: WorkerConnection | None = None  # the worker to which the GPU posts
        self._followed: WorkerConnection | None = None  # the newest worker whose mailbox was tried
        self._mailbox: DeviceMailboxClient | None = None
        self._metrics: WorkerMetrics | None = None
        if worker is not None:
            self._supervisor, self._metrics, geometry = worker
            self._mailbox = DeviceMailboxClient(geometry, pool.device)
            self._follow_worker()
        self._used: tuple[HybridConfig, Tuning] | None = None
        self._rates = rates
        self._one_batch = model.one_batch  # else rows of other batches would lose their pages at every step
        # the logits module is the last that a step runs; without one the step ends with its last attention
        self._has_logits = model.logits is not None
        if model.logits is not None:
            model.logits.register_forward_hook(self._after_logits)
        self._predictors: dict[int, QueryAhead] = {}
        self._watcher: RatioWatcher | None = None
        self._scale = model.scale
        self._prefill = DevicePrefill(
            self._layers, self._shape.max_blocks, model.group * pool.head_num, model.dtype, pool.device,
        )  # fmt: skip
        self.use(config, tuning)
        self._settling_lane = Lane(pool.device)
        self._settling: Step | None = None
        self._last_tokens = torch.empty(0, dtype=torch.int64)

    def unsupported_reason(self, config: HybridConfig) -> str | None:
        return unsupported_settings(config) or (unsupported_over_fp8(config.policy) if self._is_fp8 else None)

    def use(self, config: HybridConfig, tuning: Tuning) -> None:
        if (config, tuning) == self._used:
            return
        if _program_of(config).reads_digests and self._layers[0].digests.is_none:
            raise PolicyError(
                f"policy={config.policy} reads digests of all pages, and this pool has none: start with the settings "
                "that decode"
            )
        if keeps_codes_in_slots(config) and not self._is_fp8 and self._layers[0].steps is None:
            raise PolicyError("slots of 8 bits need ranges of channels: start with scout.slot_dtype=int8 too")
        context = ProgramContext(
            layers=self._layers,
            shape=self._shape,
            config=config,
            tuning=tuning,
            holds_whole_requests=config.whole_requests == "auto" and self._one_batch,
            has_logits=self._has_logits,
            mailbox=self._mailbox,
            worker_cores=len(self._link.planned.cores or os.sched_getaffinity(0)) if self._link else 0,
            rates=self._rates,
            borrow_staging=self._prefill.lend,
        )
        self.program: StepProgram = _program_of(config).create(context)
        self._used = config, tuning
        self._whole_requests: WholeRequestMode | None = None
        if context.holds_whole_requests and self.program.dense.pages:  # some programs never hold whole rows
            self._whole_requests = WholeRequestMode(self.program.dense.pages, self.program.dense.block_bytes)
            self.program.is_dense = self._whole_requests.is_dense
        self._near_tokens = self.program.near_tokens(config)
        self.watch: RatioWatch | None = self.program.new_watch(context)
        if self.watch:
            self.watch.metrics = self._metrics
        self.watch_ratio(self._watcher)

    def watch_ratio(self, watcher: RatioWatcher | None) -> None:
        self._watcher = watcher
        if self.watch:
            self.watch.on_ratio = watcher

    def readings(self) -> Readings:
        read = self.watch.readings() if self.watch else Readings()
        pages = self.program.dense.pages
        if not pages:  # whole requests are never held
            return read
        # either each row has the same number of slots, or all rows share one memory
        most = pages if self.program.is_dense else self.program.blocks_per_row
        total = pages if self.program.is_dense else most * self._shape.rows
        used = sum(min(-(-length // BLOCK_TOKENS), most) for length in self._lengths)
        holds = None if self._whole_requests is None else self.program.is_dense
        return dataclasses.replace(read, slots=total, slots_used=used, holds_whole_requests=holds)

    def describe_worker(self) -> dict[str, Any] | None:
        return self._supervisor.describe() if self._supervisor else None

    # -- prediction --------------------------------------------------------------------------

    def set_predictors(self, predictions: Mapping[int, LayerPrediction]) -> None:
        self._predictors = {}
        if not predictions:
            return
        # queries of two layers can be predicted at the same time
        buffers = [_prediction_buffers(self._shape.max_batch, predictions) for _ in range(2)]
        for layer, given in predictions.items():
            predictor = DevicePredictor(
                given.weights, given.correction, max_batch=self._shape.max_batch, buffers=buffers[layer % 2]
            )
            self._predictors[layer] = QueryAhead(layer, predictor, given.scale)

    def ahead(
        self, layers: Sequence[int], hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        self.program.predict([self._predictors[layer] for layer in layers], hidden, residual, positions)

    # -- decode ------------------------------------------------------------------------------

    def begin_step(self, batch: StepBatch) -> None:
        self.program.begin_step()
        if not batch.is_recorded:
            self._begin_arrived_rows()
        rows, count = batch.rows, batch.rows.shape[0]
        if batch.is_recorded or count == 0:  # no row decodes: a graph is recorded, or only another rank has work
            self.program.step.load_nothing()
            return
        active = count - batch.padding
        self.program.step.load(self._req_to_token, rows, batch.lengths, active)
        lengths = self._lengths = batch.lengths_on_host[:active].tolist()
        whole = self._whole_requests is not None and self._whole_requests.decide(lengths, time.monotonic())
        if whole != self.program.is_dense:
            self._tell(whole, len(lengths))
            self.program.hold_rows(whole, count)
            self.program.step.load(self._req_to_token, rows, batch.lengths, active)
        if self.program.is_dense:
            self.program.dense.begin_step(count, lengths)
            self._watch_step(0)
            return
        self._follow_worker()
        if self._link is not None:
            self._link.mailbox.wake()
        self._watch_step(int((batch.lengths_on_host > self._near_tokens).sum()))

    def _watch_step(self, longer_rows: int) -> None:
        if self.watch:
            self.watch.step(longer_rows)

    def _after_logits(self, *_of_module: Any) -> None:
        self.program.end_step()

    def _tell(self, whole: bool, rows: int) -> None:
        if whole:
            logger.info("the GPU's memory holds %d running requests as a whole: attention is exact", rows)
            return
        logger.info(
            "%d running requests are longer than the GPU's memory holds: %s",
            rows, self.program.without_whole_requests,
        )  # fmt: skip

    @property
    def graph_variant(self) -> str:
        return _WHOLE_REQUESTS if self.program.is_dense else ""

    def graph_variants(self, batch_size: int) -> list[str]:
        return [""] if self._whole_requests is None else ["", _WHOLE_REQUESTS]

    @contextlib.contextmanager
    def recording(self, variant: str) -> Iterator[None]:
        serving = self.program.is_dense
        self.program.is_dense = variant == _WHOLE_REQUESTS
        try:
            yield
        finally:
            self.program.is_dense = serving

    def _follow_worker(self) -> None:
        """Attach the mailbox of the current worker, if the worker changed since the last call."""
        link = self._supervisor.link if self._supervisor else None
        if self._mailbox is None or link is self._followed:
            return
        self._followed, self._link = link, None
        self._mailbox.attach(None)
        if link is None:
            return
        try:
            self._mailbox.attach(link.mailbox)
        except CudaError as error:  # for example, because of a limit on locked memory
            logger.warning("CPU worker %d is not used, the GPU cannot have its mailbox: %s", link.pid, error)
            if self._metrics:
                self._metrics.worker_is(False)
            return
        self._link = link

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return self.program.decode(layer, query.contiguous(), keys, values, scale)

    # -- prefill -----------------------------------------------------------------------------

    def begin_prefill(self, batch: PrefillBatch) -> None:
        rows, lengths, new_tokens = batch.rows.to(torch.int64), batch.lengths, batch.new_tokens
        table = page_table(self._req_to_token, rows, max(lengths, default=0), BLOCK_TOKENS)
        self._prefill.begin(PrefillRows(table.cpu(), lengths, new_tokens), self._scale)
        # if whole rows are held, their first decode step loads them
        self._settling = None
        settles = self.program.loads_initial_blocks and not self.program.is_dense
        self.program.reset_rows(rows, prefilled=settles)
        if not settles:
            return
        device = rows.device
        pages = torch.zeros(len(lengths), self._shape.max_blocks, dtype=torch.int32, device=device)
        pages[:, : table.shape[1]] = table
        # rows as in their first decode step, one token longer
        longer = torch.tensor(lengths, dtype=torch.int32, device=device) + 1
        self._settling = Step(pages, longer, rows.to(torch.int32))
        self._last_tokens = torch.tensor(new_tokens, device=device).cumsum(0) - 1

    def prefill(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend, and select and load the rows' first resident blocks while the following layers run."""
        out = self._prefill.attend(layer, query, keys, values, scale)
        if self._settling is not None:
            self._settle(layer, query[self._last_tokens], self._settling, scale)
        if layer == len(self._layers) - 1:
            self._prefill.finish()
            if self._settling is not None:
                self._settling_lane.wait_for(layer)
        return out

    def _settle(self, layer: int, last: torch.Tensor, rows: Step, scale: float) -> None:
        with self._settling_lane.fork():
            lane = torch.cuda.current_stream()
            lane.wait_event(self._prefill.written(layer))
            last.record_stream(lane)
            self.program.load_initial_blocks(layer, rows, last, scale)
            self._settling_lane.mark(layer)

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Forget all state of ``rows`` before the next step, on the stream of steps.

        Called on SGLang's scheduling stream, while a step of the rows' previous owners may still be under way.
        """
        self._arrived.append(rows.to(self._req_to_token.device))

    def _begin_arrived_rows(self) -> None:
        if self._arrived:
            rows = torch.cat(self._arrived)
            for arrived in self._arrived:
                if arrived.is_cuda:  # keeps the memory, allocated on another stream, until this one is done with it
                    arrived.record_stream(torch.cuda.current_stream())
            self._arrived = []
            self.program.reset_rows(rows)


def _program_of(config: HybridConfig) -> type[StepProgram]:
    program = policy_named(config.policy).cuda_program
    assert program is not None  # unsupported_reason checks this first
    return program()


def _prediction_buffers(max_batch: int, predictions: Mapping[int, LayerPrediction]) -> PredictionBuffers:
    projection = next(iter(predictions.values())).weights.projection
    corrections = [given.correction for given in predictions.values() if given.correction is not None]
    ranks = [correction.right.shape[0] for correction in corrections if correction.right is not None]
    width, hidden = projection.shape
    return PredictionBuffers(max_batch, hidden, width, max(ranks, default=0), projection.dtype, projection.device)


def _digests(pool: KVPool, layer: int, dtype: torch.dtype) -> LayerDigests:
    """Return the pool's digests of a layer, with sketches if the pool has them. ``dtype``: of the model."""
    if pool.digests is None:
        return LayerDigests.none(pool.k_buffer[layer], pool.device, dtype)
    if pool.sketches is None:
        return LayerDigests(pool.digests.of_layer(layer), pool=pool.dtype)
    sketch = pool.sketches.of_layer(layer)
    compact_of = (dtype, pool.head_dim) if isinstance(pool.digests, CompactDigests) else None
    return LayerDigests(pool.digests.of_layer(layer), sketch.codes, sketch.channels, compact_of, pool.dtype)
