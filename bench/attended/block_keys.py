"""Keys and values as other parts of the server represent them: digests, sketches, and codes of 8 bits in slots."""

from __future__ import annotations

import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.ops import reference


def approximate(keys: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Return the keys ``[KV heads, tokens, dim]`` that compact digests and sketches represent, in float32.

    Tokens behind the last whole block are cut off. ``channels`` ``[KV heads, C]`` are those of the sketch: in these a
    token has the middle of the step that its code names. In all other channels it has the middle of its block's range.
    """
    heads, _, dim = keys.shape
    blocks = _in_blocks(keys)
    filled = torch.full((len(blocks),), BLOCK_TOKENS, device=keys.device)
    digests = reference.compact_digest(reference.minmax_digest(blocks, filled), channels)
    codes = reference.sketch_codes(blocks, digests, channels)
    highest, lowest = reference.expand_digest(digests, channels, dim).unbind(2)  # [blocks, KV heads, dim]
    made = ((highest + lowest) / 2)[:, :, None].repeat(1, 1, BLOCK_TOKENS, 1)
    where = channels.expand(len(blocks), -1, -1)
    step = ((highest - lowest) / reference.SKETCH_STEPS).gather(2, where)[:, :, None]
    places = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float()
    told = lowest.gather(2, where)[:, :, None] + (places + 0.5) * step
    made.scatter_(3, where[:, :, None].expand_as(told), told)
    return made.transpose(0, 1).reshape(heads, -1, dim)


def _in_blocks(keys: torch.Tensor) -> torch.Tensor:
    """Return whole blocks ``[blocks, KV heads, tokens of a block, dim]``."""
    heads, tokens, dim = keys.shape
    blocks = tokens // BLOCK_TOKENS
    return keys[:, : blocks * BLOCK_TOKENS].reshape(heads, blocks, BLOCK_TOKENS, dim).transpose(0, 1).contiguous()


def estimates(queries: torch.Tensor, approximated: torch.Tensor, scale: float) -> torch.Tensor:
    """Estimate the logarithm of each block's attention mass, in units of ``q . k``: ``[n, KV heads, group, blocks]``.

    queries ``[n, heads, dim]``, and keys from ``approximate``. The result is that of ``reference.sketch_logits``, which
    reads digests and codes for each query anew.
    """
    asked = queries.float().unflatten(1, (len(approximated), -1))
    logits = torch.einsum("nhgd,htd->nhgt", asked, approximated) * scale
    found: torch.Tensor = logits.unflatten(3, (-1, BLOCK_TOKENS)).logsumexp(dim=4) / scale
    return found


def coded(numbers: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the keys or values ``[KV heads, tokens, dim]`` that codes of 8 bits represent, in float32.

    ``steps`` ``[KV heads, dim]``: of these keys or of these values, from ``CodeSteps``.
    """
    codes, factors = reference.to_codes(numbers, steps)
    return reference.of_codes(codes, steps, factors)
