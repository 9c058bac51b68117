"""GPU versions of ``reference_weights``: logits of quantised keys, and selection by cumulative share of attention."""

from __future__ import annotations

import torch

from sglang_hybrid.ops.cuda.library import launch
from sglang_hybrid.ops.cuda.tensors import address

_INDICES = (torch.uint8, torch.int16)


def lookup_logits(tables: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return ``reference_weights.lookup_logits``: tables ``[B, H, G, groups, C]``, codes ``[B, H, N, groups]``.

    The result is ``[B, H, G, N]``, float32. Up to 24,576 centroids; codes are uint8 or int16. An index beyond a table
    uses the table's last entry.
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
    """Return ``reference_weights.cumulative_share`` of weights ``[..., N]``, as bool.

    NaN and weights below 0 are never kept. Sums are multiples of 2^-40 of a list's largest weight. The reference sums
    in float32, so at the edge of ``least`` one entry more or less may be kept.
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
