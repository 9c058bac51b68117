"""The decoder layers of SGLang's Llama-like models: their inputs, and the weights that compute their queries.

Llama, Mistral, Qwen2 and Qwen3 are built alike: ``layer(positions, hidden_states, forward_batch, residual)`` with an
``input_layernorm`` and ``self_attn.{qkv_proj, rotary_emb, attn}``. The model is not changed: hooks in front of the
layers read their inputs. Since SGLang 0.5.21 (Qwen3) and 0.5.22 (the others) the residual is no argument: it is in
``forward_batch.residual_stream``, and hidden states may be an output that is not yet summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid.integration.kv_scales import scales_of
from sglang_hybrid.integration.plain_weights import is_plain, matrix_of
from sglang_hybrid.policies.scout.predictor import QueryWeights

# layer id, the layer's input [tokens, hidden], positions [tokens], SGLang's forward batch
LayerInput = Callable[[int, torch.Tensor, torch.Tensor, Any], None]
# as LayerInput, with the input in two parts: hidden states, and the residual to add to them (None: nothing to add)
LayerParts = Callable[[int, torch.Tensor, torch.Tensor | None, torch.Tensor, Any], None]


class UnknownLayers(Exception):
    """The structure of a model's layers does not allow queries to be predicted. The message names the obstacle."""


class DecoderLayers:
    def __init__(self, model: torch.nn.Module) -> None:
        modules: list[Any] = [module for module in model.modules() if _is_decoder_layer(module)]
        self._layers: dict[int, Any] = {int(module.self_attn.attn.layer_id): module for module in modules}
        self._matrices: dict[int, torch.Tensor] = {}  # computed from quantised weights, or plain weights themselves
        if not self._layers:
            raise UnknownLayers(f"{type(model).__name__} has no decoder layers with self_attn.attn and input_layernorm")

    @property
    def ids(self) -> list[int]:
        return sorted(self._layers)

    def query_weights(self, layer: int) -> QueryWeights:
        """Return the weights that compute the layer's query. Raise UnknownLayers if they cannot be read."""
        module = self._layers[layer]
        attention, norm = module.self_attn, module.input_layernorm
        projection = self._projection(layer)
        if type(norm).__name__ != "RMSNorm" or not hasattr(norm, "variance_epsilon"):
            raise UnknownLayers(f"layer {layer}'s input_layernorm is a {type(norm).__name__}")
        rotary = attention.rotary_emb
        if not hasattr(rotary, "cos_sin_cache") or getattr(rotary, "mrope_section", None):
            raise UnknownLayers(f"layer {layer}'s rotary embedding is a {type(rotary).__name__}")
        head_norm = getattr(attention, "q_norm", None)
        bias = getattr(attention.qkv_proj, "bias", None)
        return QueryWeights(
            norm=norm.weight.data,
            norm_eps=float(norm.variance_epsilon),
            projection=projection[: attention.q_size],
            bias=None if bias is None else bias.data[: attention.q_size],
            head_dim=int(attention.head_dim),
            head_norm=None if head_norm is None else head_norm.weight.data,
            head_norm_eps=0.0 if head_norm is None else float(head_norm.variance_epsilon),
            rotary=rotary.cos_sin_cache,
            neox=bool(rotary.is_neox_style),
        )

    def key_projection(self, layer: int) -> torch.Tensor:
        """Return the key projection ``[KV heads * head_dim, hidden]`` of this rank."""
        attention = self._layers[layer].self_attn
        return self._projection(layer)[attention.q_size : attention.q_size + attention.kv_size]

    def _projection(self, layer: int) -> torch.Tensor:
        """Return ``qkv_proj``, ``[outputs, hidden]``. Raise UnknownLayers if no plain matrix can be read from it."""
        if layer not in self._matrices:
            gain = self._layers[layer].input_layernorm.weight
            matrix = matrix_of(self._layers[layer].self_attn.qkv_proj, gain.shape[0], gain.dtype)
            if matrix is None:
                raise UnknownLayers(f"layer {layer}'s qkv_proj is quantised or packed, not a plain matrix")
            self._matrices[layer] = matrix
        return self._matrices[layer]

    def output_projection(self, layer: int) -> torch.Tensor:
        """Return ``o_proj``, ``[hidden, query heads * head_dim]``. Raise UnknownLayers if it is not a plain matrix."""
        attention = self._layers[layer].self_attn
        projection: Any = getattr(getattr(attention, "o_proj", None), "weight", None)
        if not is_plain(projection) or projection.shape[1:] != (attention.q_size,):
            raise UnknownLayers(f"layer {layer}'s o_proj is quantised or packed, not a plain matrix")
        matrix: torch.Tensor = projection.data
        return matrix

    def scale(self, layer: int, pool_dtype: torch.dtype) -> float:
        """Return the factor by which the layer multiplies products of queries and keys of the pool."""
        attention = self._layers[layer].self_attn.attn
        return float(attention.scaling) * scales_of(attention, pool_dtype).keys

    def on_input(self, callback: LayerInput) -> Callable[[], None]:
        """Call ``callback`` before each layer runs. Return a function that stops the calls."""

        def summed(
            layer: int, hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, batch: Any
        ) -> None:
            callback(layer, hidden if residual is None else hidden + residual, positions, batch)

        return self.on_parts(summed)

    def on_parts(self, callback: LayerParts) -> Callable[[], None]:
        """Call ``callback`` as ``on_input`` does, but with hidden states and residual not yet added.

        The layer's norm changes both tensors in place afterwards.
        """
        handles = [
            module.register_forward_pre_hook(_Input(layer, callback), with_kwargs=True)
            for layer, module in self._layers.items()
        ]

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop


class _Input:
    """Forward hook that finds the parts of a layer's input among the layer's arguments."""

    _NAMES = ("positions", "hidden_states", "forward_batch", "residual")

    def __init__(self, layer: int, callback: LayerParts) -> None:
        self._layer = layer
        self._callback = callback

    def __call__(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Return changed arguments for the layer if the hook had to complete the layer's input, otherwise None."""
        given = dict(zip(self._NAMES, args, strict=False)) | kwargs
        hidden, batch = given["hidden_states"], given["forward_batch"]
        stream = getattr(batch, "residual_stream", None)
        if stream is None:
            self._callback(self._layer, hidden, given.get("residual"), given["positions"], batch)
            return None
        completed = stream.complete(hidden)
        # without a pending output the hidden states are the whole input
        self._callback(
            self._layer, completed, None if stream.pending is None else stream.residual, given["positions"], batch
        )
        if completed is hidden:
            return None
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": completed}
        return (args[0], completed, *args[2:]), kwargs


def _is_decoder_layer(module: torch.nn.Module) -> bool:
    attention = getattr(module, "self_attn", None)
    return hasattr(module, "input_layernorm") and hasattr(attention, "attn") and hasattr(attention, "qkv_proj")
