#!/usr/bin/env python3
"""Install a wheel into an empty environment without torch, SGLang and a compiler, and test what must work there.

    python3 tools/smoke_wheel.py dist/sglang_hybrid-0.2.0-py3-none-manylinux_2_28_x86_64.whl [--borrow]

The environment gets the small packages that the wheel requires: from the package index, or with --borrow from the
Python that runs this script, which needs no network. The tests cover commands, the CPU library, and a worker that
computes attention.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

_LARGE = {"sglang", "matplotlib"}  # not installed, nor torch, which SGLang brings: most commands do not need them
_CHECK = Path(__file__).resolve().with_name("wheel_check.py")
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "model_type": "llama", "tie_word_embeddings": False,
}  # fmt: skip


class SmokeError(RuntimeError):
    """A check of the wheel failed. The message says what was run and what happened."""


class Environment:
    """A virtual environment with the wheel and its small dependencies. Programs that run in it find no compiler."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self._folder = folder
        self.python = folder / "bin" / "python"
        (self.packages,) = (folder / "lib").glob("python*/site-packages")

    def install(self, wheel: Path, *, borrow: bool) -> None:
        self._pip("--no-deps", "--no-index", "--no-compile", str(wheel))
        needed = small_dependencies(wheel)
        if borrow:
            for name in with_dependencies(needed):
                link_package(name, self.packages)
        else:
            self._pip(*needed)

    def _pip(self, *arguments: str) -> None:
        # pip would take a checkout on PYTHONPATH for an installed package
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", *arguments], env=environment, check=True)

    def run(self, *command: str, status: int = 0) -> str:
        """Run a command with only the environment's own programs on the PATH, and return its output.

        Raises SmokeError if the exit status is not ``status`` or if the command prints a traceback.
        """
        program = str(self._folder / "bin" / command[0])
        environment = {
            "PATH": str(self._folder / "bin"),
            "HOME": str(self._folder),
            "SGLANG_HYBRID_CACHE": str(self._folder / "cache"),  # a library compiled here would be kept in this folder
        }
        done = subprocess.run(
            [program, *command[1:]], cwd=self._folder, env=environment, text=True, check=False, capture_output=True,
            timeout=120,
        )  # fmt: skip
        if done.returncode != status or "Traceback" in done.stderr:
            said = f"{done.stdout}\n{done.stderr}".strip()
            raise SmokeError(f"{' '.join(command)} ended with status {done.returncode}, not {status}:\n{said}")
        return done.stdout if status == 0 else f"{done.stdout}\n{done.stderr}"


def small_dependencies(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    asked = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return [line for line in asked if _name(line) not in _LARGE]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def with_dependencies(requirements: list[str]) -> set[str]:
    """Return the names of these packages and of all their dependencies, as installed in this Python."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name)
        waiting += importlib.metadata.requires(requirement.name) or []
    return found


def link_package(name: str, packages: Path) -> None:
    """Make a package of this Python importable from the folder ``packages`` too."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        if not (packages / top).exists():
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


def try_commands(installed: Environment) -> None:
    version = installed.run("sglang-hybrid", "--version").strip()
    _expect(f"-{version}-" in f"-{_version_of(installed)}-", f"--version says {version}")
    _expect("doctor" in installed.run("sglang-hybrid", "--help"), "--help lists no doctor")
    _expect(
        "budget_tokens: 4096" in installed.run("sglang-hybrid", "config", "--hybrid", "budget_tokens=4096"), "config"
    )
    model = installed.packages.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(_MODEL))
    sized = ("--gpu-memory", "80GB", "--host-memory", "200GiB", "--context", "32k", "--json")
    _expect("hybrid" in installed.run("sglang-hybrid", "size", str(model), *sized), "size")
    # torch and SGLang are missing here, and doctor must find no other problem
    report = json.loads(installed.run("sglang-hybrid", "doctor", "--quick", "--json", status=1).partition("\n\n")[0])
    status = {check["name"]: check["status"] for check in report["checks"]}
    wrong = {name for name, found in status.items() if found == "problem"} - {"torch", "SGLang"}
    _expect(not wrong and status["torch"] == "problem" and status["CPU library"] == "ok", f"doctor: {status}")
    _expect("SGLang" in installed.run("sglang-hybrid", "check", status=1), "check does not speak of SGLang")


def _version_of(installed: Environment) -> str:
    (information,) = installed.packages.glob("sglang_hybrid-*.dist-info")
    return information.name.removesuffix(".dist-info").partition("-")[2]


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise SmokeError(what)


def smoke(wheel: Path, folder: Path, *, borrow: bool) -> str:
    """Install and test the wheel in ``folder``. Return what ``wheel_check.py`` prints. Raise SmokeError on failure."""
    installed = Environment(folder)
    installed.install(wheel, borrow=borrow)
    try_commands(installed)
    said = installed.run("python", str(_CHECK))
    _expect(not (folder / "cache" / "native").exists(), "the library was compiled, not loaded from the wheel")
    return said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--borrow", action="store_true", help="link packages of this Python, in place of installing them"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sglang-hybrid-smoke-") as folder:
        try:
            print(smoke(args.wheel.resolve(), Path(folder), borrow=args.borrow))
        except SmokeError as error:
            sys.exit(f"{args.wheel.name}: {error}")


if __name__ == "__main__":
    main()
