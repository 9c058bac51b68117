"""Policy ``scoutattention``: ScoutAttention as its paper has it, on the machinery of ``scout``.

Queries are predicted by the next layer's own projection, all KV heads of a layer share one selection, exactly the
selected blocks are attended, and the CPU computes those that are not resident. Nothing is added to the scores of
resident blocks, no miss is too small, nothing is corrected when the real query is there, what was selected by a
predicted query becomes resident, and it stands for itself alone.
"""

from __future__ import annotations

from sglang_hybrid.policies.registry import PolicyContext
from sglang_hybrid.policies.scout.options import ScoutAttentionOptions
from sglang_hybrid.policies.scout.policy import ScoutPolicy
from sglang_hybrid.policies.scout.rules import ScoutRules
from sglang_hybrid.policies.scout.tuning import Tuning


def create(context: PolicyContext) -> ScoutPolicy:
    config, layers = context.config, context.layers
    options = config.section(ScoutAttentionOptions)
    resident = config.budget_tokens if options.resident_tokens == "auto" else options.resident_tokens
    fixed = options.recall_interval != "auto"
    tuning = Tuning(
        bonus=(0.0,) * layers,
        # the context's are the profile's, or the same default
        intervals=(options.recall_interval,) * layers if fixed else context.tuning.intervals,  # type: ignore[arg-type]
        beta=options.target_cpu_ratio,
        adapt=options.recall_adapt and not fixed,
        miss_shares=(0.0,) * layers,
        any_block=(False,) * layers,
    )
    rules = ScoutRules(
        resident, per_layer=True, only_selected=True, shifts=False, recalls_by_real_query=False, early_recalls=0,
        stands_for_all=False,
    )  # fmt: skip
    return ScoutPolicy(config, rules, context.misses, tuning, context.prompts, context.rows)
