"""bench/headline.py draws README's first chart from committed results."""

from __future__ import annotations

import json
from pathlib import Path

from bench import headline
from bench.record import RESULTS


def test_the_chart_is_drawn_from_the_committed_results(tmp_path: Path) -> None:
    throughput, ruler = (
        json.loads((RESULTS / name).read_text()) for name in ("qwen-throughput.json", "qwen-ruler-bars.json")
    )
    assert headline.draw(throughput, ruler, tmp_path / "chart.png").stat().st_size > 10_000
