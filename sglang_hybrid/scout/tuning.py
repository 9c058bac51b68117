"""What a profile tunes per layer, or the settings fix: the bonus of resident blocks and the recall intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sglang_hybrid.config import HybridConfig

# Without a profile. A small bonus removes most of the churn around the boundary and costs nothing on any text we know;
# the interval is what ScoutAttention's own profiles end up with for most layers.
DEFAULT_BONUS = 1.0
DEFAULT_INTERVAL = 8


class Profiled(Protocol):
    """What a profile says per layer."""

    @property
    def bonus(self) -> tuple[float, ...]: ...

    @property
    def intervals(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Tuning:
    """One value per layer of this rank."""

    bonus: tuple[float, ...]  # what a resident block's score gets on top, in attention logits
    intervals: tuple[int, ...]  # decode steps between two recalls, 0 for never
    beta: float  # the CPU compute ratio that recall keeps
    adapt: bool  # whether live traffic changes the intervals


def tuning_of(config: HybridConfig, layers: int, profile: Profiled | None = None) -> Tuning:
    """Settings win over the profile."""
    if config.sticky_bonus != "auto":
        bonus = (float(config.sticky_bonus),) * layers
    else:
        bonus = profile.bonus if profile else (DEFAULT_BONUS,) * layers
    if config.recall_interval != "auto":
        intervals = (int(config.recall_interval),) * layers
    else:
        intervals = profile.intervals if profile else (DEFAULT_INTERVAL,) * layers
    # a fixed interval is meant to stay
    adapt = config.recall_adapt and config.recall_interval == "auto"
    return Tuning(bonus, intervals, config.recall_beta, adapt)
