"""Results that say where they come from: command, commit, machine, date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_hybrid.origin import ROOT, origin

RESULTS = ROOT / "bench" / "results"


def write_result(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Write ``result`` with its origin to ``out``, by default ``bench/results/<name>.json``."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"origin": origin(), **result}, indent=1) + "\n")
    return path
