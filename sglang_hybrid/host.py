"""Detection of GPUs, cores, memory and matrix instructions without importing torch, which takes seconds."""

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
_NAME_BYTES = 96  # NVML's limit for the length of a device's name
# Flags in /proc/cpuinfo of matrix instructions for 16-bit numbers. ARM's FEAT_FP16 (asimdhp) is not listed: with it
# torch multiplies float16 matrices far more slowly than float32 matrices.
_INSTRUCTIONS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16"}}


@dataclass(frozen=True)
class Host:
    gpus: tuple[str, ...]  # names of the GPUs that torch can use in this process
    topology: Topology  # cores that this process may use
    memory: int  # bytes, within the container's limits
    available: int  # bytes that are free now, within the same limits

    @property
    def cpus(self) -> int:
        return len(self.topology.cpus)

    def __str__(self) -> str:
        memory = f"{self.available / GIB:.1f} of {self.memory / GIB:.1f} GiB of memory available"
        return f"{', '.join(self.gpus) or 'no GPU'}; CPUs {format_cpus(self.topology.cpus)}; {memory}"


class InstalledGpu(NamedTuple):
    """A GPU that NVML lists."""

    name: str
    address: str  # on the PCI bus, such as 0000:3b:00.0; empty if unknown


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
    """Return the NVIDIA GPUs that torch can use: none if torch lacks CUDA or the environment hides them."""
    return _visible(_installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")) if _torch_has_cuda() else ()


def gpu_names() -> tuple[str, ...]:
    """Return the names of NVIDIA GPUs that torch can use: none if torch lacks CUDA or the environment hides them."""
    return tuple(gpu.name for gpu in visible_gpus())


def multiplies_fast(dtype: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if this CPU has matrix instructions for ``dtype``, "bfloat16" or "float16"."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return bool(flags and _INSTRUCTIONS[dtype] & set(flags[1].split()))


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")  # finds the package without importing it
    if spec is None or spec.origin is None:
        return False
    try:
        version = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*= *['\"]", version, re.MULTILINE) is not None


def _installed_gpus() -> tuple[InstalledGpu, ...]:
    """Return GPUs in NVML's order. Unlike CUDA, NVML creates no context in this process."""
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
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects. As in CUDA, the first unknown entry ends the list."""
    if variable is None:
        return tuple(gpus)
    chosen: list[_G] = []
    for entry in variable.split(","):
        text = entry.strip()
        if text.isdecimal() and int(text) < len(gpus):
            chosen.append(gpus[int(text)])
        elif text.startswith(("GPU-", "MIG-")) and len(chosen) < len(gpus):  # a UUID is not resolved
            chosen.append(gpus[len(chosen)])
        else:
            break
    return tuple(chosen)
