"""Random layers, rows and slots for the tests of digests, scores and selection on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from cuda_cases import BLOCK_TOKENS, DEVICE, seeded

from sglang_hybrid.core import LayerCache
from sglang_hybrid.memory.sketches import LayerSketch
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.digests import LayerDigests, SlotTable
from sglang_hybrid.ops.cuda.step import Step


def later(work: Callable[[], object]) -> None:
    """Run ``work`` in the order of the current stream. On a GPU torch ensures the order, so call ``work`` at once."""
    work()


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    group: int
    dim: int
    channels: int
    max_blocks: int
    dtype: torch.dtype = torch.bfloat16
    compact: bool = False  # whether digests are compact

    @property
    def rows(self) -> int:
        return self.batch + 2

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


@dataclass(frozen=True)
class LayerCase:
    """Keys of random pages with their digests and sketches, and the rows of a step."""

    shape: Shape
    keys: torch.Tensor  # [pages, H, 32, D]
    digests: LayerDigests
    step: Step
    query: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        return -(-self.step.lengths.long() // BLOCK_TOKENS)

    def cache(self) -> LayerCache:
        codes, channels = self.digests.codes, self.digests.channels
        sketch = None
        if codes is not None and channels is not None:
            sketch = LayerSketch(codes, channels)
        return LayerCache(self.keys, self.keys, self.digests.digests, sketch=sketch)

    def logits(self) -> torch.Tensor:
        table = self.step.page_table.long().clamp(min=0)
        estimates = self.cache().estimates(self.query, table, reference.DIGEST_SPREAD, self.shape.scale)
        return reference.without_tail(estimates, self.counts)

    def expected_scores(self) -> torch.Tensor:
        return reference.block_scores(self.logits(), self.counts, self.shape.scale)

    def with_active(self, active: int) -> LayerCase:
        return replace(self, step=replace(self.step, active_rows=numbers(active)))


def numbers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def random_layer(shape: Shape, seed: int, lengths: list[int] | None = None) -> LayerCase:
    random = seeded(seed)
    pages = shape.batch * shape.max_blocks + 5
    keys = torch.randn(pages, shape.heads, BLOCK_TOKENS, shape.dim, generator=random)
    # blocks differ from each other, as in a text: each has its own mean and width
    keys = keys * torch.rand(pages, shape.heads, 1, shape.dim, generator=random) * 1.5
    keys = (keys + torch.randn(pages, shape.heads, 1, shape.dim, generator=random)).to(shape.dtype)
    if lengths is None:
        longest = shape.max_blocks * BLOCK_TOKENS
        lengths = torch.randint(1, longest + 1, (shape.batch,), generator=random).tolist()
        lengths[0] = longest
        lengths[-1] = min(lengths[-1], BLOCK_TOKENS + 1)
    table = torch.randperm(pages, generator=random)[: shape.batch * shape.max_blocks].view(shape.batch, -1)
    beyond = torch.arange(shape.max_blocks) >= -(-torch.tensor(lengths)[:, None] // BLOCK_TOKENS)
    query = torch.randn(shape.batch, shape.heads * shape.group, shape.dim, generator=random) * 2
    row_of = torch.randperm(shape.rows, generator=random)[: shape.batch]
    step = Step(table.masked_fill(beyond, -1).int().to(DEVICE), numbers(*lengths), row_of.int().to(DEVICE))
    return LayerCase(shape, keys.to(DEVICE), summaries(keys, shape, seed), step, query.to(DEVICE, shape.dtype))


def summaries(keys: torch.Tensor, shape: Shape, seed: int) -> LayerDigests:
    """Compute digests and, if the shape has channels, sketches of full pages by the reference."""
    full = torch.full((keys.shape[0],), BLOCK_TOKENS)
    digests = reference.minmax_digest(keys, full)
    if shape.channels == 0:
        return LayerDigests(digests.to(DEVICE))
    order = torch.rand(shape.heads, shape.dim, generator=seeded(seed)).argsort(dim=1)
    channels = order[:, : shape.channels].contiguous()
    if shape.compact:
        digests = reference.compact_digest(digests, channels)
    codes = reference.sketch_codes(keys, digests, channels)
    compact_of = (shape.dtype, shape.dim) if shape.compact else None
    return LayerDigests(digests.to(DEVICE), codes.to(DEVICE), channels.to(DEVICE), compact_of)


def random_table(shape: Shape, lengths: torch.Tensor, row_of: torch.Tensor, sink: int, recent: int, resident: int,
                 seed: int) -> SlotTable:  # fmt: skip
    """Return slots as in the middle of a decode: near blocks and some resident blocks have slots, tails not always."""
    random = seeded(seed)
    slots = sink + recent + 1 + resident
    positions = torch.full((shape.rows, shape.heads, slots), reference.NO_BLOCK)
    for entry, row in enumerate(row_of.tolist()):
        length = int(lengths[entry])
        count = -(-length // BLOCK_TOKENS)
        opens = length % BLOCK_TOKENS == 1
        before = count - opens  # number of blocks in the previous step
        near = [p for p in range(max(sink, before - 1 - recent), before) if p >= sink]
        middle = range(sink, max(sink, before - 1 - recent))
        for head in range(shape.heads):
            for p in range(min(sink, before)):
                positions[row, head, p] = p
            some = torch.randperm(len(middle), generator=random)[:resident].tolist()
            if head % 2 and some:
                some = some[: len(some) // 2]  # leaves slots empty
            held = [middle[i] for i in some] + near
            places = (torch.randperm(slots - sink, generator=random)[: len(held)] + sink).tolist()
            for place, p in zip(places, held, strict=True):
                positions[row, head, place] = p
    return SlotTable(positions.int().to(DEVICE), sink, recent)


def bits_of(words: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return whether each block's bit is set: ``[..., words]`` -> bool ``[..., blocks]``."""
    places = torch.arange(blocks, device=words.device)
    return (words[..., places // 32] >> places % 32 & 1).bool()
