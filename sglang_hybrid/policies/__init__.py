"""Decode policies, by the name they have in the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.base import DecodePolicy

if TYPE_CHECKING:
    from sglang_hybrid.misses.base import MissServer


def create_policy(config: HybridConfig, misses: MissServer | None = None) -> DecodePolicy:
    """``misses`` serves what a policy does not keep near; without it, plain torch does."""
    if config.policy == "full":
        from sglang_hybrid.policies.full import FullPolicy

        return FullPolicy()
    from sglang_hybrid.misses.reference import ReferenceMisses
    from sglang_hybrid.policies.scout import ScoutPolicy

    return ScoutPolicy(config, misses or ReferenceMisses())
