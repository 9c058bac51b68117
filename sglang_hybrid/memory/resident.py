"""The resident blocks of each (row, layer, KV head): those that have a slot in device memory."""

from __future__ import annotations

import torch

from sglang_hybrid.ops.reference import NO_BLOCK


class ResidentSet:
    """One layer's resident blocks, as positions in their rows' sequences.

    Sink, recent and tail blocks have slots of their own and are not listed here. The tensor is allocated once, for all
    rows that SGLang can run, and indexed by SGLang's row number.
    """

    def __init__(self, rows: int, heads: int, slots: int, device: torch.device | str) -> None:
        self.positions = torch.full((rows, heads, slots), NO_BLOCK, dtype=torch.int64, device=device)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the resident positions of ``rows``, ``[rows, KV heads, slots]``, with NO_BLOCK in empty slots."""
        return self.positions[rows]

    def replace(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Replace the blocks of ``rows`` by positions ``[rows, KV heads, at most slots]``, with NO_BLOCK anywhere."""
        self.forget(rows)
        self.positions[rows, :, : positions.shape[2]] = positions

    def forget(self, rows: torch.Tensor) -> None:
        self.positions[rows] = NO_BLOCK

    def admit(self, rows: torch.Tensor, positions: torch.Tensor, scores: torch.Tensor) -> None:
        """Add one block to each row, positions ``[rows]``, in an empty slot or in place of the lowest-scoring block.

        ``scores`` ``[rows, KV heads, blocks]`` must be finite for every block that is resident.
        """
        if self.positions.shape[2] == 0:
            return
        listed = self.positions[rows]
        of_listed = scores.gather(2, listed.clamp(0, scores.shape[2] - 1))
        worst = of_listed.masked_fill(listed == NO_BLOCK, -torch.inf).argmin(dim=2, keepdim=True)
        new = positions[:, None, None].expand(-1, listed.shape[1], 1)
        self.positions[rows] = listed.scatter(2, worst, new)
