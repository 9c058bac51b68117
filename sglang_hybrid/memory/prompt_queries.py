"""The query of each row's last prompt token, per layer. It chooses the row's first resident blocks."""

from __future__ import annotations

import torch


class PromptQueries:
    """Last prompt queries, stored by prefill. Each chunk of a prompt overwrites the query of the chunk before."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._layers: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}

    def store(self, layer: int, rows: torch.Tensor, queries: torch.Tensor) -> None:
        """Store one layer's queries ``[rows, query heads, head_dim]`` of ``rows``."""
        if layer not in self._layers:
            self._layers[layer] = queries.new_zeros(self._rows, *queries.shape[1:])
            self._known[layer] = torch.zeros(self._rows, dtype=torch.bool, device=queries.device)
        self._layers[layer][rows] = queries
        self._known[layer][rows] = True

    def of(self, layer: int, rows: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Return stored queries, and those of ``otherwise`` for rows whose prompt was computed elsewhere."""
        if layer not in self._layers:
            return otherwise
        return torch.where(self._known[layer][rows][:, None, None], self._layers[layer][rows], otherwise)
