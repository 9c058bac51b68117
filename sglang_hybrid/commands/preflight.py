"""Checks before the start that need neither torch nor SGLang, so that mistakes are reported within a second.

Mistakes that only SGLang can find are reported later in the same way, in one sentence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid import env, host_settings
from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.commands import model_files
from sglang_hybrid.commands.arguments import Refused, ServerArguments
from sglang_hybrid.commands.ports import check_port
from sglang_hybrid.config import ConfigError, HybridConfig, load_with_sources
from sglang_hybrid.host import GIB, this_host
from sglang_hybrid.policies.registry import policy_named
from sglang_hybrid.policies.scout.profile_facts import ProfileError, mismatches, read_facts

_ALLOW_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def check(arguments: ServerArguments) -> HybridConfig | None:
    """Return our backend's settings, None with another backend. Raise Refused for wrong settings, port or model."""
    config = check_settings(arguments.hybrid_config, arguments.hybrid, arguments.ranks) if arguments.is_hybrid else None
    check_port(arguments.host, arguments.port)
    if arguments.model_path is not None:
        check_model(arguments, config)
    return config


def check_settings(file: Path | None, overrides: Sequence[str], ranks: int = 1) -> HybridConfig:
    """Return the settings of file, flags and environment. Raise Refused if they cannot be used on this host."""
    try:
        config, sources = load_with_sources(file or env.CONFIG.get(), [*env.SET.get(), *overrides])
        host = this_host()
        host_settings.check(config, host, sources, ranks)
        policy = policy_named(config.policy)
        if policy.describe:
            policy.describe(config)  # reads the files that the policy's settings name
    except ConfigError as error:
        raise Refused(str(error)) from error
    if (asked := config.host_memory_bytes(host.available)) > host.available:
        raise Refused(
            f"host_memory={config.host_memory} asks for {asked / GIB:.2f} GiB, but only {host.available / GIB:.2f} GiB "
            "of host memory are available: lower host_memory or free memory"
        )
    return config


def check_model(arguments: ServerArguments, config: HybridConfig | None) -> None:
    """Raise Refused if model path, context length or profile cannot be used, as far as config.json shows."""
    assert arguments.model_path is not None
    model = model_files.read_config(arguments.model_path)
    if arguments.overrides_model:
        model = None
    if model is not None and arguments.context_length is not None:
        longest = model_files.context_tokens(model)
        allowed = os.environ.get(_ALLOW_LONGER, "").lower() in ("1", "true", "yes", "on")
        if longest is not None and arguments.context_length > longest and not allowed:
            raise Refused(
                f"--context-length {arguments.context_length} is longer than the {longest} tokens that this model was "
                f"made for: lower it, or set {_ALLOW_LONGER}=1 to try it all the same"
            )
    if config is not None and policy_named(config.policy).needs.prediction and config.profile_file is not None:
        _check_profile(config.profile_file, config, {} if model is None else model_files.identity(model))


def _check_profile(file: str, config: HybridConfig, model: dict[str, object]) -> None:
    try:
        wrong = mismatches(read_facts(Path(file)), model, BLOCK_TOKENS, config.budget_tokens)
    except ProfileError as error:
        raise Refused(f"profile {file}: {error}") from error
    if wrong:
        raise Refused(f"profile {file}: made for something else: {'; '.join(wrong)}")
