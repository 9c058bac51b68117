"""Policy ``scout`` on a GPU: SGLang's batches for ``gpu.DeviceScout``, and the worker it posts to."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.cuda import CudaError
from sglang_hybrid.cuda.digests import HostPool, LayerDigests, Step
from sglang_hybrid.cuda.host_memory import RegisteredRegion
from sglang_hybrid.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.gpu.admission import PageAdmission
from sglang_hybrid.gpu.decode import DeviceScout
from sglang_hybrid.gpu.lanes import Lane
from sglang_hybrid.gpu.layers import DeviceLayer, DeviceShape
from sglang_hybrid.gpu.prefill import DevicePrefill, PrefillRows
from sglang_hybrid.gpu.room import Room
from sglang_hybrid.gpu.settings import path_rates, settings_of, why_not, why_not_model
from sglang_hybrid.integration.device_watch import DeviceWatch
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.miss_server import checked_geometry, start_worker
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.memory.digests import CompactDigests
from sglang_hybrid.metrics import WorkerMetrics
from sglang_hybrid.scout.profile import HostRates
from sglang_hybrid.scout.recall import RecallSchedule
from sglang_hybrid.scout.tuning import Tuning
from sglang_hybrid.worker.link import Link
from sglang_hybrid.worker.supervisor import Supervisor

logger = logging.getLogger("sglang.srt.hybrid")


# A GPU cannot wake a worker that sleeps. The host does so before every step, which it launches a step ahead, so the
# worker has to stay awake for two steps, long ones too: it would find the next post only 0.1 s later.
_SPIN_US = 200_000


def why_not_on_device(config: HybridConfig, pool: HostKVPool, model_runner: Any) -> str | None:
    """Why this server computes in plain torch, in words; None where the CUDA kernels do it."""
    if torch.device(pool.device).type != "cuda":
        return "the model is not on a GPU"
    if model_runner.server_args.disable_cuda_graph:
        return "CUDA graphs are off"
    return why_not(config) or why_not_model(
        pool.head_dim, pool.v_head_dim, _group(pool, model_runner), pool.store_dtype.itemsize
    )


def _group(pool: HostKVPool, model_runner: Any) -> int:
    heads: int = model_runner.model_config.get_num_attention_heads(model_runner.server_args.tp_size)
    return heads // int(pool.head_num)


class DeviceAttention:
    """One per model runner on a GPU."""

    def __init__(
        self, config: HybridConfig, tuning: Tuning, rates: HostRates | None, pool: HostKVPool, model_runner: Any
    ) -> None:
        """Raises Refusal when a worker is wanted and cannot be had."""
        req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self._req_to_token = req_to_token
        group = _group(pool, model_runner)
        self._shape = DeviceShape(
            rows=req_to_token.shape[0],
            most=req_to_token.shape[0],
            max_blocks=-(-req_to_token.shape[1] // config.block_tokens),
            heads=pool.head_num,
            group=group,
            dim=pool.head_dim,
            pool_pages=pool.k_buffer[0].shape[0],
        )
        region = RegisteredRegion(pool.region)
        self._group = group
        self._layers = [
            DeviceLayer(HostPool(region, keys, values), _digests(pool, layer))
            for layer, (keys, values) in enumerate(zip(pool.k_buffer, pool.v_buffer, strict=True))
        ]
        if model_runner.server_args.disaggregation_mode == "decode":
            pool.admission = PageAdmission(self._layers, pool.head_num, pool.head_dim, pool.store_dtype, pool.device)
        self._arrived: list[torch.Tensor] = []  # rows that begin with the next step
        self._supervisor: Supervisor | None = None
        self._link: Link | None = None  # whose mailbox the device posts to
        self._followed: Link | None = None  # the newest that was tried
        self._mailbox: DeviceMailboxClient | None = None
        self._metrics: WorkerMetrics | None = None
        if config.worker != "none":
            geometry = checked_geometry(config, pool, model_runner)
            assert geometry is not None  # the device's kernels have fewer shapes than the CPU's
            self._supervisor, self._metrics = start_worker(config, pool, model_runner, geometry, _SPIN_US)
            self._mailbox = DeviceMailboxClient(geometry, pool.device)
            self._follow_worker()
        self._used: tuple[HybridConfig, Tuning] | None = None
        self._rates = rates
        # rows of other batches would lose their pages at every step
        args = model_runner.server_args
        self._one_batch = args.pp_size == 1 and not args.enable_two_batch_overlap and not args.enable_pdmux
        # logits are the last thing that a step computes; without any it ends with its last attention
        logits = getattr(model_runner.model, "logits_processor", None)
        self._has_logits = isinstance(logits, torch.nn.Module)
        if isinstance(logits, torch.nn.Module):
            logits.register_forward_hook(self._after_logits)
        self.use(config, tuning)
        self._scale = _scale(model_runner.model)
        self._prefill = DevicePrefill(
            self._layers, self._shape.max_blocks, group * pool.head_num, pool.store_dtype, pool.device,
        )  # fmt: skip
        self._settling_lane = Lane(pool.device)
        self._settling: Step | None = None
        self._last_tokens = torch.empty(0, dtype=torch.int64)

    def use(self, config: HybridConfig, tuning: Tuning) -> None:
        """Decode by these settings from now on. Rows that are decoding begin anew, graphs must be recorded anew."""
        if (config, tuning) != self._used:
            settings = settings_of(config, tuning, self._group)
            self.scout = DeviceScout(self._layers, self._shape, settings, tuning.intervals, self._mailbox)
            self.scout.is_ended = self._has_logits
            self._used = config, tuning
            self._room: Room | None = None
            if config.dense == "auto" and self._one_batch:
                self._room = Room(self.scout.dense.pages, self.scout.dense.block_bytes)
                self.scout.is_dense = self._room.is_dense
            self._budget_tokens = config.budget_tokens
            recall = RecallSchedule(tuning.intervals, tuning.beta, tuning.adapt)
            outcomes = self._mailbox.outcome_counts if self._mailbox else None
            cores = len(self._link.planned.cores or os.sched_getaffinity(0)) if self._link else 0
            rates = path_rates(self._rates, cores) if settings.gather_share is None else None
            self.watch = DeviceWatch(self.scout, recall, self._shape.heads * settings.budget, outcomes, rates)
            self.watch.metrics = self._metrics

    # -- decode ------------------------------------------------------------------------------

    def begin_decode(self, batch: Any, in_capture: bool) -> None:
        """Before a step is launched, replayed or recorded. Takes a copy of what the layers read."""
        self.scout.begin_step()
        if not in_capture:
            self._begin_arrived_rows()
        rows, count = batch.req_pool_indices, batch.batch_size
        if in_capture or count == 0:  # nothing is decoded: a graph is being recorded, or another rank has work
            self.scout.step.load_nothing()
            return
        active = count - getattr(batch, "num_padding", 0)
        self.scout.step.load(self._req_to_token, rows, batch.seq_lens, active)
        lengths = batch.seq_lens_cpu[:active].tolist()
        whole = self._room is not None and self._room.look(lengths, time.monotonic())
        if whole != self.scout.is_dense:
            self._tell(whole, len(lengths))
            self.scout.hold_rows(whole, count)
            self.scout.step.load(self._req_to_token, rows, batch.seq_lens, active)
        if self.scout.is_dense:
            self.scout.dense.begin_step(count, lengths)
            self.watch.step(0)
            return
        self._follow_worker()
        if self._link is not None:
            self._link.mailbox.wake()
        self.watch.step(int((batch.seq_lens_cpu > self._budget_tokens).sum()))

    def _after_logits(self, *_of_module: Any) -> None:
        self.scout.end_step()

    def _tell(self, whole: bool, rows: int) -> None:
        if whole:
            logger.info("the GPU's memory holds %d running requests as a whole: attention is exact", rows)
            return
        logger.info(
            "%d running requests are longer than the GPU's memory holds: blocks are selected, %d tokens of each",
            rows, self._budget_tokens,
        )  # fmt: skip

    @property
    def holds_whole_rows(self) -> bool:
        """Whether the step that begins, or is recorded, has all of its rows in device memory."""
        return self.scout.is_dense

    def kinds_of_steps(self) -> list[bool]:
        """For each CUDA graph of a batch size, whether its steps hold whole rows."""
        return [False] if self._room is None else [False, True]

    @contextlib.contextmanager
    def recording(self, whole: bool) -> Iterator[None]:
        """Steps that are recorded hold whole rows, or blocks in slots."""
        serving = self.scout.is_dense
        self.scout.is_dense = whole
        try:
            yield
        finally:
            self.scout.is_dense = serving

    def _follow_worker(self) -> None:
        """Post to the worker that is there now."""
        link = self._supervisor.link if self._supervisor else None
        if self._mailbox is None or link is self._followed:
            return
        self._followed, self._link = link, None
        self._mailbox.attach(None)
        if link is None:
            return
        try:
            self._mailbox.attach(link.mailbox)
        except CudaError as error:  # such as a limit on locked memory
            logger.warning("CPU worker %d is not used, the GPU cannot have its mailbox: %s", link.pid, error)
            if self._metrics:
                self._metrics.worker_is(False)
            return
        self._link = link

    def decode(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return self.scout.decode(layer, query.contiguous(), keys, values, scale)

    # -- prefill -----------------------------------------------------------------------------

    def begin_prefill(self, rows: torch.Tensor, table: torch.Tensor, lengths: list[int], new_tokens: list[int]) -> None:
        """These rows bring more of their prompts."""
        self._prefill.begin(PrefillRows(table.cpu(), lengths, new_tokens), self._scale)
        # where whole rows are held, their first decode step loads them
        self._settling = None
        settles = not self.scout.is_dense
        self.scout.rows_begin(rows, prefilled=settles)
        if not settles:
            return
        device = rows.device
        pages = torch.zeros(len(lengths), self._shape.max_blocks, dtype=torch.int32, device=device)
        pages[:, : table.shape[1]] = table
        # as the first decode step will see them
        longer = torch.tensor(lengths, dtype=torch.int32, device=device) + 1
        self._settling = Step(pages, longer, rows.to(torch.int32))
        self._last_tokens = torch.tensor(new_tokens, device=device).cumsum(0) - 1

    def prefill(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query ``[T, query heads, dim]``, keys and values ``[T, KV heads, dim]`` of the rows' prompts, padded perhaps.

        Beside the layers that follow, the rows' first resident blocks are chosen and loaded.
        """
        out = self._prefill.attend(layer, query, keys, values)
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
            self.scout.settle(layer, rows, last, scale)
            self._settling_lane.mark(layer)

    def rows_begin(self, rows: torch.Tensor) -> None:
        """These rows arrived from elsewhere, or go back to the end of their prompts.

        Told on SGLang's scheduling stream, while a step of the rows' previous owners may still be under way: what is
        known of them is forgotten on the stream of steps, before the next one.
        """
        self._arrived.append(rows)

    def _begin_arrived_rows(self) -> None:
        if self._arrived:
            rows = torch.cat(self._arrived)
            for arrived in self._arrived:
                if arrived.is_cuda:  # made on another stream, which must not use the memory again before this one has
                    arrived.record_stream(torch.cuda.current_stream())
            self._arrived = []
            self.scout.rows_begin(rows)


def _scale(model: torch.nn.Module) -> float:
    """What all layers multiply attention logits with. Raises Refusal where they differ: prefill is planned once."""
    scales = {float(module.scaling) for module in model.modules() if isinstance(module, RadixAttention)}
    if len(scales) != 1:
        raise Refusal(f"layers that scale attention differently ({scales}) need --disable-cuda-graph")
    return scales.pop()


def _digests(pool: HostKVPool, layer: int) -> LayerDigests:
    if pool.sketches is None:
        return LayerDigests(pool.digests.of_layer(layer))
    sketch, keys = pool.sketches.of_layer(layer), pool.k_buffer[layer]
    compact_of = (keys.dtype, pool.head_dim) if isinstance(pool.digests, CompactDigests) else None
    return LayerDigests(pool.digests.of_layer(layer), sketch.codes, sketch.channels, compact_of)
