"""Runs of pages between the host pool and staged pages, by the GPU's copy engines.

A copy engine needs a command for every run, but takes no room from kernels: attention on Hopper fills a processor's
registers alone, so that a kernel that copies beside it keeps whole processors from it.
"""

from __future__ import annotations

import torch

from sglang_hybrid.cuda.host_memory import RegisteredRegion
from sglang_hybrid.cuda.library import launch, library
from sglang_hybrid.cuda.prefill_structs import CopyRuns
from sglang_hybrid.cuda.tensors import address


def copy_runs(
    region: RegisteredRegion,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    *,
    to_pool: bool,
) -> None:
    """Copy pages of a layer, keys and values ``[pages, H, 32, D]`` in ``region``, to or from slots of that shape.

    runs ``[n, 3]`` int32 in host memory: first page, first slot, how many. Raises CudaError when one is out of bounds.
    """
    if keys.shape != values.shape or keys.shape[1:] != key_slots.shape[1:]:
        raise ValueError(
            f"pages of {tuple(keys.shape)} and {tuple(values.shape)} do not fit slots {tuple(key_slots.shape)}"
        )
    if runs.dtype != torch.int32 or runs.device.type != "cpu" or not runs.is_contiguous() or runs.shape[1:] != (3,):
        raise ValueError(f"runs are {tuple(runs.shape)} of {runs.dtype} on {runs.device}, must be [n, 3] int32 in host")
    region.address_of("keys", keys)  # registered, or copies would wait for each other
    region.address_of("values", values)
    arguments = CopyRuns(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_slots=address("key_slots", key_slots, keys.dtype, tuple(key_slots.shape)),
        value_slots=address("value_slots", value_slots, values.dtype, tuple(key_slots.shape)),
        runs=runs.data_ptr(),
        page_bytes=keys[0].numel() * keys.itemsize,
        count=runs.shape[0],
        pool_pages=keys.shape[0],
        staged_pages=key_slots.shape[0],
        to_pool=int(to_pool),
    )
    launch(library().sh_cuda_copy_runs, arguments)
