"""The command line that commands which load a model themselves give to SGLang, and their flags for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-path", type=Path, metavar="MODEL", help="directory of a Hugging Face model, or a name that "
        "sglang-hybrid model --help lists (default: the default model)",
    )  # fmt: skip
    group.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    group.add_argument(
        "--dtype", default="auto", help="float32, bfloat16 or float16 (default: auto, the model's on a GPU and float32 "
        "on a CPU)",
    )  # fmt: skip
    group.add_argument("--host-memory", default="4GiB", metavar="SIZE", help="of the KV cache (default: 4GiB)")
    group.add_argument(
        "--server-flag", action="append", default=[], metavar="FLAG", help="any further flag of SGLang's, such as "
        "--server-flag=--trust-remote-code",
    )  # fmt: skip


def model_directory(options: argparse.Namespace) -> Path:
    """Prepares the model where that is needed. Raises DefaultModelError."""
    from rich.console import Console

    from sglang_hybrid.commands.model import find_model

    return find_model(options.model_path, console=Console(stderr=True))


def session_flags(options: argparse.Namespace, settings: Sequence[str]) -> list[str]:
    """``settings``: of the backend, as key=value. Raises DefaultModelError."""
    model = model_directory(options)
    everything = [f"host_memory={options.host_memory}", "worker=none", *settings]
    # plain torch, on a GPU too: settings change all the time here, and so do policies that only watch
    return [
        f"--model-path={model}", "--attention-backend=hybrid", f"--dtype={options.dtype}",
        *([f"--device={options.device}"] if options.device else []),
        "--log-level=error", "--disable-cuda-graph", "--cuda-graph-backend-prefill=disabled",
        *(f"--hybrid={setting}" for setting in everything), *options.server_flag,
    ]  # fmt: skip
