"""Attention weights, sums of values by given weights, and logits from quantised keys, in plain torch.

These operations serve policies that decide by attention weights (HGCA), or that never read keys in full (HCAttention).
As in ``reference.py``, fast versions have the same names and signatures. ``reference.py`` also explains the letters in
shapes.
"""

from __future__ import annotations

import torch

from sglang_hybrid.ops import reference


def token_weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    ids: torch.Tensor,
    fill: torch.Tensor,
    scale: float,
    lse: torch.Tensor,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention weights of the tokens of listed blocks: ``[B, H, G, N, T]``, float32, 0 where no token counts.

    Arguments as for ``reference.attend_blocks``. ``lse`` ``[B, H * G]`` is the LSE of all tokens that the weights are
    shares of, listed or not: with the LSE of the list itself, the weights of a list add up to 1. ``-inf`` gives zeros.
    """
    rows, heads, _ = ids.shape
    k = reference.gather_blocks(keys, ids, query.device).float()  # [B, H, N, T, D]
    q = query.float().view(rows, heads, -1, query.shape[-1])
    logits = torch.einsum("bhgd,bhntd->bhgnt", q, k) * scale
    counted = reference.is_counted(fill, keys.shape[2], masks)[:, :, None]
    total = lse.float().view(rows, heads, -1, 1, 1)
    weights = torch.exp(logits - total.masked_fill(total == -torch.inf, 0.0))
    return torch.where(counted & (total > -torch.inf), weights, 0.0)


def block_weights(weights: torch.Tensor) -> torch.Tensor:
    """Sum attention weights of tokens to those of their blocks: ``[B, H, G, N, T]`` -> ``[B, H, G, N]``."""
    return weights.sum(dim=4)


def sum_values(weights: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sum values by weights that the caller has computed. No key is read.

    weights ``[B, H, G, N, T]``, values: a pool, ids ``[B, H, N]`` -> ``[B, H * G, Dv]``, float32. A value with weight 0
    is left out, whatever the value is: slots without a token may hold NaN.
    """
    v = reference.gather_blocks(values, ids, weights.device).float()  # [B, H, N, T, Dv]
    asked = (weights != 0).any(dim=2) & (ids != reference.NO_BLOCK)[..., None]
    v = v.masked_fill(~asked[..., None], 0.0)
    return torch.einsum("bhgnt,bhntd->bhgd", weights.float(), v).flatten(1, 2)


# -- quantised keys --------------------------------------------------------------------------


def nearest_centroids(keys: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Return the nearest centroid of each part of each key (grouped vector quantisation).

    keys ``[n, H, T, D]``, codebooks ``[H, groups, C, D / groups]`` -> ``[n, H, T, groups]``, int64. Of two centroids
    that are equally near, the first is returned.
    """
    _, groups, _, part = codebooks.shape
    parts = keys.float().unflatten(3, (groups, part))  # [n, H, T, groups, part]
    # |k - c|^2 without |k|^2, which is the same for all centroids
    far = codebooks.float().square().sum(dim=3)[:, None] / 2
    return (far - torch.einsum("nhtgp,hgcp->nhtgc", parts, codebooks.float())).argmin(dim=4)


def lookup_tables(query: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Return dot products of the query's parts with all centroids: ``[B, H * G, D]`` -> ``[B, H, G, groups, C]``."""
    heads, groups, _, part = codebooks.shape
    q = query.float().view(query.shape[0], heads, -1, groups, part)
    return torch.einsum("bhgip,hicp->bhgic", q, codebooks.float())


def lookup_logits(tables: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return ``q . k`` of quantised keys, by adding up table entries (HCAttention, equation 3).

    tables ``[B, H, G, groups, C]``, codes ``[B, H, N, groups]`` of any integer dtype -> ``[B, H, G, N]``.
    """
    where = codes.to(torch.int64).transpose(2, 3)[:, :, None].expand(-1, -1, tables.shape[2], -1, -1)
    return tables.gather(4, where).sum(dim=3)


def cumulative_share(weights: torch.Tensor, least: float) -> torch.Tensor:
    """Select the fewest entries whose weights add up to share ``least`` of all weights (HCAttention, equation 4).

    weights ``[..., N]``, not negative -> bool ``[..., N]``; sums are over the last dimension. ``least`` 1 selects every
    entry with a weight above 0. Of equal weights, the first is selected first.
    """
    kept, order = weights.sort(dim=-1, descending=True, stable=True)
    before = kept.cumsum(dim=-1) - kept
    wanted = (before < least * weights.sum(dim=-1, keepdim=True)) | (least >= 1)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, wanted & (kept > 0))
