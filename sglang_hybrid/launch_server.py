"""``python -m sglang_hybrid.launch_server``: SGLang's server with the hybrid backend.

Takes every flag of ``python -m sglang.launch_server``. What is not given and has an obvious
value here is filled in: the backend and the default model. The plugin adds a device that exists and its dtype
(``integration.server_args``).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.integration import BACKEND_NAME


def main(argv: Sequence[str] | None = None) -> None:
    from sglang_hybrid.env import ConfigError
    from sglang_hybrid.integration.loading import load_plugin
    from sglang_hybrid.memory.capacity import CapacityError

    arguments = list(sys.argv[1:] if argv is None else argv)
    load_plugin()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sglang_hybrid.integration.refusals import Refusal

    try:
        server_args = prepare_server_args(with_defaults(arguments))
        _announce_when_ready(server_args.url())
        run_server(server_args)
    except (ConfigError, Refusal, CapacityError) as error:
        sys.exit(f"sglang-hybrid: {error}")
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments, completed."""
    completed = list(arguments)
    asks_for_help = _given(completed, "-h", "--help")
    if not _given(completed, "--attention-backend"):
        completed += ["--attention-backend", BACKEND_NAME]
    if not _given(completed, "--model-path", "--model", "--config") and not asks_for_help:
        model = _default_model()
        completed += ["--model-path", str(model)]
        if not _given(completed, "--served-model-name"):
            completed += ["--served-model-name", model.name]
    return completed


def _given(arguments: Sequence[str], *flags: str) -> bool:
    return any(argument.split("=", 1)[0] in flags for argument in arguments)


def _default_model() -> Path:
    from sglang_hybrid.default_model import DefaultModelError, prepare_default_model

    try:
        return prepare_default_model(report=lambda line: print(line, file=sys.stderr, flush=True))
    except DefaultModelError as error:
        sys.exit(f"sglang-hybrid: {error}")


def _announce_when_ready(url: str) -> None:
    """Print where the server is and how to try it, once it answers."""
    threading.Thread(target=_announce, args=(url,), daemon=True).start()


def _announce(url: str) -> None:
    waiting = threading.Event()
    while _get(f"{url}/health") is None:  # answers once SGLang's own warm-up is over
        waiting.wait(0.5)
    model = json.loads(_get(f"{url}/v1/models") or "{}")["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 8})
    print(
        f"\nsglang-hybrid is serving {model} at {url} (OpenAI-compatible: {url}/v1). Try it:\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n",
        flush=True,
    )


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bytes(reply.read())
    except (urllib.error.URLError, OSError):
        return None


if __name__ == "__main__":
    main()
