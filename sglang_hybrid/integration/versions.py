"""Versions of SGLang that this code is tested with. Every other file that needs a version number reads it here.

The installer and the Makefile read this file before anything is installed: only the standard library is imported here.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from sglang_hybrid import env

if TYPE_CHECKING:
    from packaging.version import Version

TESTED = ("0.5.17", "0.5.20", "0.5.21", "0.5.22", "0.5.23")  # oldest first; versions between are accepted
OLDEST_TESTED, NEWEST_TESTED = TESTED[0], TESTED[-1]
# the installer's default on each device: the newest version that a server was tested with
INSTALLED = {"cpu": NEWEST_TESTED, "cuda": "0.5.17"}


class UntestedSGLang(RuntimeError):
    """The installed SGLang is outside the tested range, and the environment does not allow that."""


def installed_sglang() -> Version:
    from packaging.version import Version

    return Version(metadata.version("sglang"))


def check_sglang_version() -> None:
    """Raise UntestedSGLang outside the tested range, unless the environment allows it."""
    from packaging.version import Version

    seen = installed_sglang()
    tested = Version(OLDEST_TESTED) <= Version(seen.base_version) <= Version(NEWEST_TESTED)
    if tested or env.ALLOW_UNTESTED_SGLANG.get():
        return
    raise UntestedSGLang(
        f"sglang {seen} is installed, but sglang-hybrid is tested with {OLDEST_TESTED} to {NEWEST_TESTED}: install "
        f"one of those, or set {env.ALLOW_UNTESTED_SGLANG.name}=1 to try this one"
    )
