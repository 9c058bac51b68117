"""Reads the flags of SGLang's command line that launchers need.

SGLang parses the whole command line itself, in the child process. A launcher reads only what its checks and its
console need, and leaves everything else, mistakes included, to SGLang.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped,unused-ignore]

from sglang_hybrid.config_flags import add_config_flags
from sglang_hybrid.integration import BACKEND_NAME

MODEL_PATH_FLAGS = ("--model-path", "--model")
MODEL_FLAGS = (*MODEL_PATH_FLAGS, "--config")


class Refused(ValueError):
    """The launcher must not start a server with these arguments. The message tells the user why."""


@dataclass(frozen=True)
class ServerArguments:
    """Values that SGLang will use for the flags that launchers check before SGLang starts."""

    model_path: str | None
    served_model_name: str | None
    host: str
    port: int
    context_length: int | None
    attention_backend: str
    overrides_model: bool  # --json-model-override-args is given: config.json alone does not describe the model
    ranks: int  # tensor-parallel ranks on this host
    hybrid: tuple[str, ...]
    hybrid_config: Path | None

    @property
    def is_hybrid(self) -> bool:
        return self.attention_backend == BACKEND_NAME


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def given(arguments: Sequence[str], *flags: str) -> bool:
    return any(argument.split("=", 1)[0] in flags for argument in arguments)


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    value: str | None = parser.parse_known_args(arguments)[0].value
    return value


def without(arguments: Sequence[str], *flags: str) -> list[str]:
    """Return ``arguments`` without ``flags``, which are spellings of one flag, and without their values."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(*flags)
    return parser.parse_known_args(arguments)[1]


def read(arguments: Sequence[str]) -> ServerArguments:
    """Parse ``arguments`` and the file of SGLang's --config. Raise Refused for a value that a flag cannot have."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(*MODEL_PATH_FLAGS)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--attention-backend", default=BACKEND_NAME)
    parser.add_argument("--json-model-override-args")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=int, default=1)
    parser.add_argument("--nnodes", type=int, default=1)
    add_config_flags(parser)
    found, _others = parser.parse_known_args([*_of_config_file(arguments), *arguments])
    return ServerArguments(
        model_path=found.model_path,
        served_model_name=found.served_model_name,
        host=found.host,
        port=found.port,
        context_length=found.context_length,
        attention_backend=found.attention_backend,
        overrides_model=found.json_model_override_args is not None,
        ranks=max(1, found.tensor_parallel_size // max(1, found.nnodes)),
        hybrid=tuple(found.hybrid),
        hybrid_config=Path(found.hybrid_config) if found.hybrid_config else None,
    )


def _of_config_file(arguments: Sequence[str]) -> list[str]:
    """Return the flags in the file of SGLang's own --config FILE; they come before those of the command line.

    Raise Refused if the file cannot be read or is not YAML.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    path = parser.parse_known_args(arguments)[0].config
    if path is None:
        return []
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--config {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise Refused(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        return []
    flags = []
    for key, value in content.items():
        flags += _flag(str(key), value)
    return flags


def _flag(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    values = value if isinstance(value, list) else [value]
    return [f"--{key}", *map(str, values)]
