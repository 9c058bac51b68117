"""The CPU library is loaded from the package, or built in the cache if the package's file does not load."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid import env
from sglang_hybrid.ops.cpu import NativeError, build

library = importlib.import_module("sglang_hybrid.ops.cpu.library")  # the package has a function ``library``
LOADED = library.FILE


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Damage the package's library. Return a list that records builds; a build copies a good library."""
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"for another processor")
    monkeypatch.setattr(library, "FILE", damaged)
    monkeypatch.setenv(env.CACHE.name, str(tmp_path / "cache"))
    builds: list[Path] = []

    def copy(build_dir: Path, target: Path, jobs: int, *definitions: str) -> None:
        builds.append(build_dir)
        target.mkdir(parents=True)
        shutil.copy(LOADED, target / build.LIBRARY)

    monkeypatch.setattr(build, "build", copy)
    return builds


load: Callable[[], object] = library.library.__wrapped__  # without functools' cache, so that each call loads


def test_a_library_that_does_not_load_is_built_once_and_kept(broken: list[Path], tmp_path: Path) -> None:
    assert load() and load()
    assert len(broken) == 1
    (kept,) = (tmp_path / "cache" / "native").glob("*.so")
    assert kept.stem == build.source_hash()
    assert (tmp_path / "cache" / "native").stat().st_mode & 0o077 == 0


def test_without_a_compiler_one_is_told_why_and_what_to_do(broken: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(NativeError) as refused:
        load()
    assert "damaged.so" in str(refused.value) and "no C++ compiler" in str(refused.value)
    assert "install the package again" in str(refused.value)
    assert not broken


def test_a_build_that_others_may_write_is_not_loaded(broken: list[Path], tmp_path: Path) -> None:
    load()
    (tmp_path / "cache" / "native").chmod(0o777)
    with pytest.raises(NativeError, match="can be written by others"):
        load()


def test_a_cache_that_cannot_be_written_is_an_error_in_words(
    broken: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(env.CACHE.name, str(tmp_path / "file"))
    with pytest.raises(NativeError, match="choose another place with SGLANG_HYBRID_CACHE"):
        load()


def test_a_library_that_was_named_is_not_replaced_by_another(
    broken: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.NATIVE_LIBRARY.name, str(tmp_path / "damaged.so"))
    with pytest.raises(NativeError, match=r"cannot be loaded: .*damaged\.so"):
        load()
    assert not broken


def test_a_host_without_cmake_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))  # type: ignore[attr-defined]
    with pytest.raises(build.BuildError, match="pip install cmake"):
        build.build(tmp_path / "build", tmp_path / "target", 1)
