"""The size of a block. This module imports nothing, so that commands which load no torch know the size too."""

BLOCK_TOKENS = 32  # tokens of a block, and SGLang's page size: the kernels are compiled for this number
