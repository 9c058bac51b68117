"""Checks of CPU kernels, cores and NUMA nodes."""

from __future__ import annotations

import re

from sglang_hybrid import env
from sglang_hybrid.commands.doctor.machine import Machine
from sglang_hybrid.commands.doctor.report import Finding, advice, ok, problem
from sglang_hybrid.ops.cpu import library, variants
from sglang_hybrid.ops.cpu.structs import DTYPES
from sglang_hybrid.protocol.cores import format_cpus

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
# flags of /proc/cpuinfo that a kernel variant needs, fastest variant first; "portable" needs none
_NEEDS = {
    "amx": _AVX512 | {"amx_tile", "amx_bf16"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "neon-bf16": frozenset({"asimd", "bf16"}),
    "neon": frozenset({"asimd"}),
}
_HEAD_DIM = 128
_FEW_CORES = 4  # cores below which advice is given, with a GPU: SGLang's processes and the worker share the cores


def offered_variants() -> list[str]:
    """Return the variants that the CPU library can run here, fastest first."""
    return variants()


def chosen_variant() -> str | None:
    """Return the variant for a bfloat16 cache; None if the environment asks for a variant that cannot run here."""
    name: bytes | None = library().sh_variant_name(DTYPES["bfloat16"], _HEAD_DIM, None)
    return None if name is None else name.decode()


def kernels(machine: Machine) -> Finding:
    flags = _flags(machine)
    features = [name for name in sorted(frozenset().union(*_NEEDS.values())) if name in flags]
    offered, chosen = offered_variants(), chosen_variant()
    forced = machine.environment.get(env.CPU_VARIANT.name)
    if chosen is None:
        return problem(
            f"{env.CPU_VARIANT.name}={forced} cannot run here, the CPU has {' '.join(features) or 'no known features'}",
            f"Unset {env.CPU_VARIANT.name}, or set it to one of {', '.join(offered)}.",
        )
    found = f"kernels {chosen}; the CPU has {' '.join(features) or 'no features that faster kernels need'}"
    if forced and chosen != offered[0]:
        return advice(found, f"Unset {env.CPU_VARIANT.name}: {offered[0]} is faster than {chosen}.")
    possible = next((name for name, needed in _NEEDS.items() if needed <= flags), "portable")
    if possible not in offered:
        return advice(
            found,
            f"The CPU can run {possible}, which this build of the CPU kernels lacks or the kernel does not permit: "
            "update the kernel, and build with GCC 11 or newer (python tools/build_native.py in a checkout).",
        )
    if chosen == "portable":
        return advice(
            found, "Use a CPU with AVX2 or NEON; in a virtual machine, pass the host's CPU model to the guest."
        )
    return ok(found)


def _flags(machine: Machine) -> frozenset[str]:
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", machine.read("proc/cpuinfo") or "", re.MULTILINE)
    return frozenset(line[1].split()) if line else frozenset()


def cores(machine: Machine) -> Finding:
    usable, physical = machine.topology.cpus, len(machine.topology.cores)
    online = machine.read("sys/devices/system/cpu/online")
    placement = machine.placement
    bound = f"on CPUs {format_cpus(placement.cores)}" if placement.cores else "not bound to cores"
    others = machine.topology.taken
    found = (
        f"{physical} cores: CPUs {format_cpus(usable)}{f' of {online}' if online else ''}; "
        + (f"running workers have CPUs {format_cpus(others)}; " if others else "")
        + f"a worker would have {_threads(placement.threads)}, {bound}"
    )
    if twice := others.intersection(placement.cores):
        return advice(
            found, f"Give each server cores of its own (worker_cores): CPUs {format_cpus(twice)} are used twice."
        )
    if physical < 2:
        return advice(
            found, "Give this process two cores or more (taskset, docker --cpuset-cpus): server and worker compete."
        )
    if machine.gpus and physical < _FEW_CORES:
        return advice(
            found,
            f"Give this process {_FEW_CORES} cores or more (taskset, docker --cpuset-cpus): "
            "the worker computes on them.",
        )
    return ok(found)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def quota(machine: Machine) -> Finding:
    """Check the container's limit of CPU time, which is independent of its set of CPUs."""
    granted, cpus = machine.topology.quota, len(machine.topology.cpus)
    if granted is None:
        return ok("no limit of CPU time")
    found = f"CPU time of {granted:g} cores for {cpus} CPUs"
    if granted >= cpus:
        return ok(found)
    threads = max(1, int(granted) - 1)
    if machine.placement.threads > granted:
        return advice(
            found,
            f"Set worker_threads={threads}, or give the container CPUs (docker --cpuset-cpus) in place of CPU time "
            "(docker --cpus): threads beyond the limit are stopped for most of each 100 ms.",
        )
    return advice(
        found,
        "Give the container CPUs (docker --cpuset-cpus) in place of CPU time (docker --cpus): a process that used up "
        "its time is stopped in the middle of a decode step.",
    )


def numa(machine: Machine) -> Finding:
    nodes = sorted(int(path.name[4:]) for path in (machine.root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return ok("one NUMA node")
    used = sorted({core.node for core in machine.topology.cores})
    found = f"{len(nodes)} NUMA nodes; this process may use cores of {', '.join(map(str, used))}"
    if machine.read("proc/sys/kernel/numa_balancing") not in (None, "0"):
        return advice(
            f"{found}; automatic balancing is on",
            "Turn balancing off (sysctl -w kernel.numa_balancing=0 as root): its page faults hold up the worker.",
        )
    return ok(found)
