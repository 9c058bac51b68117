"""Policy ``scout`` on a GPU: the CUDA kernels in their order, on persistent buffers, so that a graph can hold a step.

``engine`` is what SGLang's adapter calls. Nothing here knows SGLang.
"""
