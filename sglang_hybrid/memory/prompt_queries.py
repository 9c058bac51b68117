"""The query of each row's last prompt token, per layer: what first chooses a row's resident blocks."""

from __future__ import annotations

import torch


class PromptQueries:
    """Written by prefill, whose every chunk overwrites what the one before it left."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._layers: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}

    def store(self, layer: int, rows: torch.Tensor, queries: torch.Tensor) -> None:
        """queries ``[rows, query heads, head_dim]``."""
        if layer not in self._layers:
            self._layers[layer] = queries.new_zeros(self._rows, *queries.shape[1:])
            self._known[layer] = torch.zeros(self._rows, dtype=torch.bool, device=queries.device)
        self._layers[layer][rows] = queries
        self._known[layer][rows] = True

    def of(self, layer: int, rows: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """As stored; rows whose prompt was computed elsewhere get ``otherwise``, of the same shape."""
        if layer not in self._layers:
            return otherwise
        return torch.where(self._known[layer][rows][:, None, None], self._layers[layer][rows], otherwise)
