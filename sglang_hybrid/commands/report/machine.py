"""The machine that a report is made on, and the size of experiments that suits it."""

from __future__ import annotations

import os
from typing import Any

from sglang_hybrid.host import GIB, this_host
from sglang_hybrid.origin import origin

_FULL_GIB = 64  # of memory beside a GPU: the KV cache of 64 rows
_SMALL_CORES, _SMALL_GIB = 8, 16


def auto_size(gpus: int, cores: int, memory_bytes: int) -> str:
    """full where there is a GPU with much host memory, small on a host with several cores, else tiny."""
    if gpus and memory_bytes >= _FULL_GIB * GIB:
        return "full"
    if gpus or (cores >= _SMALL_CORES and memory_bytes >= _SMALL_GIB * GIB):
        return "small"
    return "tiny"


def size_of_this_machine() -> str:
    host = this_host()
    return auto_size(len(host.gpus), host.cpus, host.memory)


def describe() -> dict[str, Any]:
    """Commit, date and machine of a result, as other results of this package have them."""
    host, found = this_host(), origin()
    machine = {**found["machine"], "cores": host.cpus, "memory_gib": round(host.memory / GIB, 1)}
    return {**{key: found[key] for key in ("commit", "uncommitted_changes", "date", "python")}, "machine": machine}


def in_words(machine: dict[str, Any]) -> str:
    gpu = machine.get("gpu") or "no GPU"
    cpu = machine["cpu"] or "an unknown CPU"
    return f"{gpu}; {machine['cores']} cores of {cpu}; {machine['memory_gib']} GiB of memory"


def load_average() -> float:
    """Of the last minute: programs that wanted a core."""
    return round(os.getloadavg()[0], 1)
