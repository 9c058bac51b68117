"""Host memory that is registered with CUDA, so that kernels can read and write it."""

from __future__ import annotations

import ctypes
import weakref

import torch

from sglang_hybrid.ops.cuda.library import checked, library
from sglang_hybrid.protocol.region import SharedRegion


class RegisteredRegion:
    """A shared region that is registered with CUDA until this object is closed or collected.

    Registering pins every memory page, and takes time in proportion to the region's size: register once, at start.
    """

    def __init__(self, region: SharedRegion) -> None:
        """Register ``region``. Raises CudaError if CUDA cannot pin the memory: `ulimit -l` limits it on some hosts."""
        self._region = region  # the reference keeps the region mapped
        self._start = region.address
        device = ctypes.c_void_p()
        checked(library().sh_cuda_register, self._start, region.size, ctypes.byref(device))
        self.device_address = int(device.value or 0)
        self._release = weakref.finalize(self, library().sh_cuda_unregister, self._start)

    def address_of(self, name: str, tensor: torch.Tensor) -> int:
        """Return the device address of a contiguous tensor of the region. Raises ValueError for any other tensor."""
        first, size = tensor.data_ptr() - self._start, tensor.numel() * tensor.itemsize
        if not tensor.is_contiguous() or first < 0 or first + size > self._region.size:
            raise ValueError(f"{name} is not a contiguous tensor of this region")
        return self.device_address + first

    def close(self) -> None:
        """Unregister the region. No kernel may use the region from now on."""
        self._release()
