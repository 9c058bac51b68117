"""SGLang's attention backend ``hybrid``: translates SGLang's batches and calls for an engine."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_hybrid import __version__, events
from sglang_hybrid.config import HybridConfig, config_from_environment
from sglang_hybrid.engines.base import Engine, PrefillBatch, RatioWatcher, StepBatch
from sglang_hybrid.engines.first_steps import FirstSteps, SplitStep
from sglang_hybrid.integration.automatic_calibration import calibration_for
from sglang_hybrid.integration.channels import choose_channels
from sglang_hybrid.integration.create_engines import create_engines
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.key_bases import choose_bases
from sglang_hybrid.integration.kv_scales import scales_of
from sglang_hybrid.integration.predictor import Scouting, read_profile
from sglang_hybrid.integration.ranks import kv_heads_of, rank_of
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.integration.slot_dtype import settled
from sglang_hybrid.integration.versions import installed_sglang
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import code_bytes
from sglang_hybrid.metrics.server import ServerMetrics
from sglang_hybrid.policies.base import DecodePolicy
from sglang_hybrid.policies.registry import calibrates_at_start, keeps_codes_in_slots, policy_named, prediction_of
from sglang_hybrid.policies.scout.calibration_file import Calibration
from sglang_hybrid.policies.scout.corrections_file import Calibrated
from sglang_hybrid.policies.scout.profile import Profile
from sglang_hybrid.policies.scout.tuning import tuning_of

logger = logging.getLogger("sglang.srt.hybrid")


class HybridAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Implements SGLang's interface of attention backends by an ``Engine``. One instance per model runner."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        pool = model_runner.token_to_kv_pool
        if not isinstance(pool, HostKVPool):
            raise Refusal(
                f"SGLang keeps this model's KV cache in a {type(pool).__name__}, which cannot be moved to host "
                "memory: serve it with another --attention-backend"
            )
        self._pool = pool
        self._model_runner = model_runner
        self._started = config = self._settled(config_from_environment())  # settings with which the pool was created
        profile = read_profile(config, model_runner)  # refuses a bad profile before a worker is started
        self._calibration: Calibration | None = None  # fitted by this server, or by an earlier one
        calibrated = self._calibrated(config, profile)
        self.choose_channels(calibrated)
        self._torch, self._fast = create_engines(config, profile, pool, model_runner, calibrated)
        self.engine: Engine = self._torch  # engine that serves the current settings
        self._first_steps = FirstSteps()
        self._split: SplitStep | None = None  # set during steps with rows in their first steps
        self._scouting = Scouting(model_runner, lambda: self._split)
        self.metrics: ServerMetrics | None = None  # None without --enable-metrics
        if model_runner.server_args.enable_metrics:
            self.metrics = ServerMetrics(rank_of(model_runner), lambda: self.engine.readings())
        self.use(config, profile)
        if self.metrics and self.engine.reports_ratio and policy_named(config.policy).needs.worker:
            self.watch_ratio(self.metrics.layers.ratio)
        settings = self._config.by_key().items()
        logger.info("hybrid attention: %s", " ".join(f"{key}={value}" for key, value in settings))

    # -- settings ----------------------------------------------------------------------------

    def use(self, config: HybridConfig, profile: Profile | None = None) -> None:
        """Decode by these settings from now on, with ``profile`` or else the profile that the settings name.

        CUDA graphs must be recorded again afterwards. Raise Refusal for settings that this model does not support.
        """
        config = self._settled(config)
        profile = profile or read_profile(config, self._model_runner)
        self._refuse_other_codes(config)
        fits = self._fast is not None and self._fast.unsupported_reason(config) is None
        self.engine = self._fast if self._fast is not None and fits else self._torch
        self.engine.use(config, tuning_of(config, self._pool.layer_num, profile))
        calibrated = self._calibrated(config, profile)
        self._scouting.use(config, calibrated, self.engine)
        self._config = config
        if self.metrics:
            self.metrics.serves(self.labels())
            if calibrated is not None and self._scouting.prediction == "calibrated":
                self.metrics.calibrated(calibrated.cosines)

    def _settled(self, config: HybridConfig) -> HybridConfig:
        runner, pool = self._model_runner, self._pool
        return settled(config, runner.model, runner.server_args, str(pool.device), pool.dtype)

    def _refuse_other_codes(self, config: HybridConfig) -> None:
        pool = self._pool
        shape = KVShape(pool.layer_num, pool.head_num, pool.head_dim, pool.v_head_dim, pool.dtype.itemsize)
        wanted, kept = code_bytes(config, shape), pool.codes.code_bytes if pool.codes else 0
        if wanted and (config.policy, wanted) != (self._started.policy, kept):
            raise Refusal(
                f"policy={config.policy} keeps {wanted} bytes of every key from prefill on, this pool was made for "
                f"policy={self._started.policy}, {kept} bytes: start with the settings that decode"
            )

    def _calibrated(self, config: HybridConfig, profile: Profile | None) -> Calibrated | None:
        """Return the profile or calibration for predictions with these settings, or None.

        Fit a calibration if the settings ask for one and this server has none yet.
        """
        on_gpu = torch.device(self._pool.device).type == "cuda"
        if profile is not None or not calibrates_at_start(config, on_gpu=on_gpu):
            return profile
        if self._calibration is None:
            self._calibration = calibration_for(config, self._model_runner)
        return self._calibration

    def labels(self) -> dict[str, str]:
        """Return versions, policy, engine and prediction of this server, as labels for metrics and server info."""
        return {
            "version": __version__,
            "sglang": str(installed_sglang()),
            "policy": self._config.policy,
            "engine": self.engine.name,
            "prediction": self._scouting.prediction,
        }

    @property
    def config(self) -> HybridConfig:
        """Return the current settings."""
        return self._config

    @property
    def pool(self) -> HostKVPool:
        return self._pool

    def expect_changes(self) -> None:
        """Prepare for changes of settings and policies: stop using a fast engine that cannot change its settings."""
        if self._fast is not None and not self._fast.may_change:
            self._fast = self._pool.kernels = None
            self.use(self._config)

    def use_policy(self, policy: DecodePolicy) -> None:
        """Decode by ``policy``, which no setting names, in the torch engine, until settings change."""
        self.engine = self._torch
        self._torch.attention.policy = policy

    def watch_ratio(self, watcher: RatioWatcher | None) -> None:
        """Call ``watcher`` with every layer's CPU compute ratio from now on."""
        self.engine.watch_ratio(watcher)

    def choose_channels(self, calibrated: Calibrated | None) -> None:
        """Choose the channels of sketches and the bases of partial keys. Those of keys in the pool become void."""
        own, model = kv_heads_of(self._model_runner), self._model_runner.model
        if self._pool.sketches:
            choose_channels(self._pool.sketches, self._pool.start_layer, own, model, calibrated)
        if self._pool.codes and policy_named(self._started.policy).needs.skew:
            choose_bases(self._pool.codes, self._pool, own, model, calibrated)

    # -- weights -----------------------------------------------------------------------------

    def why_weights_must_stay(self) -> str | None:
        """Return why weights cannot be replaced while this server runs, in words; None if they can."""
        if self.engine.holds_weights and self._scouting.is_predicting:
            return (
                "queries are predicted from copies of the weights, which recorded CUDA graphs hold: start the server "
                "with --hybrid prediction=none to update weights while it runs"
            )
        if self.engine.holds_weights and keeps_codes_in_slots(self._config):
            return (
                "codes in slots have steps that were measured with these weights: start the server with "
                "--hybrid scout.slot_dtype=model to update weights while it runs"
            )
        return None

    def weights_changed(self) -> None:
        """Create predictors anew after an update of weights. Rows that are decoding keep their state.

        Disable prediction if the profile does not fit the new weights, or if predictions were calibrated on the old
        ones.
        """
        try:
            # the bases of partial keys remain valid, if not the best: only calibrated predictions become wrong
            if self._calibration is not None and prediction_of(self._config, is_calibrated=True) == "calibrated":
                raise Refusal("predictions were calibrated on the old weights, and are calibrated at the next start")
            self._scouting.use(self._config, read_profile(self._config, self._model_runner), self.engine)
        except Refusal as refusal:
            logger.error("after an update of weights: %s. Queries are not predicted any more", refusal)
            self._calibration = None
            self.use(msgspec.structs.replace(self._config, profile="none", prediction="none"))

    # -- forward passes ----------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: the engine has already allocated all buffers of graphs, for all rows."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the engine for a forward pass. SGLang calls this before the layers of the pass."""
        self._split = None
        if forward_batch.forward_mode.is_decode_or_idle():
            count = forward_batch.batch_size
            batch = StepBatch(
                rows=forward_batch.req_pool_indices[:count],
                lengths=forward_batch.seq_lens[:count],
                lengths_on_host=forward_batch.seq_lens_cpu[:count],
                slots=forward_batch.out_cache_loc,
                padding=getattr(forward_batch, "num_padding", 0),
                is_recorded=in_capture,
            )
            if self._first_steps.any_waits:
                self._split = self._first_steps.take(batch, self._config.budget_tokens)
            if self._split is None:
                self.engine.begin_step(batch)
            else:
                self._split.begin(self.engine)
            return
        self._begin_rows(forward_batch.req_pool_indices)
        self.engine.begin_prefill(
            PrefillBatch(
                rows=forward_batch.req_pool_indices,
                lengths=forward_batch.seq_lens_cpu.tolist(),
                new_tokens=list(forward_batch.extend_seq_lens_cpu),
                slots=forward_batch.out_cache_loc,
            )
        )

    def _begin_rows(self, rows: torch.Tensor) -> None:
        steps = policy_named(self._config.policy).needs.thorough_steps
        if steps and not self.engine.knows_first_steps:
            self._first_steps.begin(rows, steps)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        parts = self._parts(q, k, v, layer, more)
        events.layer(layer.layer_id - self._pool.start_layer, self._pool.layer_num)
        return self._scaled(self.engine.prefill(*parts), layer).flatten(1)

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        parts = self._parts(q, k, v, layer, more)
        out = self.engine.decode(*parts) if self._split is None else self._split.attend(self.engine, *parts)
        return self._scaled(out, layer).flatten(1)

    def _scaled(self, out: torch.Tensor, layer: Any) -> torch.Tensor:
        scale = scales_of(layer, self._pool.dtype).values
        return out if scale == 1 else out * scale

    def _parts(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, more: dict[str, Any]
    ) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """Return the arguments of an engine's call: layer, query, keys, values and scale of logits.

        Raise Refusal if a model passes arguments of attention that are not supported, such as sinks.
        """
        if asked := [name for name, value in more.items() if value is not None]:
            raise Refusal(
                f"this model's attention wants {', '.join(asked)}, which is not supported: serve it with another "
                "--attention-backend"
            )
        if k is None or v is None:
            raise Refusal("layers that share keys and values are not supported: use another --attention-backend")
        scales = scales_of(layer, self._pool.dtype)
        k, v = (part if scale == 1 else part / scale for part, scale in zip((k, v), scales, strict=True))
        return (
            layer.layer_id - self._pool.start_layer,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            layer.scaling * scales.keys,
        )

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Forget all state of ``rows``: a new request took the row, or a request was rewound to its prompt."""
        self._begin_rows(rows)
        self.engine.reset_rows(rows)
