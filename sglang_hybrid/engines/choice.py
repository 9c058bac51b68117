"""Which engine serves which settings. Imports neither torch nor SGLang: commands ask before they load either."""

from __future__ import annotations

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.registry import policy_named

_CHANNELS_MULTIPLE = 16  # of a sketch, in the native loops

# Settings that describe what is resident on a GPU, and who computes the rest ahead of time. Who sets one of them wants
# to see it at work, and gets the torch implementation.
_OF_GPU = {
    "prediction": ("auto", "none"),
    "scout.resident_tokens": ("auto",),
    "scout.resident_bonus": ("auto",),
    "scout.min_miss_attention": ("auto",),
    "scout.recall_interval": ("auto",),
    "worker": ("auto", "none"),
    "digest_dtype": ("auto", "model"),
}


def unsupported_by_cpu_engine(config: HybridConfig, head_dim: int) -> str | None:
    """Why a host without a GPU serves these settings in plain torch, in words; None where ``CpuEngine`` does."""
    policy = policy_named(config.policy)
    if policy.native_budget is None:
        return f"policy={config.policy}"
    if policy.native_budget(config) is None:  # everything is attended to: nothing is selected
        return None
    values = config.by_key()
    for key, known in _OF_GPU.items():
        section, dot, _ = key.partition(".")
        if (not dot or section == config.policy) and values[key] not in known:
            return f"{key}={values[key]}"
    if (channels := min(config.sketch_channels, head_dim)) % _CHANNELS_MULTIPLE:
        return f"a sketch of {channels} channels is not a multiple of {_CHANNELS_MULTIPLE}"
    return None
