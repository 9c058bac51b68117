"""Packages of other people, for tests: their entry points, without an installation."""

from __future__ import annotations

import os
from pathlib import Path


def installed(directory: Path, name: str, group: str, value: str, code: Path) -> dict[str, str]:
    """An environment in which a package is installed, as far as entry points go."""
    information = directory / f"{name}-0.1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return {"PYTHONPATH": os.pathsep.join([str(code), str(directory), os.environ.get("PYTHONPATH", "")])}
