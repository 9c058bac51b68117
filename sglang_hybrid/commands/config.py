"""``sglang-hybrid config``: print every setting, what ``auto`` becomes on this host, and the source of the value."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_hybrid.config import ConfigError, describe
from sglang_hybrid.config_flags import add_config_flags, config_of_arguments
from sglang_hybrid.policies.registry import policy_named


def main(arguments: Sequence[str]) -> int:
    """Print the configuration. Return the exit status: 2 for settings that cannot be used, or not on this host."""
    parser = argparse.ArgumentParser(
        prog="sglang-hybrid config",
        description="Print every setting with its meaning, its value, what auto becomes on this host, and where the "
        "value comes from. The output is a YAML file that --hybrid-config takes. Settings that cannot work, here or "
        "anywhere, are refused.",
        epilog="example: sglang-hybrid config --hybrid budget_tokens=4096 > mine.yaml",
    )
    add_config_flags(parser)
    parser.parse_args(arguments)
    try:
        config, sources = config_of_arguments(arguments)
        from sglang_hybrid import host_settings
        from sglang_hybrid.host import this_host

        host = this_host()
        host_settings.check(config, host, sources)
        policy = policy_named(config.policy)
        about = policy.describe(config) if policy.describe else ""
    except ConfigError as error:
        print(f"sglang-hybrid config: {error}", file=sys.stderr)
        return 2
    print(f"# On this host: {host}")
    print(f"# Policy {config.policy}: {about}\n" if about else "")
    print(describe(config, sources, host_settings.resolved(config, host)), end="")
    return 0
