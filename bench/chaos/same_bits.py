"""Makes a row's numbers independent of the rows beside it, bit for bit, in every batch and chunk. For tests; slow.

Matrix products and reductions round differently with other shapes, functions round differently at the end of a vector
of numbers, and a selection of blocks turns the last bit of a score into another block. Here every row is computed in a
fixed shape, and by one thread, so that the division of work between threads does not matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from sglang_hybrid.core import DecodeBatch, LayerCache
from sglang_hybrid.ops import reference
from sglang_hybrid.policies.infinigen.policy import InfinigenPolicy

ROWS = 8  # rows of every matrix product
TOKENS = 32  # tokens of a prompt that are attended at a time, starting at multiples of this
ESTIMATED = 16  # blocks that are estimated at a time, starting at multiples of this
LISTED = 64  # reduced dimensions are padded to multiples of this
BLOCKS = 256

_linear = torch.nn.functional.linear
_matmul = torch.matmul
_attend_blocks = reference.attend_blocks
_block_scores = reference.block_scores
_lse_shift = reference.lse_shift
_merge = reference.merge
_near_bias = reference.near_bias
_estimates = LayerCache.estimates
_speculate = InfinigenPolicy._speculate


def install() -> None:
    """Patch torch and this package in this process. Raise RuntimeError if products here depend on a row's place."""
    torch.set_num_threads(1)
    _check_places()
    for place, replacements in (
        (torch.nn.functional, (linear,)),
        (torch, (matmul,)),
        (reference, (attend_blocks, attend_prefill, block_scores, lse_shift, merge, near_bias)),
        (LayerCache, (estimates,)),
    ):
        for function in replacements:
            setattr(place, function.__name__, function)
    InfinigenPolicy._speculate = speculated  # type: ignore[method-assign, assignment]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return _in_panels(flat, lambda panel: _linear(panel, weight, bias)).view(*x.shape[:-1], weight.shape[0])


def matmul(x: torch.Tensor, other: torch.Tensor, **more: Any) -> torch.Tensor:
    if x.dim() != 2 or other.dim() != 2 or more:
        return _matmul(x, other, **more)
    return _in_panels(x, lambda panel: _matmul(panel, other))


def _in_panels(x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    rows = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % ROWS)) if rows else x.new_zeros(ROWS, x.shape[1])
    return torch.cat([product(panel) for panel in padded.split(ROWS)])[:rows]


def attend_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, tile: int = 0
) -> torch.Tensor:
    total, new = key.shape[1], query.shape[0]
    heads, group = key.shape[0], query.shape[1] // key.shape[0]
    before = total - new
    out = query.new_empty(new, query.shape[1], value.shape[2])
    for start in range(before // TOKENS * TOKENS, total, TOKENS):
        end = min(start + TOKENS, total)
        first = max(start, before)
        panel = query.new_zeros(TOKENS, *query.shape[1:])
        panel[first - start : end - start] = query[first - before : end - before]
        asked = panel.view(TOKENS, heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)  # [heads, group * TOKENS, dim]
        logits = torch.bmm(asked, key[:, :end].transpose(1, 2)) * scale
        hidden = torch.arange(end) > torch.arange(start, start + TOKENS)[:, None]
        weights = logits.masked_fill(hidden.repeat(group, 1), -torch.inf).softmax(dim=2)
        attended = torch.bmm(weights, value[:, :end]).unflatten(1, (group, TOKENS)).permute(2, 0, 1, 3).flatten(1, 2)
        out[first - before : end - before] = attended[first - start : end - start]
    return out


def attend_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    fill: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = [_wider(ids, LISTED, reference.NO_BLOCK), _wider(fill, LISTED, 0)]
    optional = {name: part for name, part in (("bias", bias), ("masks", masks)) if part is not None}

    def attend(q: torch.Tensor, i: torch.Tensor, f: torch.Tensor, *more: torch.Tensor) -> Any:
        return _attend_blocks(q, keys, values, i, f, scale, **dict(zip(optional, more, strict=True)))

    return _by_row_pairs(attend, query, *wide, *(_wider(part, LISTED, 0) for part in optional.values()))


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _by_row_pairs(_merge, out_a, lse_a, out_b, lse_b)


def estimates(cache: LayerCache, query: torch.Tensor, pages: torch.Tensor, spread: float, scale: float) -> torch.Tensor:
    wide = _wider(pages, ESTIMATED, 0)
    panels = [
        _by_row(lambda q, p: _estimates(cache, q, p, spread, scale), query, panel.contiguous())
        for panel in wide.split(ESTIMATED, dim=-1)
    ]
    return torch.cat(panels, dim=-1)[..., : pages.shape[-1]]


def speculated(
    policy: InfinigenPolicy, query: torch.Tensor, cache: LayerCache, batch: DecodeBatch, scale: float
) -> torch.Tensor:
    pages = _wider(batch.page_table, ESTIMATED, 0)
    wide = dataclasses.replace(batch, page_table=pages)
    rows = [
        _speculate(policy, query[row : row + 1], cache, wide.part(torch.tensor([row])), scale)
        for row in range(len(query))
    ]
    return torch.cat(rows)[..., : batch.page_table.shape[1] * cache.block_tokens]


def block_scores(logits: torch.Tensor, block_counts: torch.Tensor, scale: float) -> torch.Tensor:
    wide = _wider(logits, BLOCKS, 0.0)
    return _by_row(lambda e, counts: _block_scores(e, counts, scale), wide, block_counts)[..., : logits.shape[3]]


def near_bias(
    logits: torch.Tensor, attended: torch.Tensor, block_counts: torch.Tensor, scale: float, sink: int, recent: int
) -> torch.Tensor:
    wide = _wider(logits, BLOCKS, 0.0), _wider(attended, BLOCKS, False), block_counts
    return _by_row(lambda e, there, counts: _near_bias(e, there, counts, scale, sink, recent), *wide)


def lse_shift(real: torch.Tensor, ahead: torch.Tensor, listed: torch.Tensor, scale: float) -> torch.Tensor:
    wide = _wider(real, LISTED, 0.0), _wider(ahead, LISTED, 0.0), _wider(listed, LISTED, False)
    return _by_row(lambda r, a, there: _lse_shift(r, a, there, scale), *wide)


def _by_row(function: Callable[..., torch.Tensor], *batches: torch.Tensor) -> torch.Tensor:
    rows = range(max(1, len(batches[0])))  # without rows, an empty slice gives the output its shape
    return torch.cat([function(*(batch[row : row + 1] for batch in batches)) for row in rows])


def _by_row_pairs(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], *batches: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [function(*(batch[row : row + 1] for batch in batches)) for row in range(max(1, len(batches[0])))]
    return torch.cat([first for first, _ in rows]), torch.cat([second for _, second in rows])


def _wider(x: torch.Tensor, multiple: int, filler: float) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple), value=filler).contiguous()


def _check_places() -> None:
    chance = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 576, generator=chance) for rows in (960, 16 * ROWS))
    order = torch.randperm(len(x), generator=chance)
    if not torch.equal(linear(x, weight)[order], linear(x[order], weight)):
        raise RuntimeError("on this machine a matrix product rounds a row by its place: answers cannot be compared")
