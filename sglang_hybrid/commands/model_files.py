"""Finds and reads a model's config.json without SGLang."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.arguments import Refused

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# keys of the context length, in the order in which SGLang looks for them
_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


def read_config(model_path: str) -> dict[str, Any] | None:
    """Return the model's config.json, or None if only SGLang can read the model. Raise Refused if there is no model."""
    path = Path(model_path).expanduser()
    if path.is_dir():
        return _read(path, model_path)
    if path.exists() or "://" in model_path:  # a GGUF file, or an object store
        return None
    if not _HUB_NAME.fullmatch(model_path):
        raise Refused(f"there is no model at {model_path}: check --model-path")
    cached = _in_hub_cache(model_path)
    if cached is not None:
        return _read(cached, model_path)
    if any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _OFFLINE):
        raise Refused(
            f"there is no directory {model_path}, no model of that name in the Hugging Face cache, and downloads are "
            f"switched off ({' or '.join(_OFFLINE)}): check --model-path"
        )
    return None


def _read(directory: Path, model_path: str) -> dict[str, Any] | None:
    file = directory / "config.json"
    if not file.is_file():
        if (directory / "params.json").is_file() or any(directory.glob("*.gguf")):
            return None
        raise Refused(f"{model_path} is not a model: there is no config.json in it")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise Refused(f"{file} is not a model's configuration: it holds no JSON object")
    return config


def _in_hub_cache(name: str) -> Path | None:
    """Return the cached ``main`` snapshot, or None. The hub's library is not used: importing it takes a second."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    repository = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if (snapshot / "config.json").is_file() else None


def context_tokens(config: dict[str, Any]) -> int | None:
    """Return the model's longest context in tokens, as SGLang derives it, or None if ``config`` does not have it."""
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = scaling.get("factor") or 1
    if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
        factor = 1
    for key in _CONTEXT_KEYS:
        if text.get(key) is not None:
            return int(factor * text[key])
    return None


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a profile's ModelIdentity that ``config`` contains."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    fields = {
        "architecture": next(iter(config.get("architectures") or []), None),
        "layers": config.get("num_hidden_layers"),
        "hidden": hidden,
        "query_heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or (hidden // heads if heads and hidden else None),
    }
    return {name: value for name, value in fields.items() if value is not None}
