"""Detection of GPUs, cores, memory and matrix instructions without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sglang_hybrid import container
from sglang_hybrid.protocol.core_claims import taken_cpus
from sglang_hybrid.protocol.cores import Topology, format_cpus, pci_node, read_topology
from sglang_hybrid.visible_devices import selected

logger = logging.getLogger("sglang.srt.hybrid")

GIB = 1 << 30
_TEXT_BYTES = 96  # NVML's limit for the lengths of a device's name and UUID
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
    uuids: tuple[str, ...] = ()  # its own, and those of its MIG instances


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


def _gpu(nvml: Any, index: int) -> InstalledGpu:
    device, name, pci = ctypes.c_void_p(), ctypes.create_string_buffer(_TEXT_BYTES), _PciInfo()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return InstalledGpu(f"GPU {index}", "")
    named = nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(_TEXT_BYTES)) == 0
    located = nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(pci)) == 0
    return InstalledGpu(
        name.value.decode(errors="replace") if named else f"GPU {index}",
        f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if located else "",
        tuple(uuid for handle in (device, *_mig_instances(nvml, device)) if (uuid := _uuid(nvml, handle))),
    )


def _mig_instances(nvml: Any, device: ctypes.c_void_p) -> Iterator[ctypes.c_void_p]:
    count = ctypes.c_uint()
    try:
        if nvml.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(count)) != 0:
            return
    except AttributeError:  # a driver before R450, which knows no instances
        return
    for index in range(count.value):
        instance = ctypes.c_void_p()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, ctypes.c_uint(index), ctypes.byref(instance)) == 0:
            yield instance


def _uuid(nvml: Any, device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    found = nvml.nvmlDeviceGetUUID(device, text, ctypes.c_uint(_TEXT_BYTES)) == 0
    return text.value.decode(errors="replace") if found else ""


def _visible(gpus: Sequence[InstalledGpu], variable: str | None) -> tuple[InstalledGpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects. A UUID that is not resolved is a GPU of unknown address."""
    if variable is None or not gpus:
        return tuple(gpus)
    chosen = []
    for found in selected(variable, [gpu.uuids for gpu in gpus]):
        if isinstance(found, str):
            _warn_of_unresolved(found)
        chosen.append(InstalledGpu(found, "") if isinstance(found, str) else gpus[found])
    return tuple(chosen)


@functools.cache  # a warning for each UUID, although GPUs are listed several times
def _warn_of_unresolved(uuid: str) -> None:
    logger.warning(
        "CUDA_VISIBLE_DEVICES names %s, which is not exactly one GPU or MIG instance that the driver lists: no core is "
        "known to be near it. Write the UUID as nvidia-smi -L prints it.", uuid,
    )  # fmt: skip
