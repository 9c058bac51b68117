"""Prediction of layer i+1's query from layer i's input on the GPU, in persistent buffers, as CUDA graphs need them."""

from __future__ import annotations

import torch

from sglang_hybrid.ops.cuda.predictor import finish_queries, unit_rms
from sglang_hybrid.policies.scout.predictor import Correction, QueryWeights, merged_projection


class PredictionBuffers:
    """Intermediate results of a prediction, for batches of up to ``batch`` rows.

    Predictors may share them only if they do not run at the same time: ``prepare`` of one predictor overwrites what
    ``finish`` of another reads.
    """

    def __init__(
        self, batch: int, hidden: int, width: int, rank: int, dtype: torch.dtype, device: torch.device | str = "cuda"
    ) -> None:
        """``width``: query heads * head_dim. ``rank``: largest rank of the low-rank corrections, 0 without any."""
        self.unit, self.normed = torch.zeros(2, batch, hidden, dtype=dtype, device=device).unbind(0)
        self.projected = torch.zeros(batch, width, dtype=dtype, device=device)
        self.thin = torch.zeros(batch * rank, dtype=dtype, device=device)


class DevicePredictor:
    """``QueryPredictor`` on a GPU. Allocates no memory after its construction."""

    def __init__(
        self,
        weights: QueryWeights,
        correction: Correction | None = None,
        *,
        max_batch: int,
        buffers: PredictionBuffers | None = None,
    ) -> None:
        """Weights and correction must be on the device. Without ``buffers`` this predictor allocates its own."""
        dtype, device = weights.projection.dtype, weights.projection.device
        is_merged = correction is not None and correction.right is None
        thin = None if correction is None or correction.right is None else correction
        self._weights = weights
        self._projection = weights.projection
        if correction is not None and is_merged:
            self._projection = merged_projection(weights, correction)
        # a full correction holds the gain of the norm already
        self._gain = None if is_merged else weights.norm.to(dtype)
        self._thin = None if thin is None or thin.right is None else (thin.right.to(dtype), thin.left.to(dtype))
        biases = [weights.bias, None if correction is None else correction.bias]
        given = [bias.float() for bias in biases if bias is not None]
        self._bias = torch.stack(given).sum(dim=0) if given else None
        self._head_norm = None if weights.head_norm is None else weights.head_norm.float().contiguous()
        rank = 0 if self._thin is None else self._thin[0].shape[0]
        width, hidden = self._projection.shape
        self._buffers = buffers or PredictionBuffers(max_batch, hidden, width, rank, dtype, device)

    def query(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        out: torch.Tensor,
        *,
        active_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the predicted query to ``out`` ``[n, query heads, head_dim]`` and return it.

        ``hidden`` and ``residual`` ``[n, hidden size]``: input of the layer before. ``positions`` ``[n]``.
        """
        self.prepare(hidden, residual, active_rows=active_rows)
        return self.finish(positions, out, active_rows=active_rows)

    def prepare(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, *, active_rows: torch.Tensor | None = None
    ) -> None:
        """Read and normalise the layer's input. Call before the layer's norm overwrites it, on the same stream."""
        kept, batch = self._buffers, hidden.shape[0]
        needs_unit = self._gain is None or self._thin is not None
        unit_rms(
            hidden,
            residual,
            self._weights.norm_eps,
            unit=kept.unit[:batch] if needs_unit else None,
            normed=None if self._gain is None else kept.normed[:batch],
            gain=self._gain,
            active_rows=active_rows,
        )

    def finish(
        self, positions: torch.Tensor, out: torch.Tensor, *, active_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the query of the input that ``prepare`` read to ``out``, and return it. May run on a side stream."""
        kept, batch, weights = self._buffers, out.shape[0], self._weights
        projected = kept.projected[:batch]
        torch.mm((kept.unit if self._gain is None else kept.normed)[:batch], self._projection.t(), out=projected)
        if self._thin is not None:
            right, left = self._thin
            thin = kept.thin[: batch * right.shape[0]].view(batch, -1)
            torch.mm(kept.unit[:batch], right.t(), out=thin)
            projected.addmm_(thin, left.t())
        finish_queries(
            projected,
            weights.rotary,
            positions,
            out,
            neox=weights.neox,
            bias=self._bias,
            head_norm=self._head_norm,
            head_norm_eps=weights.head_norm_eps,
            active_rows=active_rows,
        )
        return out
