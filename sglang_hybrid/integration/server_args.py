"""The command line: our two flags, defaults that fit the backend, refusals.

SGLang has no way for a plugin to add a setting of its own, so the flags become environment
variables, which the processes that SGLang spawns inherit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid import env
from sglang_hybrid.config import config_from_environment
from sglang_hybrid.gpu.settings import why_not
from sglang_hybrid.integration import BACKEND_NAME, load_file
from sglang_hybrid.integration.pools import check_capacity
from sglang_hybrid.integration.refusals import Refusal, refuse_flags, refuse_model_config

logger = logging.getLogger("sglang.srt.hybrid")


def resolution_method() -> str:
    """The method of ServerArgs that turns what was asked for into what will be done."""
    from sglang.srt.server_args import ServerArgs

    return "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"


def add_flags(_result: Any, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sglang-hybrid", f"settings of --attention-backend {BACKEND_NAME}")
    add_config_flags(group)


def add_config_flags(parser: Any) -> None:
    parser.add_argument("--hybrid-config", metavar="FILE", help="YAML file with settings, see configs/default.yaml")
    parser.add_argument(
        "--hybrid",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting, wins over the file; may be repeated. `sglang-hybrid config` lists them",
    )


def export_flags(_cls: Any, args: argparse.Namespace) -> None:
    """Before SGLang makes its ServerArgs of the command line."""
    backends = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    if (args.hybrid_config or args.hybrid) and BACKEND_NAME not in backends:
        raise Refusal(f"--hybrid and --hybrid-config are settings of --attention-backend {BACKEND_NAME}: add it")
    export_config_flags(args)


def export_config_flags(args: argparse.Namespace) -> None:
    """Carry the flags to this process's configuration and to the processes it starts."""
    if args.hybrid_config:
        os.environ[env.CONFIG.name] = os.path.abspath(args.hybrid_config)
    if args.hybrid:
        # what was in the environment stays, what is on the command line comes later and wins
        os.environ[env.SET.name] = json.dumps([*env.SET.get(), *args.hybrid])


def resolve(original: Callable[[Any], None], args: Any) -> None:
    """Around SGLang's resolution: defaults and refusals of flags before, of models after."""
    asked = (args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend)
    if BACKEND_NAME not in asked:
        load_file.withdraw()
        original(args)
        return
    if getattr(args, "_resolution_finished", False):  # by the process that spawned this one
        original(args)
        return
    args.attention_backend = BACKEND_NAME
    refuse_flags(args, config_from_environment())
    _set_defaults(args)
    original(args)
    if args.model_path.lower() not in ("none", "dummy"):
        model_config = _model_config(args)
        refuse_model_config(model_config)
        check_capacity(model_config, args.tp_size, args.nnodes)
    load_file.provide()


_ROWS_ON_DEVICE = 64


def _set_defaults(args: Any) -> None:
    config = config_from_environment()
    args.page_size = config.block_tokens
    if not (args.device in (None, "cuda") and torch.cuda.is_available()) or why_not(config):
        # the plain torch version of a decode step copies between host and device as it goes
        args.disable_cuda_graph = True
    elif args.max_running_requests is None:
        # every row has its resident blocks in device memory: SGLang's own default, in the thousands, would not fit
        args.max_running_requests = _ROWS_ON_DEVICE
    # prefill streams pages from host memory, as many as there happen to be
    args.cuda_graph_backend_prefill = "disabled"
    if args.disaggregation_mode == "decode" and hasattr(args, "disaggregation_decode_retraction_backup"):
        # the other way copies to a second pool in host memory
        args.disaggregation_decode_retraction_backup = "cpu_tensor"


def _model_config(args: Any) -> Any:
    if hasattr(args, "get_model_config"):
        return args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(args)
