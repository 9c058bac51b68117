"""``python -m sglang_hybrid.server``: SGLang's server with the hybrid backend, in this process.

``sglang-hybrid serve`` starts this as its child; benchmarks and ``sglang-hybrid pd`` start it too. Takes every flag of
``python -m sglang.launch_server``. What is not given and has an obvious value here is filled in.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from sglang_hybrid import events
from sglang_hybrid.commands.arguments import MODEL_FLAGS, given
from sglang_hybrid.commands.ports import listener
from sglang_hybrid.integration import BACKEND_NAME

REFUSED = 2  # exit status


def main(argv: Sequence[str] | None = None) -> None:
    from sglang_hybrid.integration.loading import load_plugin

    arguments = list(sys.argv[1:] if argv is None else argv)
    load_plugin()
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    from sglang_hybrid.config import ConfigError
    from sglang_hybrid.integration.refusals import Refusal
    from sglang_hybrid.memory.capacity import CapacityError

    try:
        server_args = _parse(with_defaults(arguments))
        _tell_when_ready(server_args)
        run_server(server_args)
    except (ConfigError, Refusal, CapacityError) as error:
        events.refused(str(error))
        print(f"sglang-hybrid: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments, completed. A device that exists and its dtype come from ``integration.server_args``."""
    completed = list(arguments)
    if not given(completed, "--attention-backend"):
        completed += ["--attention-backend", BACKEND_NAME]
    if not given(completed, *MODEL_FLAGS, "-h", "--help"):
        completed += default_model()
    if _has_gpu():
        return completed
    if not given(completed, "--sleep-on-idle"):
        completed += ["--sleep-on-idle"]  # an idle scheduler would take a core
    if not given(completed, "--watchdog-timeout"):
        # a chunk of a long prompt takes minutes on cores that others use too; after 300 s SGLang takes itself for stuck
        completed += ["--watchdog-timeout", "1800"]
    return completed


def default_model() -> list[str]:
    """Flags for the default model, which is converted on the first call. Ends the process where there is none."""
    from sglang_hybrid.default_model import DefaultModelError, prepare_default_model

    try:
        model = prepare_default_model(report=lambda line: print(line, file=sys.stderr, flush=True))
    except DefaultModelError as error:
        sys.exit(f"sglang-hybrid: {error}")
    return ["--model-path", str(model), "--served-model-name", model.name]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _parse(arguments: Sequence[str]) -> Any:
    """SGLang's ServerArgs. The parser's usage of a thousand lines goes to the log, the sentence to the console."""
    from sglang.srt.server_args import prepare_server_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return prepare_server_args(list(arguments))
    except SystemExit as ended:
        if ended.code and said.getvalue().strip():
            events.refused(said.getvalue().strip().splitlines()[-1].split("error: ", 1)[-1])
        raise
    finally:
        sys.stderr.write(said.getvalue())


def _tell_when_ready(server_args: Any) -> None:
    if events.enabled():
        threading.Thread(target=_wait_and_tell, args=(server_args,), daemon=True).start()


def _wait_and_tell(server_args: Any) -> None:
    """SGLang's own warm-up is over when /health answers; and it is us who answers when the port is ours."""
    url, waiting = server_args.url(), threading.Event()
    while not (listener(server_args.port) == os.getpid() and _get(f"{url}/health", server_args.api_key) is not None):
        waiting.wait(0.5)  # no event to wait for: SGLang has none that every version calls
    models = json.loads(_get(f"{url}/v1/models", server_args.api_key) or b"{}")
    name = models["data"][0]["id"] if models.get("data") else server_args.served_model_name
    events.tell(events.Ready(url=url, model=name))


def _get(url: str, api_key: str | None) -> bytes | None:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    # it is this very process that answers, so its certificate need not prove anything
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as reply:
            return bytes(reply.read())
    except (urllib.error.URLError, OSError):
        return None


if __name__ == "__main__":
    main()
