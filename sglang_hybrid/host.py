"""What this machine has, found without importing torch, which takes seconds: GPUs, cores, memory, instructions."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from sglang_hybrid import container
from sglang_hybrid.protocol.core_claims import taken_cpus
from sglang_hybrid.protocol.cores import Topology, format_cpus, pci_node, read_topology

_G = TypeVar("_G")

GIB = 1 << 30
_NAME_BYTES = 96  # NVML's own limit for the name of a device
# Matrix instructions for 16-bit numbers, as /proc/cpuinfo calls them. ARM's FEAT_FP16 (asimdhp) is none of them: torch
# multiplies float16 matrices far more slowly than float32 ones with it.
_INSTRUCTIONS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16"}}


@dataclass(frozen=True)
class Host:
    gpus: tuple[str, ...]  # names of those that torch can use from this process
    topology: Topology  # cores that this process may use
    memory: int  # bytes, within what the container grants
    available: int  # bytes of it that are free now

    @property
    def cpus(self) -> int:
        return len(self.topology.cpus)

    def __str__(self) -> str:
        memory = f"{self.available / GIB:.1f} of {self.memory / GIB:.1f} GiB of memory available"
        return f"{', '.join(self.gpus) or 'no GPU'}; CPUs {format_cpus(self.topology.cpus)}; {memory}"


class InstalledGpu(NamedTuple):
    name: str
    address: str  # on the PCI bus, such as 0000:3b:00.0; empty where that is not told


class _PciInfo(ctypes.Structure):
    """NVML's nvmlPciInfo_t."""

    _fields_ = (
        ("legacy_bus_id", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "device_id", "subsystem_id")),
        ("bus_id", ctypes.c_char * 32),
    )


def this_host() -> Host:
    memory = container.memory()
    gpus, topology = visible_gpus(), read_topology()
    near = pci_node(gpus[0].address) if gpus else None
    topology = replace(topology, near=near, taken=taken_cpus(topology.cpus))
    return Host(tuple(gpu.name for gpu in gpus), topology, memory.total, memory.available)


def visible_gpus() -> tuple[InstalledGpu, ...]:
    """NVIDIA GPUs that torch would find: none where torch was built without CUDA or the environment hides them."""
    return _visible(_installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")) if _torch_has_cuda() else ()


def gpu_names() -> tuple[str, ...]:
    return tuple(gpu.name for gpu in visible_gpus())


def multiplies_fast(dtype: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has matrix instructions for ``dtype``, "bfloat16" or "float16"."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return bool(flags and _INSTRUCTIONS[dtype] & set(flags[1].split()))


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # looks for the package and does not import it
    if spec is None or spec.origin is None:
        return False
    try:
        version = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*= *['\"]", version, re.MULTILINE) is not None


def _installed_gpus() -> tuple[InstalledGpu, ...]:
    """In the order of NVIDIA's management library. Unlike CUDA's, that makes no context in this process."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        return tuple(_gpu(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> InstalledGpu:
    device, name, pci = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES), _PciInfo()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return InstalledGpu(f"GPU {index}", "")
    named = nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_BYTES)) == 0
    located = nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(pci)) == 0
    return InstalledGpu(
        name.value.decode(errors="replace") if named else f"GPU {index}",
        f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if located else "",
    )


def _visible(gpus: Sequence[_G], variable: str | None) -> tuple[_G, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves. As in CUDA, the first entry that does not exist ends the list."""
    if variable is None:
        return tuple(gpus)
    chosen: list[_G] = []
    for entry in variable.split(","):
        text = entry.strip()
        if text.isdecimal() and int(text) < len(gpus):
            chosen.append(gpus[int(text)])
        elif text.startswith(("GPU-", "MIG-")) and len(chosen) < len(gpus):  # by identity: which one does not matter
            chosen.append(gpus[len(chosen)])
        else:
            break
    return tuple(chosen)
