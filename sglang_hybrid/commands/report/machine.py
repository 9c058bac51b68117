"""The machine that makes a report, and the size of experiments that suits this machine."""

from __future__ import annotations

import os
from typing import Any

from sglang_hybrid.host import GIB, this_host
from sglang_hybrid.origin import origin

_FULL_GIB = 64  # host memory that size full needs beside a GPU: the KV cache of 64 rows
_SMALL_CORES, _SMALL_GIB = 8, 16


def auto_size(gpus: int, cores: int, memory_bytes: int) -> str:
    """Return ``full`` for a GPU with much host memory, ``small`` for other GPUs and large CPU hosts, else ``tiny``."""
    if gpus and memory_bytes >= _FULL_GIB * GIB:
        return "full"
    if gpus or (cores >= _SMALL_CORES and memory_bytes >= _SMALL_GIB * GIB):
        return "small"
    return "tiny"


def size_of_this_machine() -> str:
    host = this_host()
    return auto_size(len(host.gpus), host.cpus, host.memory)


def describe() -> dict[str, Any]:
    """Return commit, date and machine of a result, in the format of this package's other results."""
    host, found = this_host(), origin()
    machine = {**found["machine"], "cores": host.cpus, "memory_gib": round(host.memory / GIB, 1)}
    return {**{key: found[key] for key in ("commit", "uncommitted_changes", "date", "python")}, "machine": machine}


def in_words(machine: dict[str, Any]) -> str:
    gpu = machine.get("gpu") or "no GPU"
    cpu = machine["cpu"] or "an unknown CPU"
    return f"{gpu}; {machine['cores']} cores of {cpu}; {machine['memory_gib']} GiB of memory"


def load_average() -> float:
    """Return the mean number of tasks that ran or waited for a core in the last minute."""
    return round(os.getloadavg()[0], 1)
