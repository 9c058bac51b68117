"""SGLang's attention interface: translates its batches and hands over to ``HybridAttention``."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_hybrid import events
from sglang_hybrid.backend import HybridAttention, PrefillBatch
from sglang_hybrid.config import HybridConfig, config_from_environment
from sglang_hybrid.engines.cpu import CpuEngine
from sglang_hybrid.gpu.settings import why_not
from sglang_hybrid.integration.channels import choose_channels
from sglang_hybrid.integration.device_attention import DeviceAttention, why_not_on_device
from sglang_hybrid.integration.host_attention import create_cpu_engine, why_not_native
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.miss_server import create_miss_server, rank_of
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.integration.scouting import Scouting, read_profile
from sglang_hybrid.memory.digests import CompactDigests
from sglang_hybrid.memory.pages import page_table
from sglang_hybrid.metrics import ScoutMetrics
from sglang_hybrid.policies.base import DecodeBatch, LayerCache
from sglang_hybrid.policies.scout import ScoutPolicy
from sglang_hybrid.scout.profile import Profile
from sglang_hybrid.scout.tuning import tuning_of

logger = logging.getLogger("sglang.srt.hybrid")


class HybridAttnBackend(AttentionBackend):  # type: ignore[misc]
    """One per model runner. State lives in the pool; this holds the batch of the current step."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, HostKVPool):
            raise Refusal(
                f"SGLang keeps this model's KV cache in a {type(pool).__name__}, which cannot be moved to host "
                "memory: serve it with another --attention-backend"
            )
        self._pool = pool
        self._req_to_token = model_runner.req_to_token_pool.req_to_token
        self._model_runner = model_runner
        config = config_from_environment()
        profile = read_profile(config, model_runner)  # what is wrong with it is said before a worker is started
        self.choose_channels(profile)
        self._on_device = self._device_attention(config, profile)
        self._device = self._on_device  # None while settings are used that the CUDA kernels do not have
        self._cpu = self._cpu_engine(config)
        # policy full attends to everything in this process
        alone = config.policy != "scout" or self._device is not None or self._cpu is not None
        misses = None if alone else create_miss_server(config, pool, model_runner)
        self.attention = HybridAttention(config, self._req_to_token.shape[0], pool.layer_num, misses)
        self._scouting = Scouting(model_runner)
        self._config = config
        self.use(config, profile)
        policy = self.attention.policy
        if self._cpu is None and isinstance(policy, ScoutPolicy) and model_runner.server_args.enable_metrics:
            teller = self._device.watch if self._device else policy
            teller.on_ratio = ScoutMetrics(rank_of(model_runner)).ratio
        self._steps = 0
        self._batch: PrefillBatch | DecodeBatch | None = None
        settings = msgspec.structs.asdict(self._config)
        logger.info("hybrid attention: %s", " ".join(f"{key}={value}" for key, value in settings.items()))

    def _device_attention(self, config: HybridConfig, profile: Profile | None) -> DeviceAttention | None:
        """Raises Refusal where CUDA graphs are wanted and cannot be had."""
        if (why := why_not_on_device(config, self._pool, self._model_runner)) is None:
            tuning = tuning_of(config, self._pool.layer_num, profile)
            rates = profile.facts.rates if profile else None
            return DeviceAttention(config, tuning, rates, self._pool, self._model_runner)
        if torch.device(self._pool.device).type == "cuda":
            if not self._model_runner.server_args.disable_cuda_graph:
                raise Refusal(f"the CUDA kernels do not do this ({why}): serve it in plain torch, --disable-cuda-graph")
            logger.warning("attention is computed in plain torch, which is slow: %s", why)
        return None

    def _cpu_engine(self, config: HybridConfig) -> CpuEngine | None:
        """Native kernels on a host without a GPU, as far as they have these settings."""
        if torch.device(self._pool.device).type != "cpu":
            return None
        if why := why_not_native(config, self._pool, self._model_runner):
            logger.info("attention is computed in plain torch, more slowly than by the native kernels: %s", why)
            return None
        engine = create_cpu_engine(config, self._pool, self._model_runner)
        self._pool.kernels = engine.kernels
        logger.info(
            "attention is computed by native kernels in this process, %d threads: no worker is started, it would take "
            "the same cores (worker=start starts one)", torch.get_num_threads(),
        )  # fmt: skip
        return engine

    def use_torch(self) -> None:
        """Compute in plain torch from now on, on a host without a GPU too: its policies can change."""
        self._cpu = self._pool.kernels = None
        self.use(self._config)

    def use(self, config: HybridConfig, profile: Profile | None = None) -> None:
        """Decode by these settings from now on, and by ``profile`` or the one that they name.

        CUDA graphs that were recorded before have to be recorded anew.
        Raises Refusal for what this model cannot do.
        """
        profile = profile or read_profile(config, self._model_runner)
        tuning = tuning_of(config, self._pool.layer_num, profile)
        if self._on_device:
            self._device = None if why_not(config) else self._on_device
            if self._device:
                self._device.use(config, tuning)
        self._predict(config, profile)
        self.attention.use(config, tuning)
        self._config = config

    def _predict(self, config: HybridConfig, profile: Profile | None) -> None:
        if self._cpu is None:
            self._scouting.use(config, profile, self._device.scout if self._device else self._ahead)

    def choose_channels(self, profile: Profile | None) -> None:
        """What sketches hold. Those of keys that are written already become void."""
        if self._pool.sketches:
            heads, rank = self._pool.head_num, self._model_runner.ps.tp_rank
            # with more ranks than KV heads several ranks share one
            shared = max(
                1, self._model_runner.server_args.tp_size // self._model_runner.model_config.get_total_num_kv_heads()
            )
            first = rank // shared * heads
            own = slice(first, first + heads)
            choose_channels(self._pool.sketches, self._pool.start_layer, own, self._model_runner.model, profile)

    @property
    def device(self) -> DeviceAttention | None:
        """Where CUDA kernels decode."""
        return self._device

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Everything that a graph needs is there already, for all rows."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Take a copy of all that the layers read: the scheduler prepares the next batch meanwhile."""
        decodes = forward_batch.forward_mode.is_decode_or_idle()
        if decodes and self._device:
            self._device.begin_decode(forward_batch, in_capture)
            return
        lengths = forward_batch.seq_lens_cpu.tolist()
        table = page_table(
            self._req_to_token, forward_batch.req_pool_indices, max(lengths, default=0), self._config.block_tokens
        )
        rows = forward_batch.req_pool_indices.to(torch.int64)
        if self._cpu and decodes:
            self._cpu.begin_decode(table, forward_batch.seq_lens_cpu.to(torch.int64))
            return
        if decodes:
            self._steps += 1
            on_host = rows.tolist()  # on a GPU this waits; rows that come and go are known to the host
            self._batch = DecodeBatch(
                table, forward_batch.seq_lens.to(torch.int64), lengths, rows, on_host, self._steps
            )
            self.attention.begin_decode(self._batch)
            return
        new_tokens = list(forward_batch.extend_seq_lens_cpu)
        if self._device:
            self._device.begin_prefill(rows, table, lengths, new_tokens)
        elif self._cpu:
            self._cpu.begin_prefill(table, lengths, new_tokens)
        else:
            self._batch = PrefillBatch(table, rows, lengths, new_tokens)
            self.attention.rows_begin(rows.tolist())

    def why_weights_must_stay(self) -> str | None:
        """Why they cannot be replaced while this server runs."""
        if self._device and self._scouting.is_predicting:
            return (
                "queries are predicted from copies of the weights, which recorded CUDA graphs hold: start the server "
                "with --hybrid prediction=none to update weights while it runs"
            )
        return None

    def weights_changed(self) -> None:
        """Predictors are made anew. Without a profile that fits the new weights nothing is predicted.

        Rows that are decoding go on as they are.
        """
        try:
            self._predict(self._config, read_profile(self._config, self._model_runner))
        except Refusal as refusal:
            logger.error("after an update of weights: %s. Queries are not predicted any more", refusal)
            self.use(msgspec.structs.replace(self._config, profile="none", prediction="none"))

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        _refuse_arguments(more)
        events.layer(layer.layer_id - self._pool.start_layer, self._pool.layer_num)
        if self._device:
            return self._device.prefill(*self._parts(q, k, v, layer)).flatten(1)
        if self._cpu:
            _index, query, keys, values, scale = self._parts(q, k, v, layer)
            return self._cpu.prefill(query, keys, values, self._cache(layer.layer_id), scale).flatten(1)
        assert isinstance(self._batch, PrefillBatch)
        query = self._store(q, k, v, layer, forward_batch, save_kv_cache)
        new = sum(self._batch.new_tokens)  # SGLang may pad the batch beyond its real tokens
        out = query.new_zeros(query.shape[0], query.shape[1], layer.v_head_dim)
        out[:new] = self.attention.prefill(query[:new], self._cache(layer.layer_id), self._batch, layer.scaling)
        return out.flatten(1)

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        _refuse_arguments(more)
        if self._device:
            return self._device.decode(*self._parts(q, k, v, layer)).flatten(1)
        if self._cpu:
            return self._cpu.decode(*self._parts(q, k, v, layer)).flatten(1)
        assert isinstance(self._batch, DecodeBatch)
        query = self._store(q, k, v, layer, forward_batch, save_kv_cache)
        return self.attention.decode(query, self._cache(layer.layer_id), self._batch, layer.scaling).flatten(1)

    def _parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any
    ) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, float]:
        return (
            layer.layer_id - self._pool.start_layer,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            layer.scaling,
        )

    def _store(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self._pool.set_kv_buffer(
                layer,
                forward_batch.out_cache_loc,
                k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            )
        return q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)

    def _ahead(self, layer_id: int, query: torch.Tensor, scale: float) -> None:
        assert isinstance(self._batch, DecodeBatch)
        rows = len(self._batch.lengths_on_host)
        self.attention.ahead(query[:rows], self._cache(layer_id), self._batch, scale)

    def _cache(self, layer_id: int) -> LayerCache:
        keys, values = self._pool.get_kv_buffer(layer_id)
        index = layer_id - self._pool.start_layer
        # compact digests tell nothing without sketches
        wanted = self._config.sketch_channels > 0 or isinstance(self._pool.digests, CompactDigests)
        sketch = self._pool.sketches.of_layer(index) if self._pool.sketches and wanted else None
        return LayerCache(keys, values, self._pool.digests.of_layer(index), index, sketch)

    def rows_begin(self, rows: torch.Tensor) -> None:
        """These rows go back to the end of their prompts."""
        if self._device:
            self._device.rows_begin(rows.to(self._req_to_token.device))
        elif self._cpu is None:
            self.attention.rows_begin(rows.tolist())

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def _refuse_arguments(more: dict[str, Any]) -> None:
    """Raise Refusal for what a model wants of attention that we would leave out, such as sinks."""
    if asked := [name for name, value in more.items() if value is not None]:
        raise Refusal(
            f"this model's attention wants {', '.join(asked)}, which is not supported: serve it with another "
            "--attention-backend"
        )
