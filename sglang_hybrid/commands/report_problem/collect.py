"""Collects the parts of a report. A part that fails contains its error, which may be the problem to be reported."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from sglang_hybrid import __version__
from sglang_hybrid.commands.doctor.report import Finding, Report, Status
from sglang_hybrid.commands.report_problem.redact import Redactor
from sglang_hybrid.ops.cpu import build as cpu_build
from sglang_hybrid.ops.cpu.library import FILE
from sglang_hybrid.ops.cuda import build as cuda_build
from sglang_hybrid.ops.cuda import sources, toolchain

LOG_BYTES = 1 << 20  # bytes kept of the end of a log
_DOCTOR_SECONDS = 600  # time limit of a command that hangs: a measurement on a busy machine may take minutes
# prefixes of variables that change what a server does; all other variables are left out
_VARIABLES = (
    "SGLANG_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "OMP_", "MKL_", "KMP_",
    "MALLOC_", "LD_", "HF_", "TRANSFORMERS_", "PYTHON", "CXX", "MOONCAKE_", "XDG_CACHE_HOME",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One file of the archive, without secrets."""

    name: str
    what: str
    text: str


@dataclass(frozen=True)
class Wanted:
    """What to collect. ``settings``: the server's flags for settings, as ``sglang-hybrid config`` takes them."""

    log: Path | None = None
    quick: bool = False
    settings: Sequence[str] = ()


def parts(wanted: Wanted, redactor: Redactor, tell: Callable[[str], None] = lambda _: None) -> Iterator[Part]:
    """Collect the parts one after another. ``tell`` is called with the name of each step before the step."""
    tell("versions")
    yield _json("versions.json", "versions of Python, system and all packages", versions, redactor)
    tell("doctor")
    doctor = _attempt(lambda: run_doctor(wanted.quick))
    yield _json("doctor.json", "checks and measurements of this machine", lambda: doctor, redactor)
    yield _text("doctor.txt", "the same as a table", lambda: doctor_table(doctor), redactor)
    tell("settings")
    yield _text(
        "settings.yaml", "every setting, its source, and what auto becomes", lambda: settings(wanted.settings), redactor
    )
    yield _json("environment.json", "environment variables that change what a server does", environment, redactor)
    tell("kernels")
    yield _json("kernels.json", "compiled kernels: where, which, and compilers", kernels, redactor)
    if wanted.log is not None:
        log = wanted.log
        yield _text("log.txt", f"the end of the log, at most {LOG_BYTES >> 20} MiB", lambda: end_of(log), redactor)


def _text(name: str, what: str, collect: Callable[[], str], redactor: Redactor) -> Part:
    found = _attempt(collect)
    return Part(name, what, redactor.text(found if isinstance(found, str) else json.dumps(found)) + "\n")


def _json(name: str, what: str, collect: Callable[[], Any], redactor: Redactor) -> Part:
    return Part(name, what, json.dumps(redactor.value(_attempt(collect)), indent=1) + "\n")


def _attempt(collect: Callable[[], Any]) -> Any:
    try:
        return collect()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def versions() -> dict[str, Any]:
    packages = {one.name: one.version for one in importlib.metadata.distributions()}
    return {
        "sglang-hybrid": __version__,
        "python": sys.version,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "distribution": _distribution(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def run_doctor(quick: bool) -> dict[str, Any]:
    """Return what ``doctor --json`` prints. Doctor runs in its own process, because a kernel may crash.

    Raises RuntimeError if doctor fails.
    """
    done = _ours("doctor", "--json", *(["--quick"] if quick else []))
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise RuntimeError(f"doctor ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def doctor_table(found: dict[str, Any]) -> str:
    if "checks" not in found:
        return str(found.get("error"))
    from rich.console import Console

    from sglang_hybrid.commands.doctor.main import print_report

    findings = {
        check["name"]: Finding(Status(check["status"]), check["found"], check["to_do"] or "")
        for check in found["checks"]
    }
    written = StringIO()
    print_report(Report(found["versions"], findings), Console(file=written, width=160, highlight=False))
    return written.getvalue().rstrip()


def settings(flags: Sequence[str]) -> str:
    """Return what ``sglang-hybrid config`` prints for ``flags``: the settings, or an error."""
    done = _ours("config", *flags)
    return (done.stdout or done.stderr).strip()


def _ours(*command: str) -> subprocess.CompletedProcess[str]:
    called = [sys.executable, "-m", "sglang_hybrid.cli", *command]
    return subprocess.run(called, capture_output=True, text=True, check=False, timeout=_DOCTOR_SECONDS)


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def kernels() -> dict[str, Any]:
    """Return files and compilers of the kernels. Doctor checks whether the library loads and which variant is used."""
    built_from = FILE.with_name(".built-from")  # exists only in a checkout
    return {
        "cpu": {
            "library": _file(FILE) if FILE.is_file() else None,
            "built_from": built_from.read_text() if built_from.is_file() else None,
            "sources": _attempt(cpu_build.source_hash),
            "compiler": cpu_build.compiler_version().partition("\n")[0] or None,
            "cache": _files(cpu_build.cache_folder()),
        },
        "cuda": {
            "sources": _attempt(sources.source_hash),
            "nvcc": _attempt(_nvcc),
            "cache": _files(cuda_build.cache_folder()),
        },
    }


def _nvcc() -> str | None:
    found = toolchain.find_nvcc()
    return None if found is None else f"{found.path} {found.version}"


def _files(folder: Path) -> list[dict[str, Any]]:
    return [_file(path) for path in sorted(folder.glob("*.so"))]


def _file(path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def end_of(log: Path) -> str:
    """Return the last lines of a log, at most ``LOG_BYTES``. Raise OSError if the log cannot be read."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        text = file.read().decode(errors="replace")
    if size <= LOG_BYTES:
        return text
    _, _, lines = text.partition("\n")  # the first line is incomplete
    return f"(the first {size - LOG_BYTES} bytes are left out)\n{lines}"
