"""Parsed files of ``docker/`` for tests: Dockerfiles as stages of instructions, compose files with variables set."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
COMPOSE_FILES = sorted(DOCKER.glob("compose.*.yaml"))
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
GIVEN = {"MODEL": "/models/NAME", "GRAFANA_PASSWORD": "secret"}  # variables that a user of compose must set
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::([-?])([^}]*))?\})")
_FLAG = re.compile(r"--([a-z-]+)=(\S+)\s+")


@dataclass(frozen=True)
class Instruction:
    name: str  # RUN, COPY, ...
    text: str  # without its flags, lines joined
    flags: tuple[tuple[str, str], ...]  # such as ("from", "build")

    def flag(self, name: str) -> str | None:
        return dict(self.flags).get(name)

    def words(self) -> list[str]:
        """Return the arguments: the items of a JSON list, or the words as a shell splits them."""
        return [str(word) for word in json.loads(self.text)] if self.text.startswith("[") else shlex.split(self.text)


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        return [one for one in self.instructions if one.name == name]

    def last(self, name: str) -> Instruction:
        return self.all(name)[-1]

    def health_check(self) -> list[str]:
        """Return the command of the health check, as a list of words."""
        return [str(word) for word in json.loads(self.last("HEALTHCHECK").text.removeprefix("CMD "))]

    def arguments(self) -> dict[str, str]:
        """Return the defaults of the build arguments that have one, by name."""
        pairs = (one.text.partition("=") for one in self.all("ARG"))
        return {name: value for name, given, value in pairs if given}

    def variables(self) -> dict[str, str]:
        pairs = (word.partition("=") for one in self.all("ENV") for word in one.words())
        return {name: value for name, _, value in pairs}


@dataclass
class Dockerfile:
    arguments: dict[str, str]  # build arguments before the first FROM, with their defaults
    stages: list[Stage]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        arguments: dict[str, str] = {}
        stages: list[Stage] = []
        for one in _instructions(path.read_text(encoding="utf-8")):
            if one.name == "FROM":
                base, *alias = one.text.split()
                stages.append(Stage(substitute(base, arguments), alias[1] if alias else ""))
            elif stages:
                stages[-1].instructions.append(one)
            else:
                name, _, value = one.text.partition("=")
                arguments[name] = substitute(value, arguments)
        return cls(arguments, stages)

    @property
    def final(self) -> Stage:
        return self.stages[-1]

    def stage(self, name: str) -> Stage:
        (found,) = (stage for stage in self.stages if stage.name == name)
        return found


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for joined in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        name, _, rest = joined.partition(" ")
        flags = []
        rest = rest.strip()
        while found := _FLAG.match(rest):
            flags.append((found[1], found[2]))
            rest = rest[found.end() :]
        yield Instruction(name, rest, tuple(flags))


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace variables in Docker's and compose's syntax. A variable that is not in ``values`` must have a default."""

    def value(found: re.Match[str]) -> str:
        name, kind, default = found[1] or found[2], found[3], found[4]
        if name in values:
            return values[name]
        assert kind == "-", f"{found[0]} has no default, and the test gives no value"
        return str(default)

    return _VARIABLE.sub(value, text)


def compose(path: Path, **values: str) -> dict[str, Any]:
    """Load a compose file as if ``values`` and GIVEN were environment variables."""
    loaded: dict[str, Any] = yaml.safe_load(substitute(path.read_text(encoding="utf-8"), {**GIVEN, **values}))
    return loaded


def manifest(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded
