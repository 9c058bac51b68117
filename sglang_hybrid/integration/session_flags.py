"""SGLang's command line for commands that load a model themselves, and the flags of these commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

MOST_ROWS = 8  # that decode together in a session of `eval`: CUDA graphs are recorded up to this batch size


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
    """Return the model's directory, and prepare the model if needed. Raise DefaultModelError if that fails."""
    from rich.console import Console

    from sglang_hybrid.commands.model import find_model

    return find_model(options.model_path, console=Console(stderr=True))


# few graphs, because they are recorded anew whenever settings change; no compiled sampler, because nothing is sampled
_BY_GRAPHS = (
    f"--max-running-requests={MOST_ROWS}", "--sampling-backend=pytorch",
    "--cuda-graph-bs-decode", *(str(rows) for rows in (1, 2, 4, MOST_ROWS)),
)  # fmt: skip


def has_cuda(options: argparse.Namespace) -> bool:
    import torch

    device: str | None = options.device
    return torch.cuda.is_available() if device is None else device.split(":")[0] == "cuda"


def session_flags(options: argparse.Namespace, settings: Sequence[str], *, as_served: bool = False) -> list[str]:
    """Return SGLang's command line. ``settings`` of the backend are key=value. Raise DefaultModelError without a model.

    ``as_served``: decode on a GPU by CUDA graphs, with a worker. Otherwise decode in plain torch on every device, which
    also works with policies that only observe.
    """
    model = model_directory(options)
    by_graphs = as_served and "--disable-cuda-graph" not in options.server_flag and has_cuda(options)
    everything = [f"host_memory={options.host_memory}", *([] if by_graphs else ["worker=none"]), *settings]
    return [
        f"--model-path={model}", "--attention-backend=hybrid", f"--dtype={options.dtype}",
        *([f"--device={options.device}"] if options.device else []),
        "--log-level=error", *(_BY_GRAPHS if by_graphs else ["--disable-cuda-graph"]),
        "--cuda-graph-backend-prefill=disabled",
        *(f"--hybrid={setting}" for setting in everything), *options.server_flag,
    ]  # fmt: skip
