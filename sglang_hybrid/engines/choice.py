"""Choice of the engine on a host without a GPU. Imports neither torch nor SGLang, so that commands can ask quickly."""

from __future__ import annotations

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.policies.registry import policy_named

_CHANNELS_MULTIPLE = 16  # the native loops need a multiple of this number of sketch channels

# Settings about residency in GPU memory and about computing ahead of time, with the values that the native engine
# supports. A user who sets another value wants to see its effect, and gets the torch engine.
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
    """Return why a host without a GPU serves these settings in plain torch, in words. None means ``CpuEngine`` does."""
    policy = policy_named(config.policy)
    if policy.native_budget is None:
        return f"policy={config.policy}"
    if policy.native_budget(config) is None:  # all blocks are attended to, so settings of selection do not matter
        return None
    values = config.by_key()
    for key, known in _OF_GPU.items():
        section, dot, _ = key.partition(".")
        if (not dot or section == config.policy) and values[key] not in known:
            return f"{key}={values[key]}"
    if (channels := min(config.sketch_channels, head_dim)) % _CHANNELS_MULTIPLE:
        return f"a sketch of {channels} channels is not a multiple of {_CHANNELS_MULTIPLE}"
    return None
