"""Rules of selection and attention in which policies ``scout`` and ``scoutattention`` differ."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.scout.tuning import FIRST_STEPS, resident_tokens_of


@dataclass(frozen=True)
class ScoutRules:
    """How policy ``scout`` or ``scoutattention`` selects and attends. The defaults are those of ``scout``."""

    resident_tokens: int  # of a (row, KV head), sink, recent and tail blocks included
    per_layer: bool = False  # all KV heads of a layer share one selection
    only_selected: bool = False  # resident blocks that are not selected in this step are not attended
    shifts: bool = True  # the weight of misses is corrected when the real query is known
    recalls_by_real_query: bool = True  # it chooses resident blocks; otherwise the query that selected misses
    early_recalls: int = FIRST_STEPS  # first steps of a row in which all layers recall
    stands_for_all: bool = True  # selected blocks stand for all candidates: see reference.near_bias


def rules_of_scout(config: HybridConfig) -> ScoutRules:
    return ScoutRules(resident_tokens_of(config))
