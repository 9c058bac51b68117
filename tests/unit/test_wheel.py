"""What is installed from a wheel has what the README names: CUDA sources to compile, default.yaml, profiles, a page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid import shipped
from sglang_hybrid.commands.top import web
from sglang_hybrid.ops.cuda import sources

ROOT = Path(__file__).resolve().parents[2]
# the library that is there is taken: other tests use it at the same time, and it must not be replaced under them
BUILD = """
import runpy, sys
sys.path.insert(0, "tools")
import build_native
build_native.main = lambda arguments: None
sys.argv = ["setup.py", "--quiet", "build_py", "--build-lib", sys.argv[1]]
runpy.run_path("setup.py")
"""
ASK = """from sglang_hybrid.ops.cuda import sources
print(sources.source_hash(), *sources.translation_units(), sep="\\n")"""


SETTINGS = """
from pathlib import Path
from sglang_hybrid import config, shipped
loaded = config.load_config(shipped.CONFIGS / "default.yaml", ["profile=SmolLM2-135M-Instruct-2048"])
print(loaded.profile, *shipped.files(), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel would hold, as a directory."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, check=True, capture_output=True)
    return folder


def ask(wheel: Path, program: str) -> list[str]:
    # what the environment itself loads at start comes from there too
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
