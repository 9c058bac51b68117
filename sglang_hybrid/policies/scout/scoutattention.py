"""Policy ``scoutattention``: ScoutAttention as its paper has it, on the machinery of ``scout``.

The next layer's own projection predicts queries, all KV heads of a layer share one selection, exactly the selected
blocks are attended to, and the CPU computes those that are not resident. Resident blocks get no bonus on their scores,
misses have no minimum attention, and the weight of misses is not corrected when the real query is known. Blocks that a
predicted query selected become resident, and selected blocks do not stand for others (``reference.near_bias``).
"""

from __future__ import annotations

from sglang_hybrid.policies.registry import PolicyContext
from sglang_hybrid.policies.scout.paper import paper_resident_tokens, paper_tuning
from sglang_hybrid.policies.scout.policy import ScoutPolicy
from sglang_hybrid.policies.scout.rules import ScoutRules


def create(context: PolicyContext) -> ScoutPolicy:
    config = context.config
    rules = ScoutRules(
        paper_resident_tokens(config), per_layer=True, only_selected=True, shifts=False, recalls_by_real_query=False,
        early_recalls=0, stands_for_all=False,
    )  # fmt: skip
    tuning = paper_tuning(config, context.tuning)
    return ScoutPolicy(config, rules, context.misses, tuning, context.prompts, context.rows)
