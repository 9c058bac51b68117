"""The skew of a layer: the basis in which few columns of queries and keys carry most of their products.

InfiniGen takes the right singular vectors of a sample's queries. They are rotated queries here: keys are cached after
their rotation, and an orthogonal matrix behind it leaves all products as they are.
"""

from __future__ import annotations

import torch

_TOKENS = 128  # of a text


class SkewSample:
    """Queries and keys of one layer, from some tokens of each text."""

    def __init__(self) -> None:
        self._queries: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = []

    def add(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Of one text, after rotation: queries ``[tokens, query heads, dim]``, keys ``[tokens, KV heads, dim]``."""
        at = torch.linspace(0, keys.shape[0] - 1, min(_TOKENS, keys.shape[0]), device=keys.device).long()
        self._queries.append(queries[at].float().cpu())
        self._keys.append(keys[at].float().cpu())

    def skew(self) -> torch.Tensor:
        """Of each KV head an orthogonal matrix, its most telling column first: ``[KV heads, dim, dim]``, float32."""
        keys = torch.cat(self._keys).double().transpose(0, 1)  # [KV heads, tokens, dim]
        queries = torch.cat(self._queries).double().unflatten(1, (keys.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        return skew_of(queries, keys).float()


def skew_of(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries ``[KV heads, n, dim]``, those of all query heads of a KV head together; keys ``[KV heads, m, dim]``.

    Columns are in the order of the paper's measure: the sizes of their entries in skewed queries and keys. Means and
    not sums, because a KV head has more queries than keys.
    """
    # eigenvectors of Q^T Q are the right singular vectors of Q, also where there are fewer queries than channels
    skew: torch.Tensor = torch.linalg.eigh(queries.transpose(1, 2) @ queries).eigenvectors
    sizes = (queries @ skew).abs().mean(dim=1) + (keys @ skew).abs().mean(dim=1)
    order = sizes.argsort(dim=1, descending=True, stable=True)
    return skew.gather(2, order[:, None, :].expand_as(skew))
