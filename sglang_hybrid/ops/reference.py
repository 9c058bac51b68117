"""The operations of hybrid attention in plain torch: the specification of their fast versions.

A fast version has the same name and signature and is tested against the one here; the ones
here are tested against softmax attention. They run on any device and compute in float32,
except for ``attend_prefill``, which computes as torch's own attention does.

Shapes: B rows (requests), H KV heads, G query heads per KV head, D head_dim, T tokens per
block, N blocks listed per (row, KV head). A pool is ``[pages, H, T, D]``: block ``b`` of
KV head ``h`` is ``pool[b, h]``, contiguous. ``-1`` in a block list means "no block", so
that lists of different lengths share one tensor. LSE is the natural logarithm.
A pool may be quantised to ``FP8``. What is computed from it is computed from the numbers that its bytes stand for.
"""

from __future__ import annotations

import math

import torch

from sglang_hybrid.blocks import COMPACT_GROUP, compact_bytes

NO_BLOCK = -1
FP8 = torch.float8_e4m3fn  # of a quantised pool: 4 bits of exponent, 3 of mantissa, no infinity
DIGEST_SPREAD = 0.5  # of estimates by digests alone, where blocks are selected: see digest_logits
SKETCH_STEPS = 16  # of a channel's range in a block: four bits tell a place in it
SKETCH_REACH = 126 * math.log(2)  # e to that power, and to its opposite, are numbers of float32


# -- prediction ------------------------------------------------------------------------------


def rms_unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` divided by the root of its mean square over the last dimension: RMSNorm without its gain, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def rotate(heads: torch.Tensor, cos_sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """Rotary embedding: heads ``[n, heads, D]``, cos_sin ``[n, R]``, cosines then sines -> heads' shape and dtype.

    ``neox`` rotates channel c against c + R / 2, otherwise 2c against 2c + 1. Channels from R on stay as they are.
    """
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
    turned, rest = heads.float().split((cos_sin.shape[-1], heads.shape[-1] - cos_sin.shape[-1]), dim=-1)
    if neox:
        first, second = turned.chunk(2, dim=-1)
        pairs = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((pairs, rest), dim=-1).to(heads.dtype)


# -- pools -----------------------------------------------------------------------------------


def to_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as a pool of ``dtype`` stores them.

    FP8 rounds to the nearest number, of two the even one. Beyond the largest, 448, it is the largest, and NaN stays
    NaN: that is torch's cast, but versions of torch differ beyond the largest.
    """
    if dtype != FP8 or x.dtype == FP8:
        return x.to(dtype)
    largest = torch.finfo(FP8).max
    return x.clamp(-largest, largest).to(FP8)


# -- digests ---------------------------------------------------------------------------------


def minmax_digest(keys: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Channel-wise maximum and minimum of the first ``filled`` keys of each page (Quest).

    keys ``[n, H, T, D]``, filled ``[n]`` (at least 1) -> ``[n, H, 2, D]``, maximum first.
    """
    keys = keys.float() if keys.dtype == FP8 else keys  # torch does not compare FP8
    empty = _beyond(filled, keys.shape[2])
    highest = keys.masked_fill(empty, -torch.inf).amax(dim=2)
    lowest = keys.masked_fill(empty, torch.inf).amin(dim=2)
    return torch.stack((highest, lowest), dim=2)


def _beyond(filled: torch.Tensor, block_tokens: int) -> torch.Tensor:
    return (torch.arange(block_tokens, device=filled.device) >= filled[:, None])[:, None, :, None]


def digest_logits(query: torch.Tensor, digests: torch.Tensor, spread: float) -> torch.Tensor:
    """Estimate, for every query head, of the highest ``q . k`` in every block.

    query ``[B, H * G, D]``, digests ``[B, N, H, 2, D]`` (max, min) -> ``[B, H, G, N]``.

    Per channel the keys of a block lie in an interval, and the estimate is
    the query's dot product with the interval's middle, plus ``spread`` times the most that the
    rest of the interval can add. ``spread`` 1 is Quest's upper bound, which assumes that one key
    has the best value of every channel at once; 0 is the middle. Either way it is one dot
    product of depth 2 D.
    """
    rows, _, heads, _, dim = digests.shape
    q = query.float().view(rows, heads, query.shape[1] // heads, dim)
    toward, away = (1 + spread) / 2, (1 - spread) / 2
    up, down = q.clamp(min=0), q.clamp(max=0)
    parts = torch.stack((toward * up + away * down, away * up + toward * down), dim=-2)
    return torch.einsum("bhgkd,bnhkd->bhgn", parts, digests.float())


def sketch_codes(keys: torch.Tensor, digests: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Where each key lies in its block's range, in a few channels, four bits each.

    keys ``[n, H, T, D]``, digests ``[n, H, 2, D]`` (max, min), channels ``[H, C]`` -> bytes ``[n, H, T, C / 2]``, of
    two channels the first in the low bits. The digest holds the range, so that codes need no scale. Digests may be
    compact: codes are places in the range that a reader gets.
    """
    digests = _plain(digests, channels, keys.shape[3])
    where = channels[None, :, None, :].expand(keys.shape[0], -1, -1, -1)
    highest, lowest = digests.float().gather(3, where.expand(-1, -1, 2, -1)).unsqueeze(3).unbind(2)
    chosen = keys.float().gather(3, where.expand(-1, -1, keys.shape[2], -1))
    step = (highest - lowest) / SKETCH_STEPS
    # a channel without a range, or a slot behind the last token with anything in it, gives some code
    codes = ((chosen - lowest) / step).nan_to_num(0.0).clamp(0, SKETCH_STEPS - 1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def sketch_logits(
    query: torch.Tensor, digests: torch.Tensor, codes: torch.Tensor, channels: torch.Tensor, scale: float
) -> torch.Tensor:
    """Estimate, for every query head, of the logarithm of a block's attention mass, in units of ``q . k``.

    query and digests as for ``digest_logits``, (max, min), or compact ones ``[B, N, H, bytes]``; codes
    ``[B, N, H, ...]`` of ``channels`` ``[H, C]``, as ``sketch_codes`` makes them.
    In those channels each token has a logit of its own: a code stands for the middle of its part of the range.
    All tokens of a block have the middle of the range in the others. The block gets the log-sum-exp of its tokens,
    which is told from e^-87 to e^87 times the mass of a token at the middle: what float32 holds.
    """
    digests = _plain(digests, channels, query.shape[2])
    rows, blocks, heads, _, dim = digests.shape
    q = query.float().view(rows, heads, query.shape[1] // heads, dim)
    highest, lowest = digests.float().unbind(3)
    step = (highest - lowest).gather(3, channels.expand(rows, blocks, -1, -1)) / SKETCH_STEPS  # [B, N, H, C]
    asked = q.gather(3, channels[None, :, None, :].expand(rows, -1, q.shape[2], -1)) * scale
    # the range goes into the query, once for a block and not for each of its tokens
    weights = step[..., None, :] * asked[:, None]  # [B, N, H, G, C]
    # in the order of bits: torch is faster then
    weights = torch.cat((weights[..., ::2], weights[..., 1::2]), dim=-1)
    places = torch.cat((codes & 15, codes >> 4), dim=-1).float()
    tokens = weights @ places.transpose(3, 4)  # [B, N, H, G, T]
    # a code of c stands for (c - 7.5) steps from the middle of the range
    mass = tokens.logsumexp(dim=4) - (SKETCH_STEPS - 1) / 2 * weights.sum(dim=4)
    mass = mass.clamp(-SKETCH_REACH, SKETCH_REACH)
    middle = torch.einsum("bhgd,bnhd->bhgn", q, (highest + lowest) / 2)
    estimates: torch.Tensor = mass.permute(0, 2, 3, 1) / scale + middle
    return estimates


# -- compact digests -------------------------------------------------------------------------


def compact_digest(digests: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """What sketches need of min/max digests, in fewer bytes: ``[n, H, compact_bytes]`` of uint8.

    digests ``[n, H, 2, D]`` (max, min), channels ``[H, C]`` of the sketch; D a multiple of 16, C of 8. One block has

        middles   [D]       of the channels' ranges: 128 + a whole number from -127 to 127, times the group's scale
        steps     [C]       float16, a sixteenth of the range of each channel of the sketch; of eight channels the
                            order is 0, 4, 1, 5, 2, 6, 3, 7, in which kernels use them
        scales    [D / 16]  float16, of 16 channels each

    and zeros behind. Groups are that small because keys may have a few channels that are much larger than all others.
    What is not finite makes a group's scale so that its middles are NaN.
    """
    highest, lowest = digests.float().unbind(2)
    middle = ((highest + lowest) / 2).unflatten(2, (-1, COMPACT_GROUP))
    scale = (middle.abs().amax(dim=3) / 127).half()
    unit = scale.float().unsqueeze(3)
    levels = torch.where((unit > 0) & (unit < torch.inf), middle / unit, 0.0).round().clamp(-127, 127) + 128
    step = ((highest - lowest) / SKETCH_STEPS).half().gather(2, channels.expand(len(digests), -1, -1))
    step = step.unflatten(2, (-1, 2, 4)).transpose(3, 4).flatten(2)
    parts = (levels.flatten(2).to(torch.uint8), step.contiguous().view(torch.uint8), scale.view(torch.uint8))
    compact = torch.cat(parts, dim=2)
    room = compact_bytes(digests.shape[3], channels.shape[1]) - compact.shape[2]
    return torch.nn.functional.pad(compact, (0, room))


def expand_digest(compact: torch.Tensor, channels: torch.Tensor, dim: int) -> torch.Tensor:
    """The digests ``[..., H, 2, dim]`` that ``compact`` ``[..., H, bytes]`` stands for, in float32.

    Channels that are not in the sketch have no range: their maximum and minimum are the middle.
    """
    count = channels.shape[1]
    levels, step, scale, _ = compact.split(
        (dim, 2 * count, 2 * dim // COMPACT_GROUP, compact.shape[-1] - dim - 2 * count - 2 * dim // COMPACT_GROUP),
        dim=-1,
    )
    unit = scale.contiguous().view(torch.float16).float().unsqueeze(-1)
    middle = ((levels.float() - 128).unflatten(-1, (-1, COMPACT_GROUP)) * unit).flatten(-2)
    step = step.contiguous().view(torch.float16).float().unflatten(-1, (-1, 4, 2)).transpose(-1, -2).flatten(-3)
    radius = torch.zeros_like(middle).scatter_(-1, channels.expand_as(step), step * (SKETCH_STEPS / 2))
    return torch.stack((middle + radius, middle - radius), dim=-2)


def _plain(digests: torch.Tensor, channels: torch.Tensor, dim: int) -> torch.Tensor:
    return expand_digest(digests, channels, dim) if digests.dtype == torch.uint8 else digests


def lse_shift(
    estimates: torch.Tensor, estimates_ahead: torch.Tensor, listed: torch.Tensor, scale: float
) -> torch.Tensor:
    """What to add to an LSE that was computed ahead of time, with a predicted query: ``[B, H * G]``.

    estimates ``[B, H, G, N]`` of the listed blocks' attention mass by the real query and by the predicted one, as
    ``sketch_logits`` gives them; listed ``[B, H, N]``, whether there is a block. A predicted query that is a little
    too long or too short changes all logits of a list alike, and with them the weight of the list against all others.
    Estimates show by how much: their own error is the same on both sides. An empty list shifts by 0.
    """
    absent = ~listed[:, :, None, :]
    real, ahead = ((e * scale).masked_fill(absent, -torch.inf).logsumexp(dim=3) for e in (estimates, estimates_ahead))
    return (real - ahead).nan_to_num(0.0, posinf=0.0, neginf=0.0).flatten(1)


def without_tail(logits: torch.Tensor, block_counts: torch.Tensor) -> torch.Tensor:
    """Estimates ``[B, H, G, N]`` in which the tail, the last of each row's blocks, has nothing: shares are those of
    all other blocks.

    The tail is always attended. What is known of it while it is being filled is partly another request's: slots that
    hold no token yet, and all of a page whose first token is still to be written.
    """
    is_tail = torch.arange(logits.shape[3], device=logits.device) == block_counts[:, None] - 1
    return logits.masked_fill(is_tail[:, None, None, :], -torch.inf)


def block_scores(logits: torch.Tensor, block_counts: torch.Tensor, scale: float) -> torch.Tensor:
    """Score of every block for every KV head: the logarithm of its estimated share of attention.

    logits ``[B, H, G, N]`` of ``digest_logits``, block_counts ``[B]`` -> ``[B, H, N]``.

    Each query head's estimates become shares of its attention, by softmax over the row's blocks,
    and the G heads that read the same KV head add up. So a head that cares about few blocks
    gets them, whatever the size of its logits; a maximum over the logits would not do that.
    Blocks beyond a row's end get ``-inf``.
    """
    absent = torch.arange(logits.shape[3], device=logits.device) >= block_counts[:, None]
    estimates = _estimates(logits, scale).masked_fill(absent[:, None, None, :], -torch.inf)
    shares = estimates.log_softmax(dim=3).logsumexp(dim=2)
    lowest = torch.finfo(logits.dtype).min
    return shares.clamp(min=lowest).masked_fill(absent[:, None, :], -torch.inf)


def _estimates(logits: torch.Tensor, scale: float) -> torch.Tensor:
    # A page that somebody filled with NaN or infinity (an aborted transfer) must not win, nor poison the others; it
    # is still a block of its row, better than the -inf of "no block".
    lowest = torch.finfo(logits.dtype).min
    return (logits * scale).nan_to_num(nan=lowest, posinf=lowest, neginf=lowest)


# -- what is not attended --------------------------------------------------------------------


def near_bias(
    logits: torch.Tensor, attended: torch.Tensor, block_counts: torch.Tensor, scale: float, sink: int, recent: int
) -> torch.Tensor:
    """What to add to the logits of blocks that are always in, so that the selected ones stand for all others.

    logits ``[B, H, G, N]`` as for ``block_scores``, attended ``[B, H, N]`` of bool -> ``[B, H, G]``, at most 0: the
    logarithm of what attended blocks have of the estimated attention of all that could have been selected. Nobody
    attends to the others, so a head that looks everywhere would take a few blocks for the context, and its first and
    newest tokens would weigh too much. 0 where everything is attended, or nothing can be told.
    """
    position = torch.arange(logits.shape[3], device=logits.device)
    candidates = ((position >= sink) & (block_counts[:, None] - 1 - position > recent))[:, None, :]
    estimates = _estimates(logits, scale)
    of_attended, of_all = (
        estimates.masked_fill(~part[:, :, None, :], -torch.inf).logsumexp(dim=3)
        for part in (candidates & attended, candidates)
    )
    return (of_attended - of_all).nan_to_num(0.0, posinf=0.0, neginf=0.0).clamp(max=0.0)


# -- selection -------------------------------------------------------------------------------


def select_blocks(scores: torch.Tensor, block_counts: torch.Tensor, limit: int, sink: int, recent: int) -> torch.Tensor:
    """The ``limit`` best blocks of each (row, KV head), as positions in the row's sequence.

    scores ``[B, H, N]``; block_counts ``[B]`` blocks of each row, the last one being the tail
    (the block that is being filled) -> positions ``[B, H, min(limit, N)]``, ascending, then
    ``NO_BLOCK``. The tail, the ``recent`` blocks before it and the first ``sink`` blocks are
    always in; ``limit`` must hold them.
    """
    position = torch.arange(scores.shape[2], device=scores.device)
    age = block_counts[:, None] - 1 - position  # 0 is the tail, negative is beyond the end
    forced = (age <= recent) | (position < sink)
    ranked = scores.masked_fill(forced[:, None, :], torch.inf).masked_fill((age < 0)[:, None, :], -torch.inf)

    limit = min(limit, scores.shape[2])
    chosen = ranked.topk(limit, dim=2).indices
    absent = chosen >= block_counts[:, None, None]
    # absent ones sort behind every real position
    chosen = chosen.masked_fill(absent, torch.iinfo(chosen.dtype).max).sort(dim=2).values
    return chosen.masked_fill(chosen >= block_counts[:, None, None], NO_BLOCK)


def blocks_worth(
    scores: torch.Tensor,
    resident: torch.Tensor,
    block_counts: torch.Tensor,
    least: float,
    limit: int,
    sink: int,
    recent: int,
) -> torch.Tensor:
    """Blocks that score ``least`` or more and are not here: neither resident nor always in; of too many the best.

    scores and ``resident`` (bool) ``[B, H, N]`` -> positions ``[B, H, min(limit, N)]``, ascending, then ``NO_BLOCK``.
    Unlike ``select_blocks`` it takes from each list what is worth it, however many others are better.
    """
    position = torch.arange(scores.shape[2], device=scores.device)
    age = block_counts[:, None] - 1 - position
    here = ((age <= recent) | (position < sink))[:, None, :] | resident  # what is beyond a row's end, too
    best = scores.masked_fill(here | (scores < least), -torch.inf).topk(min(limit, scores.shape[2]), dim=2)
    absent = torch.iinfo(best.indices.dtype).max
    positions = best.indices.masked_fill(best.values == -torch.inf, absent).sort(dim=2).values
    return positions.masked_fill(positions == absent, NO_BLOCK)


def is_listed(positions: torch.Tensor, blocks: int) -> torch.Tensor:
    """Which of a row's ``blocks`` first positions are in the list: ``[B, H, N]`` -> ``[B, H, blocks]``."""
    # one more place takes NO_BLOCK, and whatever lies beyond
    place = positions.masked_fill((positions < 0) | (positions >= blocks), blocks)
    listed = torch.zeros(*positions.shape[:2], blocks + 1, dtype=torch.bool, device=positions.device)
    return listed.scatter_(2, place, True)[..., :blocks]


def is_forced(positions: torch.Tensor, block_counts: torch.Tensor, sink: int, recent: int) -> torch.Tensor:
    """Which of the selected positions ``[B, H, N]`` are tail, recent or sink blocks."""
    age = block_counts[:, None, None] - 1 - positions
    return (positions != NO_BLOCK) & ((age <= recent) | (positions < sink))


def split(positions: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a block list in two by a mask of the same shape; each part keeps its order and shape."""
    return positions.masked_fill(~first, NO_BLOCK), positions.masked_fill(first, NO_BLOCK)


def block_ids(positions: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """Positions ``[B, H, N]`` to pages, through each row's page table ``[B, pages]``."""
    table = page_table[:, None, :].expand(-1, positions.shape[1], -1)
    pages = table.gather(2, positions.clamp(min=0))
    return pages.masked_fill(positions == NO_BLOCK, NO_BLOCK)


def block_fill(positions: torch.Tensor, lengths: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Tokens in each listed block: ``block_tokens``, fewer in the tail, 0 where there is none."""
    fill = (lengths[:, None, None] - positions * block_tokens).clamp(0, block_tokens)
    return fill.masked_fill(positions == NO_BLOCK, 0)


# -- attention -------------------------------------------------------------------------------


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The listed blocks of each (row, KV head): ids ``[B, H, N]`` -> ``[B, H, N, T, D]`` on ``device``.

    The pool may be in host memory and ``device`` a GPU. ``NO_BLOCK`` gives some block; its
    tokens count as none.
    """
    heads = torch.arange(pool.shape[1], device=pool.device)[None, :, None]
    blocks = ids.clamp(min=0).to(pool.device) * pool.shape[1] + heads
    # block by block, which torch copies faster than what two indices select
    chosen = pool.flatten(0, 1).index_select(0, blocks.flatten())
    return chosen.view(*ids.shape, *pool.shape[2:]).to(device or ids.device)


def is_counted(fill: torch.Tensor, block_tokens: int, masks: torch.Tensor | None = None) -> torch.Tensor:
    """Which tokens of listed blocks are attended: fill ``[B, H, N]`` -> ``[B, H, N, block_tokens]``, bool.

    The first ``fill`` tokens of a block; with ``masks`` (int32, ``[B, H, N]``) those of them whose bit is set, bit t
    for token t. A list of blocks with masks is a list of tokens that is addressed by block.
    """
    token = torch.arange(block_tokens, device=fill.device)
    counted = token < fill[..., None]
    return counted if masks is None else counted & (masks.to(fill.device)[..., None] >> token & 1).bool()


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
    """Attention of one token per row over a list of blocks.

    query ``[B, H * G, D]``; keys, values: pools; ids and fill ``[B, H, N]``, ``fill`` tokens of
    block ``ids`` -> output ``[B, H * G, Dv]`` and LSE ``[B, H * G]``, both float32. A row
    without tokens gives output 0 and LSE ``-inf``: merging it changes nothing. ``bias``
    ``[B, H, G, N]`` is added to the logits of all tokens of a block. ``masks`` ``[B, H, N]`` say
    which tokens of a block count: see ``is_counted``.
    """
    rows, heads, listed = ids.shape
    k = gather_blocks(keys, ids, query.device).float().flatten(2, 3)  # [B, H, N * T, D]
    v = gather_blocks(values, ids, query.device).float().flatten(2, 3)
    counted = is_counted(fill, keys.shape[2], masks).reshape(rows, heads, 1, listed * keys.shape[2])

    q = query.float().view(rows, heads, -1, query.shape[-1])
    logits = q @ k.transpose(2, 3) * scale
    if bias is not None:
        logits = logits + bias.repeat_interleave(keys.shape[2], dim=3)
    logits = logits.masked_fill(~counted, -torch.inf)
    lse = logits.logsumexp(dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    # a weight of 0 does not silence NaN or infinity in a slot that holds no token. What was gathered is a copy.
    out = weights @ v.masked_fill_(~counted.squeeze(2)[..., None], 0.0)
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint token sets, from the attention over each.

    outputs ``[..., Dv]``, LSEs ``[...]`` in natural logarithm. A side with LSE ``-inf`` is
    empty and leaves the other side's bits as they are; two empty sides give 0 and ``-inf``.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (torch.exp(side - lse)[..., None] for side in (lse_a, lse_b))  # NaN when both are -inf
    empty_a, empty_b = ((side == -torch.inf)[..., None] for side in (lse_a, lse_b))
    # chosen, not computed, where a side is empty: its output may be anything
    out = torch.where(empty_a, out_b, torch.where(empty_b, out_a, out_a * weight_a + out_b * weight_b))
    return out.masked_fill(empty_a & empty_b, 0.0), lse


def attend_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, tile: int = 512
) -> torch.Tensor:
    """Causal attention of one row's last tokens over all its tokens so far.

    query ``[q, H * G, D]``: the last q of the row's n tokens; key, value ``[H, n, D]``, which are
    computed with in the query's dtype -> ``[q, H * G, Dv]`` in that dtype. Works in tiles of
    queries, so that the mask of a long context stays small and no tile reads keys beyond its own
    end.
    """
    key, value = key.to(query.dtype), value.to(query.dtype)
    total, new = key.shape[1], query.shape[0]
    out = query.new_empty(new, query.shape[1], value.shape[2])
    group = query.shape[1] != key.shape[0]
    for first in range(0, new, tile):
        last = min(first + tile, new)
        end = total - new + last
        position = torch.arange(end - (last - first), end, device=query.device)
        visible = torch.arange(end, device=query.device) <= position[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[first:last].transpose(0, 1).unsqueeze(0),
            key[:, :end].unsqueeze(0),
            value[:, :end].unsqueeze(0),
            attn_mask=visible,
            scale=scale,
            enable_gqa=group,
        )
        out[first:last] = attended.squeeze(0).transpose(0, 1)
    return out
