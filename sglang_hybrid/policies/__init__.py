"""Decode policies, by the name they have in the configuration."""

from __future__ import annotations

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.base import DecodePolicy


def create_policy(config: HybridConfig) -> DecodePolicy:
    if config.policy == "full":
        from sglang_hybrid.policies.full import FullPolicy

        return FullPolicy()
    from sglang_hybrid.policies.scout import ScoutPolicy

    return ScoutPolicy(config)
