"""Assign cores to ranks on a host without a GPU: SGLang requires this if ranks outnumber NUMA nodes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from sglang_hybrid.protocol.cores import Core, read_topology

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"  # "0-3|4-7": cores of the first rank, cores of the second


def share_cores(ranks: int, ranks_here: int) -> None:
    """Divide this host's cores between its ``ranks_here`` of all ``ranks``, for processes that are started later.

    Do nothing if the user has divided the cores, or if SGLang can give a NUMA node to every rank.
    """
    cores = read_topology().cores
    if ranks > len({core.node for core in cores}) and not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = "|".join(divide(cores, ranks_here))


def divide(cores: Sequence[Core], ranks: int) -> list[str]:
    """Return a list of CPUs such as "0,1,2" for each rank, about equally long. Ranks share cores if there are few."""
    ordered = [core.cpus[0] for core in sorted(cores, key=lambda core: (core.node, core.cpus))]
    if ranks > len(ordered):
        return [str(ordered[rank % len(ordered)]) for rank in range(ranks)]
    bounds = [rank * len(ordered) // ranks for rank in range(ranks + 1)]
    return [",".join(map(str, ordered[start:end])) for start, end in itertools.pairwise(bounds)]
