"""CUDA engine: launches the kernels of each policy in order, on persistent buffers, so that a CUDA graph holds a step.

SGLang's adapter calls ``engine``. No module of this package depends on SGLang.
"""
