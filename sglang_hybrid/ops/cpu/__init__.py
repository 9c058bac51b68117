"""The C++ library of ``kernels/cpu``: attention kernels, mailbox and worker engine. Needs no torch."""

from sglang_hybrid.ops.cpu.library import NativeError, library, variants

__all__ = ["NativeError", "library", "variants"]
