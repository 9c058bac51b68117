"""Tuning per layer, from a profile or from settings: bonus of resident blocks, recall intervals, minimum attention.

Imports no torch: ``sglang-hybrid config`` shows these numbers too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # which imports the policies, and so this module
    from sglang_hybrid.config import HybridConfig

# Without a profile. A small bonus removes most swaps of nearly equal blocks and costs nothing on any text we know; the
# interval is the one that ScoutAttention's own profiles have for most layers.
DEFAULT_BONUS = 1.0
DEFAULT_INTERVAL = 8
# The interval where misses are copied to a GPU: a copied block is resident from then on, so recalls find little to do,
# and take PCIe and attention's time ("Recall intervals" in docs/measurements.md).
COPYING_INTERVAL = 32
# First decode steps of a row, in which all layers recall and every block that matters is attended to: queries change
# most right after the prompt, an answer depends on its beginning, and a short answer would end before each layer has
# recalled once.
FIRST_STEPS = 16
# Minimum estimated attention, as a share of the KV head's, of a block that is attended to in these steps. With 0.0005,
# first steps chose another token than full attention in three times as many of RULER's prompts.
FIRST_SHARE = 0.0002
DEFAULT_MISS_SHARE = 0.001
DEFAULT_TARGET = 0.12  # CPU compute ratio, as in ScoutAttention, until the host's speed is known


def resident_tokens_of(config: HybridConfig) -> int:
    """Return the number of tokens per (row, KV head) that are kept resident."""
    resident = config.scout.resident_tokens
    return config.budget_tokens if resident == "auto" else resident


class Profiled(Protocol):
    """Values of a profile, one per layer."""

    @property
    def bonus(self) -> tuple[float, ...]: ...

    @property
    def intervals(self) -> tuple[int, ...]: ...

    @property
    def miss_shares(self) -> tuple[float, ...]: ...  # empty, if the profile is older than this list


@dataclass(frozen=True)
class Tuning:
    """One value per layer of this rank."""

    bonus: tuple[float, ...]  # added to a resident block's score, in attention logits
    intervals: tuple[int, ...]  # decode steps between two recalls, 0 for never
    beta: float  # target CPU compute ratio of recalls, or its initial value
    adapt: bool  # whether live traffic changes the intervals
    miss_shares: tuple[float, ...]  # minimum of a block's share of a KV head's attention for a miss
    any_block: tuple[bool, ...]  # True: every such block is a miss; False: only selected ones
    follows_host: bool = False  # True: beta becomes what the worker computes without any wait for it


def beyond_selection(interval: int) -> bool:
    """Return True if blocks that are not selected can be misses of a layer with this recall interval.

    Such misses make up for resident blocks that were chosen some steps ago. A layer that recalls at every step has the
    best blocks resident, as many as the budget holds: it would compute more blocks at every step, and no recall would
    make them resident.
    """
    return interval != 1


def tuning_of(config: HybridConfig, layers: int, profile: Profiled | None = None) -> Tuning:
    """Return the tuning of ``layers`` layers. Settings take precedence over the profile."""
    options = config.scout
    if options.resident_bonus != "auto":
        bonus = (float(options.resident_bonus),) * layers
    else:
        bonus = profile.bonus if profile else (DEFAULT_BONUS,) * layers
    if options.recall_interval != "auto":
        intervals = (options.recall_interval,) * layers
    else:
        intervals = profile.intervals if profile else (DEFAULT_INTERVAL,) * layers
    # a fixed interval must not be adapted
    adapt = options.recall_adapt and options.recall_interval == "auto"
    miss_shares, any_block = (DEFAULT_MISS_SHARE,) * layers, (False,) * layers
    if options.min_miss_attention != "auto":
        miss_shares = (float(options.min_miss_attention),) * layers
    elif profile and profile.miss_shares:
        # Only shares per layer allow this: with one share for all layers the selection has to limit the misses.
        miss_shares = profile.miss_shares
        any_block = tuple(beyond_selection(interval) for interval in intervals)
    follows = options.target_cpu_ratio == "auto"
    beta = DEFAULT_TARGET if options.target_cpu_ratio == "auto" else options.target_cpu_ratio
    return Tuning(bonus, intervals, beta, adapt, miss_shares, any_block, follows)
