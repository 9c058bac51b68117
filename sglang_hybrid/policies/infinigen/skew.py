"""The skew of a layer: the basis in which few columns of queries and keys carry most of their products.

InfiniGen takes the right singular vectors of a sample's queries. Here these are rotated queries: keys are cached after
their rotation, and an orthogonal matrix that is applied after the rotation leaves all products as they are.
"""

from __future__ import annotations

import torch

_TOKENS = 128  # sampled from each text


class SkewSample:
    """Queries and keys of one layer, from some tokens of each text."""

    def __init__(self) -> None:
        self._queries: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = []

    def add(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Add a text's rotated queries ``[tokens, query heads, dim]`` and keys ``[tokens, KV heads, dim]``."""
        at = torch.linspace(0, keys.shape[0] - 1, min(_TOKENS, keys.shape[0]), device=keys.device).long()
        self._queries.append(queries[at].float().cpu())
        self._keys.append(keys[at].float().cpu())

    def skew(self) -> torch.Tensor:
        """Return an orthogonal matrix per KV head, most informative column first: ``[KV heads, dim, dim]``, float32."""
        keys = torch.cat(self._keys).double().transpose(0, 1)  # [KV heads, tokens, dim]
        queries = torch.cat(self._queries).double().unflatten(1, (keys.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        return skew_of(queries, keys).float()


def skew_of(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the skew ``[KV heads, dim, dim]`` of queries ``[KV heads, n, dim]`` and keys ``[KV heads, m, dim]``.

    Queries of all query heads of a KV head are together. Columns are ordered by the paper's measure: the sizes of their
    entries in skewed queries and keys. The sizes are means, not sums, because a KV head has more queries than keys.
    """
    # eigenvectors of Q^T Q are the right singular vectors of Q, also where there are fewer queries than channels
    skew: torch.Tensor = torch.linalg.eigh(queries.transpose(1, 2) @ queries).eigenvectors
    sizes = (queries @ skew).abs().mean(dim=1) + (keys @ skew).abs().mean(dim=1)
    order = sizes.argsort(dim=1, descending=True, stable=True)
    return skew.gather(2, order[:, None, :].expand_as(skew))
