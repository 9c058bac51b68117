"""K-means over parts of keys: scikit-learn's MiniBatchKMeans with the settings of HCAttention's section 4.1.

If each channel is a group of its own, points are numbers, and sorting replaces the computation of distances.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from sglang_hybrid.commands.eval.errors import InputError

_BATCH, _ITERATIONS = 10_000, 200
_HOW_TO_INSTALL = (
    "codebooks need scikit-learn: pip install 'sglang-hybrid[codebook]' (in a checkout: pip install -r "
    "requirements/codebook.txt)"
)

Cluster = Callable[[torch.Tensor, int], torch.Tensor]  # points [n, channels], number -> centroids [number, channels]


def minibatch_kmeans() -> Cluster:
    """Return the function that clusters points. Raise InputError if scikit-learn is missing."""
    try:
        from sklearn.cluster import MiniBatchKMeans
        from sklearn.exceptions import ConvergenceWarning
    except ImportError as error:
        raise InputError(_HOW_TO_INSTALL) from error

    def cluster(points: torch.Tensor, number: int) -> torch.Tensor:
        if points.shape[1] == 1:
            return means_of_numbers(points.flatten().float(), number).unsqueeze(1)
        # The time of k-means++ grows with the points that it chooses from: scikit-learn's least are three per centroid.
        means = MiniBatchKMeans(number, batch_size=_BATCH, max_iter=_ITERATIONS, init_size=3 * number, random_state=0)
        with warnings.catch_warnings():
            # with fewer distinct points than centroids some centroids are equal
            warnings.simplefilter("ignore", ConvergenceWarning)
            means.fit(points.float().numpy())
        return torch.from_numpy(means.cluster_centers_).float()

    return cluster


def means_of_numbers(points: torch.Tensor, number: int) -> torch.Tensor:
    """Return the ``[number]`` centroids of ``[n]`` points, ascending: k-means that starts from quantiles."""
    ordered = points.sort().values
    sums = torch.cat((ordered.new_zeros(1, dtype=torch.float64), ordered.double().cumsum(0)))
    first = torch.linspace(0, len(ordered) - 1, number).round().long()
    means = ordered[first]
    for _ in range(_ITERATIONS):
        # The points of centroid i are those between the middles to its neighbours.
        ends = torch.searchsorted(ordered, (means[1:] + means[:-1]) / 2)
        begin = torch.cat((ends.new_zeros(1), ends))
        end = torch.cat((ends, ends.new_tensor([len(ordered)])))
        count = end - begin
        moved = ((sums[end] - sums[begin]) / count.clamp(min=1)).float()
        moved = torch.where(count > 0, moved, means).sort().values  # a centroid without points stays
        if torch.equal(moved, means):
            break
        means = moved
    return means


def codebook_of(
    keys: torch.Tensor, groups: int, centroids: int, *, shared: bool, cluster: Cluster, done: Callable[[], None]
) -> torch.Tensor:
    """Fit one layer: keys ``[KV heads, tokens, head_dim]`` -> ``[KV heads, groups or 1, centroids, channels]``.

    ``done`` is called after each codebook.
    """
    parts = keys.unflatten(2, (groups, -1)).transpose(1, 2)  # [KV heads, groups, tokens, channels]
    if shared:
        parts = parts.flatten(1, 2).unsqueeze(1)
    tables = []
    for points in parts.flatten(0, 1):
        tables.append(cluster(points, centroids))
        done()
    return torch.stack(tables).view(*parts.shape[:2], centroids, parts.shape[3])


def codebooks_to_fit(kv_heads: int, groups: int, *, shared: bool) -> int:
    """Return the number of codebooks of each layer."""
    return kv_heads * (1 if shared else groups)


def relative_error(keys: torch.Tensor, decoded: torch.Tensor) -> float:
    """Return the squared error as a share of the keys' variance; both tensors ``[KV heads, tokens, head_dim]``."""
    spread = (keys - keys.mean(dim=1, keepdim=True)).square().sum()
    return float((keys - decoded).square().sum() / spread)
