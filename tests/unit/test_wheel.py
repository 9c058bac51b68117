"""What is installed from a wheel can compile its CUDA kernels: their sources are in it, and found there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sglang_hybrid.cuda import sources

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
ASK = "from sglang_hybrid.cuda import sources; print(sources.source_hash(), *sources.translation_units(), sep='\\n')"


def test_a_wheel_holds_the_cuda_sources_of_the_checkout(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    # what the environment itself loads at start comes from there too
    instead = os.environ | {"PYTHONPATH": str(tmp_path)}
    asked = subprocess.run([sys.executable, "-c", ASK], env=instead, check=True, capture_output=True, text=True)
    version, *units = asked.stdout.split()
    assert version == sources.source_hash()
    assert all(Path(unit).is_relative_to(tmp_path) for unit in units)
    assert [Path(unit).name for unit in units] == [unit.name for unit in sources.translation_units()]
    assert list(tmp_path.glob("sglang_hybrid/native/*.so"))
