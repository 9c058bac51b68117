"""Shape of a model and bytes of its weights, read from config.json and the headers of its safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.model_files import context_tokens, read_config
from sglang_hybrid.commands.size.errors import SizeError
from sglang_hybrid.memory.capacity import KVShape

ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
)  # fmt: skip
_HEAD_NORMS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_FLOATS = ("F32", "F16", "BF16")  # are converted to the model's dtype when they are loaded
_ITEMSIZE = 2  # SGLang serves bfloat16 and float16 as they are, and float32 as float16
_STORED = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights of all ranks together, divided by how much of them a decode step reads."""

    dense: int  # read at every step: attention, MLP, norms, output
    embedding: int = 0  # only a few rows are read; 0 if the output is the same matrix
    experts: int = 0  # only the experts are read to which tokens are routed

    @property
    def total(self) -> int:
        return self.dense + self.embedding + self.experts


@dataclass(frozen=True)
class ModelShape:
    name: str
    architecture: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    most_tokens: int | None  # longest context that the model supports; None: unknown
    dtype: str
    quantisation: str | None
    weights: Weights
    weights_from: str  # source of ``weights``, in words
    experts: int = 0  # number of experts per layer
    experts_per_token: int = 0
    kv_itemsize: int = _ITEMSIZE  # bytes of a number in the KV cache

    @property
    def has_fp8_cache(self) -> bool:
        return self.kv_itemsize == 1

    def kv_shape(self, ranks: int) -> KVShape:
        """Return the KV cache's shape on one of ``ranks`` GPUs. KV heads are replicated if they are fewer than GPUs."""
        heads = max(1, self.kv_heads // ranks)
        group = self.query_heads // ranks // heads
        return KVShape(self.layers, heads, self.head_dim, self.head_dim, self.kv_itemsize, group)

    def check_ranks(self, ranks: int) -> None:
        """Raise SizeError if this number of GPUs cannot share the heads."""
        if self.query_heads % ranks or max(self.kv_heads, ranks) % min(self.kv_heads, ranks):
            possible = [
                count for count in range(1, self.query_heads + 1)
                if self.query_heads % count == 0 and max(self.kv_heads, count) % min(self.kv_heads, count) == 0
            ]  # fmt: skip
            raise SizeError(
                f"--tp {ranks} cannot share {self.query_heads} query heads and {self.kv_heads} KV heads: "
                f"take one of {', '.join(map(str, possible))}"
            )

    def weights_read(self, rows: int) -> int:
        """Return the bytes that a decode step of ``rows`` tokens reads of the weights.

        Assumes that tokens choose their experts independently.
        """
        touched = 1 - (1 - self.experts_per_token / self.experts) ** rows if self.experts else 0
        return int(self.weights.dense + touched * self.weights.experts)


def read_model(path: Path) -> ModelShape:
    """Return the shape of a model. ``path``: its directory or config.json. Raise SizeError if it cannot be sized."""
    path = path.expanduser()
    directory = path.parent if path.is_file() else path
    if path.is_file() and path.suffix != ".json":
        raise SizeError(f"{path} is no configuration: name a model's directory, or its config.json")
    if not path.exists():
        raise SizeError(f"there is no {path}: name a model's directory, or its config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else read_config(str(path))
    except (OSError, ValueError, Refused) as error:
        raise SizeError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise SizeError(f"{path} has no config.json with a JSON object: name a directory in Hugging Face's layout")
    name = path.stem if path.is_file() and path.name != "config.json" else directory.resolve().name
    return shape_of(config, name, _stored_tensors(directory))


def shape_of(config: Mapping[str, Any], name: str, stored: Mapping[str, tuple[str, int]] | None = None) -> ModelShape:
    """Return the shape of a model with this configuration. Raise SizeError if it cannot be sized.

    ``stored``: dtype and number of values of each tensor in the model's files; without it weights are estimated from
    the configuration.
    """
    architecture = next(iter(config.get("architectures") or []), "none")
    if architecture not in ARCHITECTURES:
        raise SizeError(f"{name} has architecture {architecture}: only {', '.join(ARCHITECTURES)} can be sized")
    quantised = _Quantisation.of(config)
    heads = _number(config, "num_attention_heads")
    if stored:
        weights = _of_files(config, stored, is_quantised=quantised is not None)
    elif quantised and quantised.linear_bytes is None:
        raise SizeError(
            f"{name} is quantised by {quantised.method}, whose bytes are known from safetensors files only: put them "
            "beside config.json. From the configuration alone: fp8, awq, gptq and compressed-tensors"
        )
    else:
        weights = _by_arithmetic(config, architecture, quantised.linear_bytes or _ITEMSIZE if quantised else _ITEMSIZE)
    is_moe = architecture == "Qwen3MoeForCausalLM"
    return ModelShape(
        name=name,
        architecture=architecture,
        layers=_number(config, "num_hidden_layers"),
        query_heads=heads,
        kv_heads=_number(config, "num_key_value_heads", heads),
        head_dim=_head_dim(config),
        most_tokens=context_tokens(dict(config)),
        dtype=_dtype(config),
        quantisation=quantised.method if quantised else None,
        weights=weights,
        weights_from="safetensors files" if stored else "arithmetic from config.json",
        experts=_number(config, "num_experts") if is_moe else 0,
        experts_per_token=_number(config, "num_experts_per_tok") if is_moe else 0,
    )


def _dtype(config: Mapping[str, Any]) -> str:
    stored = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return "float16" if stored == "float32" else str(stored)


def _number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise SizeError(f"config.json has {key}={config.get(key)!r}: a whole number above 0 is needed")
    return value


def _head_dim(config: Mapping[str, Any]) -> int:
    return _number(config, "head_dim", _number(config, "hidden_size") // _number(config, "num_attention_heads"))


# -- quantisation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Quantisation:
    method: str
    linear_bytes: float | None  # bytes of one weight of a projection, with its share of scales; None: unknown

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Quantisation | None:
        given = config.get("quantization_config")
        if not given:
            return None
        method = str(given.get("quant_method", "a method without a name"))
        bits, group = given.get("bits"), given.get("group_size") or 128
        if method == "compressed-tensors":
            groups = list((given.get("config_groups") or {}).values())
            of_weights = (groups[0].get("weights") or {}) if groups else {}
            bits, group = of_weights.get("num_bits"), of_weights.get("group_size") or -1
        elif method == "fp8":
            bits, group = 8, -1
        elif method not in ("awq", "gptq"):
            bits = None
        if not isinstance(bits, int):
            return cls(method, None)
        scales = (_ITEMSIZE + bits / 8) / group if group > 0 else 0  # a scale and a zero point for each group
        return cls(f"{method}, {bits} bits", bits / 8 + scales)


# -- bytes -------------------------------------------------------------------------------------------------------------


def _by_arithmetic(config: Mapping[str, Any], architecture: str, linear_bytes: float) -> Weights:
    """Return the bytes of weights from the configuration alone. Embedding and output are never quantised.

    ``linear_bytes``: bytes of one weight of a projection.
    """
    hidden, layers, dim = _number(config, "hidden_size"), _number(config, "num_hidden_layers"), _head_dim(config)
    heads = _number(config, "num_attention_heads")
    queries, keys = heads * dim, _number(config, "num_key_value_heads", heads) * dim
    linear = layers * hidden * (2 * queries + 2 * keys)
    others = layers * 2 * hidden + hidden  # norms
    if architecture in _HEAD_NORMS:
        others += layers * 2 * dim
    if config.get("attention_bias", architecture == "Qwen2ForCausalLM"):
        others += layers * (queries + 2 * keys)
    sparse = 0
    experts = 0
    if architecture == "Qwen3MoeForCausalLM":
        step, dense_only = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
        sparse = sum(1 for layer in range(layers) if layer not in dense_only and (layer + 1) % step == 0)
        count = _number(config, "num_experts")
        experts = sparse * count * 3 * hidden * _number(config, "moe_intermediate_size")
        others += sparse * count * hidden  # the router
    if layers > sparse:
        linear += (layers - sparse) * 3 * hidden * _number(config, "intermediate_size")
    table = _number(config, "vocab_size") * hidden * _ITEMSIZE
    dense = int(linear * linear_bytes) + others * _ITEMSIZE + table  # the output
    return Weights(dense, 0 if _is_tied(config) else table, int(experts * linear_bytes))


def _of_files(config: Mapping[str, Any], stored: Mapping[str, tuple[str, int]], *, is_quantised: bool) -> Weights:
    is_tied = _is_tied(config) or not any(name.startswith("lm_head.") for name in stored)
    dense = embedding = experts = 0
    for name, (dtype, count) in stored.items():
        size = count * (_ITEMSIZE if dtype in _FLOATS and not is_quantised else _STORED.get(dtype, 1))
        if name.startswith("lm_head.") and is_tied:
            continue  # SGLang does not load it
        if ".embed_tokens." in name and not is_tied:
            embedding += size
        elif ".experts." in name:
            experts += size
        else:
            dense += size
    return Weights(dense, embedding, experts)


def _is_tied(config: Mapping[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _stored_tensors(directory: Path) -> dict[str, tuple[str, int]]:
    """Return dtype and number of values of every tensor in the safetensors files; empty if files are missing."""
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            if not all(file.is_file() for file in files):
                return {}  # an index without its files says no more than the configuration
        elif len(files) > 1:  # directories of Mistral models have the weights twice
            files = [file for file in files if not file.name.startswith("consolidated")]
        tensors = {}
        for file in files:
            tensors.update(_header(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SizeError(f"the safetensors files in {directory} cannot be read: {error!r}") from error
    return tensors


def _header(file: Path) -> dict[str, tuple[str, int]]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, 100 << 20)))
    return {
        name: (entry["dtype"], math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__"
    }
