"""Stand-in for the part of Intel's extension for PyTorch that the worker uses, on processors without the extension."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def installed() -> Iterator[None]:
    """Make the extension's module and operator available. Torch's own attention serves the operator."""
    library = torch.library.Library("torch_ipex", "DEF")
    library.define(
        "flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, *, "
        "Tensor? attention_mask=None, float? scale=None) -> (Tensor, Tensor)"
    )
    library.impl("flash_attention", torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, "CPU")
    module = types.ModuleType("intel_extension_for_pytorch")
    try:
        with mock.patch.dict(sys.modules, {"intel_extension_for_pytorch": module}):
            yield
    finally:
        library._destroy()
