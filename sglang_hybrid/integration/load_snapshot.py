"""SGLang's load file, without a name.

SGLang's scheduler reports its load to the server process through a file in /dev/shm that nobody
removes: every server leaves one behind, killed or not. Ours gets a memfd of the server process
instead, which goes when the processes do. The spawned processes open it through /proc, by a
path that they inherit in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from sglang_hybrid import env


def provide() -> None:
    """In the server process, before it spawns others."""
    # kept open until the process ends: the path is good as long as it is
    descriptor = os.memfd_create("sglang-hybrid-load", os.MFD_CLOEXEC)
    os.environ[env.LOAD_FILE.name] = f"/proc/{os.getpid()}/fd/{descriptor}"


def withdraw() -> None:
    """For a server with another backend, started where one of ours was before."""
    os.environ.pop(env.LOAD_FILE.name, None)


def shm_path_for(original: Callable[[str], str], ipc_name: str) -> str:
    given = env.LOAD_FILE.get()
    return str(given) if given else original(ipc_name)
