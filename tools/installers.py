"""The two programs that can install packages into an environment: uv, which takes seconds, and pip."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import pip_settings

OLDEST_UV = (0, 8)  # oldest version with --torch-backend and with variables for all of pip's settings
_CUDA_PACKAGES = ("nvidia-", "cuda-")
_CPU_TORCH = (
    "give pip an index with a CPU build of torch (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS), "
    "or accept several GB of CUDA packages: make ... INSTALL=--any-torch"
)


class InstallError(Exception):
    """A command failed. The error has the command, its output, and a hint for the user if there is one."""

    def __init__(self, command: list[str], output: str, hint: str | None = None) -> None:
        super().__init__(f"failed: {' '.join(command)}")
        self.command = command
        self.output = output
        self.hint = hint

    @property
    def reason(self) -> str:
        """The most useful line of the output: the first that mentions an error, else the last."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else str(self))


def run(command: list[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run ``command`` and return its output. Raise InstallError, with the output, if the command fails."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **(environment or {})}, cwd=cwd, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise InstallError(command, str(error)) from error
    if done.returncode:
        raise InstallError(command, done.stdout)
    return done.stdout


class Installer(ABC):
    """A program that installs packages into one virtual environment."""

    name: str

    @abstractmethod
    def install(self, *arguments: str, cwd: Path | None = None) -> str:
        """Install the packages that ``arguments`` of ``pip install`` name. Raise InstallError if that fails."""

    @abstractmethod
    def planned(self, *arguments: str) -> list[str]:
        """Return the names of the packages that ``install`` would add or replace, or at least of the packages that
        ``arguments`` name and of those packages' direct dependencies. Raise InstallError if that fails."""


class Uv(Installer):
    def __init__(self, program: str, python: Path, environment: Mapping[str, str], *options: str) -> None:
        self.name = " ".join(["uv", *options])
        self._command = [program, "pip", "install", "--python", str(python), *options]
        self._environment = {"UV_NO_PROGRESS": "1", **environment}

    def install(self, *arguments: str, cwd: Path | None = None) -> str:
        return run([*self._command, *arguments], self._environment, cwd)

    def planned(self, *arguments: str) -> list[str]:
        # do not spend minutes on an index that cannot be reached: there is another installer
        quick = {"UV_HTTP_RETRIES": "1", "UV_HTTP_CONNECT_TIMEOUT": "10"}
        said = run([*self._command, "--dry-run", *arguments], {**quick, **self._environment})
        return re.findall(r"^ \+ ([\w.-]+)==", said, re.MULTILINE)


class Pip(Installer):
    name = "pip"

    def __init__(self, command: list[str]) -> None:
        self._command = [*command, "install", "--quiet", "--disable-pip-version-check"]

    def install(self, *arguments: str, cwd: Path | None = None) -> str:
        return run([*self._command, *arguments], cwd=cwd)

    def planned(self, *arguments: str) -> list[str]:
        # --no-deps: to resolve dependencies, pip would download gigabytes of packages that may then be refused
        said = run([*self._command, "--dry-run", "--no-deps", "--report", "-", *arguments])
        found = [entry["metadata"] for entry in json.loads(said[said.index("{\n") :])["install"]]  # after warnings
        needed = [re.match(r"[\w.-]+", text) for package in found for text in package.get("requires_dist", [])]
        names = [package["name"] for package in found] + [name.group() for name in needed if name]
        return [name.lower() for name in names]


def choose(python: Path, requirements: list[str], without_cuda: bool) -> tuple[Installer, str]:
    """Return the first installer that can install ``requirements``, and a remark if that installer is pip.

    With ``without_cuda``, an installer that would install torch with CUDA does not count. Raises InstallError if no
    installer is left.
    """
    refused: list[str] = []
    found_cuda = False
    for installer in _candidates(python, without_cuda, refused):
        try:
            planned = installer.planned(*requirements)
        except InstallError as error:
            refused.append(f"{installer.name}: {error.reason}")
            continue
        cuda = [name for name in planned if name.startswith(_CUDA_PACKAGES)]
        if cuda and without_cuda:
            refused.append(f"{installer.name}: would install torch with {len(cuda)} CUDA packages")
            found_cuda = True
            continue
        return installer, "" if isinstance(installer, Uv) else f"by pip, slowly; {'; '.join(refused)}"
    command = ["uv", "pip", "install", *requirements]
    raise InstallError(command, "\n".join(refused), _CPU_TORCH if found_cuda else None)


def _candidates(python: Path, without_cuda: bool, refused: list[str]) -> Iterator[Installer]:
    try:
        program = find_uv(python)
    except InstallError as error:
        refused.append(f"uv: {error.reason}")
    else:
        environment = pip_settings.for_uv(pip_settings.read(pip_of_this_python()))
        yield Uv(program, python, environment)
        if without_cuda:
            yield Uv(program, python, environment, "--torch-backend=cpu")  # uv knows PyTorch's index of CPU builds
    yield Pip(pip_for(python))


def pip_of_this_python() -> list[str] | None:
    command = [sys.executable, "-m", "pip"]
    try:
        run([*command, "--version"])
    except InstallError:
        return None
    return command


def pip_for(python: Path) -> list[str]:
    """Return the command of a pip that installs into ``python``'s environment, which was made without pip."""
    own = [str(python), "-m", "pip"]
    try:
        run([*own, "--version"])
    except InstallError:
        outside = [sys.executable, "-m", "pip", "--python", str(python)]  # pip 22.3 and later
        try:
            run([*outside, "--version"])
        except InstallError:
            run([str(python), "-m", "ensurepip"])
        else:
            return outside
    return own


def find_uv(python: Path) -> str:
    """Return the uv of the environment or of the PATH; without one, install uv into the environment.

    Raises InstallError if uv cannot be installed.
    """
    own = python.parent / "uv"
    for program in (str(own), shutil.which("uv")):
        if program and _version(program) >= OLDEST_UV:
            return program
    Pip(pip_for(python)).install("uv")
    return str(own)


def _version(program: str) -> tuple[int, ...]:
    try:
        said = run([program, "--version"])
    except InstallError:
        return ()
    found = re.search(r"(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()
