"""Choose the key channels that sketches store: as calibration measured, or by the norms of the model's weights."""

from __future__ import annotations

import logging

import torch

from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.memory.sketches import Sketches, channel_order
from sglang_hybrid.policies.scout.corrections_file import Calibrated

logger = logging.getLogger("sglang.srt.hybrid")


def choose_channels(
    sketches: Sketches, first_layer: int, heads: slice, model: torch.nn.Module, calibrated: Calibrated | None
) -> None:
    """Choose the sketch channels of every layer. Call this function before the first key is written.

    ``heads`` are this rank's KV heads. ``calibrated`` covers the whole model or only this rank. A channel adds
    ``q_c k_c`` to a logit, and this product varies as much as the channel's queries and keys do.
    """
    if calibrated and calibrated.channels:
        for layer, order in calibrated.channels.items():
            sketches.choose(layer - first_layer, order[heads] if len(order) != heads.stop - heads.start else order)
        return
    try:
        layers = DecoderLayers(model)
        for layer in layers.ids:
            sketches.choose(layer - first_layer, order_by_projections(layers, layer))
    except UnknownLayers as unknown:
        logger.warning("sketches take the first channels of every key: %s", unknown)


def order_by_projections(layers: DecoderLayers, layer: int) -> torch.Tensor:
    """Return each KV head's channels ``[KV heads, head_dim]``, those whose queries and keys can get largest first."""
    weights, keys = layers.query_weights(layer), layers.key_projection(layer)
    dim = weights.head_dim
    heads = keys.shape[0] // dim
    # a projection's inputs are normalised, so the norm of a row of weights says how large the row's channel gets
    of_query, of_key = (
        (matrix.float() * weights.norm.float()).square().sum(dim=1) for matrix in (weights.projection, keys)
    )
    if weights.head_norm is not None:  # each head is normalised again, so only the gain counts
        of_query = weights.head_norm.float().square().repeat(of_query.shape[0] // dim)
    group = of_query.view(heads, -1, dim).mean(dim=1)
    importance = (group * of_key.view(heads, dim)).sqrt()
    return channel_order(importance, weights.rotary.shape[-1], weights.neox)
