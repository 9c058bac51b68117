"""Compares measured points with the aims of the design."""

from __future__ import annotations

from typing import Any

from bench.side_by_side.capacity import GB, KVModel

Point = dict[str, Any]

# the aims are for Qwen3-14B's shape with 10 layers
AIMED_MODEL = KVModel(layers=10, kv_heads=8, head_dim=128, itemsize=2)
AIMED_GPU_BYTES = 11 * GB
# input length -> least throughput of hybrid / stock, best batch of each side
SPEED_UP_AIMS = {8192: 2.0, 16384: 3.5, 32768: 7.0, 65536: 10.0}
SINGLE_ROW_AIM = 0.99
PAPERS_AIM = 2.1  # least ratio of policy scout to the better of _OTHERS: ScoutAttention's paper reports this of its own
_OTHERS = ("hgca", "infinigen")
AGAINST_RAW_AIM = 0.97  # least ratio of the defaults, with calibrated prediction, to the prediction that costs least


def best(points: list[Point], configuration: str, length: int) -> Point | None:
    """Return the point of the batch with the highest throughput; None without points."""
    found = [one for one in points if one["configuration"] == configuration and one["length"] == length]
    return max(found, key=lambda one: one["tokens_per_s"], default=None)


def lengths_of(points: list[Point]) -> list[int]:
    return sorted({one["length"] for one in points})


def speed_ups(points: list[Point]) -> list[dict[str, Any]]:
    """Compare the best batches of hybrid and stock, at every length that both have."""
    found = []
    for length in lengths_of(points):
        theirs, ours = best(points, "stock", length), best(points, "hybrid", length)
        if theirs and ours:
            found.append(
                {
                    "length": length,
                    "stock_rows": theirs["rows"],
                    "hybrid_rows": ours["rows"],
                    "speed_up": round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3),
                    "speed_up_over_fp8": _ratio(ours, best(points, "stock fp8", length)),
                    "fp8_speed_up_over_fp8": _ratio(
                        best(points, "hybrid fp8", length), best(points, "stock fp8", length)
                    ),
                }
            )
    return found


def _ratio(ours: Point | None, theirs: Point | None) -> float | None:
    return round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3) if ours and theirs else None


def claims(points: list[Point]) -> list[dict[str, Any]]:
    """Return every aim with its measured value, None where there is none.

    ``points`` must be those of AIMED_MODEL with AIMED_GPU_BYTES.
    """
    measured = {one["length"]: one["speed_up"] for one in speed_ups(points)}
    found = [
        _claim(f"{tokens_label(length)}, best batch of each: hybrid / stock", aim, measured.get(length))
        for length, aim in SPEED_UP_AIMS.items()
    ]
    for length in lengths_of(points):
        alone = {one["configuration"]: one for one in points if one["length"] == length and one["rows"] == 1}
        if "stock" in alone and "hybrid" in alone:
            ratio = alone["hybrid"]["tokens_per_s"] / alone["stock"]["tokens_per_s"]
            found.append(_claim(f"{tokens_label(length)}, one row: hybrid / stock", SINGLE_ROW_AIM, round(ratio, 3)))
    for length in lengths_of(points):
        ours, least = best(points, "hybrid", length), best(points, "raw", length)
        if ours and least:
            ratio = ours["tokens_per_s"] / least["tokens_per_s"]
            found.append(_claim(f"{tokens_label(length)}: defaults / prediction=raw", AGAINST_RAW_AIM, round(ratio, 3)))
    return found


def against_papers(points: list[Point]) -> list[dict[str, Any]]:
    """Compare the default policy, and ScoutAttention's, with the better of two other policies at equal batches."""
    found = []
    for length, rows in sorted({(one["length"], one["rows"]) for one in points}):
        rates = {
            one["configuration"]: one["tokens_per_s"]
            for one in points
            if (one["length"], one["rows"]) == (length, rows)
        }
        others = {name: rates[name] for name in _OTHERS if name in rates}
        if len(others) < len(_OTHERS):
            continue
        better = max(others, key=lambda name: others[name])
        for name, aim in (("hybrid", PAPERS_AIM), ("scoutattention", None)):
            if name in rates:
                what = f"{tokens_label(length)} x {rows}: {'scout' if name == 'hybrid' else name} / {better}"
                found.append(_claim(what, aim, round(rates[name] / others[better], 3)))
    return found


def _claim(what: str, aim: float | None, measured: float | None) -> dict[str, Any]:
    reached = None if measured is None or aim is None else measured >= aim
    return {"what": what, "aim": aim, "measured": measured, "reached": reached}


def tokens_label(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)
