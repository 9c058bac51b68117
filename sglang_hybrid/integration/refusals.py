"""Flags, models and requests that cannot be served, each with a sentence that says what to change.

A refusal is better than a wrong answer: most of these cases would read or write the KV cache in a way that the host
pool does not support.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_hybrid import events
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import ConfigError, HybridConfig
from sglang_hybrid.engines.cuda.settings import unsupported_over_fp8
from sglang_hybrid.integration import BACKEND_NAME
from sglang_hybrid.integration.kv_scales import FP8_FLAG, scales_of
from sglang_hybrid.memory.capacity import CapacityError
from sglang_hybrid.ops.reference import FP8
from sglang_hybrid.policies.registry import policy_named

# transfer backends that can write to host memory; only nixl has to know the kind of memory
TRANSFER_BACKENDS = ("mooncake", "mooncake_tcp", "nixl", "fake")


class Refusal(ValueError):
    """The server must not start, or not do what was asked. The message is for the user, and says what to change."""


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Send a refusal that is raised within this context to the launcher's console, and raise it again.

    SGLang itself only logs an exception that ends a scheduler process.
    """
    try:
        yield
    except (ConfigError, Refusal, CapacityError) as error:
        events.refused(str(error))
        raise


def _is_set(variable: str) -> bool:
    """Return True if an environment variable is set to a value that SGLang reads as true."""
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")


# flag test -> sentence. `a` is SGLang's ServerArgs as given on the command line.
_FLAGS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda a: any(b not in (None, BACKEND_NAME) for b in (a.prefill_attention_backend, a.decode_attention_backend)),
        "the KV cache is in host memory, where no other attention backend can read it: drop "
        "--prefill-attention-backend and --decode-attention-backend",
    ),
    (lambda a: a.pp_size > 1, "pipeline parallelism is not supported: drop --pp-size, use --tp-size instead"),
    (lambda a: a.speculative_algorithm, "speculative decoding is not supported: drop --speculative-algorithm"),
    (
        lambda a: a.kv_cache_dtype not in ("auto", "bfloat16", "bf16", "float16", "fp16", "float32", FP8_FLAG),
        f"of quantised KV caches only {FP8_FLAG} is supported: use --kv-cache-dtype {FP8_FLAG} or auto",
    ),
    (
        lambda a: a.enable_hierarchical_cache,
        "HiCache is not supported, the whole KV cache is in host memory already: drop --enable-hierarchical-cache",
    ),
    (
        lambda a: a.disaggregation_mode == "prefill",
        "a prefill instance sends pages in SGLang's layout, which the host pool does not have: start it with another "
        "--attention-backend and --page-size 32; this backend is for the decode instance",
    ),
    (
        lambda a: a.disaggregation_mode == "decode" and a.disaggregation_transfer_backend not in TRANSFER_BACKENDS,
        f"pages are received by {' or '.join(TRANSFER_BACKENDS)}: choose one of them with "
        "--disaggregation-transfer-backend",
    ),
    (
        lambda a: a.disaggregation_decode_enable_radix_cache,
        "a radix cache on the decode instance is not tested: drop --disaggregation-decode-enable-radix-cache",
    ),
    (
        lambda a: a.disaggregation_decode_enable_offload_kvcache,
        "the whole KV cache is in host memory already: drop --disaggregation-decode-enable-offload-kvcache",
    ),
    (
        lambda a: getattr(a, "disaggregation_decode_retraction_backup", None) == "host_pool",
        "requests that are retracted are copied out of the host pool: use --disaggregation-decode-retraction-backup "
        "cpu_tensor or drop the flag",
    ),
    (
        lambda a: getattr(a, "enable_pd_role_switch", False),
        "a decode instance cannot become a prefill instance: drop --enable-pd-role-switch",
    ),
    (
        lambda a: getattr(a, "disaggregation_enable_kv_checksum", False),
        "pages get another layout on arrival, and so another checksum: drop --disaggregation-enable-kv-checksum",
    ),
    (lambda a: a.enable_hisparse, "HiSparse is another backend's host offload: drop --enable-hisparse"),
    (
        lambda a: a.enable_dp_attention or getattr(a, "attn_dp_size", 1) > 1,
        "data-parallel attention is not supported: drop --enable-dp-attention and --attn-dp-size",
    ),
    (lambda a: a.dcp_size > 1, "decode context parallelism is not supported: drop --dcp-size"),
    (lambda a: a.enable_two_batch_overlap, "two-batch overlap is not supported: drop --enable-two-batch-overlap"),
    (lambda a: a.enable_pdmux, "PD multiplexing is not supported: drop --enable-pdmux"),
    (lambda a: a.enable_unified_memory, "the unified memory pool is not supported: drop --enable-unified-memory"),
    (
        lambda a: getattr(a, "enable_lmcache", False),
        "LMCache would copy a KV cache that is in host memory already: drop --enable-lmcache",
    ),
    (
        lambda a: getattr(a, "enable_flexkv", False) or getattr(a, "radix_cache_backend", None) is not None,
        "another radix cache would copy a KV cache that is in host memory already: drop --enable-flexkv and "
        "--radix-cache-backend",
    ),
    (
        lambda a: getattr(a, "enable_unified_cache_external_linker", False),
        "an external KV store cannot read the host pool: drop --enable-unified-cache-external-linker",
    ),
    (
        lambda a: getattr(a, "attn_cp_size", 1) > 1,
        "attention context parallelism is not supported: drop --attn-cp-size",
    ),
    (
        lambda a: getattr(a, "kv_canary", "none") != "none",
        "the KV canary looks into a KV cache on the device, and this one is in host memory: drop --kv-canary",
    ),
    (
        lambda a: a.enable_mixed_chunk,
        "mixed chunks send decoding requests through prefill, which reads their whole context: drop "
        "--enable-mixed-chunk",
    ),
    (
        lambda a: a.disaggregation_mode == "decode" and _is_set("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        "the host pool has its size before graphs are recorded: unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    ),
    (lambda a: a.enable_page_major_kv_layout, "the host pool has its own layout: drop --enable-page-major-kv-layout"),
    (
        lambda a: a.enable_memory_saver,
        "the memory saver gives GPU memory back, and the KV cache is in host memory, which would stay taken: drop "
        "--enable-memory-saver",
    ),
    (
        lambda a: a.enable_torch_compile,
        "attention reads other blocks at every step, which torch.compile cannot trace: drop --enable-torch-compile",
    ),
    (
        lambda a: getattr(a, "enable_nvidia_megakernel", False) or getattr(a, "enable_amd_monokernel", False),
        "megakernels read a KV cache in SGLang's layout: drop --enable-nvidia-megakernel and --enable-amd-monokernel",
    ),
    (
        lambda a: getattr(a, "dllm_algorithm", None) is not None,
        "diffusion language models attend in both directions, which is not supported: drop --dllm-algorithm",
    ),
    (
        lambda a: getattr(a, "enable_mis", False),
        "multi-item scoring hides items from each other by a mask, which is not supported: drop --enable-mis",
    ),
    (
        lambda a: a.enable_deterministic_inference or getattr(a, "rl_on_policy_target", None) is not None,
        "which tokens are attended depends on what else runs, so answers are not the same for every batch: drop "
        "--enable-deterministic-inference and --rl-on-policy-target",
    ),
    (
        lambda a: getattr(a, "prefill_only_disable_kv_cache", False),
        "attention reads the KV cache in host memory, during prefill too: drop --prefill-only-disable-kv-cache",
    ),
)  # fmt: skip


def refuse_flags(args: Any, config: HybridConfig) -> None:
    """Raise Refusal if the command line asks for something that the backend does not support."""
    for asked_for, sentence in _FLAGS:
        if asked_for(args):
            raise Refusal(f"--attention-backend {BACKEND_NAME}: {sentence}")
    if args.page_size not in (None, BLOCK_TOKENS):
        raise Refusal(
            f"--attention-backend {BACKEND_NAME}: --page-size {args.page_size} differs from the block size: "
            f"use --page-size {BLOCK_TOKENS} or drop the flag"
        )


def refuse_on_cpu(args: Any, model_config: Any) -> None:
    """Raise Refusal for flags and models that SGLang accepts on a CPU but cannot serve there with any backend."""
    from sglang.srt.utils import cpu_has_amx_support

    if (args.enable_lora or args.lora_paths) and not torch.cuda.is_available():
        raise Refusal(
            "SGLang keeps LoRA adapters in pinned memory, which a host without a GPU does not have: merge the adapter "
            "into the model and drop --enable-lora and --lora-paths"
        )
    if model_config.quantization and not cpu_has_amx_support():
        raise Refusal(
            f"SGLang's kernels for {model_config.quantization} weights need a GPU, or a CPU with AMX: serve this model "
            "with weights in float32, bfloat16 or float16"
        )


def refuse_model_config(model_config: Any) -> None:
    """Raise Refusal for models whose configuration shows that the backend cannot serve them."""
    from sglang.srt.configs.model_config import AttentionArch

    name = _architecture(model_config)
    if model_config.attention_arch == AttentionArch.MLA:
        raise Refusal(f"{name} uses multi-head latent attention (MLA), which is not supported: {_OTHER_BACKEND}")
    if model_config.is_hybrid_swa:
        raise Refusal(f"{name} has sliding-window layers, which are not supported: {_OTHER_BACKEND}")


def refuse_quantised_cache(kv_dtype: str, device: str, policy: str, *, receives_pages: bool = False) -> None:
    """Raise Refusal for an FP8 KV cache that this device or policy does not support.

    ``kv_dtype``: value of ``--kv-cache-dtype``, or name of a dtype. ``receives_pages``: this is a decode instance.
    """
    kind = device.partition(":")[0]
    if kv_dtype not in (FP8_FLAG, "float8_e4m3fn"):
        return
    if kind == "cpu":
        if receives_pages:
            raise Refusal("a decode instance without a GPU receives no quantised pages: use --kv-cache-dtype auto")
        return
    if kind != "cuda":
        raise Refusal(f"an FP8 KV cache is read by CPUs and CUDA kernels: use --kv-cache-dtype bfloat16 on {device}")
    if why := unsupported_over_fp8(policy):
        raise Refusal(f"the CUDA kernels do not do this ({why}): choose one of them or --kv-cache-dtype bfloat16")


def refuse_model(model: Any, model_config: Any, kv_dtype: torch.dtype, device: str, policy: str) -> None:
    """Raise Refusal for models with a layer that the backend would compute wrongly."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    refuse_model_config(model_config)
    name = str(kv_dtype).removeprefix("torch.")
    if kv_dtype not in (torch.bfloat16, torch.float16, torch.float32, FP8):
        raise Refusal(
            f"the checkpoint asks for a KV cache of {name}, and of quantised ones only {FP8_FLAG} is supported: add "
            f"--kv-cache-dtype {FP8_FLAG} or bfloat16"
        )
    refuse_quantised_cache(name, device, policy)
    name = _architecture(model_config)
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        raise Refusal(f"{name} has no attention layer of the usual kind: {_OTHER_BACKEND}")
    for layer in layers:
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            raise Refusal(
                f"{name} has sliding-window layers (layer {layer.layer_id}: {layer.sliding_window_size} tokens), "
                f"which are not supported: {_OTHER_BACKEND}"
            )
        if layer.logit_cap:
            raise Refusal(f"{name} caps its attention logits, which is not supported: {_OTHER_BACKEND}")
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise Refusal(f"{name} has attention that is not causal self-attention: {_OTHER_BACKEND}")
        if policy_named(policy).needs.unscaled_keys and scales_of(layer, kv_dtype).keys != 1:
            raise Refusal(
                f"{name} scales the keys of its FP8 KV cache, and policy {policy} reads codes of keys without a scale: "
                "use another policy"
            )


def refuse_request(manager: Any, request: Any) -> None:
    """Raise Refusal for a request that would end the scheduler process.

    Hook before SGLang's tokenizer manager takes a request. SGLang answers with status 400 and the message.
    """
    if request.input_embeds is None or manager.server_args.attention_backend != BACKEND_NAME:
        return
    dtype = manager.model_config.dtype
    if dtype is not torch.bfloat16:
        raise Refusal(
            f"SGLang turns input_embeds into bfloat16, which a model in {str(dtype).removeprefix('torch.')} cannot "
            "read: start the server with --dtype bfloat16"
        )


_OTHER_BACKEND = "serve it with another --attention-backend"


def _architecture(model_config: Any) -> str:
    return ", ".join(model_config.hf_config.architectures or ["this model"])
