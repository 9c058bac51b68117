"""Build of the CUDA kernels: compiles for every supported architecture, only once, and reports what is missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_hybrid.ops.cuda import CudaError, build
from sglang_hybrid.ops.cuda.library import load
from sglang_hybrid.ops.cuda.sources import source_hash
from sglang_hybrid.ops.cuda.toolchain import Nvcc, find_nvcc
from sglang_hybrid.user_cache import default_cache_dir

ARCHITECTURES = [80, 90, 100]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_HYBRID_CACHE", str(tmp_path))
    return tmp_path / "cuda"


def with_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    fake = tmp_path / "nvcc"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(build, "find_nvcc", lambda: Nvcc(fake, "1.2.3"))


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_the_kernels_compile_and_python_has_the_same_structs() -> None:
    """Compile quickly, for one architecture, to the user's cache: the same sources are compiled once on a machine."""
    folder = default_cache_dir().expanduser() / "cuda"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    nvcc = find_nvcc()
    assert nvcc is not None
    made = folder / f"{source_hash()}-sm90-checked.so"  # a name that servers do not look for
    if not made.is_file():
        build._compile(nvcc, 90, made, quickly=True)
    load(made)  # compares the structs; needs no GPU


@pytest.mark.full
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_compiles_and_python_has_the_same_structs(architecture: int) -> None:
    """Compile to the user's own cache, so that the same sources are compiled once on a machine."""
    library = build.built(architecture)
    load(library)  # compares the structs; needs no GPU
    assert f"{source_hash()}-sm{architecture}-" in library.name


def test_a_library_is_compiled_once_even_by_two(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the fake compiler's last argument is the path of the library
    with_compiler(
        monkeypatch, tmp_path, f'echo compiled >> {tmp_path}/log; for last; do :; done; echo library > "$last"'
    )
    with ThreadPoolExecutor(max_workers=2) as pool:
        first, second = pool.map(build.built, (90, 90))
    assert first == second == build.built(90)
    assert (tmp_path / "log").read_text().splitlines() == ["compiled"]
    assert "-sm90-nvcc1.2.3" in first.name
    assert build.built(80) != first


def test_what_the_compiler_said_is_told_and_nothing_is_left_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_compiler(monkeypatch, tmp_path, "echo 'error: no such thing' >&2; exit 1")
    with pytest.raises(CudaError, match=r"nvcc 1\.2\.3 failed for sm_90(.|\n)*no such thing"):
        build.built(90)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_host_without_a_compiler_uses_what_was_compiled_elsewhere(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(CudaError, match="CUDA_HOME"):
        build.built(90)
    with monkeypatch.context() as elsewhere:
        with_compiler(elsewhere, tmp_path, 'for last; do :; done; echo library > "$last"')
        compiled = build.built(90)
    assert build.built(90) == compiled
    with pytest.raises(CudaError, match="--arch 100"):
        build.built(100)


def test_old_devices_are_refused_with_what_is_needed(cache: Path) -> None:
    with pytest.raises(CudaError, match=r"8\.0 or newer, not 7\.5"):
        build.built(75)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGLANG_HYBRID_CACHE", str(tmp_path / "file"))
    with_compiler(monkeypatch, tmp_path, "exit 0")
    with pytest.raises(CudaError, match="SGLANG_HYBRID_CACHE"):
        build.built(90)
