"""Adds flags that a server's command line leaves out and that have an obvious value here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.commands.arguments import MODEL_FLAGS, MODEL_PATH_FLAGS, Refused, given, read, value_of, without
from sglang_hybrid.commands.model import DefaultModelError, find_model, is_model_name
from sglang_hybrid.host import gpu_names
from sglang_hybrid.integration import BACKEND_NAME

# An idle scheduler would spin on a whole core. A chunk of a long prompt takes minutes on cores that other processes
# use too, and after 300 s SGLang's watchdog takes the server for stuck and ends it.
WITHOUT_GPU = (("--sleep-on-idle",), ("--watchdog-timeout", "1800"))


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with the missing flags: backend, model, and flags for a host without a GPU.

    Device and dtype are filled in later, when SGLang resolves its arguments (``integration/server_args.py``).
    Raise Refused for invalid values and for a model that cannot be prepared.
    """
    completed = list(arguments)
    if not given(completed, "--attention-backend"):
        completed += ["--attention-backend", BACKEND_NAME]
    completed = with_model(completed)
    if value_of(completed, "--device") == "cpu" or not gpu_names():
        for flag in WITHOUT_GPU:
            if not given(completed, flag[0]):
                completed += flag
    return completed


def with_model(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with a model directory in place of no model (the default model) or of a catalogue's name.

    Other models stay as they are. Raise Refused for invalid values and for a model that cannot be prepared.
    """
    if given(arguments, "-h", "--help"):
        return list(arguments)
    asked = read(arguments)
    if given(arguments, *MODEL_FLAGS) and not (asked.model_path and is_model_name(asked.model_path)):
        return list(arguments)
    model = _directory_of(asked.model_path)
    name = ["--served-model-name", model.name] if asked.served_model_name is None else []
    return [*without(arguments, *MODEL_PATH_FLAGS), "--model-path", str(model), *name]


def _directory_of(name: str | None) -> Path:
    from rich.console import Console

    try:
        console = Console(stderr=True)
        return find_model(name, report=lambda line: print(line, file=sys.stderr, flush=True), console=console)
    except DefaultModelError as error:
        raise Refused(str(error)) from error
