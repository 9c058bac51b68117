"""Writes result files that state their origin: command, commit, machine and date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_hybrid.origin import ROOT, origin

RESULTS = ROOT / "bench" / "results"


def write_result(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Write ``result`` and its origin to ``out``, by default ``bench/results/<name>.json``, and return the path."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"origin": origin(), **result}, indent=1) + "\n")
    return path
