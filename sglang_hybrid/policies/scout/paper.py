"""What policy ``scoutattention`` has of its settings where ``scout`` has a tuning. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.policies.scout.options import ScoutAttentionOptions
from sglang_hybrid.policies.scout.tuning import Tuning

if TYPE_CHECKING:  # which knows the policies, and so this
    from sglang_hybrid.config import HybridConfig


def paper_resident_tokens(config: HybridConfig) -> int:
    """Tokens of a (row, KV head) that are kept resident."""
    resident = config.section(ScoutAttentionOptions).resident_tokens
    return config.budget_tokens if resident == "auto" else resident


def paper_tuning(config: HybridConfig, tuning: Tuning) -> Tuning:
    """No bonus, no least share. ``tuning``: whose intervals are the profile's, or the same default."""
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
