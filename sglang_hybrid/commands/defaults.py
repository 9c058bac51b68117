"""What a server's command line leaves out and has an obvious value here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.commands.arguments import MODEL_FLAGS, Refused, given, value_of
from sglang_hybrid.host import gpu_names
from sglang_hybrid.integration import BACKEND_NAME

# An idle scheduler would take a whole core. A chunk of a long prompt takes minutes on cores that others use too, and
# after 300 s SGLang takes itself for stuck and ends.
WITHOUT_GPU = (("--sleep-on-idle",), ("--watchdog-timeout", "1800"))


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments, completed: backend, model, and what a host without a GPU wants. Raises Refused.

    Device and dtype are completed where SGLang resolves its arguments (``integration/server_args.py``).
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
    """The arguments, with the default model where none is named. Raises Refused."""
    if given(arguments, *MODEL_FLAGS, "-h", "--help"):
        return list(arguments)
    model = _default_model()
    name = [] if given(arguments, "--served-model-name") else ["--served-model-name", model.name]
    return [*arguments, "--model-path", str(model), *name]


def _default_model() -> Path:
    from sglang_hybrid.commands.model import DefaultModelError, prepare_default_model

    try:
        return prepare_default_model(report=lambda line: print(line, file=sys.stderr, flush=True))
    except DefaultModelError as error:
        raise Refused(str(error)) from error
