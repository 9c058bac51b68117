"""``python forking_server.py MODULE ...``: run a server whose processes are forked, for tests that start many servers.

SGLang spawns its scheduler and its detokenizer, and each imports all of SGLang again: 13 seconds of a core each.
``sglang-hybrid serve`` and ``pd``, which tests also start, and the server of a chaos run spawn them as for a user.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from typing import Any

_set_start_method = multiprocessing.set_start_method


def _fork_instead(method: str | None, **options: Any) -> None:
    _set_start_method("fork" if method == "spawn" else method, **options)


if __name__ == "__main__":
    multiprocessing.set_start_method = _fork_instead  # type: ignore[assignment]
    sys.path[0] = os.getcwd()  # as with python -m
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
