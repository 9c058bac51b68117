"""The GPU's side: CUDA kernels that know no framework, compiled when first used, and their operations in Python.

Importing this package needs neither a GPU nor a compiler.
"""

from sglang_hybrid.ops.cuda.errors import CudaError

__all__ = ["CudaError"]
