"""Run the tests of the CUDA kernels, and of the code that launches them, on an emulated GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels_on_cpu import built

from sglang_hybrid.user_cache import default_cache_dir

TESTS = Path(__file__).resolve().parents[2]
# test files and the number of processes that share the tests of each file
DEVICE_ALONE = {
    "test_cuda_attention.py": 2,
    "test_cuda_copies.py": 1,
    "test_cuda_dense.py": 1,
    "test_cuda_digests.py": 1,
    "test_cuda_finishing.py": 1,
    "test_cuda_fp8.py": 1,
    "test_cuda_gather.py": 1,
    "test_cuda_kept_tokens.py": 1,
    "test_cuda_key_codes.py": 1,
    "test_cuda_mailbox.py": 1,
    "test_cuda_posted_sums.py": 1,
    "test_cuda_prediction.py": 1,
    "test_cuda_near_bias.py": 1,
    "test_cuda_salience.py": 1,
    "test_cuda_scoring.py": 1,
    "test_cuda_selection.py": 2,
    "test_cuda_speculation.py": 1,
    "test_cuda_weights.py": 1,
    "test_gpu_admission.py": 1,
}
WITH_STREAMS = {
    "test_gpu_dense.py": 1,
    "test_gpu_engine.py": 1,
    "test_gpu_full.py": 1,
    "test_gpu_handover.py": 1,
    "test_gpu_hcattention.py": 1,
    "test_gpu_hgca.py": 1,
    "test_gpu_infinigen.py": 1,
    "test_gpu_prefill.py": 1,
    "test_gpu_scout.py": 2,
    "test_gpu_scoutattention.py": 1,
}
# files of which every other test runs here; the other tests run in make test-full
HALVED = ("test_gpu_scout.py", "test_cuda_selection.py")
# files whose kernels change least: they run in make test-full
RARE = ("test_cuda_prediction.py", "test_gpu_dense.py", "test_gpu_prefill.py")
# files whose largest cases take minutes in emulation: these cases run in make test-full
LARGE = ("test_cuda_attention.py",)


@pytest.fixture(scope="module")
def library() -> Path:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return built(default_cache_dir().expanduser() / "emulation")


@pytest.mark.parametrize(
    ("name", "part", "chosen"),
    [
        pytest.param(
            name,
            f"{part}/{parts}",
            "not full",
            id=f"{name} {part + 1} of {parts}",
            marks=pytest.mark.full if name in RARE or (part and name in HALVED) else (),
        )
        for name, parts in (WITH_STREAMS | DEVICE_ALONE).items()
        for part in range(parts)
    ]
    + [pytest.param(name, "0/1", "full", id=f"{name} large", marks=pytest.mark.full) for name in LARGE],
)
def test_kernels_do_on_a_cpu_what_the_reference_does(name: str, part: str, chosen: str, library: Path) -> None:
    paths = [TESTS / "emulation", TESTS / "gpu", TESTS.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "KERNELS_ON_CPU": str(library)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "emulated_device", "-p", "no:cacheprovider"]
    streams = ["-p", "emulated_streams"] if name in WITH_STREAMS else []
    done = subprocess.run(
        [*command, *streams, "--noconftest", "-m", f"{chosen} and not device", str(TESTS / "gpu" / name)],
        env=environment | {"EMULATED_PART": part},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
