"""Which cores the worker's threads run on. Pure functions of a topology, which ``read_topology`` reads from Linux."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_GROUP_THREADS = 4
# SGLang's processes: scheduler, HTTP server, detokenizer, and one more for the system and clients on the same host. On
# 16 cores and 64 rows of 8k tokens a server with threads on 15 of them had 16 % less throughput than with 12.
_SERVING_CORES = 4
_FEW_CORES = 2  # so few that the scheduler gets to where it is needed only if nobody is bound
_MOST_CPUS = 1 << 16  # of any machine; bounds what a list is expanded to
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


class CoresError(ValueError):
    """Cores that cannot be had here. The message says which can."""


@dataclass(frozen=True)
class Core:
    """A physical core: the hardware threads of it that this process may use, and its NUMA node."""

    cpus: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True)
class Topology:
    """What this process may use: its physical cores, and the CPU time that its cgroup grants, in cores."""

    cores: tuple[Core, ...]
    quota: float | None = None
    near: int | None = None  # the GPU's NUMA node, whose cores come first
    taken: frozenset[int] = frozenset()  # CPUs that other workers are bound to

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus)


@dataclass(frozen=True)
class Placement:
    """``cores[i]`` is the CPU of thread i; empty: threads are not bound. Thread i is in group i // group_threads."""

    threads: int
    group_threads: int
    cores: tuple[int, ...] = ()


def place(topology: Topology, cores: str, threads: int, group_threads: int, ranks: int = 1) -> Placement:
    """Where to run ``threads`` threads in groups of ``group_threads``, each 0 for "choose".

    cores "auto": one thread per physical core, but a quarter of the cores, four at most and one more for every further
    rank, is left to SGLang's processes; not bound where that would do harm (few cores, or more threads than cores).
    Cores of the GPU's node come first, and those that other workers are bound to are not there.
    "none": not bound. A list such as "0-7,16": exactly these CPUs. Raises CoresError.
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
        ordered = ordered[1:]  # to the scheduler the first one, which serves most interrupts too
    ordered.sort(key=lambda core: core.node != topology.near)
    return Placement(count, group, tuple(core.cpus[0] for core in _whole_groups_first(ordered, group)[:count]))


def _default_threads(cores: int, quota: float | None, ranks: int) -> int:
    most = cores
    if quota is not None:
        # threads beyond the quota spin away the CPU time of those that compute
        most = min(most, max(1, int(quota)))
    left = min(most // 4, _SERVING_CORES + ranks - 1)
    return max(1, most - max(1, left))


def _group(group_threads: int, threads: int) -> int:
    return min(group_threads or _GROUP_THREADS, threads)


def _whole_groups_first(cores: Sequence[Core], group: int) -> list[Core]:
    """Node by node as many whole groups as it has, then what is left: only left-over cores may share across nodes."""
    whole: list[Core] = []
    rest: list[Core] = []
    for node in dict.fromkeys(core.node for core in cores):
        of_node = [core for core in cores if core.node == node]
        split = len(of_node) // group * group
        whole += of_node[:split]
        rest += of_node[split:]
    return whole + rest


def cpus_of_node(topology: Topology, node: int | None) -> frozenset[int]:
    """CPUs of a node that this process may use; none where there is only one node, and so nothing to choose."""
    if len({core.node for core in topology.cores}) < 2:
        return frozenset()
    return frozenset(cpu for core in topology.cores if core.node == node for cpu in core.cpus)


def other_cpus(topology: Topology, bound: Iterable[int]) -> frozenset[int]:
    """CPUs of cores that no thread is bound to."""
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
    """CPUs of a list such as "0-7,16", in its order. Raises ValueError."""
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
    """The shortest list of the same CPUs: [0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def read_topology(allowed: Iterable[int] | None = None, sys: Path = Path("/sys")) -> Topology:
    """The cores among the CPUs ``allowed`` (default: this process's affinity).

    Where the system does not tell, every CPU counts as a core of node 0.
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    cores: list[Core] = []
    seen: set[int] = set()
    for cpu in sorted(usable):
        if cpu in seen:
            continue
        directory = sys / "devices/system/cpu" / f"cpu{cpu}"
        try:
            siblings = parse_cpus((directory / "topology/thread_siblings_list").read_text().strip())
        except (OSError, ValueError):
            siblings = []
        cpus = tuple(sorted(usable & {cpu, *siblings}))
        nodes = [int(entry.name[4:]) for entry in directory.glob("node[0-9]*") if entry.name[4:].isdigit()]
        cores.append(Core(cpus, min(nodes, default=0)))
        seen.update(cpus)
    return Topology(tuple(cores), _read_quota(sys / "fs/cgroup/cpu.max"))


def pci_node(address: str, sys: Path = Path("/sys")) -> int | None:
    """NUMA node of a PCI device such as "0000:3b:00.0"; None where the firmware does not tell."""
    try:
        text = (sys / "bus/pci/devices" / address / "numa_node").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # -1: not told


def _read_quota(file: Path) -> float | None:
    """CPU time of this process's cgroup (version 2, as a container sees it), in cores; None: no limit known."""
    try:
        granted, period = file.read_text().split()
        return None if granted == "max" else int(granted) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
