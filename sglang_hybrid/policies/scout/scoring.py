"""Scores that outlive a step: all blocks of a row are scored now and then, the hot ones at every step."""

from __future__ import annotations

import torch

from sglang_hybrid.ops import reference


class RecentScores:
    """Of one layer, by row."""

    def __init__(self, rows: int, hot: int) -> None:
        """``hot``: blocks of a list that are scored in between; 0: none, and scores stay as they are until then."""
        self._rows, self._hot = rows, hot
        self._scores = torch.empty(0)  # [rows, KV heads, blocks]
        self._is_hot = torch.empty(0, dtype=torch.bool)  # likewise
        self._shares = torch.empty(0)  # [rows, KV heads, G]: of what is hot, when all was scored
        self._bias = torch.empty(0)  # likewise: see near_bias

    def of_step(
        self, logits: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, turn: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Scores ``[B, H, N]`` of batch entries, from estimates ``[B, H, G, N]`` of which only needed ones are used.

        counts ``[B]`` blocks of ``rows`` ``[B]``. turn ``[B]``: of whom all blocks are scored. So are those of rows
        that have few.
        """
        self._make_room(logits)
        blocks = logits.shape[3]
        if self._hot:
            turn = turn | (counts <= self._hot + 1)
            rest = (~turn).nonzero()[:, 0]
            if len(rest):
                here = rows[rest]
                hot = self._is_hot[here, :, :blocks] | _is_tail(counts[rest], blocks)
                before = self._scores[here, :, :blocks]
                kept = self._shares[here]
                self._scores[here, :, :blocks] = reference.rescore(before, logits[rest], hot, kept, scale)
        due = turn.nonzero()[:, 0]
        if len(due):
            here, of_due = rows[due], counts[due]
            scores = reference.block_scores(logits[due], of_due, scale)
            self._scores[here] = -torch.inf
            self._scores[here, :, :blocks] = scores
            if self._hot and self._hot < blocks:
                hot = reference.hot_blocks(scores, of_due, self._hot)
                self._is_hot[here] = False
                self._is_hot[here, :, :blocks] = hot
                shares = reference.head_shares(logits[due], of_due, scale)
                self._shares[here] = reference.hot_shares(shares, hot | _is_tail(of_due, blocks))
        return self._scores[rows, :, :blocks]

    def near_bias(
        self,
        logits: torch.Tensor,
        attended: torch.Tensor,
        counts: torch.Tensor,
        rows: torch.Tensor,
        turn: torch.Tensor,
        scale: float,
        sink: int,
        recent: int,
    ) -> torch.Tensor:
        """``reference.near_bias`` behind ``of_step``, by what is known; attended ``[B, H, N]`` -> ``[B, H, G]``."""
        if self._hot:
            turn = turn | (counts <= self._hot + 1)
            rest = (~turn).nonzero()[:, 0]
            if len(rest):
                here = rows[rest]
                hot = self._is_hot[here, :, : logits.shape[3]]
                self._bias[here] = reference.near_bias_by_hot(
                    logits[rest], attended[rest], counts[rest], scale, sink, recent, hot, self._shares[here]
                )
        due = turn.nonzero()[:, 0]
        if len(due):
            self._bias[rows[due]] = reference.near_bias(logits[due], attended[due], counts[due], scale, sink, recent)
        return self._bias[rows]

    def _make_room(self, logits: torch.Tensor) -> None:
        _, heads, group, blocks = logits.shape
        held = self._scores.shape[2] if self._scores.dim() == 3 else 0
        if held >= blocks:
            return
        scores = logits.new_full((self._rows, heads, blocks), -torch.inf)
        is_hot = torch.zeros_like(scores, dtype=torch.bool)
        if held:
            scores[..., :held], is_hot[..., :held] = self._scores, self._is_hot
        else:
            self._shares = logits.new_zeros(self._rows, heads, group)
            self._bias = torch.zeros_like(self._shares)
        self._scores, self._is_hot = scores, is_hot


def _is_tail(counts: torch.Tensor, blocks: int) -> torch.Tensor:
    return (torch.arange(blocks, device=counts.device) == counts[:, None] - 1)[:, None, :]
