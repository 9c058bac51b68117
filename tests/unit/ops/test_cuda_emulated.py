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
# Test files, and the number of processes that share the tests of each file. A line of several files has one process for
# all of them, because a process takes seconds to start.
DEVICE_ALONE = {
    "test_cuda_attention.py": 2,
    "test_cuda_copies.py test_cuda_digests.py test_cuda_dense.py test_cuda_fp8.py test_cuda_slot_codes.py": 1,
    "test_cuda_finishing.py": 1,
    "test_cuda_gather.py test_cuda_key_codes.py test_cuda_posted_sums.py test_cuda_near_bias.py": 1,
    "test_cuda_kept_tokens.py": 1,
    "test_cuda_mailbox.py test_cuda_salience.py test_cuda_weights.py test_gpu_admission.py": 1,
    "test_cuda_prediction.py": 1,
    "test_cuda_scoring.py": 1,
    "test_cuda_selection.py": 2,
    "test_cuda_speculation.py": 1,
}
WITH_STREAMS = {
    "test_gpu_dense.py": 1,
    "test_gpu_engine.py test_gpu_full.py": 1,
    "test_gpu_handover.py": 2,
    "test_gpu_hcattention.py": 1,
    "test_gpu_hgca.py": 1,
    "test_gpu_infinigen.py": 1,
    "test_gpu_prefill.py": 1,
    "test_gpu_scout.py": 2,
    "test_gpu_scoutattention.py": 1,
}
# files of which every other test runs here; the other tests run in make test-full
HALVED = ("test_gpu_handover.py", "test_gpu_scout.py", "test_cuda_selection.py")
# files whose kernels change least, or run in the engines' tests here too: they run in make test-full
RARE = (
    "test_cuda_kept_tokens.py", "test_cuda_prediction.py", "test_cuda_speculation.py", "test_gpu_dense.py",
    "test_gpu_prefill.py",
)  # fmt: skip
# files whose largest cases take minutes in emulation: these cases run in make test-full
LARGE = ("test_cuda_attention.py",)


@pytest.fixture(scope="module")
def library() -> Path:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return built(default_cache_dir().expanduser() / "emulation")


@pytest.mark.parametrize(
    ("names", "part", "chosen"),
    [
        pytest.param(
            names,
            f"{part}/{parts}",
            "not full",
            id=f"{names} {part + 1} of {parts}",
            marks=pytest.mark.full if names in RARE or (part and names in HALVED) else (),
        )
        for names, parts in (WITH_STREAMS | DEVICE_ALONE).items()
        for part in range(parts)
    ]
    + [pytest.param(name, "0/1", "full", id=f"{name} large", marks=pytest.mark.full) for name in LARGE],
)
def test_kernels_do_on_a_cpu_what_the_reference_does(names: str, part: str, chosen: str, library: Path) -> None:
    paths = [TESTS / "emulation", TESTS / "gpu", TESTS.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "KERNELS_ON_CPU": str(library)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "emulated_device", "-p", "no:cacheprovider"]
    streams = ["-p", "emulated_streams"] if names in WITH_STREAMS else []
    files = [str(TESTS / "gpu" / name) for name in names.split()]
    done = subprocess.run(
        [*command, *streams, "--noconftest", "-m", f"{chosen} and not device", *files],
        env=environment | {"EMULATED_PART": part},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
