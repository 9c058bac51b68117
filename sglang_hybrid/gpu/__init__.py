"""Policy ``scout`` on a GPU: the CUDA kernels in their order, on persistent buffers, so that a graph can hold a step.

Knows tensors, pages and rows; ``integration.device_attention`` translates SGLang's batches.
"""
