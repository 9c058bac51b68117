"""Distributions: the source distribution builds the wheel, and the wheel works in an empty environment.

The wheel has what the README names: the CPU library, CUDA sources to compile, default.yaml, profiles, the page of
``top --web``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import build_wheel
import pytest
import smoke_wheel

from sglang_hybrid import __version__, shipped
from sglang_hybrid.commands.top import web
from sglang_hybrid.ops.cpu import build as cpu_build
from sglang_hybrid.ops.cuda import sources

ROOT = Path(__file__).resolve().parents[2]
ASK = """from sglang_hybrid.ops.cuda import sources
print(sources.source_hash(), *sources.translation_units(), sep="\\n")"""
SETTINGS = """
from pathlib import Path
from sglang_hybrid import config, shipped
loaded = config.load_config(shipped.CONFIGS / "default.yaml", ["profile=SmolLM2-135M-Instruct-2048"])
print(loaded.profile, *shipped.files(), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a source distribution, as ``make wheel`` does, with the library from set-up's cache."""
    source, wheel = build_wheel.build(tmp_path_factory.mktemp("dist"), Path(sys.executable))
    assert source.name == f"sglang_hybrid-{__version__}.tar.gz"
    return wheel


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> Path:
    """Return a directory with the wheel's content."""
    folder = wheel_file.parent / "unpacked"
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(folder)
    return folder


def test_distributions_and_images_are_made_of_the_same_files() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(build_wheel.SOURCES)


def test_one_wheel_is_for_every_python_of_a_platform(wheel_file: Path, wheel: Path) -> None:
    name, version, python, abi, platform = wheel_file.stem.split("-")
    assert (name, version, python, abi) == ("sglang_hybrid", __version__, "py3", "none")
    assert platform.endswith(f"linux_{os.uname().machine}") or platform.startswith("manylinux_")
    (information,) = wheel.glob("*.dist-info/WHEEL")
    assert f"Root-Is-Purelib: false\nTag: py3-none-{platform.split('.')[0]}" in information.read_text()


def test_the_wheel_works_in_an_empty_environment_without_a_compiler(wheel_file: Path, tmp_path: Path) -> None:
    said = smoke_wheel.smoke(wheel_file, tmp_path / "environment", borrow=True)
    assert "computes attention" in said


@pytest.mark.full
def test_a_library_that_does_not_load_is_compiled_from_the_sources_in_the_wheel(wheel: Path, tmp_path: Path) -> None:
    shutil.copytree(wheel, tmp_path / "wheel")
    (tmp_path / "wheel/sglang_hybrid/ops/cpu" / cpu_build.LIBRARY).write_bytes(b"for another processor")
    program = "from sglang_hybrid.ops.cpu import variants; print(*variants())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "wheel"), "SGLANG_HYBRID_CACHE": str(tmp_path / "cache")}
    for _ in range(2):
        said = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        )
        assert said.stdout.split()[-1] == "portable"
        assert len(list((tmp_path / "cache/native").glob("*.so"))) == 1


def ask(wheel: Path, program: str) -> list[str]:
    # modules that the environment itself loads at start come from the wheel too
    instead = os.environ | {"PYTHONPATH": str(wheel)}
    asked = subprocess.run(
        [sys.executable, "-c", program], env=instead, cwd=wheel, check=True, capture_output=True, text=True
    )
    return asked.stdout.split()


def test_a_wheel_holds_the_cuda_sources_of_the_checkout(wheel: Path) -> None:
    version, *units = ask(wheel, ASK)
    assert version == sources.source_hash()
    assert all(Path(unit).is_relative_to(wheel) for unit in units)
    assert [Path(unit).name for unit in units] == [unit.name for unit in sources.translation_units()]
    assert list(wheel.glob("sglang_hybrid/ops/cpu/*.so"))


def test_a_wheel_holds_the_settings_that_come_with_the_package(wheel: Path) -> None:
    profile, *files = ask(wheel, SETTINGS)
    inside = wheel / "sglang_hybrid" / "configs"
    assert Path(profile) == inside / "profiles" / "SmolLM2-135M-Instruct-2048.safetensors"
    named = ("default.yaml", "pd/decode.yaml", "pd/prefill.yaml", "profiles/SmolLM2-135M-Instruct-1024.safetensors")
    assert {str(inside / name) for name in named} <= set(files)
    assert {Path(file).relative_to(inside) for file in files} == {
        path.relative_to(ROOT / "configs") for path in shipped.files()
    }


def test_a_wheel_holds_the_page_of_top(wheel: Path) -> None:
    inside = wheel / "sglang_hybrid" / "commands" / "top" / "page"
    assert {file.name for file in inside.iterdir()} == {name for name, _kind in web.FILES.values()}


def test_a_profile_that_comes_with_the_package_is_named_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped_file = str(ROOT / "configs" / "profiles" / "SmolLM2-135M-Instruct-1024.safetensors")
    assert shipped.profile_path("SmolLM2-135M-Instruct-1024") == shipped_file
    assert shipped.profile_path("SmolLM2-135M-Instruct-1024.safetensors") == shipped_file
    for other in ("none", "of-mine", "./SmolLM2-135M-Instruct-1024", "/x/SmolLM2-135M-Instruct-1024.safetensors"):
        assert shipped.profile_path(other) == other
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct-1024.safetensors").touch()
    assert shipped.profile_path("SmolLM2-135M-Instruct-1024.safetensors") == "SmolLM2-135M-Instruct-1024.safetensors"
