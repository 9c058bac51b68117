"""Reads the tasks of RULER from NVIDIA's installed package ``nvidia-long-context-eval``."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from sglang_hybrid.commands.eval.errors import InputError

NAME = "nvidia-long-context-eval"
TESTED = "26.3"
_MODULE = "long_context_eval"
_HOW_TO_INSTALL = (
    "RULER needs NVIDIA's generators: pip install 'sglang-hybrid[ruler]' (in a checkout: pip install -r "
    "requirements/ruler.txt), or read prompts that were made elsewhere with --ruler-prompts FILE"
)


@dataclass(frozen=True)
class Task:
    name: str  # as in published tables, such as "niah_multikey_2"
    generator: str  # the program that makes the task's prompts, without ".py"
    arguments: tuple[str, ...]
    template: str
    answer_prefix: str
    new_tokens: int
    metric: str


@dataclass(frozen=True)
class Package:
    root: Path
    version: str

    def script(self, task: Task) -> Path:
        return self.root / "data" / "synthetic" / f"{task.generator}.py"

    def tasks(self) -> dict[str, Task]:
        """Return the tasks by name. Raise InputError if the package is not laid out as the tested version."""
        try:
            named = yaml.safe_load((self.root / "synthetic.yaml").read_text(encoding="utf-8"))
            asked = _tasks_of(self.root / "data" / "synthetic" / "constants.py")
            scored = _tasks_of(self.root / "eval" / "synthetic" / "constants.py")
            return {
                name: _task(name, given, asked[given["task"]], scored[given["task"]]) for name, given in named.items()
            }
        except (OSError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{NAME} {self.version} is not laid out as {TESTED} is ({type(error).__name__}: {error}): "
                f"pip install {NAME}=={TESTED}"
            ) from error


def installed() -> Package:
    """Return the installed package. Raise InputError, which says how to install it, if it is missing."""
    spec = util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(_HOW_TO_INSTALL)
    try:
        version = metadata.version(NAME)
    except metadata.PackageNotFoundError:
        raise InputError(_HOW_TO_INSTALL) from None
    return Package(Path(next(iter(spec.submodule_search_locations))), version)


def _tasks_of(path: Path) -> dict[str, Any]:
    """Return ``TASKS`` of a file of constants. Only the file is run: importing its package needs more packages."""
    tasks: dict[str, Any] = runpy.run_path(str(path))["TASKS"]
    return tasks


def _task(name: str, given: dict[str, Any], asked: dict[str, Any], scored: dict[str, Any]) -> Task:
    return Task(
        name=name,
        generator=given["task"],
        arguments=tuple(text for key, value in given["args"].items() for text in (f"--{key}", str(value))),
        template=asked["template"],
        answer_prefix=asked.get("answer_prefix", ""),
        new_tokens=asked["tokens_to_generate"],
        metric=scored["metric_fn"].__name__,
    )
