"""Variants of the hybrid backend's settings that are compared with stock. The model is loaded once for all of them."""

from __future__ import annotations

BUDGET = 8192  # tokens; above every prompt, so all blocks are selected
# All blocks but sink and tail are misses, at every step, by real queries: none is resident, none is left out.
_ALL_MISSED = ("recent_blocks=0", "scout.resident_tokens=0", "prediction=none", "scout.min_miss_attention=0")
# settings of the process: the worker's mailbox is sized for this budget, no row is late on a busy host, and resident
# blocks are what stock attends over, not codes of 8 bits
START = (f"budget_tokens={BUDGET}", "worker_deadline_ms=2000", "whole_requests=never", "scout.slot_dtype=model")

VARIANTS: dict[str, tuple[str, ...]] = {
    "gate1-budget": START,
    "gate1-dense": (*START, "whole_requests=auto"),  # prompts fit in the memory of the resident blocks
    "gate2-worker": (*START, *_ALL_MISSED, "scout.cpu_share=1"),
    "gate2-gather": (*START, *_ALL_MISSED, "scout.cpu_share=0"),
    "too-small": (*START, "budget_tokens=128", "prediction=none"),
    "gate2-no-worker": (*START, *_ALL_MISSED, "worker=none"),
}
# variant in which the worker must serve all rows with misses
ALL_ON_WORKER = "gate2-worker"
# variant that must differ by more than rounding: otherwise these cases would not detect wrong attention either
MUST_DIFFER = "too-small"
# without a GPU nothing is gathered, and the start of the process decides who computes misses
ON_CPU = ("gate1-budget", "gate2-worker", "too-small")
