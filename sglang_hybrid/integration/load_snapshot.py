"""Replace SGLang's load file by one without a name.

SGLang's scheduler reports its load to the server process through a file in /dev/shm that is never
removed: every server leaves one behind, killed or not. Our servers use a memfd of the server
process instead, which disappears with the processes. Spawned processes open the memfd through
/proc, by a path that they inherit in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from sglang_hybrid import env


def provide() -> None:
    """Create the memfd and export its path. Call this in the server process, before it spawns others."""
    # kept open until the process ends: the path is valid while the descriptor is open
    descriptor = os.memfd_create("sglang-hybrid-load", os.MFD_CLOEXEC)
    os.environ[env.LOAD_FILE.name] = f"/proc/{os.getpid()}/fd/{descriptor}"


def withdraw() -> None:
    """Remove the path from the environment, for a server with another backend that follows one of ours in a process."""
    os.environ.pop(env.LOAD_FILE.name, None)


def shm_path_for(original: Callable[[str], str], ipc_name: str) -> str:
    given = env.LOAD_FILE.get()
    return str(given) if given else original(ipc_name)
