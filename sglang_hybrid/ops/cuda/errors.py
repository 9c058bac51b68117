class CudaError(RuntimeError):
    """The CUDA kernels cannot be built, loaded or launched; the message says why, and what to do."""
