"""Choice of cores for the worker's threads: pure functions of a topology, which ``read_topology`` reads from Linux."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.protocol.cgroups import cpu_quota

_GROUP_THREADS = 4
# Cores for SGLang's processes: scheduler, HTTP server and detokenizer, and one more for the system and clients on the
# same host. On 16 cores and 64 rows of 8k tokens a server with threads on 15 of them had 16 % less throughput than with
# 12.
_SERVING_CORES = 4
_FEW_CORES = 2  # with so few cores threads are not bound: the scheduler must be able to run on any of them
_MOST_CPUS = 1 << 16  # more than any machine has; bounds the expansion of a list
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


class CoresError(ValueError):
    """The requested cores or threads cannot be used here. The message says what can."""


@dataclass(frozen=True)
class Core:
    """A physical core: its hardware threads (CPUs) that this process may use, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True)
class Topology:
    """The physical cores that this process may use, and limits on their use."""

    cores: tuple[Core, ...]
    quota: float | None = None  # CPU time that the cgroup grants, in cores; None: no limit
    near: int | None = None  # the GPU's NUMA node, whose cores are taken first
    taken: frozenset[int] = frozenset()  # CPUs that other workers are bound to

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus)


@dataclass(frozen=True)
class Placement:
    """The worker's threads and their CPUs.

    ``cores[i]`` is the CPU of thread i; empty: threads are not bound. Thread i is in group i // group_threads.
    """

    threads: int
    group_threads: int
    cores: tuple[int, ...] = ()


def place(topology: Topology, cores: str, threads: int, group_threads: int, ranks: int = 1) -> Placement:
    """Return a placement of ``threads`` threads in groups of ``group_threads``. 0 lets this function choose a number.

    cores "auto": one thread per physical core, except for a quarter of the cores that is left to SGLang's processes:
    at most four cores, and one more for every further rank. Threads are not bound where that would do harm (few cores,
    or more threads than cores). Cores of the GPU's node come first; cores of other workers are not used.
    "none": threads are not bound. A list such as "0-7,16": exactly these CPUs. Raise CoresError if the list is not
    valid, has CPUs that this process may not use, or has fewer CPUs than ``threads``.
    """
    if cores not in ("auto", "none"):
        listed = _listed(topology, cores)
        if threads > len(listed):
            raise CoresError(
                f"{threads} threads for the {len(listed)} cores {cores!r}: list more cores, or ask for fewer"
            )
        count = threads or len(listed)
        return Placement(count, _group(group_threads, count), tuple(listed[:count]))
    free = [core for core in topology.cores if not topology.taken.intersection(core.cpus)]
    count = threads or _default_threads(len(free), topology.quota, ranks)
    group = _group(group_threads, count)
    if cores == "none" or count > len(free) or len(free) <= _FEW_CORES:
        return Placement(count, group)
    ordered = sorted(free, key=lambda core: (core.node, core.cpus))
    if count < len(ordered):
        ordered = ordered[1:]  # leave the first core, which also serves most interrupts, to the scheduler
    ordered.sort(key=lambda core: core.node != topology.near)
    return Placement(count, group, tuple(core.cpus[0] for core in _whole_groups_first(ordered, group)[:count]))


def _default_threads(cores: int, quota: float | None, ranks: int) -> int:
    most = cores
    if quota is not None:
        # threads beyond the quota would spend, by spinning, CPU time that computing threads need
        most = min(most, max(1, int(quota)))
    left = min(most // 4, _SERVING_CORES + ranks - 1)
    return max(1, most - max(1, left))


def _group(group_threads: int, threads: int) -> int:
    return min(group_threads or _GROUP_THREADS, threads)


def _whole_groups_first(cores: Sequence[Core], group: int) -> list[Core]:
    """Order cores so that groups stay on one node: first the whole groups of each node, then the cores left over.

    So only groups of left-over cores may span nodes.
    """
    whole: list[Core] = []
    rest: list[Core] = []
    for node in dict.fromkeys(core.node for core in cores):
        of_node = [core for core in cores if core.node == node]
        split = len(of_node) // group * group
        whole += of_node[:split]
        rest += of_node[split:]
    return whole + rest


def cpus_of_node(topology: Topology, node: int | None) -> frozenset[int]:
    """Return the CPUs of a node that this process may use; empty if all usable cores are on one node."""
    if len({core.node for core in topology.cores}) < 2:
        return frozenset()
    return frozenset(cpu for core in topology.cores if core.node == node for cpu in core.cpus)


def other_cpus(topology: Topology, bound: Iterable[int]) -> frozenset[int]:
    """Return the CPUs of cores of which no CPU is in ``bound``."""
    used = frozenset(bound)
    return frozenset(cpu for core in topology.cores if not used.intersection(core.cpus) for cpu in core.cpus)


def _listed(topology: Topology, text: str) -> list[int]:
    try:
        cpus = parse_cpus(text)
    except ValueError as error:
        raise CoresError(f'cores {text!r}: {error}; must be "auto", "none" or a list such as "0-7,16"') from None
    if missing := [cpu for cpu in cpus if cpu not in topology.cpus]:
        raise CoresError(
            f"cores {text!r}: {format_cpus(missing)} cannot be used by this process, which may run on "
            f"{format_cpus(topology.cpus)}"
        )
    return cpus


def parse_cpus(text: str) -> list[int]:
    """Return the CPUs of a list such as "0-7,16", in its order. Raise ValueError if the list is not valid."""
    cpus: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= _MOST_CPUS:
            raise ValueError(f"{part.strip()!r} is not a range of CPUs")
        cpus += range(first, last + 1)
        if len(cpus) > _MOST_CPUS:
            break
    if len(set(cpus)) != len(cpus):
        raise ValueError("a CPU is named twice")
    return cpus


def format_cpus(cpus: Iterable[int]) -> str:
    """Return the shortest list of these CPUs as text: [0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def read_topology(allowed: Iterable[int] | None = None, root: Path = Path("/")) -> Topology:
    """Return the cores of the CPUs ``allowed`` (default: this process's affinity), and the CPU quota.

    Without information from the system, every CPU counts as a core of its own on node 0.
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    cores: list[Core] = []
    seen: set[int] = set()
    for cpu in sorted(usable):
        if cpu in seen:
            continue
        directory = root / "sys/devices/system/cpu" / f"cpu{cpu}"
        try:
            siblings = parse_cpus((directory / "topology/thread_siblings_list").read_text().strip())
        except (OSError, ValueError):
            siblings = []
        cpus = tuple(sorted(usable & {cpu, *siblings}))
        nodes = [int(entry.name[4:]) for entry in directory.glob("node[0-9]*") if entry.name[4:].isdigit()]
        cores.append(Core(cpus, min(nodes, default=0)))
        seen.update(cpus)
    return Topology(tuple(cores), cpu_quota(root))


def pci_node(address: str, sys: Path = Path("/sys")) -> int | None:
    """Return the NUMA node of a PCI device such as "0000:3b:00.0"; None if the firmware does not report one."""
    try:
        text = (sys / "bus/pci/devices" / address / "numa_node").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # -1: not reported
