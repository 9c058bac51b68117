"""Sources of settings: YAML files, and ``key=value`` overrides whose values are YAML too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from sglang_hybrid.env import ConfigError


class _YamlLoader(yaml.SafeLoader):  # type: ignore[misc,unused-ignore]
    """Safe YAML in which a repeated key is an error: PyYAML would silently keep the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # lists and mappings cannot be keys; the constructor raises for them
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return node


# PyYAML follows YAML 1.1, where 1e-3 (no dot) is text; here it is a number.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), [*"-+0123456789"]
)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of YAML ``text``. Raise ConfigError, which names ``source`` and the line, for invalid YAML."""
    try:
        return yaml.load(text, _YamlLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: text that looks like a date or number and is none
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source}{where}: not valid YAML: {what}") from error


def read_file(file: Path) -> dict[Any, Any]:
    """Return the content of a settings file. Raise ConfigError if the file cannot be read or holds no mapping."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"file {file}: does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {file}: cannot be read: {error}") from error
    content = parse_yaml(text, f"file {file}")
    if content is None:  # empty, or comments only
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"file {file}: must hold lines of the form key: value, not a {type(content).__name__}")
    return content


def read_override(override: str) -> dict[Any, Any]:
    """Return the one setting of ``key=value`` as a dict. Raise ConfigError for text of another form."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r}: must have the form key=value")
    return {key.strip(): parse_yaml(text, f"override {override!r}")}
