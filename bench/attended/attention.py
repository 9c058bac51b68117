"""Attention of some tokens over masks of tokens: with a bias, with codes for tokens in slots, with a mean of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slots:
    """The tokens that are in slots, and the numbers that their codes represent."""

    tokens: torch.Tensor  # [n, KV heads, tokens] of bool
    keys: torch.Tensor  # [KV heads, tokens, dim]
    values: torch.Tensor


@dataclass(frozen=True)
class Mean:
    """One more value to attend to, which stands for the tokens that are left out."""

    logits: torch.Tensor  # [n, KV heads, group]
    value: torch.Tensor  # [KV heads, dim]


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attended: torch.Tensor,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    slots: Slots | None = None,
    mean: Mean | None = None,
) -> torch.Tensor:
    """Return attention ``[n, heads, dim]`` in float32.

    ``queries`` ``[n, heads, dim]``; ``keys`` and ``values`` ``[KV heads, tokens, dim]``; ``attended``
    ``[n, KV heads, tokens]`` of bool; ``bias`` ``[n, KV heads, group, tokens]`` is added to logits. With ``slots``, the
    keys and values of tokens in slots are those that the codes represent.
    """
    asked = queries.float().unflatten(1, (len(keys), -1))
    logits = torch.einsum("nhgd,htd->nhgt", asked, keys.float()) * scale
    if slots is not None:
        of_codes = torch.einsum("nhgd,htd->nhgt", asked, slots.keys) * scale
        logits = torch.where(slots.tokens[:, :, None], of_codes, logits)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~attended[:, :, None], -torch.inf)
    if mean is not None:
        logits = torch.cat((logits, mean.logits[..., None]), dim=-1)
    weights, of_mean = logits.softmax(dim=-1).split((keys.shape[1], 0 if mean is None else 1), dim=-1)
    if slots is None:
        out = torch.einsum("nhgt,htd->nhgd", weights, values.float())
    else:
        in_slots = slots.tokens[:, :, None]
        out = torch.einsum("nhgt,htd->nhgd", weights.masked_fill(~in_slots, 0.0), slots.values)
        out += torch.einsum("nhgt,htd->nhgd", weights.masked_fill(in_slots, 0.0), values.float())
    if mean is not None:
        out += of_mean * mean.value[:, None]
    return out.flatten(1, 2)
