"""The operations of hybrid attention in plain torch: the specification of their fast versions.

A fast version has the same name and signature, and is tested against the function here. The functions here are tested
against softmax attention. They run on any device and compute in float32, except for ``attend_prefill``, which computes
as torch's own attention does.

Shapes: B rows (requests), H KV heads, G query heads per KV head, D head_dim, Dv dim of values, T tokens per block, N
blocks listed per (row, KV head). A pool is ``[pages, H, T, D]``: block ``b`` of KV head ``h`` is ``pool[b, h]``,
contiguous. ``-1`` (``NO_BLOCK``) in a block list means "no block", so that lists of different lengths share one tensor.
LSE is the log-sum-exp of logits, a natural logarithm. A pool may be quantised to ``FP8``: then all results are computed
from the numbers that its bytes represent.
"""

from __future__ import annotations

import math

import torch

from sglang_hybrid.blocks import COMPACT_GROUP, compact_bytes

NO_BLOCK = -1
FP8 = torch.float8_e4m3fn  # dtype of a quantised pool: 4 bits of exponent, 3 of mantissa, no infinity
CODE_MOST = 127  # largest code of a number in slots of 8 bits
LEAST_FACTOR, MOST_FACTOR = 2.0**-14, 4.0  # of a token's codes
CODE_ZERO = 128  # the byte that stands for 0 there
DIGEST_SPREAD = 0.5  # ``spread`` of digest_logits where blocks are selected by digests alone
SKETCH_STEPS = 16  # steps that a channel's range in a block is divided into: a code of four bits names one
SKETCH_REACH = 126 * math.log(2)  # exp(SKETCH_REACH) and exp(-SKETCH_REACH) are in the range of float32


# -- prediction ------------------------------------------------------------------------------


def rms_unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide ``x`` by the root of its mean square over the last dimension: RMSNorm without its gain, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def rotate(heads: torch.Tensor, cos_sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """Apply the rotary embedding: heads ``[n, heads, D]``, cos_sin ``[n, R]`` -> the shape and dtype of ``heads``.

    ``cos_sin`` holds cosines, then sines. With ``neox``, channel c is rotated with c + R / 2, otherwise 2c with 2c + 1.
    Channels from R on do not change.
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
    """Convert keys or values to the ``dtype`` of a pool, as the pool stores them.

    Conversion to FP8 rounds to the nearest number, and to the even one of two equally near. Numbers beyond the largest,
    448, become the largest; NaN stays NaN. Torch's cast does the same, but its versions differ beyond the largest.
    """
    if dtype != FP8 or x.dtype == FP8:
        return x.to(dtype)
    largest = torch.finfo(FP8).max
    return x.clamp(-largest, largest).to(FP8)


def to_codes(x: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert keys or values ``[..., H, T, D]`` to the codes of slots, by the ``steps`` ``[H, D]`` of their channels.

    A number is its code times its channel's step times the factor of its token ``[..., H, T]`` (float16), by which the
    token's largest code is 127. Codes are whole numbers from -127 to 127, stored as 128 more (uint8). A factor is at
    most ``MOST_FACTOR``: numbers far beyond a channel's range get its last code, and NaN gets the lowest.
    """
    levels = x.float() * steps.reciprocal()[:, None]
    largest = levels.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=-1)
    exact = (largest / CODE_MOST).clamp(LEAST_FACTOR, MOST_FACTOR)
    # rounded up to float16, which has 13 bits less: a code of a smaller factor would be beyond 127
    factors = ((exact.view(torch.int32) + 0x1FFF) & ~0x1FFF).view(torch.float32).half()
    codes = (levels * factors.float().reciprocal()[..., None]).nan_to_num(nan=-CODE_MOST)
    return (codes.round().clamp(-CODE_MOST, CODE_MOST) + CODE_ZERO).to(torch.uint8), factors


def with_reciprocals(steps: torch.Tensor) -> torch.Tensor:
    """Return ``steps`` ``[2, H, D]`` of keys and values, and their reciprocals: ``[4, H, D]``, as CUDA kernels need."""
    return torch.cat((steps, steps.reciprocal()))


def of_codes(codes: torch.Tensor, steps: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers that ``codes`` ``[..., H, T, D]`` stand for, with ``factors`` ``[..., H, T]``."""
    return (codes.float() - CODE_ZERO) * steps[:, None] * factors.float()[..., None]


# -- digests ---------------------------------------------------------------------------------


def minmax_digest(keys: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Return the channel-wise maximum and minimum of the first ``filled`` keys of each page (Quest).

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
    """Estimate the highest ``q . k`` in every block, for every query head.

    query ``[B, H * G, D]``, digests ``[B, N, H, 2, D]`` (max, min) -> ``[B, H, G, N]``.

    In each channel the keys of a block lie in an interval. The estimate is the query's dot product with the middles of
    the intervals, plus ``spread`` times the most that the rest of the intervals can add. ``spread`` 1 is Quest's upper
    bound, which assumes that one key has the best value of every channel at once; ``spread`` 0 is the middle. For every
    ``spread`` the estimate is one dot product of depth 2 D.
    """
    rows, _, heads, _, dim = digests.shape
    q = query.float().view(rows, heads, query.shape[1] // heads, dim)
    toward, away = (1 + spread) / 2, (1 - spread) / 2
    up, down = q.clamp(min=0), q.clamp(max=0)
    parts = torch.stack((toward * up + away * down, away * up + toward * down), dim=-2)
    return torch.einsum("bhgkd,bnhkd->bhgn", parts, digests.float())


def sketch_codes(keys: torch.Tensor, digests: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Encode the position of each key in its block's range, with four bits for each channel of the sketch.

    keys ``[n, H, T, D]``, digests ``[n, H, 2, D]`` (max, min), channels ``[H, C]`` -> bytes ``[n, H, T, C / 2]``. The
    first of two channels in a byte is in the low bits. The digest holds the range, so that codes need no scale. With
    compact digests, codes are positions in the rounded range that a reader of compact digests gets.
    """
    digests = _plain(digests, channels, keys.shape[3])
    where = channels[None, :, None, :].expand(keys.shape[0], -1, -1, -1)
    highest, lowest = digests.float().gather(3, where.expand(-1, -1, 2, -1)).unsqueeze(3).unbind(2)
    chosen = keys.float().gather(3, where.expand(-1, -1, keys.shape[2], -1))
    step = (highest - lowest) / SKETCH_STEPS
    # a channel without a range, or a slot behind the last token, whatever is in it, gets an arbitrary code
    codes = ((chosen - lowest) / step).nan_to_num(0.0).clamp(0, SKETCH_STEPS - 1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def sketch_logits(
    query: torch.Tensor, digests: torch.Tensor, codes: torch.Tensor, channels: torch.Tensor, scale: float
) -> torch.Tensor:
    """Estimate the logarithm of each block's attention mass, in units of ``q . k``, as ``[B, H, G, N]``.

    query as for ``digest_logits``; digests as for ``digest_logits``, or compact ``[B, N, H, bytes]``; codes
    ``[B, N, H, T, C / 2]`` of ``channels`` ``[H, C]``, from ``sketch_codes``.
    In the channels of the sketch each token has a value of its own: the middle of the step that its code names. In all
    other channels each token has the middle of the block's range. The estimate is the log-sum-exp over the block's
    tokens, limited to e^-87 to e^87 times the mass of a token at the middle, which is the range of float32.
    """
    digests = _plain(digests, channels, query.shape[2])
    rows, blocks, heads, _, dim = digests.shape
    q = query.float().view(rows, heads, query.shape[1] // heads, dim)
    highest, lowest = digests.float().unbind(3)
    step = (highest - lowest).gather(3, channels.expand(rows, blocks, -1, -1)) / SKETCH_STEPS  # [B, N, H, C]
    asked = q.gather(3, channels[None, :, None, :].expand(rows, -1, q.shape[2], -1)) * scale
    # the query is multiplied by the range once per block, not once per token
    weights = step[..., None, :] * asked[:, None]  # [B, N, H, G, C]
    # channels of low bits first, then channels of high bits: torch is faster in this order
    weights = torch.cat((weights[..., ::2], weights[..., 1::2]), dim=-1)
    places = torch.cat((codes & 15, codes >> 4), dim=-1).float()
    tokens = weights @ places.transpose(3, 4)  # [B, N, H, G, T]
    # code c means (c - 7.5) steps from the middle of the range
    mass = tokens.logsumexp(dim=4) - (SKETCH_STEPS - 1) / 2 * weights.sum(dim=4)
    mass = mass.clamp(-SKETCH_REACH, SKETCH_REACH)
    middle = torch.einsum("bhgd,bnhd->bhgn", q, (highest + lowest) / 2)
    estimates: torch.Tensor = mass.permute(0, 2, 3, 1) / scale + middle
    return estimates


# -- compact digests -------------------------------------------------------------------------


def compact_digest(digests: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Pack the part of min/max digests that sketches need into fewer bytes: ``[n, H, compact_bytes]`` of uint8.

    digests ``[n, H, 2, D]`` (max, min), channels ``[H, C]`` of the sketch; D is a multiple of 16, C of 8. One block has

        middles   [D]       of the channels' ranges: 128 + a whole number from -127 to 127, times the group's scale
        steps     [C]       float16, a sixteenth of the range of each channel of the sketch; of eight channels the
                            order is 0, 4, 1, 5, 2, 6, 3, 7, in which kernels use them
        scales    [D / 16]  float16, of 16 channels each

    and zeros behind. Groups are this small because keys may have a few channels that are much larger than all others.
    A channel that is not finite sets its group's scale so that all middles of the group are NaN.
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
    """Unpack compact digests ``[..., H, bytes]`` to digests ``[..., H, 2, dim]`` (max, min) in float32.

    Channels that are not in the sketch have no range: their maximum and minimum both are the middle.
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
    """Return the correction to add to an LSE that was computed with a predicted query: ``[B, H * G]``.

    estimates and estimates_ahead ``[B, H, G, N]`` are the listed blocks' attention mass by the real and by the
    predicted query, as ``sketch_logits`` returns it; listed ``[B, H, N]`` is True where the list has a block. A
    predicted query that is a little too long or too short changes all logits of a list alike, and so the weight of the
    list against all other blocks. The difference of the estimates shows by how much, because their own error is the
    same on both sides. The correction of an empty list is 0.
    """
    absent = ~listed[:, :, None, :]
    real, ahead = ((e * scale).masked_fill(absent, -torch.inf).logsumexp(dim=3) for e in (estimates, estimates_ahead))
    return (real - ahead).nan_to_num(0.0, posinf=0.0, neginf=0.0).flatten(1)


def without_tail(logits: torch.Tensor, block_counts: torch.Tensor) -> torch.Tensor:
    """Set the estimates ``[B, H, G, N]`` of each row's tail to ``-inf``, so that shares are those of the other blocks.

    The tail, the last block of a row, is always attended to. While it is being filled, its digest is partly another
    request's: slots without a token hold old data, as does a whole page whose first token is still to be written.
    """
    is_tail = torch.arange(logits.shape[3], device=logits.device) == block_counts[:, None] - 1
    return logits.masked_fill(is_tail[:, None, None, :], -torch.inf)


def block_scores(logits: torch.Tensor, block_counts: torch.Tensor, scale: float) -> torch.Tensor:
    """Score every block for every KV head by the logarithm of its estimated share of attention.

    logits ``[B, H, G, N]`` of ``digest_logits`` or ``sketch_logits``, block_counts ``[B]`` -> ``[B, H, N]``.

    A softmax over the row's blocks turns each query head's estimates into shares of its attention. The shares of the G
    query heads that read the same KV head are summed. So a query head that attends to few blocks gets these blocks,
    whatever the size of its logits; a maximum over the logits would not ensure this. Blocks beyond a row's end get
    ``-inf``.
    """
    absent = torch.arange(logits.shape[3], device=logits.device) >= block_counts[:, None]
    estimates = _estimates(logits, scale).masked_fill(absent[:, None, None, :], -torch.inf)
    shares = estimates.log_softmax(dim=3).logsumexp(dim=2)
    lowest = torch.finfo(logits.dtype).min
    return shares.clamp(min=lowest).masked_fill(absent[:, None, :], -torch.inf)


def _estimates(logits: torch.Tensor, scale: float) -> torch.Tensor:
    # A page that holds NaN or infinity (after an aborted transfer) must not win, nor make the estimates of other pages
    # NaN. The page is still a block of its row, so it scores better than the -inf of "no block".
    lowest = torch.finfo(logits.dtype).min
    return (logits * scale).nan_to_num(nan=lowest, posinf=lowest, neginf=lowest)


# -- what is not attended --------------------------------------------------------------------


def near_bias(
    logits: torch.Tensor, attended: torch.Tensor, block_counts: torch.Tensor, scale: float, sink: int, recent: int
) -> torch.Tensor:
    """Return the bias to add to the logits of sink, recent and tail blocks, which makes up for blocks left out.

    logits ``[B, H, G, N]`` as for ``block_scores``, attended ``[B, H, N]`` of bool -> ``[B, H, G]``, at most 0. The
    candidates are all blocks but sink, recent and tail. The bias is the logarithm of the attended candidates' share in
    the estimated attention of all candidates. Blocks left out get no attention. Without the bias, in a head that
    attends everywhere, a few selected blocks would stand for the whole context, and the first and newest tokens would
    weigh too much. The bias is 0 if all candidates are attended to, or none.
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
    """Select the ``limit`` best blocks of each (row, KV head), as positions in the row's sequence.

    scores ``[B, H, N]``; block_counts ``[B]``, the blocks of each row with the tail (the block being filled)
    -> positions ``[B, H, min(limit, N)]``, ascending, then ``NO_BLOCK``. The tail, the ``recent`` blocks before it and
    the first ``sink`` blocks are always selected; ``limit`` must be large enough for them.
    """
    position = torch.arange(scores.shape[2], device=scores.device)
    age = block_counts[:, None] - 1 - position  # 0: the tail; negative: beyond the row's end
    forced = (age <= recent) | (position < sink)
    ranked = scores.masked_fill(forced[:, None, :], torch.inf).masked_fill((age < 0)[:, None, :], -torch.inf)

    limit = min(limit, scores.shape[2])
    chosen = ranked.topk(limit, dim=2).indices
    absent = chosen >= block_counts[:, None, None]
    # absent blocks sort behind every real position
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
    """Select blocks with a score of at least ``least`` that are neither resident nor sink, recent or tail blocks.

    scores and ``resident`` (bool) ``[B, H, N]`` -> positions ``[B, H, min(limit, N)]``, ascending, then ``NO_BLOCK``.
    Of more than ``limit`` such blocks the best are selected. Unlike in ``select_blocks``, it does not matter how many
    other blocks of the list have better scores.
    """
    position = torch.arange(scores.shape[2], device=scores.device)
    age = block_counts[:, None] - 1 - position
    here = ((age <= recent) | (position < sink))[:, None, :] | resident  # also beyond a row's end
    best = scores.masked_fill(here | (scores < least), -torch.inf).topk(min(limit, scores.shape[2]), dim=2)
    absent = torch.iinfo(best.indices.dtype).max
    positions = best.indices.masked_fill(best.values == -torch.inf, absent).sort(dim=2).values
    return positions.masked_fill(positions == absent, NO_BLOCK)


def is_listed(positions: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return which of a row's first ``blocks`` positions are listed: ``[B, H, N]`` -> bool ``[B, H, blocks]``."""
    # NO_BLOCK and positions beyond ``blocks`` go to one more place at the end, which is cut off
    place = positions.masked_fill((positions < 0) | (positions >= blocks), blocks)
    listed = torch.zeros(*positions.shape[:2], blocks + 1, dtype=torch.bool, device=positions.device)
    return listed.scatter_(2, place, True)[..., :blocks]


def is_forced(positions: torch.Tensor, block_counts: torch.Tensor, sink: int, recent: int) -> torch.Tensor:
    """Return which of the selected positions ``[B, H, N]`` are tail, recent or sink blocks, as bool."""
    age = block_counts[:, None, None] - 1 - positions
    return (positions != NO_BLOCK) & ((age <= recent) | (positions < sink))


def split(positions: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a block list into the blocks where ``first`` is True, and the others. Both keep the order and shape."""
    return positions.masked_fill(~first, NO_BLOCK), positions.masked_fill(first, NO_BLOCK)


def block_ids(positions: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """Convert positions ``[B, H, N]`` to pages by each row's page table ``[B, pages]``. ``NO_BLOCK`` stays."""
    table = page_table[:, None, :].expand(-1, positions.shape[1], -1)
    pages = table.gather(2, positions.clamp(min=0))
    return pages.masked_fill(positions == NO_BLOCK, NO_BLOCK)


def block_fill(positions: torch.Tensor, lengths: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Return the tokens in each listed block: ``block_tokens``, fewer in the tail, 0 for ``NO_BLOCK``."""
    fill = (lengths[:, None, None] - positions * block_tokens).clamp(0, block_tokens)
    return fill.masked_fill(positions == NO_BLOCK, 0)


# -- attention -------------------------------------------------------------------------------


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Copy the listed blocks of each (row, KV head): ids ``[B, H, N]`` -> ``[B, H, N, T, D]`` on ``device``.

    The pool may be in host memory and ``device`` a GPU; the default is the device of ``ids``. ``NO_BLOCK`` gives an
    arbitrary block, whose tokens must not be counted.
    """
    heads = torch.arange(pool.shape[1], device=pool.device)[None, :, None]
    blocks = ids.clamp(min=0).to(pool.device) * pool.shape[1] + heads
    # one index over whole blocks: torch copies faster than with two indices
    chosen = pool.flatten(0, 1).index_select(0, blocks.flatten())
    return chosen.view(*ids.shape, *pool.shape[2:]).to(device or ids.device)


def is_counted(fill: torch.Tensor, block_tokens: int, masks: torch.Tensor | None = None) -> torch.Tensor:
    """Return which tokens of listed blocks are attended to: fill ``[B, H, N]`` -> bool ``[B, H, N, block_tokens]``.

    These are the first ``fill`` tokens of a block; with ``masks`` (int32, ``[B, H, N]``) only those whose bit is set,
    bit t for token t. So a list of blocks with masks is a list of tokens that is addressed by block.
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
    """Compute the attention of one token per row over a list of blocks.

    query ``[B, H * G, D]``; keys, values: pools; ids and fill ``[B, H, N]``: the first ``fill`` tokens of block ``ids``
    -> output ``[B, H * G, Dv]`` and LSE ``[B, H * G]``, both float32. A list without tokens gives output 0 and LSE
    ``-inf``: merging such a result changes nothing. ``bias`` ``[B, H, G, N]`` is added to the logits of all tokens of a
    block. ``masks`` ``[B, H, N]`` select tokens of a block, see ``is_counted``.
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
    # A weight of 0 does not silence NaN or infinity in a slot that holds no token. ``v`` is a copy: it may be changed.
    out = weights @ v.masked_fill_(~counted.squeeze(2)[..., None], 0.0)
    return out.flatten(1, 2), lse.flatten(1, 2)


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention over two disjoint token sets into the attention over their union: output and LSE.

    outputs ``[..., Dv]``, LSEs ``[...]`` in natural logarithm. A side with LSE ``-inf`` is empty and leaves the other
    side's bits as they are; two empty sides give 0 and ``-inf``.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (torch.exp(side - lse)[..., None] for side in (lse_a, lse_b))  # NaN when both are -inf
    empty_a, empty_b = ((side == -torch.inf)[..., None] for side in (lse_a, lse_b))
    # where a side is empty, the other side is taken unchanged: the output of an empty side may be anything
    out = torch.where(empty_a, out_b, torch.where(empty_b, out_a, out_a * weight_a + out_b * weight_b))
    return out.masked_fill(empty_a & empty_b, 0.0), lse


def attend_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, tile: int = 512
) -> torch.Tensor:
    """Compute the causal attention of one row's last tokens over all tokens of the row so far.

    query ``[q, H * G, D]``: the last q of the row's n tokens; key ``[H, n, D]``, value ``[H, n, Dv]``, which are
    converted to the query's dtype -> ``[q, H * G, Dv]`` in the same dtype. Queries are processed in tiles of ``tile``,
    so that the mask of a long context stays small and no tile reads keys beyond its own end.
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
