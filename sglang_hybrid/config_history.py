"""Settings of earlier versions, renamed or removed, and the advice that the error for such a key ends with."""

from __future__ import annotations

from sglang_hybrid.blocks import BLOCK_TOKENS

_MOVED_TO_SCOUT = {
    "resident_tokens": "resident_tokens",
    "sticky_bonus": "resident_bonus",
    "miss_share": "min_miss_attention",
    "cpu_share": "cpu_share",
    "recall_interval": "recall_interval",
    "recall_beta": "target_cpu_ratio",
    "recall_adapt": "recall_adapt",
}

_RENAMED = {
    "dense": "whole_requests",
    **{old: f"scout.{new}" for old, new in _MOVED_TO_SCOUT.items()},
    **{f"scout.{old}": f"scout.{new}" for old, new in _MOVED_TO_SCOUT.items() if old != new},
}

_PAPER = "policy=scoutattention does what the paper does: drop it"
_ALL_SCORED = "all blocks are scored at every step: drop it"
_REMOVED = {
    **{f"{section}{key}": _PAPER for key in ("selection", "attend", "lse_shift") for section in ("", "scout.")},
    **{f"{section}{key}": _ALL_SCORED for key in ("score_interval", "hot_tokens") for section in ("", "scout.")},
    "block_tokens": f"blocks have {BLOCK_TOKENS} tokens, which the kernels are compiled for: drop it",
    "worker_group_threads": "the worker divides its threads into groups by itself: drop it",
    "worker_spin_us": "the worker stays awake for 200 us after the last work, and longer if steps need it: drop it",
    "worker_task_blocks": "the worker divides lists into tasks by itself: drop it",
    "digest": "selection scores the minimum and maximum of a block's keys: drop it",
    "digest_spread": "without sketches, scores go half of the way to Quest's upper bound: drop it",
    "sketch_bits": "sketches have four bits a channel: drop it, and set sketch_channels to take less memory",
    "most_budget_tokens": "budgets do not grow while few requests run: drop it, and raise budget_tokens instead",
}


def what_became_of(key: str) -> str | None:
    """Return advice about a setting of an earlier version, or None if no earlier version had this key."""
    if key in _RENAMED:
        return f"is called {_RENAMED[key]} now"
    if key in _REMOVED:
        return f"was removed; {_REMOVED[key]}"
    return None
