"""Fit the predictor on the inputs of all layers, and choose the penalty and the rank of each layer on unseen text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_hybrid.policies.scout.calibration import PENALTIES, FullCorrection, LayerFit, cosines
from sglang_hybrid.policies.scout.predictor import Correction, QueryPredictor, QueryWeights

# Ranks that are tried, as parts of the hidden size. A layer takes the smallest rank that keeps the gain in cosine.
RANK_PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
_KEEPS_THE_GAIN = 0.002  # maximum loss of cosine against the full matrix

LayerInputs = Mapping[int, torch.Tensor]  # by layer: inputs [tokens, hidden] of one text


@dataclass(frozen=True)
class LayerCalibration:
    correction: Correction
    rank: int  # the hidden size stands for the full matrix
    cosine_raw: float
    cosine: float


class Calibrator:
    """Fits corrections of predicted queries: ``add`` texts to fit on, then ``calibrate`` with other texts."""

    def __init__(self, weights: Mapping[int, QueryWeights], layers: Sequence[int] | None = None) -> None:
        """``weights``: of all layers. ``layers``: to fit, by default all but the first, which needs no prediction."""
        self._weights = weights
        self._fits = {layer: LayerFit(weights[layer]) for layer in (list(weights)[1:] if layers is None else layers)}

    @property
    def layers(self) -> list[int]:
        return list(self._fits)

    def add(self, inputs: LayerInputs) -> None:
        for layer, fit in self._fits.items():
            fit.add(inputs[layer - 1], inputs[layer])

    def calibrate(
        self, unseen: Sequence[LayerInputs], rank: int | str, progress: Callable[[], None] = lambda: None
    ) -> dict[int, LayerCalibration]:
        """Return each layer's calibration, by layer. ``rank``: "auto", "full" or a number for all layers."""
        calibrated = {}
        for layer, fit in self._fits.items():
            calibrated[layer] = self._calibrate(layer, fit, unseen, rank)
            progress()
        return calibrated

    def _calibrate(self, layer: int, fit: LayerFit, unseen: Sequence[LayerInputs], rank: int | str) -> LayerCalibration:
        weights = self._weights[layer]
        real = QueryPredictor(weights)
        pairs = [(inputs[layer - 1], real.project(inputs[layer])) for inputs in unseen]

        def cosine(correction: Correction | None) -> float:
            predictor = QueryPredictor(weights, None if correction is None else _as(correction, weights.projection))
            of_texts = [cosines(own, predictor.project(before), weights.head_dim).mean() for before, own in pairs]
            return float(torch.stack(of_texts).mean())

        fulls: list[FullCorrection] = [fit.solve(penalty) for penalty in PENALTIES]
        best = max(fulls, key=lambda full: cosine(full.full()))
        ceiling, hidden = cosine(best.full()), weights.norm.shape[0]
        candidates = {"auto": [round(part * hidden) for part in RANK_PARTS], "full": []}.get(str(rank), [])
        if isinstance(rank, int):
            candidates = [min(rank, hidden)]
        for candidate in candidates:
            thin = best.low_rank(candidate)
            reached = cosine(thin)
            if isinstance(rank, int) or reached >= ceiling - _KEEPS_THE_GAIN:
                return LayerCalibration(_stored(thin), candidate, cosine(None), reached)
        return LayerCalibration(_stored(best.full()), hidden, cosine(None), ceiling)


def _as(correction: Correction, like: torch.Tensor) -> Correction:
    return correction.to(like.device, like.dtype)


def _stored(correction: Correction) -> Correction:
    """Convert to half precision: the correction is a small part of a query, and profiles should be small files."""
    return correction.to("cpu", torch.float16)
