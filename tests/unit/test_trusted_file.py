"""Compiled code is loaded only from a file and directory that no other user can write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_hybrid import trusted_file


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    path = tmp_path / "kernels.so"
    path.touch(mode=0o600)
    return path


def test_a_file_of_our_own_is_loaded(compiled: Path) -> None:
    trusted_file.check(compiled)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_loaded(compiled: Path, mode: int) -> None:
    compiled.chmod(mode)
    with pytest.raises(trusted_file.UntrustedFile, match=f"can be written by others .mode {mode:o}.*chmod go-w"):
        trusted_file.check(compiled)


def test_a_directory_that_others_may_write_is_as_bad(compiled: Path) -> None:
    compiled.parent.chmod(0o770)
    with pytest.raises(trusted_file.UntrustedFile, match="can be written by others"):
        trusted_file.check(compiled)


def test_a_file_of_somebody_else_is_not_loaded(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = compiled.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        os.chown(compiled, 12345, -1)
    with pytest.raises(trusted_file.UntrustedFile, match="belongs to user"):
        trusted_file.check(compiled)
