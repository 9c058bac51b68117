"""Origin of a benchmark result, to be stored with the result: command, commit, machine, date."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def origin() -> dict[str, Any]:
    return {
        "command": _command(),
        # RESULT_COMMIT names the commit on a host that has the files without the repository
        "commit": os.environ.get("RESULT_COMMIT") or _git("rev-parse", "--short", "HEAD"),
        # None without a repository
        "uncommitted_changes": bool(_git("status", "--porcelain", "-uno")) if _git("rev-parse", "HEAD") else None,
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "architecture": platform.machine(), "gpu": _gpu()},
        "python": platform.python_version(),
    }


def _command() -> str:
    program, *arguments = sys.argv
    module = sys.modules["__main__"].__spec__  # None for a script; for `python -m package` its name is package.__main__
    run = ["-m", module.name.removesuffix(".__main__")] if module else [os.path.relpath(program, ROOT)]
    return shlex.join(["python", *run, *arguments])


def _git(*arguments: str) -> str:
    if not (ROOT / "pyproject.toml").is_file():  # installed: a repository around site-packages is not ours
        return ""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # no git on this host
        return ""
    return done.stdout.strip()


def cpu_name() -> str:
    """Return the name of the CPU model, or an empty string if the system does not tell."""
    try:
        found = _named("model name", Path("/proc/cpuinfo").read_text())
        # on aarch64 the kernel reports numbers only, which lscpu translates to names
        return found or _named("Model name", _said("lscpu")) or platform.processor()
    except OSError:
        return platform.processor()


def _named(key: str, lines: str) -> str:
    return next((line.split(":", 1)[1].strip() for line in lines.splitlines() if line.startswith(key)), "")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"}).stdout


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
