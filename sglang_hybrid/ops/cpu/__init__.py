"""Wrappers of the C++ library ``kernels/cpu``: attention kernels, mailbox, worker engine. No torch is imported here."""

from sglang_hybrid.ops.cpu.library import NativeError, library, variants

__all__ = ["NativeError", "library", "variants"]
