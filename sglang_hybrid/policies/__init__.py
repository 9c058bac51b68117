"""Decode policies, by the name they have in the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.base import DecodePolicy

if TYPE_CHECKING:
    from sglang_hybrid.memory.prompt_queries import PromptQueries
    from sglang_hybrid.misses.base import MissServer
    from sglang_hybrid.scout.tuning import Tuning


def create_policy(
    config: HybridConfig,
    rows: int,
    layers: int,
    misses: MissServer | None = None,
    prompts: PromptQueries | None = None,
    tuning: Tuning | None = None,
) -> DecodePolicy:
    """For at most ``rows`` requests at a time and ``layers`` layers.

    ``misses`` serves what a policy does not keep near; without it, plain torch does. ``prompts``: last queries of
    prefill. ``tuning``: from a profile; without it, from the settings alone.
    """
    if config.policy == "full":
        from sglang_hybrid.policies.full import FullPolicy

        return FullPolicy()
    from sglang_hybrid.misses.reference import ReferenceMisses
    from sglang_hybrid.policies.scout import ScoutPolicy
    from sglang_hybrid.scout.tuning import tuning_of

    return ScoutPolicy(config, misses or ReferenceMisses(), tuning or tuning_of(config, layers), prompts, rows)
