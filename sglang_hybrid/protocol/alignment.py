"""The boundary of a region's buffers. This module imports nothing, so that capacity is known without torch."""

# every piece starts on a 2 MiB boundary of the file: huge pages and DMA registration both like it
ALIGNMENT = 2 << 20
