"""The tests of digests, scores, selection and prefill on the GPU pass on an emulated one too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "emulation"))

from kernels_on_cpu import built  # noqa: E402

FILES = {
    "test_cuda_copies.py": (),
    "test_cuda_digests.py": (),
    "test_cuda_finishing.py": (),
    "test_cuda_hot_blocks.py": (),
    "test_cuda_prediction.py": (),
    "test_cuda_scoring.py": (),
    "test_cuda_selection.py": (),
    "test_cuda_dense.py": (),
    "test_cuda_places.py": (),
    "test_gpu_admission.py": (),
    "test_gpu_budgets.py": ("-p", "emulated_streams"),
    "test_gpu_dense.py": ("-p", "emulated_streams"),
    "test_gpu_prefill.py": ("-p", "emulated_streams"),
    "test_gpu_scout.py": ("-p", "emulated_streams"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return built(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("name", FILES)
def test_kernels_do_on_a_cpu_what_the_reference_does(name: str, library: Path) -> None:
    paths = [TESTS / "emulation", TESTS / "gpu", TESTS.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "KERNELS_ON_CPU": str(library)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "emulated_device", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *FILES[name], "--noconftest", str(TESTS / "gpu" / name)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
