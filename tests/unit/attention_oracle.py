"""Softmax attention in float64, written from its definition. Tests compare every operation with it.

Shapes are those of ``sglang_hybrid.ops.reference``, but keys and values are dense: ``[H, n, D]``.
"""

from collections.abc import Sequence
from typing import TypedDict

import torch


class Tolerance(TypedDict):
    """Largest accepted difference from the definition: keyword arguments of ``torch.testing.assert_close``."""

    rtol: float
    atol: float


def softmax_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one token's query ``[H * G, D]`` to n tokens: output ``[H * G, Dv]``, natural-log LSE ``[H * G]``."""
    group = query.shape[0] // keys.shape[0]
    outputs, sums = [], []
    for head, q in enumerate(query.double()):
        logits = keys[head // group].double() @ q * scale
        outputs.append(torch.softmax(logits, dim=0) @ values[head // group].double())
        sums.append(torch.logsumexp(logits, dim=0))
    return torch.stack(outputs), torch.stack(sums)


def causal_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend with queries ``[q, H * G, D]`` of the last q of n tokens, each to its own token and all earlier ones."""
    before = keys.shape[1] - query.shape[0]
    rows = []
    for i, q in enumerate(query):
        seen = before + i + 1
        rows.append(softmax_attention(q, keys[:, :seen], values[:, :seen], scale)[0])
    return torch.stack(rows)


def tokens_of_blocks(pool: torch.Tensor, head: int, blocks: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the tokens ``[n, D]`` of one KV head in a pool, for (page, number of tokens) pairs, in their order."""
    return torch.cat([pool[page, head, :filled] for page, filled in blocks] + [pool[0, head, :0]])


def attention_over_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: Sequence[Sequence[Sequence[tuple[int, int]]]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``attend_blocks`` by definition. ``blocks[row][head]`` lists (page, number of tokens) pairs."""
    rows, heads = len(blocks), keys.shape[1]
    grouped = query.reshape(rows, heads, -1, query.shape[-1])
    out = torch.zeros(*grouped.shape[:3], values.shape[-1], dtype=torch.float64)
    lse = torch.full(grouped.shape[:3], -torch.inf, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            k, v = (tokens_of_blocks(pool, head, blocks[row][head]) for pool in (keys, values))
            if len(k):
                out[row, head], lse[row, head] = softmax_attention(grouped[row, head], k[None], v[None], scale)
    return out.flatten(1, 2), lse.flatten(1, 2)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
