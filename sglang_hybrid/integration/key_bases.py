"""Choose the basis of partial keys: the skew that calibration found, or the keys' own channels."""

from __future__ import annotations

import logging

import torch

from sglang_hybrid.integration.channels import order_by_projections
from sglang_hybrid.integration.decoder_layers import DecoderLayers, UnknownLayers
from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.memory.key_codes import KeyCodes
from sglang_hybrid.memory.partial_keys import PartialKeys
from sglang_hybrid.policies.infinigen.options import COLUMN_BYTES
from sglang_hybrid.policies.scout.corrections_file import Calibrated

logger = logging.getLogger("sglang.srt.hybrid")


def choose_bases(
    codes: KeyCodes, pool: HostKVPool, heads: slice, model: torch.nn.Module, calibrated: Calibrated | None
) -> None:
    """Choose the basis in which ``codes`` encode keys. Call this function before the first key is written.

    ``heads`` are this rank's KV heads. ``calibrated`` covers the whole model or only this rank.
    """
    columns = codes.code_bytes // COLUMN_BYTES
    if calibrated and calibrated.skews:
        bases = [_of_rank(calibrated.skews[pool.start_layer + layer], heads) for layer in range(pool.layer_num)]
        logger.info("speculation by %d of %d columns of skewed keys", columns, pool.head_dim)
    else:
        bases = _own_channels(pool, model)
        logger.warning(
            "keys are not skewed: speculation is by %d of %d of their own channels, which selects less well; "
            "profile=auto calibrates a skew when the server starts, and new profiles have one",
            columns, pool.head_dim,
        )  # fmt: skip
    if isinstance(codes.encoder, PartialKeys):
        codes.encoder.choose(bases)
        return
    # 16 bits are precise enough for selection, whatever the cache's dtype
    dtype = pool.dtype if pool.dtype.itemsize == COLUMN_BYTES else torch.bfloat16
    codes.use(PartialKeys([basis.to(pool.device) for basis in bases], columns, dtype))


def _of_rank(skew: torch.Tensor, heads: slice) -> torch.Tensor:
    return skew[heads] if len(skew) != heads.stop - heads.start else skew


def _own_channels(pool: HostKVPool, model: torch.nn.Module) -> list[torch.Tensor]:
    """Return each layer's channels as a basis, sorted by the norms of projections, or unsorted for unknown models."""
    every = torch.arange(pool.head_dim).expand(pool.head_num, -1)
    orders = [every] * pool.layer_num
    try:
        layers = DecoderLayers(model)
        orders = [order_by_projections(layers, layer) for layer in layers.ids]
    except UnknownLayers as unknown:
        logger.warning("speculation is by the first channels of every key: %s", unknown)
    unit = torch.eye(pool.head_dim)
    return [unit[order.cpu()].transpose(1, 2) for order in orders]
