"""Which SGLang this code is tested with."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

from sglang_hybrid import env

OLDEST_TESTED = Version("0.5.17")
NEWEST_TESTED = Version("0.5.20")


class UntestedSGLang(RuntimeError):
    """SGLang is outside the tested range and nobody said that this is fine."""


def installed_sglang() -> Version:
    return Version(metadata.version("sglang"))


def check_sglang_version() -> None:
    """Raise UntestedSGLang outside the tested range, unless the environment allows it."""
    seen = installed_sglang()
    if OLDEST_TESTED <= Version(seen.base_version) <= NEWEST_TESTED or env.ALLOW_UNTESTED_SGLANG.get():
        return
    raise UntestedSGLang(
        f"sglang {seen} is installed, but sglang-hybrid is tested with {OLDEST_TESTED} to {NEWEST_TESTED}: install "
        f"one of those, or set {env.ALLOW_UNTESTED_SGLANG.name}=1 to try this one"
    )
