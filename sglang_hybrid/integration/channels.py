"""Which channels of the keys are worth a sketch: as calibration measured, or read off the model's weights."""

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
    """Before the first key is written. ``heads``: this rank's KV heads. ``calibrated``: of the model or of this rank.

    A channel adds ``q_c k_c`` to a logit, and what it adds varies as much as its queries and keys do.
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
    """Channels of each KV head ``[KV heads, head_dim]``, those first whose queries and keys can get largest."""
    weights, keys = layers.query_weights(layer), layers.key_projection(layer)
    dim = weights.head_dim
    heads = keys.shape[0] // dim
    # inputs of a projection are normed, so a row's norm tells how large its channel gets
    of_query, of_key = (
        (matrix.float() * weights.norm.float()).square().sum(dim=1) for matrix in (weights.projection, keys)
    )
    if weights.head_norm is not None:  # each head is normed once more, and only the gain is left
        of_query = weights.head_norm.float().square().repeat(of_query.shape[0] // dim)
    group = of_query.view(heads, -1, dim).mean(dim=1)
    importance = (group * of_key.view(heads, dim)).sqrt()
    return channel_order(importance, weights.rotary.shape[-1], weights.neox)
