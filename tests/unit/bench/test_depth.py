"""bench/depth.py without servers: lines fitted to depths, estimates for other machines, points marked as estimates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import depth, throughput
from bench.lease import Lease
from bench.side_by_side.depth_arithmetic import (
    ARITHMETIC,
    HARDWARE,
    Line,
    estimate_errors,
    machines,
    other_depths,
)


def point(configuration: str, layers: int, rows: int, step_ms: float) -> dict[str, Any]:
    return {
        "configuration": configuration, "layers": layers, "length": 32768, "rows": rows, "step_ms": step_ms,
        "most_rows": 30, "tokens_per_s": 1e3 * rows / step_ms,
    }  # fmt: skip


MEASURED = [point("stock", 10, 8, 4.5), point("stock", 20, 8, 8.5), point("hybrid", 10, 30, 4.0)]


def test_a_step_grows_with_the_layers_and_has_a_fixed_part() -> None:
    line = Line.through({10: 4.5, 20: 8.5})
    assert (line.fixed_ms, line.layer_ms, line.at(48)) == pytest.approx((0.5, 0.4, 19.7))
    assert Line.through({10: 4.5, 20: 8.5, 30: 12.5}) == line
    with pytest.raises(ValueError, match="two depths"):
        Line.through({10: 4.5})


def test_only_what_two_depths_have_is_continued_and_it_is_marked() -> None:
    rows = other_depths(MEASURED, [40, 48])
    assert [(one["configuration"], one["layers"], one["step_ms"]) for one in rows] == [
        ("stock", 40, 16.5), ("stock", 48, 19.7),
    ]  # fmt: skip
    assert {one["kind"] for one in rows} == {ARITHMETIC} and rows[-1]["tokens_per_s"] == round(8e3 / 19.7, 1)


def test_the_arithmetic_of_machines_is_compared_with_what_was_measured() -> None:
    stock, *_, hybrid = estimate_errors(MEASURED)
    assert (stock["configuration"], hybrid["configuration"]) == ("stock", "hybrid")
    assert all(abs(one["error"]) < 0.3 for one in (stock, hybrid))
    assert estimate_errors([point("stock fp8", 10, 8, 3.0)]) == []


def test_other_machines_have_requests_and_steps_or_say_that_nothing_fits() -> None:
    rows = {one["machine"]["name"]: one for one in machines(48, 32768, 1024)}
    assert set(rows) == {one.name for one in HARDWARE} and {one["kind"] for one in rows.values()} == {ARITHMETIC}
    small = rows["RTX 4090"]  # the weights alone take 33 GB
    assert (small["stock"]["requests"], small["hybrid"]["requests"], small["speed_up"]) == (0, 0, None)
    assert "nothing fits" in small["hybrid"]["bound_by"]
    assert rows["8 H200, TP 8"]["stock"]["requests"] > rows["H200"]["stock"]["requests"] > 0
    assert rows["L40S"]["hybrid"]["requests"] > rows["L40S"]["stock"]["requests"]


def test_stock_holds_the_same_rows_at_every_depth() -> None:
    args = depth.parsed(["--lease", "600"])
    assert args.depths == [10, 20]

    def limit(layers: int) -> float:
        return float(throughput.parsed(depth.throughput_flags(args, layers, Lease(600), Path("x.json"))).gpu_limit)

    assert (limit(10), limit(20)) == (11, 22)
    assert depth.parsed(["--depths", ""]).depths == []


def test_measured_points_keep_what_the_arithmetic_needs() -> None:
    whole = [point("hybrid", 10, rows, 4.0) | {"metrics": {}} for rows in (1, 30)]
    more = dict.fromkeys(("tokens_per_s_p10", "tokens_per_s_p90", "steady_seconds", "gpu_bytes_measured"), 1.0)
    found = depth.measured_of({"points": [one | more for one in whole]}, 10)
    assert [one["most_rows"] for one in found] == [30, 30] and "metrics" not in found[0]
    assert len(estimate_errors(found)) == 2
