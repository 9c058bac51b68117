"""How far logits of two backends are apart that were fed the same tokens, and whether that is rounding.

Nobody knows how large rounding is in 16 bits behind thirty layers. So it is measured: two stock backends differ by
rounding and nothing else, and ours may differ from stock by little more than they do from each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Numbers = list[list[float]]  # [rows][positions]
FACTOR = 1.5  # of what the control shows: the worst of some hundred positions is not the same in two runs
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# where there is no control: what gate 1 allows in float32, and estimates for 16 bits
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.4}


@dataclass(frozen=True)
class Reading:
    """One case (prompts that decode together) with one backend. Position 0 is behind the prompt: that is prefill."""

    name: str
    best: list[list[int]]  # the arg max
    logprob: Numbers  # of stock's token
    gap: Numbers  # between the logits of stock's token and of stock's second best


@dataclass(frozen=True)
class Flip:
    """A position whose arg max is not stock's."""

    case: str
    row: int
    position: int
    gap: float  # in stock: how far its two best are apart
    gap_change: float


@dataclass
class Comparison:
    positions: int = 0
    equal_best: int = 0
    worst_logprob: float = 0.0
    worst_prefill_logprob: float = 0.0  # of the positions behind prompts, which are in `worst_logprob` too
    mean_logprob: float = 0.0
    worst_gap_change: float = 0.0
    not_finite: int = 0
    flips: list[Flip] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        shown = {key: _rounded(value) for key, value in asdict(self).items() if key != "flips"}
        share = self.equal_best / self.positions if self.positions else 0.0
        largest = sorted(self.flips, key=lambda flip: -flip.gap)[:8]
        return shown | {
            "equal_best_share": round(share, 5),
            "flips": len(self.flips),
            "widest_flips": [{key: _rounded(value) for key, value in asdict(flip).items()} for flip in largest],
        }


def compare(stock: Sequence[Reading], other: Sequence[Reading]) -> Comparison:
    found, total = Comparison(), 0.0
    for theirs, ours in zip(stock, other, strict=True):
        assert theirs.name == ours.name
        for row, tokens in enumerate(theirs.best):
            for position, token in enumerate(tokens):
                gap = theirs.gap[row][position]
                difference = abs(ours.logprob[row][position] - theirs.logprob[row][position])
                change = abs(ours.gap[row][position] - gap)
                found.positions += 1
                if not (math.isfinite(difference) and math.isfinite(change)):
                    found.not_finite += 1
                    continue
                total += difference
                found.worst_logprob = max(found.worst_logprob, difference)
                if position == 0:
                    found.worst_prefill_logprob = max(found.worst_prefill_logprob, difference)
                found.worst_gap_change = max(found.worst_gap_change, change)
                if ours.best[row][position] == token:
                    found.equal_best += 1
                else:
                    found.flips.append(Flip(theirs.name, row, position, gap, change))
    found.mean_logprob = total / max(1, found.positions - found.not_finite)
    return found


def judge(ours: Comparison, control: Comparison | None, dtype: str, highest_logit: float) -> dict[str, Any]:
    """Whether ``ours`` is rounding: ``control`` is another stock backend against the same stock.

    The floor is one rounding of the highest logit: what equal hidden states may make of it.
    """
    floor = EPSILON[dtype] * highest_logit
    if control is None:
        allowed_logprob = allowed_gap = TOLERANCE[dtype] + floor
    else:
        allowed_logprob = FACTOR * control.worst_logprob + floor
        allowed_gap = FACTOR * control.worst_gap_change + floor
    far = [flip for flip in ours.flips if flip.gap > allowed_gap]
    return {
        "passed": not (ours.not_finite or far or ours.worst_logprob > allowed_logprob or ours.positions == 0),
        "allowed_logprob": _rounded(allowed_logprob),
        "near_tie_below": _rounded(allowed_gap),
        "flips_that_are_no_near_ties": len(far),
    }


def served_by_worker(rows: dict[str, int], expected: int | None) -> dict[str, Any]:
    """Of rows (one prompt in one layer in one step) with misses: whether the worker had all of them."""
    elsewhere = {name: count for name, count in rows.items() if count and name not in ("served", "empty", "worker")}
    served = rows.get("served", 0) + rows.get("worker", 0)
    shown = {"passed": served > 0 and not elsewhere, "served": served, "elsewhere": elsewhere}
    return shown if expected is None else shown | {"rows_with_misses_by_arithmetic": expected}


def rows_with_misses(lengths: Sequence[int], steps: int, layers: int, block: int = 32) -> int:
    """With sink and tail resident and nothing else: rows in which some block lies between the two."""
    behind = [length + step for length in lengths for step in range(1, steps + 1)]
    return layers * sum((tokens - 1) // block >= 2 for tokens in behind)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
