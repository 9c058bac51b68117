"""What a profile tunes per layer, or the settings fix: bonus of resident blocks, recall intervals, least shares.

Imports no torch: ``sglang-hybrid config`` shows these numbers too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # which knows the policies, and so this
    from sglang_hybrid.config import HybridConfig

# Without a profile. A small bonus removes most of the churn around the boundary and costs nothing on any text we know;
# the interval is what ScoutAttention's own profiles end up with for most layers.
DEFAULT_BONUS = 1.0
DEFAULT_INTERVAL = 8
# Steps of a row, its first ones, in which all its layers recall and nothing is left out that matters: queries change
# most behind the prompt, an answer's beginning decides, and a short one would end before each layer has recalled once.
FIRST_STEPS = 16
# Least estimated attention, as a share of the KV head's, of a block that is attended in these steps.
FIRST_SHARE = 0.0005
DEFAULT_MISS_SHARE = 0.001
DEFAULT_TARGET = 0.12  # of the CPU compute ratio, as in ScoutAttention, until the host tells a better one


def resident_tokens_of(config: HybridConfig) -> int:
    """Tokens of a (row, KV head) that are kept resident."""
    resident = config.scout.resident_tokens
    return config.budget_tokens if resident == "auto" else resident


class Profiled(Protocol):
    """What a profile says per layer."""

    @property
    def bonus(self) -> tuple[float, ...]: ...

    @property
    def intervals(self) -> tuple[int, ...]: ...

    @property
    def miss_shares(self) -> tuple[float, ...]: ...  # none, if it was made before there were any


@dataclass(frozen=True)
class Tuning:
    """One value per layer of this rank."""

    bonus: tuple[float, ...]  # what a resident block's score gets on top, in attention logits
    intervals: tuple[int, ...]  # decode steps between two recalls, 0 for never
    beta: float  # the CPU compute ratio that recall keeps, or begins with
    adapt: bool  # whether live traffic changes the intervals
    miss_shares: tuple[float, ...]  # of a KV head's attention, that a block must get to be a miss
    any_block: tuple[bool, ...]  # whether every such block is a miss, or those only that are selected
    follows_host: bool = False  # whether beta becomes what the worker computes while nobody waits for it


def beyond_selection(interval: int) -> bool:
    """Whether blocks that are not selected can be misses of a layer with that recall interval.

    They make up for resident blocks that were chosen some steps ago. A layer that recalls at every step has the best
    ones resident, as many as the budget holds: more would be computed again and again, and no recall would help.
    """
    return interval != 1


def tuning_of(config: HybridConfig, layers: int, profile: Profiled | None = None) -> Tuning:
    """Settings win over the profile."""
    options = config.scout
    if options.resident_bonus != "auto":
        bonus = (float(options.resident_bonus),) * layers
    else:
        bonus = profile.bonus if profile else (DEFAULT_BONUS,) * layers
    if options.recall_interval != "auto":
        intervals = (options.recall_interval,) * layers
    else:
        intervals = profile.intervals if profile else (DEFAULT_INTERVAL,) * layers
    # a fixed interval is meant to stay
    adapt = options.recall_adapt and options.recall_interval == "auto"
    miss_shares, any_block = (DEFAULT_MISS_SHARE,) * layers, (False,) * layers
    if options.min_miss_attention != "auto":
        miss_shares = (float(options.min_miss_attention),) * layers
    elif profile and profile.miss_shares:
        # One share for all layers needs the limit that a selection is: it says too little about what matters where.
        miss_shares = profile.miss_shares
        any_block = tuple(beyond_selection(interval) for interval in intervals)
    follows = options.target_cpu_ratio == "auto"
    beta = DEFAULT_TARGET if options.target_cpu_ratio == "auto" else options.target_cpu_ratio
    return Tuning(bonus, intervals, beta, adapt, miss_shares, any_block, follows)
