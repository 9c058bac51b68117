"""``python -m sglang_hybrid.server``: SGLang's server with the hybrid backend, in this process.

``sglang-hybrid serve`` starts this module as a child process; benchmarks and ``sglang-hybrid pd`` start it too. The
module takes every flag of ``python -m sglang.launch_server``, and fills in flags that have an obvious value here.
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
from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.defaults import with_defaults
from sglang_hybrid.commands.ports import listener

REFUSED = 2  # exit status of a server that refuses its settings


def main(argv: Sequence[str] | None = None) -> None:
    from sglang_hybrid.integration.activate import load_plugin

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
    except (ConfigError, Refusal, CapacityError, Refused) as error:
        events.refused(str(error))
        print(f"sglang-hybrid: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _parse(arguments: Sequence[str]) -> Any:
    """Return SGLang's ServerArgs. If parsing fails, its output goes to the log and the last line to the console."""
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
    """Send event ``Ready`` after SGLang's warm-up: /health answers, and this process is the one that has the port."""
    url, waiting = server_args.url(), threading.Event()
    while not (listener(server_args.port) == os.getpid() and _get(f"{url}/health", server_args.api_key) is not None):
        waiting.wait(0.5)  # polled, because SGLang has no callback that every version calls
    models = json.loads(_get(f"{url}/v1/models", server_args.api_key) or b"{}")
    name = models["data"][0]["id"] if models.get("data") else server_args.served_model_name
    events.tell(events.Ready(url=url, model=name))


def _get(url: str, api_key: str | None) -> bytes | None:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    # this process itself answers, so its certificate need not be verified
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as reply:
            return bytes(reply.read())
    except (urllib.error.URLError, OSError):
        return None


if __name__ == "__main__":
    main()
