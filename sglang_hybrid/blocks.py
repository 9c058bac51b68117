"""Sizes of a block and of its compact digest. This module imports nothing, so that commands need no torch."""

BLOCK_TOKENS = 32  # tokens per block, and SGLang's page size; the kernels are compiled for this number
COMPACT_GROUP = 16  # channels of a compact digest that share one scale


def compact_bytes(dim: int, channels: int) -> int:
    """Return the bytes of one block's compact digest, a multiple of 32 because GPUs read 32 bytes at a time."""
    return -(-(dim + 2 * channels + 2 * dim // COMPACT_GROUP) // 32) * 32
