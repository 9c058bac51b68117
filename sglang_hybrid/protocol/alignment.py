"""Alignment of buffers in a shared region. This module imports nothing, so that capacity is computed without torch."""

# bytes: every buffer starts on a 2 MiB boundary of the file, which suits huge pages and DMA registration
ALIGNMENT = 2 << 20
