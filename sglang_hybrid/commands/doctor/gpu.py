"""Checks of driver, compute capability, PCIe, the GPU's NUMA node and CUDA kernels.

``examine`` runs these checks, except ``driver``, only on machines with a GPU. Several GPUs share one finding, that of
the worst GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

from sglang_hybrid.commands.doctor import gpu_query
from sglang_hybrid.commands.doctor.machine import CommandError, Machine
from sglang_hybrid.commands.doctor.report import Finding, advice, ok, problem, skipped
from sglang_hybrid.ops.cuda.build import OLDEST, find_built
from sglang_hybrid.ops.cuda.toolchain import find_nvcc
from sglang_hybrid.protocol.cores import format_cpus

NO_GPU = skipped("no GPU", "Nothing to do: this machine serves on its CPU.")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # vendor, and first byte of the class, of a PCI device
_COPY_BYTES = 1 << 30  # size of the source; half of these bytes are copied
_FAIR_SHARE = 0.6  # least share of the link's bandwidth that needs no advice; a good host reaches 0.85


def driver(machine: Machine) -> Finding:
    """Report GPUs and driver, or why there is no GPU."""
    if machine.unknown_gpus:
        return problem(
            f"CUDA_VISIBLE_DEVICES names {', '.join(machine.unknown_gpus)}: not exactly one GPU or MIG instance",
            "Write UUIDs as nvidia-smi -L prints them, or numbers of GPUs.",
        )
    if machine.gpus:
        names = ", ".join(gpu.name for gpu in machine.gpus)
        return ok(f"{names}; driver {machine.gpus[0].driver}")
    devices = _pci_devices(machine)
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if not devices:
        return NO_GPU
    if hidden is not None and _answers(machine):
        return skipped(
            f"no GPU: CUDA_VISIBLE_DEVICES={hidden!r} hides them",
            "Unset CUDA_VISIBLE_DEVICES if the server shall use a GPU.",
        )
    return advice(
        f"NVIDIA device {', '.join(devices)} on the PCI bus, but nvidia-smi does not answer",
        "Install NVIDIA's driver, or start the container with --gpus all, if the server shall use the GPU.",
    )


def _pci_devices(machine: Machine) -> list[str]:
    folder = machine.root / "sys/bus/pci/devices"
    return sorted(
        path.name
        for path in (folder.iterdir() if folder.is_dir() else ())
        if machine.read(f"sys/bus/pci/devices/{path.name}/vendor") == _NVIDIA
        and (machine.read(f"sys/bus/pci/devices/{path.name}/class") or "").startswith(_DISPLAY)
    )


def _answers(machine: Machine) -> bool:
    try:
        return bool(machine.run(gpu_query.LIST).strip())
    except CommandError:
        return False


def torch_cuda() -> str | None:
    """Return the version of CUDA that torch was built with, such as "13.0"; None without CUDA. Do not import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    version = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return version[1] if version else None


def driver_cuda() -> str | None:
    """Return the newest version of CUDA that the driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def cuda(_machine: Machine) -> Finding:
    ours, drivers = torch_cuda(), driver_cuda()
    if ours is None:
        return problem("torch was built without CUDA", "Install torch for CUDA: make install USE=serve in a checkout.")
    if drivers is None:
        return advice(
            f"torch was built with CUDA {ours}; libcuda.so.1 does not tell its version",
            "Put the driver's libraries on the loader's path, as the NVIDIA container toolkit does.",
        )
    found = f"torch was built with CUDA {ours}, the driver runs {drivers}"
    if int(drivers.split(".")[0]) < int(ours.split(".")[0]):
        return problem(found, f"Update the driver, or install torch for CUDA {drivers}.")
    return ok(found)


def capability(machine: Machine) -> Finding:
    known = [gpu.capability for gpu in machine.gpus if gpu.capability is not None]
    if not known:
        return skipped("nvidia-smi does not tell", "Update the driver: nvidia-smi should know compute_cap.")
    oldest = min(known)
    found = f"compute capability {oldest / 10:.1f}"
    if oldest < OLDEST:
        return problem(
            f"{found}, and the CUDA kernels need {OLDEST / 10:.1f} or newer",
            "Use an NVIDIA GPU of the Ampere generation or newer, or hide this one with CUDA_VISIBLE_DEVICES.",
        )
    return ok(found)


def numa(machine: Machine) -> Finding:
    """Compare the NUMA nodes of the GPUs with those of the worker's cores."""
    nodes = {node for gpu in machine.gpus if (node := machine.node_of(gpu)) is not None}
    if not nodes:
        return ok("the system names no NUMA node for the GPU")
    workers = set(machine.placement.cores) or machine.topology.cpus
    used = {core.node for core in machine.topology.cores if workers & set(core.cpus)}
    found = f"GPU on node {_list(nodes)}; the worker's CPUs {format_cpus(workers)} on node {_list(used)}"
    if used <= nodes:
        return ok(found)
    if any(core.node in nodes for core in machine.topology.cores) and machine.config.worker_cores != "auto":
        return advice(found, "Set worker_cores=auto, which takes cores of the GPU's node first, or list cores of it.")
    if used & nodes:
        return ok(f"{found}; the GPU's node first, which has too few for all threads")
    return advice(found, f"Let this process use cores of node {_list(nodes)} (taskset, docker --cpuset-cpus).")


def _list(nodes: set[int]) -> str:
    return ",".join(map(str, sorted(nodes)))


def link(machine: Machine) -> Finding:
    links = [(gpu.link, gpu.best_link) for gpu in machine.gpus if gpu.link and gpu.best_link]
    if not links:
        return ok("nvidia-smi does not tell the PCIe link, as in some virtual machines")
    now, best = min(links, key=lambda pair: pair[0].lanes / pair[1].lanes)
    found = f"{now}, at best {best}"
    if now.lanes < best.lanes:
        return advice(
            found,
            "Move the GPU to a slot with all lanes, or look for risers and bifurcation in the firmware's settings.",
        )
    # a lower generation needs no advice: an idle GPU lowers its generation, and raises it with the first copies
    return ok(found)


def copy_rate() -> float | None:
    """Return the GB/s of copies from pinned memory to the GPU; None if torch sees no GPU."""
    import torch

    from sglang_hybrid.commands.profile.rates import transfer_rate

    if not torch.cuda.is_available():
        return None
    return transfer_rate(torch.zeros(_COPY_BYTES, dtype=torch.uint8))


def copies(machine: Machine) -> Finding:
    """Measure the rate of copies to the GPU, which is an upper bound for gathering blocks."""
    rate = copy_rate()
    if rate is None:
        return problem(
            "torch sees no GPU",
            "Compare torch's version of CUDA with the driver's: python -c 'import torch; torch.cuda.init()'.",
        )
    rate = round(rate, 1)
    found = f"pinned memory is copied to the GPU at {rate:g} GB/s"
    best = machine.gpus[0].best_link
    if best and best.gb_s and rate < _FAIR_SHARE * best.gb_s:
        return advice(
            f"{found}, and {best} carries {best.gb_s:.0f}",
            "Run on the GPU's NUMA node (numactl --cpunodebind, --preferred), and look for a shared PCIe switch or an "
            "IOMMU that translates every access.",
            pcie_copy_gb_s=rate,
        )
    return ok(found, pcie_copy_gb_s=rate)


def kernels(machine: Machine) -> Finding:
    known = {gpu.capability for gpu in machine.gpus if gpu.capability is not None}
    architectures = sorted(number for number in known if number >= OLDEST)
    if not architectures:
        return skipped("no GPU that the kernels are for", "See compute capability.")
    nvcc = find_nvcc()
    compiler = f"nvcc {nvcc.version}" if nvcc else "no nvcc"
    missing = [architecture for architecture in architectures if find_built(architecture) is None]
    if not missing:
        return ok(f"compiled for {_architectures(architectures)}; {compiler}")
    found = f"not compiled for {_architectures(missing)}; {compiler}"
    command = f"python -m sglang_hybrid.ops.cuda.build --arch {' '.join(map(str, missing))}"
    if nvcc is None:
        return problem(
            found,
            "Install the CUDA toolkit and set CUDA_HOME, or fill the cache directory on a host with nvcc "
            f"({command}) and copy it.",
        )
    return advice(found, f"Compile now ({command}), or let the first server do it, which takes a minute or two longer.")


def _architectures(numbers: list[int]) -> str:
    return ", ".join(f"sm_{number}" for number in numbers)
