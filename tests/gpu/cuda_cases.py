"""Random slots and partial attentions for the CUDA kernels' tests."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sglang_hybrid.ops import reference

BLOCK_TOKENS = 32
DEVICE = "cpu" if "KERNELS_ON_CPU" in os.environ else "cuda"  # cpu: the GPU is emulated, see tests/emulation
Result = tuple[torch.Tensor, torch.Tensor]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    group: int
    dim: int
    slots: int
    dtype: torch.dtype = torch.bfloat16
    rows: int = 0  # rows of the slot pool; 0: a few more than the batch has
    pool: torch.dtype | None = None  # dtype of keys and values; None: `dtype`

    @property
    def pool_rows(self) -> int:
        return self.rows or self.batch + 3

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


@dataclass(frozen=True)
class BlockSlots:
    """Blocks in device memory, and the position of each block in its row."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class SlotCase:
    """Arguments of ``attend_slots``. Keys and values are NaN for tokens beyond the end of a row."""

    shape: Shape
    query: torch.Tensor
    resident: BlockSlots
    lengths: torch.Tensor
    row_of: torch.Tensor

    def expected(self, near_bias: torch.Tensor | None = None, sink: int = 0, recent: int = 0) -> Result:
        """Compute output and LSE by the reference, on a pool whose pages are the slots."""
        kept, owner = self.resident, self.row_of.long()
        rows, _, slots = kept.positions.shape
        pages = torch.arange(rows * slots, device=DEVICE).view(rows, 1, slots)
        positions, lengths = kept.positions[owner].long(), self.lengths[owner].long()
        fill = reference.block_fill(positions, lengths, BLOCK_TOKENS)
        ids = pages[owner].expand_as(positions).masked_fill(fill == 0, reference.NO_BLOCK)
        keys, values = (part.transpose(1, 2).flatten(0, 1) for part in (kept.keys, kept.values))
        bias = None
        if near_bias is not None:
            always = reference.is_forced(positions, -(-lengths // BLOCK_TOKENS), sink, recent)
            bias = near_bias[owner][..., None] * always[:, :, None, :]
        # the reference masks invalid tokens after the product, so NaN in their keys does no harm
        return reference.attend_blocks(self.query, keys, values, ids, fill, self.shape.scale, bias)


def random_slots(shape: Shape, seed: int) -> SlotCase:
    random = seeded(seed)
    blocks_of_a_row = 2 * shape.slots + 1
    lengths = torch.randint(1, blocks_of_a_row * BLOCK_TOKENS, (shape.pool_rows,), generator=random)
    row_of = torch.randperm(shape.pool_rows, generator=random)[: shape.batch]
    query = torch.randn(shape.batch, shape.heads * shape.group, shape.dim, generator=random)
    resident = _random_blocks(shape, blocks_of_a_row, lengths, random)
    return SlotCase(shape, query.to(DEVICE, shape.dtype), resident, lengths.int().to(DEVICE), row_of.int().to(DEVICE))


def _random_blocks(shape: Shape, blocks: int, lengths: torch.Tensor, random: torch.Generator) -> BlockSlots:
    """Return random blocks with different positions in each list: the tail, some beyond the end, and empty slots."""
    rows, slots = shape.pool_rows, shape.slots
    order = torch.rand(rows, shape.heads, blocks, generator=random).argsort(dim=2)
    positions = order[..., :slots].clone()
    positions[torch.rand(positions.shape, generator=random) < 0.2] = reference.NO_BLOCK
    if slots:
        tail = (lengths - 1) // BLOCK_TOKENS
        positions = positions.masked_fill(positions == tail[:, None, None], reference.NO_BLOCK)
        positions[:, :, slots // 2] = tail[:, None]
    fill = reference.block_fill(positions, lengths, BLOCK_TOKENS)
    beyond = (torch.arange(BLOCK_TOKENS) >= fill[..., None])[..., None].to(DEVICE)
    on_device = torch.Generator(DEVICE).manual_seed(random.initial_seed())
    tokens = (2, rows, shape.heads, slots, BLOCK_TOKENS, shape.dim)
    both = torch.randn(tokens, generator=on_device, device=DEVICE, dtype=shape.dtype).masked_fill(beyond, torch.nan)
    keys, values = both.to(shape.pool or shape.dtype)
    return BlockSlots(keys, values, positions.int().to(DEVICE))


def random_partial(shape: tuple[int, int, int], seed: int, empty: float = 0.3) -> Result:
    """Return random outputs and LSEs. A share ``empty`` of the heads has LSE -inf and NaN as output."""
    random = seeded(seed)
    out, lse = torch.randn(shape, generator=random), torch.randn(shape[:2], generator=random) * 5
    nothing = torch.rand(shape[:2], generator=random) < empty
    lse = lse.masked_fill(nothing, -torch.inf)
    return out.masked_fill(nothing[..., None], torch.nan).to(DEVICE), lse.to(DEVICE)
