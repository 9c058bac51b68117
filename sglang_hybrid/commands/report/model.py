"""The model of a report: its directory, and what config.json says about its shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.model_files import context_tokens, identity, read_config


@dataclass(frozen=True)
class Model:
    path: Path
    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    has_tokenizer: bool

    @property
    def name(self) -> str:
        return self.path.resolve().name


def read_model(path: Path) -> Model:
    """Read a model's shape from config.json. Raise InputError if the file cannot be read or lacks a value."""
    try:
        config = read_config(str(path))
    except Refused as error:
        raise InputError(str(error)) from error
    if config is None:
        raise InputError(f"{path} has no config.json that can be read here: name a directory in Hugging Face's layout")
    found = identity(config)
    needed = ("architecture", "layers", "query_heads", "kv_heads", "head_dim")
    if missing := [name for name in needed if name not in found]:
        raise InputError(f"config.json of {path} does not say {', '.join(missing)}: name another model")
    has_tokenizer = (path / "tokenizer.json").is_file()
    context = context_tokens(config) or 2048
    return Model(path=path, context=context, has_tokenizer=has_tokenizer, **{name: found[name] for name in needed})
