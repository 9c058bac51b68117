"""Cosines between predicted and real queries, layer by layer, on text that the predictor was not fitted on."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.commands.profile.texts import kinds
from sglang_hybrid.commands.report.session.loaded import Loaded
from sglang_hybrid.commands.report.session.messages import Tell
from sglang_hybrid.commands.report.session.prompts import text_tokens
from sglang_hybrid.integration.calibrate import calibrate
from sglang_hybrid.policies.scout.calibration_text import CalibrationText


def cosines(session: Loaded, *, tell: Tell, windows: int, window_tokens: int) -> dict[str, Any]:
    """Fit the predictor and return each layer's cosines. The first layer is left out: nothing predicts its query."""
    text = _text(session, windows, window_tokens)
    found = calibrate(session.model.runner, text, progress=lambda part: tell("fitting the predictor", part))
    return {
        "fitted_tokens": sum(map(len, text.fit)),
        "unseen_tokens": sum(map(len, text.unseen)),
        "layers": [
            {"layer": layer, "raw": round(one.cosine_raw, 4), "calibrated": round(one.cosine, 4), "rank": one.rank}
            for layer, one in sorted(found.layers.items())
        ],
    }


def _text(session: Loaded, windows: int, window_tokens: int) -> CalibrationText:
    if session.model.tokenizer is None:
        ids = text_tokens(session)
        pieces = [tuple(ids[n * window_tokens : (n + 1) * window_tokens]) for n in range(windows + 1)]
        return CalibrationText(tuple(pieces[:-1]), (pieces[-1],))
    texts = kinds(session.model.tokenizer, [], windows, window_tokens)
    return CalibrationText(tuple(one for kind in texts for one in kind.fit), tuple(kind.unseen for kind in texts))
