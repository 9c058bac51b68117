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
from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.defaults import with_defaults
from sglang_hybrid.commands.ports import listener

REFUSED = 2  # exit status


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
