"""The tuning of policy ``scoutattention``, which follows from its settings. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.policies.scout.options import ScoutAttentionOptions
from sglang_hybrid.policies.scout.tuning import Tuning

if TYPE_CHECKING:  # which imports the policies, and so this module
    from sglang_hybrid.config import HybridConfig


def paper_resident_tokens(config: HybridConfig) -> int:
    """Return the number of tokens per (row, KV head) that are kept resident."""
    resident = config.section(ScoutAttentionOptions).resident_tokens
    return config.budget_tokens if resident == "auto" else resident


def paper_tuning(config: HybridConfig, tuning: Tuning) -> Tuning:
    """Return a tuning without bonus and minimum attention. ``tuning`` gives the intervals that no setting fixes."""
    options, layers = config.section(ScoutAttentionOptions), len(tuning.intervals)
    intervals, adapts = tuning.intervals, options.recall_adapt
    if options.recall_interval != "auto":
        intervals, adapts = (options.recall_interval,) * layers, False
    return Tuning(
        bonus=(0.0,) * layers,
        intervals=intervals,
        beta=options.target_cpu_ratio,
        adapt=adapts,
        miss_shares=(0.0,) * layers,
        any_block=(False,) * layers,
    )
