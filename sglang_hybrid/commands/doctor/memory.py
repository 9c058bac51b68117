"""Checks of memory, /dev/shm, huge pages and limits, and the bandwidth of memory."""

from __future__ import annotations

import os
import resource

import psutil

from sglang_hybrid.commands.doctor.machine import Machine
from sglang_hybrid.commands.doctor.report import Finding, advice, ok, problem
from sglang_hybrid.host import GIB

_SMALL_POOL = GIB
_SMALL_SHM = GIB
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_READ_BYTES = 512 << 20
_READS = 3


def host_pool(machine: Machine) -> Finding:
    """Check that the host pool fits in the memory that is available within the container's limit."""
    total, available, pool = machine.memory.total, machine.memory.available, machine.pool_bytes
    limit = " that the container may use" if total < psutil.virtual_memory().total else ""
    setting = f"host_memory={machine.config.host_memory}"
    found = f"{_gib(available)} of the {_gib(total)}{limit} are available; {setting} gives a host pool of {_gib(pool)}"
    if pool > available:
        return problem(found, "Lower host_memory, free memory, or raise the container's limit (docker --memory).")
    if pool < _SMALL_POOL:
        return advice(
            found,
            f"Free memory or raise the container's limit (docker --memory): the KV cache should have "
            f"{_gib(_SMALL_POOL)} or more.",
        )
    return ok(found)


def shared_memory(machine: Machine) -> Finding:
    """Check the free space of /dev/shm. The host pool is a memfd, which the size of /dev/shm does not limit."""
    try:
        state = os.statvfs(machine.root / "dev/shm")
    except OSError as error:
        return problem(
            f"/dev/shm: {error.strerror}", "Mount it (mount -t tmpfs tmpfs /dev/shm as root): Python's locks are there."
        )
    size, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    found = f"{_gib(free)} of {_gib(size)} are free; the host pool of {_gib(machine.pool_bytes)} needs none of it"
    if free < _SMALL_SHM:
        return advice(
            found,
            f"Give /dev/shm {_gib(_SMALL_SHM)} or more (docker --shm-size=1g, or mount -o remount,size=1g /dev/shm): "
            "SGLang's processes and NCCL exchange data there.",
        )
    return ok(found)


def huge_pages(machine: Machine) -> Finding:
    """Check that a region of shared memory, as the host pool is one, gets huge pages."""
    if machine.gives_huge_pages():
        return ok("shared memory gets them")
    return advice(
        "shared memory gets none",
        f"Use Linux 6.1 or newer, or run as root before a server starts: echo advise > /{_HUGE_PAGES}.",
    )


def memlock(machine: Machine) -> Finding:
    limit = machine.memlock
    if limit == resource.RLIM_INFINITY:
        return ok("no limit of locked memory")
    found = f"{limit >> 10:,} KiB of memory may be locked"
    if not machine.gpus:
        return ok(f"{found}; nothing is locked without a GPU")
    if limit >= machine.pool_bytes:
        return ok(found)
    return advice(
        f"{found}; the host pool has {_gib(machine.pool_bytes)}",
        "Raise the limit (ulimit -l unlimited, docker --ulimit memlock=-1): some drivers and RDMA refuse to register "
        "the host pool otherwise.",
    )


def read_rate(nbytes: int, threads: int) -> float:
    """Return the GB/s at which ``threads`` threads read ``nbytes`` of shared memory, the best of a few runs."""
    from sglang_hybrid.ops.cpu import library
    from sglang_hybrid.protocol.region import SharedRegion

    with SharedRegion(nbytes, name="sglang-hybrid-doctor") as region:
        read = library().sh_read_bandwidth
        return max(float(read(region.address, region.size, threads, None)) for _ in range(_READS)) / 1e9


def bandwidth(machine: Machine) -> Finding:
    threads = len(machine.topology.cores)
    rate = round(read_rate(min(_READ_BYTES, machine.memory.available // 8), threads), 1)
    found = f"{threads} cores read {rate:g} GB/s"
    link = next((gpu.best_link for gpu in machine.gpus if gpu.best_link), None)
    if link and link.gb_s and rate < link.gb_s:
        return advice(
            f"{found}, less than {link} carries ({link.gb_s:.0f} GB/s)",
            "Give this process more cores or fill all memory channels: the GPU fetches blocks faster than the worker "
            "reads them.",
            memory_read_gb_s=rate,
        )
    return ok(found, memory_read_gb_s=rate)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"
