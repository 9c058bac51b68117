"""The size of a block and of its compact digest. This module imports nothing: commands that load no torch need it."""

BLOCK_TOKENS = 32  # tokens of a block, and SGLang's page size: the kernels are compiled for this number
COMPACT_GROUP = 16  # channels of a compact digest that share a scale


def compact_bytes(dim: int, channels: int) -> int:
    """Bytes of one block's compact digest: a multiple of 32, which GPUs read at a time."""
    return -(-(dim + 2 * channels + 2 * dim // COMPACT_GROUP) // 32) * 32
