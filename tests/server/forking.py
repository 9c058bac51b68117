"""The environment of test servers whose processes are forked.

SGLang spawns its scheduler and its detokenizer, and each imports all of SGLang again: 13 seconds of a core each.
``sglang-hybrid serve`` spawns them in tests as for a user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HOOK = Path(__file__).with_name("fork_hook")  # has sitecustomize.py, which Python imports at its start


def environment(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what to add to the environment ``given`` of a server."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(HOOK), given.get("PYTHONPATH"))))}
