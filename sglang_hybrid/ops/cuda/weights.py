"""Logits of quantised keys, and the tokens that have a share of the attention: ``reference_weights`` on the GPU."""

from __future__ import annotations

import torch

from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.tensors import address

_INDICES = (torch.uint8, torch.int16)


def lookup_logits(tables: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """As the reference: tables ``[B, H, G, groups, C]``, codes ``[B, H, N, groups]`` -> ``[B, H, G, N]``, float32.

    Up to 24,576 centroids; codes are uint8 or int16. An index beyond the tables counts as the last.
    """
    rows, heads, group, groups, centroids = tables.shape
    tokens = codes.shape[2]
    logits = torch.empty(rows, heads, group, tokens, dtype=torch.float32, device=tables.device)
    launch(
        "lookup_logits",
        tables=address("tables", tables, torch.float32, (rows, heads, group, groups, centroids)),
        codes=address("codes", codes, _INDICES, (rows, heads, tokens, groups)),
        logits=address("logits", logits, torch.float32, (rows, heads, group, tokens)),
        lists=rows * heads * group,
        group=group,
        groups=groups,
        centroids=centroids,
        tokens=tokens,
        index_bytes=codes.dtype.itemsize,
    )
    return logits


def cumulative_share(weights: torch.Tensor, least: float) -> torch.Tensor:
    """As the reference: weights ``[..., N]``, not negative -> bool. NaN and what is below 0 are never kept.

    Sums are whole numbers of 2^-40 of a list's largest weight: at the edge of ``least`` an entry more or less than the
    reference, whose sums are float32.
    """
    kept = torch.empty(weights.shape, dtype=torch.bool, device=weights.device)
    shape = tuple(weights.shape)
    launch(
        "cumulative_share",
        weights=address("weights", weights, torch.float32, shape),
        kept=address("kept", kept, torch.bool, shape),
        least=least,
        lists=weights.numel() // max(1, shape[-1]),
        entries=shape[-1],
    )
    return kept
