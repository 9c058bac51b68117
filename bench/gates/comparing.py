"""Compare logits of two backends that were fed the same tokens, and judge whether they differ only by rounding.

The size of 16-bit rounding errors after thirty layers is not known in advance, so it is measured: two stock backends
differ only by rounding, and hybrid may differ from stock by little more than these two differ from each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Numbers = list[list[float]]  # [rows][positions]
FACTOR = 1.5  # times the control's difference is allowed: the worst of some hundred positions varies between runs
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# allowed differences without a control: what gate 1 allows in float32, and estimates for 16 bits
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.4}


@dataclass(frozen=True)
class Reading:
    """Logits of one case (prompts that decode together) with one backend. Position 0 is computed by prefill."""

    name: str
    best: list[list[int]]  # token with the highest logit
    logprob: Numbers  # log probability of stock's best token
    gap: Numbers  # logit of stock's best token minus logit of stock's second best token


@dataclass(frozen=True)
class Flip:
    """A position at which the best token is not stock's."""

    case: str
    row: int
    position: int
    gap: float  # stock's gap between its two best tokens
    gap_change: float  # absolute difference of the two backends' gaps


@dataclass
class Comparison:
    positions: int = 0
    equal_best: int = 0
    worst_logprob: float = 0.0
    worst_prefill_logprob: float = 0.0  # over position 0 of all rows, which `worst_logprob` includes
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
    """Judge whether ``ours`` differs from stock only by rounding; ``passed`` of the result says so.

    ``control`` compares another stock backend with the same stock; without it, ``TOLERANCE`` is allowed. A floor is
    added to what is allowed: one rounding of the highest logit, by which even equal hidden states may differ.
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
    """Judge whether the worker computed the misses of all ``rows`` with misses, counted by outcome.

    A row is one prompt in one layer in one step. ``expected``: number of such rows by arithmetic, only shown.
    """
    elsewhere = {name: count for name, count in rows.items() if count and name not in ("served", "empty", "worker")}
    served = rows.get("served", 0) + rows.get("worker", 0)
    shown = {"passed": served > 0 and not elsewhere, "served": served, "elsewhere": elsewhere}
    return shown if expected is None else shown | {"rows_with_misses_by_arithmetic": expected}


def rows_with_misses(lengths: Sequence[int], steps: int, layers: int, block: int = 32) -> int:
    """Return the number of rows with misses if only sink and tail are resident: rows with a block between the two."""
    behind = [length + step for length in lengths for step in range(1, steps + 1)]
    return layers * sum((tokens - 1) // block >= 2 for tokens in behind)


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
