"""Kernels before and after the GEMMs that predict a query: norms and rotation, rounded as in ``QueryPredictor``."""

from __future__ import annotations

import torch

from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.tensors import HALVES, active_address, address, dtype_code

_MOST_WIDTH = 16384
_MOST_HEAD_DIM = 256


def unit_rms(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    *,
    unit: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    active_rows: torch.Tensor | None = None,
) -> None:
    """Write ``reference.rms_unit`` of ``hidden + residual`` ``[B, N]`` to ``unit``, and times ``gain`` to ``normed``.

    gain ``[N]``. All tensors have one 16-bit dtype; the sum, ``unit`` and ``normed`` are rounded to it one after the
    other. The strides between rows of hidden and residual are free.
    """
    batch, width = hidden.shape
    dtype = hidden.dtype
    if width % 8 or width > _MOST_WIDTH:
        raise ValueError(f"rows of {width} values: must be a multiple of 8 and at most {_MOST_WIDTH}")
    if (normed is None) != (gain is None):
        raise ValueError("normed needs a gain, and a gain normed")
    launch(
        "unit_rms",
        hidden=_rows("hidden", hidden, dtype, (batch, width)),
        residual=None if residual is None else _rows("residual", residual, dtype, (batch, width)),
        gain=address("gain", gain, dtype, (width,)),
        unit=address("unit", unit, dtype, (batch, width)),
        normed=address("normed", normed, dtype, (batch, width)),
        active_rows=active_address(active_rows),
        hidden_stride=hidden.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        eps=eps,
        batch=batch,
        width=width,
        dtype=dtype_code(dtype),
    )


def _rows(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> int:
    if dtype not in HALVES or tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_cuda:
        wanted = f"{shape} of {dtype if dtype in HALVES else HALVES} on a CUDA device"
        raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, must be {wanted}")
    pointer: int = tensor.data_ptr()
    if tensor.stride(1) != 1 or tensor.stride(0) % 8 or pointer % 16:
        raise ValueError(f"rows of {name} must be contiguous and aligned to 16 bytes, strides are {tensor.stride()}")
    return pointer


def finish_queries(
    projected: torch.Tensor,
    rotary: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    neox: bool,
    addend: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    head_norm: torch.Tensor | None = None,
    head_norm_eps: float = 0.0,
    active_rows: torch.Tensor | None = None,
) -> None:
    """Write ``QueryPredictor.finish`` of ``projected + addend + bias`` to ``out`` ``[B, query heads, D]``.

    projected and addend ``[B, query heads * D]``; bias ``[query heads * D]`` and head_norm ``[D]`` float32; rotary
    ``[positions, R]``, cosines then sines, float32 or the dtype of ``out``; positions ``[B]`` int64. Positions beyond
    ``rotary`` use its last row. The sum is rounded once, then the norm of the heads, then the result.
    """
    batch, heads, dim = out.shape
    dtype, rotary_dim = out.dtype, rotary.shape[1]
    if dim % 2 or dim > _MOST_HEAD_DIM or rotary_dim % 2 or rotary_dim > dim:
        raise ValueError(f"heads of {dim} channels of which {rotary_dim} are rotated are not served")
    launch(
        "finish_queries",
        projected=address("projected", projected, dtype, (batch, heads * dim)),
        addend=address("addend", addend, dtype, (batch, heads * dim)),
        bias=address("bias", bias, torch.float32, (heads * dim,)),
        gain=address("head_norm", head_norm, torch.float32, (dim,)),
        rotary=address("rotary", rotary, (torch.float32, dtype), (rotary.shape[0], rotary_dim)),
        positions=address("positions", positions, torch.int64, (batch,)),
        out=address("out", out, HALVES, (batch, heads, dim)),
        active_rows=active_address(active_rows),
        rotary_rows=rotary.shape[0],
        eps=head_norm_eps,
        batch=batch,
        heads=heads,
        head_dim=dim,
        rotary_dim=rotary_dim,
        rotary_dtype=dtype_code(rotary.dtype),
        neox=neox,
        dtype=dtype_code(dtype),
    )
