"""Checks of versions, settings, hooks and the CPU library."""

from __future__ import annotations

import platform
import sys

from sglang_hybrid import __version__, env, host_settings
from sglang_hybrid.commands.doctor import gpu
from sglang_hybrid.commands.doctor.machine import CommandError, Machine, settings
from sglang_hybrid.commands.doctor.report import Finding, advice, ok, problem
from sglang_hybrid.config import ConfigError
from sglang_hybrid.integration.versions import INSTALLED, NEWEST_TESTED, OLDEST_TESTED
from sglang_hybrid.ops.cpu import NativeError, library

PYTHONS = ((3, 11), (3, 13))  # the first supported version, and the first unsupported one; as in pyproject.toml
_FLASHINFER = "flashinfer-python"
_PACKAGES = ("torch", "sglang", _FLASHINFER)
_REBUILD = "Install the package again, or run python tools/build_native.py in a checkout."


def versions(machine: Machine) -> dict[str, str | None]:
    """Return versions by the name of the software; None means not installed."""
    found = {"sglang-hybrid": __version__, "python": platform.python_version()}
    return found | {package: machine.version(package) for package in _PACKAGES} | {"torch's CUDA": gpu.torch_cuda()}


def running_python() -> tuple[int, int]:
    return sys.version_info[:2]


def python(_machine: Machine) -> Finding:
    first, end = PYTHONS
    version = running_python()
    found = f"Python {version[0]}.{version[1]}"
    if first <= version < end:
        return ok(found)
    return problem(found, f"Install Python {first[0]}.{first[1]} or {end[0]}.{end[1] - 1} and set up again.")


def torch(machine: Machine) -> Finding:
    version = machine.version("torch")
    if version is None:
        return problem("torch is not installed", "Set up again: make install USE=serve in a checkout.")
    return ok(f"torch {version}")


def sglang(machine: Machine) -> Finding:
    from packaging.version import InvalidVersion, Version

    install = f"pip install sglang=={INSTALLED['cuda' if machine.gpus else 'cpu']}"
    text = machine.version("sglang")
    if text is None:
        return problem("SGLang is not installed", f"Install it: {install}.")
    tested = f"tested are {OLDEST_TESTED} to {NEWEST_TESTED}"
    found = f"SGLang {text}; {tested}"
    try:
        base = Version(Version(text).base_version)
    except InvalidVersion:
        return problem(found, f"Install a tested version: {install}.")
    if Version(OLDEST_TESTED) <= base <= Version(NEWEST_TESTED):
        return ok(found)
    if env.ALLOW_UNTESTED_SGLANG.get():
        return advice(
            f"{found}; {env.ALLOW_UNTESTED_SGLANG.name} allows it",
            f"Install a tested version for production: {install}.",
        )
    return problem(
        found, f"Install a tested version ({install}), or set {env.ALLOW_UNTESTED_SGLANG.name}=1 to try this one."
    )


def flashinfer(machine: Machine) -> Finding:
    """Check FlashInfer, which computes prefill attention on a GPU, against the version that SGLang requires."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    asked = [Requirement(text) for text in machine.requirements("sglang")]
    wanted = next((entry for entry in asked if canonicalize_name(entry.name) == _FLASHINFER), None)
    named = f"{_FLASHINFER}{wanted.specifier}" if wanted else _FLASHINFER
    version = machine.version(_FLASHINFER)
    if version is None:
        return problem("FlashInfer is not installed", f"Install it: pip install '{named}'.")
    found = f"FlashInfer {version}"
    if wanted and not wanted.specifier.contains(version, prereleases=True):
        return advice(f"{found}; SGLang asks for {wanted.specifier}", f"Install that: pip install '{named}'.")
    return ok(found)


def check_settings(machine: Machine) -> Finding:
    """Check the settings of the environment. ``sglang-hybrid config`` checks flags of a command line."""
    try:
        config, sources = settings()
        host_settings.check(config, machine.host, sources)
    except ConfigError as error:
        return problem(
            "; ".join(error.problems),
            f"Correct {env.CONFIG.name} or {env.SET.name}; sglang-hybrid config shows all settings.",
        )
    changed = [key for key, source in sources.items() if source != "default"]
    return ok(f"the environment sets {', '.join(changed)}" if changed else "all settings have their defaults")


def cpu_library(_machine: Machine) -> Finding:
    try:
        library()
    except NativeError as error:
        return problem(str(error), _REBUILD)
    return ok("the CPU kernels are built and can be loaded")


def hooks(machine: Machine) -> Finding:
    """Run ``sglang-hybrid check`` in its own process, because importing SGLang can end a process."""
    try:
        said = machine.run((sys.executable, "-m", "sglang_hybrid.cli", "check"))
    except CommandError as error:
        return problem(
            str(error),
            "Run sglang-hybrid check for the whole message, and install an SGLang that this package is tested with.",
        )
    return ok(f"SGLang takes all {said.count(chr(10) + '  ')} hooks")
