"""What is compared with stock: settings of the hybrid backend, all behind one load of the model."""

from __future__ import annotations

BUDGET = 8192  # above every prompt: everything is selected
# Everything but sink and tail is missed, at every step, with real queries: nothing is resident, nothing is left out.
_ALL_MISSED = ("recent_blocks=0", "scout.resident_tokens=0", "prediction=none", "scout.min_miss_attention=0")
# of the process: the worker's mailbox has room for this budget, and a busy host makes no row late
START = (f"budget_tokens={BUDGET}", "worker_deadline_ms=2000", "whole_requests=never")

VARIANTS: dict[str, tuple[str, ...]] = {
    "gate1-budget": START,
    "gate1-dense": (*START, "whole_requests=auto"),  # prompts fit in the memory of the resident blocks
    "gate2-worker": (*START, *_ALL_MISSED, "scout.cpu_share=1"),
    "gate2-gather": (*START, *_ALL_MISSED, "scout.cpu_share=0"),
    "too-small": (*START, "budget_tokens=128", "prediction=none"),
    "gate2-no-worker": (*START, *_ALL_MISSED, "worker=none"),
}
# the one in which the worker must have served all there was
ALL_ON_WORKER = "gate2-worker"
# the one that must differ by more than rounding: otherwise these cases would not see wrong attention either
MUST_DIFFER = "too-small"
# without a GPU nothing is gathered, and who computes misses is decided when the process starts
ON_CPU = ("gate1-budget", "gate2-worker", "too-small")
