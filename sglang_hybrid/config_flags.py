"""The two flags that carry settings, ``--hybrid-config FILE`` and ``--hybrid KEY=VALUE``.

SGLang has no way for a plugin to add a setting of its own, so the flags become environment variables, which the
processes that SGLang spawns inherit. This module imports neither torch nor SGLang: commands read settings before they
load either.
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
    """``parser``: an argparse parser, or a group of one."""
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
    """Carry the flags to this process's configuration and to the processes it starts."""
    if args.hybrid_config:
        os.environ[env.CONFIG.name] = os.path.abspath(args.hybrid_config)
    if args.hybrid:
        # what was in the environment stays, what is on the command line comes later and wins
        os.environ[env.SET.name] = json.dumps([*env.SET.get(), *args.hybrid])


def config_of_arguments(arguments: Sequence[str]) -> tuple[HybridConfig, dict[str, str]]:
    """The configuration that a command line asks for, and the source of each value; see ``load_with_sources``.

    ``arguments``: a whole command line, whose other flags are ignored. Reads the environment and does not change it.
    Raises ConfigError.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_config_flags(parser)
    args, _others = parser.parse_known_args(arguments)
    file = Path(args.hybrid_config) if args.hybrid_config else env.CONFIG.get()
    return load_with_sources(file, [*env.SET.get(), *args.hybrid])
