"""The NUMA node of this process's GPU."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.protocol.cores import pci_node


def gpu_node(device: Any) -> int | None:
    """Return the NUMA node of a torch device; None for a CPU, or if the system or torch does not report the node."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    except AttributeError:  # torch before 2.8
        return None
    return pci_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0")
