"""Extend SGLang's command line: our flags, defaults that fit the backend and the host, and refusals."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid import host_settings
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig, config_from_environment
from sglang_hybrid.config_flags import add_config_flags, export_config_flags
from sglang_hybrid.engines.cuda.settings import unsupported_settings
from sglang_hybrid.host import multiplies_fast, this_host
from sglang_hybrid.integration import BACKEND_NAME, load_snapshot
from sglang_hybrid.integration.pools import check_capacity, ranks_on_this_host
from sglang_hybrid.integration.rank_cores import share_cores
from sglang_hybrid.integration.refusals import (
    Refusal,
    refuse_flags,
    refuse_model_config,
    refuse_on_cpu,
    refuse_quantised_cache,
)

logger = logging.getLogger("sglang.srt.hybrid")


def resolution_method() -> str:
    """Return the name of the method of ServerArgs that turns given arguments into effective ones."""
    from sglang.srt.server_args import ServerArgs

    return "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"


def add_flags(_result: Any, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sglang-hybrid", f"settings of --attention-backend {BACKEND_NAME}")
    add_config_flags(group)


def export_flags(_cls: Any, args: argparse.Namespace) -> None:
    """Export our flags to the environment, before SGLang creates its ServerArgs from the command line."""
    backends = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    if (args.hybrid_config or args.hybrid) and BACKEND_NAME not in backends:
        raise Refusal(f"--hybrid and --hybrid-config are settings of --attention-backend {BACKEND_NAME}: add it")
    export_config_flags(args)


def resolve(original: Callable[[Any], None], args: Any) -> None:
    """Wrap SGLang's resolution of arguments: set defaults and refuse flags before it, refuse models after it."""
    finished = getattr(args, "_resolution_finished", False)  # resolved by the process that spawned this one
    asked = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    if BACKEND_NAME not in asked:
        load_snapshot.withdraw()
        if _every_backend and not finished:
            _set_device_and_dtype(args)
        original(args)
        return
    if finished:
        original(args)
        return
    args.attention_backend = BACKEND_NAME
    config = config_from_environment()
    refuse_flags(args, config)
    host_settings.check(config, this_host(), ranks=ranks_on_this_host(args))
    _set_device_and_dtype(args)
    receives_pages = args.disaggregation_mode == "decode"
    refuse_quantised_cache(args.kv_cache_dtype, args.device or "cuda", config.policy, receives_pages=receives_pages)
    _set_defaults(args, config)
    original(args)
    if args.model_path.lower() not in ("none", "dummy"):
        model_config = _model_config(args)
        refuse_model_config(model_config)
        if _is_on_cpu(args):
            refuse_on_cpu(args, model_config)
        check_capacity(model_config, args)
    if _is_on_cpu(args):
        share_cores(args.tp_size * args.pp_size * args.dp_size, ranks_on_this_host(args))
    load_snapshot.provide()


def _is_on_cpu(args: Any) -> bool:
    return args.device is not None and args.device.split(":")[0] == "cpu"


_every_backend = False


def set_defaults_of_every_backend() -> None:
    """Apply our defaults of device and dtype to other attention backends too. Only our own launchers call this.

    A user who starts our launchers with another backend compares it with ours, and should not compare two dtypes.
    """
    global _every_backend
    _every_backend = True


def _set_device_and_dtype(args: Any) -> None:
    """Choose a device that exists. On a CPU choose float32, or warn if the dtype that the user asks for is slow."""
    if args.device is None and not torch.cuda.is_available():
        args.device = "cpu"
    if not _is_on_cpu(args):
        return
    if args.dtype == "auto":
        args.dtype = "float32"
        return
    dtype = _SHORT_NAMES.get(args.dtype, args.dtype)
    if dtype in ("bfloat16", "float16") and not multiplies_fast(dtype):
        logger.warning(
            "--dtype %s: this CPU has no matrix instructions for %s, expect tokens to take 10 to 30 times as long as "
            "with float32; drop --dtype to use that",
            args.dtype, dtype,
        )  # fmt: skip


_SHORT_NAMES = {"half": "float16"}
_ROWS_ON_DEVICE = 64


def _set_defaults(args: Any, config: HybridConfig) -> None:
    args.page_size = BLOCK_TOKENS
    if not (args.device in (None, "cuda") and torch.cuda.is_available()) or unsupported_settings(config):
        # a decode step in plain torch copies between host and device while it runs
        args.disable_cuda_graph = True
    elif args.max_running_requests is None:
        # every row has its resident blocks in device memory: SGLang's own default, in the thousands, would not fit
        args.max_running_requests = _ROWS_ON_DEVICE
    # prefill streams pages from host memory, a different number each time
    args.cuda_graph_backend_prefill = "disabled"
    if args.disaggregation_mode == "decode" and hasattr(args, "disaggregation_decode_retraction_backup"):
        # the alternative copies to a second pool in host memory
        args.disaggregation_decode_retraction_backup = "cpu_tensor"


def _model_config(args: Any) -> Any:
    if hasattr(args, "get_model_config"):
        return args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(args)
