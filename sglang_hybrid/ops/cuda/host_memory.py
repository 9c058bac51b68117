"""Host memory that the GPU reads and writes by itself."""

from __future__ import annotations

import ctypes
import weakref

import torch

from sglang_hybrid.ops.cuda.library import checked, library
from sglang_hybrid.protocol.region import SharedRegion


class RegisteredRegion:
    """A shared region, registered with CUDA for as long as this lives.

    Registering pins every page and takes time with the region's size: once per region, at start.
    """

    def __init__(self, region: SharedRegion) -> None:
        """Raises CudaError when CUDA cannot have the memory: it is limited by `ulimit -l` on some hosts."""
        self._region = region  # keeps the mapping
        self._start = region.address
        device = ctypes.c_void_p()
        checked(library().sh_cuda_register, self._start, region.size, ctypes.byref(device))
        self.device_address = int(device.value or 0)
        self._release = weakref.finalize(self, library().sh_cuda_unregister, self._start)

    def address_of(self, name: str, tensor: torch.Tensor) -> int:
        """Where the device sees a tensor of the region."""
        first, size = tensor.data_ptr() - self._start, tensor.numel() * tensor.itemsize
        if not tensor.is_contiguous() or first < 0 or first + size > self._region.size:
            raise ValueError(f"{name} is not a contiguous tensor of this region")
        return self.device_address + first

    def close(self) -> None:
        """Unregister. No kernel may use the region any more."""
        self._release()
