"""Make entry points of a third-party package visible to a process, without installing the package."""

from __future__ import annotations

import os
from pathlib import Path


def installed(directory: Path, name: str, group: str, value: str, code: Path) -> dict[str, str]:
    """Return environment variables under which package ``name`` provides the entry point ``group``: ``name = value``.

    Metadata is written to ``directory``; ``code`` is the folder that modules are imported from.
    """
    information = directory / f"{name}-0.1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return {"PYTHONPATH": os.pathsep.join([str(code), str(directory), os.environ.get("PYTHONPATH", "")])}
