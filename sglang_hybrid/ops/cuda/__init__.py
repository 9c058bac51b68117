"""Python wrappers of the CUDA kernels. The kernels depend on no framework and are compiled at first use.

Importing this package needs neither a GPU nor a compiler.
"""

from sglang_hybrid.ops.cuda.errors import CudaError

__all__ = ["CudaError"]
