"""The two flags that carry settings, ``--hybrid-config FILE`` and ``--hybrid KEY=VALUE``.

SGLang has no way for a plugin to add settings of its own. So the flags become environment variables, which the
processes that SGLang spawns inherit. This module imports neither torch nor SGLang, because commands read the settings
before they import either.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hybrid import env
from sglang_hybrid.config import HybridConfig, load_with_sources


def add_config_flags(parser: Any) -> None:
    """Add both flags to ``parser``, an argparse parser or argument group."""
    parser.add_argument("--hybrid-config", metavar="FILE", help="YAML file with settings, see configs/default.yaml")
    parser.add_argument(
        "--hybrid",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting, wins over the file; may be repeated. One of a section has a dotted key, such as "
        "scout.recall_interval=3. `sglang-hybrid config` lists them",
    )


def export_config_flags(args: argparse.Namespace) -> None:
    """Write the flags to this process's environment, where this process and the processes it starts read them."""
    if args.hybrid_config:
        os.environ[env.CONFIG.name] = os.path.abspath(args.hybrid_config)
    if args.hybrid:
        # settings from the environment stay; those of the command line come later and win
        os.environ[env.SET.name] = json.dumps([*env.SET.get(), *args.hybrid])


def config_of_arguments(arguments: Sequence[str]) -> tuple[HybridConfig, dict[str, str]]:
    """Return the configuration that a command line asks for, and the source of each value by key.

    ``arguments`` is a whole command line, whose other flags are ignored. The environment is read and not changed.
    Raise ConfigError as ``load_with_sources`` does.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_config_flags(parser)
    args, _others = parser.parse_known_args(arguments)
    file = Path(args.hybrid_config) if args.hybrid_config else env.CONFIG.get()
    return load_with_sources(file, [*env.SET.get(), *args.hybrid])
