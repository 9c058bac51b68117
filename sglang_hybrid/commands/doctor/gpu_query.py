"""GPUs as nvidia-smi describes them: the query, its parser, and the effect of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_hybrid.visible_devices import selected

_FIELDS = (
    "uuid", "name", "driver_version", "compute_cap", "pci.bus_id", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
COMMAND = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader")
LIST = ("nvidia-smi", "-L")
# GB/s of one lane in one direction, by PCIe generation, after line coding
_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True)
class Link:
    """A PCIe link: its generation and its number of lanes."""

    generation: int
    lanes: int

    @property
    def gb_s(self) -> float | None:
        """GB/s in one direction, before protocol overhead; None for an unknown generation."""
        lane = _LANE_GB_S.get(self.generation)
        return None if lane is None else lane * self.lanes

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.lanes}"


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str
    driver: str
    capability: int | None  # 90 is compute capability 9.0; None: nvidia-smi does not report it
    bus_id: str  # name of the GPU's folder in /sys/bus/pci/devices, such as 0000:3b:00.0
    link: Link | None  # current link: an idle GPU lowers the generation
    best_link: Link | None  # best link that GPU and slot allow
    instances: tuple[str, ...] = ()  # UUIDs of its MIG instances, if CUDA_VISIBLE_DEVICES names instances


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of ``COMMAND``. Raise ValueError for any other text."""
    gpus = []
    for row in csv.reader(text.strip().splitlines(), skipinitialspace=True):
        if len(row) != len(_FIELDS):
            raise ValueError(f"nvidia-smi said {', '.join(row)!r} instead of {len(_FIELDS)} values for each GPU")
        uuid, name, driver, capability, bus_id, generation, best_generation, lanes, best_lanes = map(str.strip, row)
        gpus.append(
            Gpu(
                uuid, name, driver, _capability(capability), _folder(bus_id), _link(generation, lanes),
                _link(best_generation, best_lanes),
            )
        )  # fmt: skip
    return tuple(gpus)


def with_instances(gpus: Sequence[Gpu], listing: str) -> tuple[Gpu, ...]:
    """Return ``gpus`` with their MIG instances. ``listing`` is the output of ``LIST``: a GPU, then its instances."""
    instances: dict[str, list[str]] = {}
    gpu = ""
    for uuid in re.findall(r"\(UUID: ([^)]+)\)", listing):
        if uuid.startswith("GPU-"):
            gpu = uuid
        else:
            instances.setdefault(gpu, []).append(uuid)
    return tuple(replace(gpu, instances=tuple(instances.get(gpu.uuid, ()))) for gpu in gpus)


def visible(gpus: Sequence[Gpu], variable: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES (``variable``) leaves, in its order, and its UUIDs of no known GPU."""
    if variable is None:
        return tuple(gpus), ()
    chosen = selected(variable, [(gpu.uuid, *gpu.instances) for gpu in gpus])
    unknown = tuple(found for found in chosen if isinstance(found, str))
    return tuple(gpus[found] for found in chosen if isinstance(found, int)), unknown


def _capability(text: str) -> int | None:
    major, _, minor = text.partition(".")
    return 10 * int(major) + int(minor) if major.isdecimal() and minor.isdecimal() else None


def _link(generation: str, lanes: str) -> Link | None:
    return Link(int(generation), int(lanes)) if generation.isdecimal() and lanes.isdecimal() else None


def _folder(bus_id: str) -> str:
    """Return a PCI address as the kernel writes it: the domain has four digits there and eight in nvidia-smi."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
