"""New tokens, as the model computes them, to staged pages, which have the pool's layout."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.cuda.library import launch, library
from sglang_hybrid.cuda.prefill_structs import PlaceTokens
from sglang_hybrid.cuda.tensors import HALVES, address


def place_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
    *,
    refused: torch.Tensor | None = None,
) -> None:
    """Copy keys and values ``[tokens, H, D]`` to slots ``[slots, H, 32, D]``.

    places ``[tokens]`` int32: ``32 * slot + token of the page``, -1 for nowhere. They are checked on the device; those
    out of bounds are left out and added to ``refused`` (one int64). Tokens may be any stride apart, as in a slice of
    the output of a fused projection.
    """
    tokens, heads, dim = keys.shape
    of_slots = (key_slots.shape[0], heads, BLOCK_TOKENS, dim)
    arguments = PlaceTokens(
        keys=_address_of_tokens("keys", keys, (tokens, heads, dim), key_slots.dtype),
        values=_address_of_tokens("values", values, (tokens, heads, dim), key_slots.dtype),
        key_slots=address("key_slots", key_slots, HALVES, of_slots),
        value_slots=address("value_slots", value_slots, key_slots.dtype, of_slots),
        places=address("places", places, torch.int32, (tokens,)),
        refused=None if refused is None else address("refused", refused.view(-1), torch.int64, (1,)),
        key_stride=keys.stride(0),
        value_stride=values.stride(0),
        most_places=key_slots.shape[0] * BLOCK_TOKENS,
        tokens=tokens,
        kv_heads=heads,
        head_dim=dim,
    )
    launch(library().sh_cuda_place_tokens, arguments)


def _address_of_tokens(name: str, tensor: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    if not tensor.is_cuda or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} are {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, must be {shape} of {dtype} on a "
            "CUDA device"
        )
    pointer: int = tensor.data_ptr()
    if tensor.stride()[1:] != (shape[2], 1) or tensor.stride(0) % 8 or pointer % 16:
        raise ValueError(f"a token of {name} must be contiguous and aligned to 16 bytes, strides are {tensor.stride()}")
    return pointer
