"""The C++ kernels, the mailbox and the worker's engine under the address and the thread sanitizer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "kernels" / "cpu"
# -O0 follows the options of every file: with their -O3 the compiler takes minutes under a sanitizer. The errors that
# the sanitizers look for (memory beyond an end, accesses without order) exist without optimization too.
COMPILE = "<CMAKE_CXX_COMPILER> <DEFINES> <INCLUDES> <FLAGS> -O0 -o <OBJECT> -c <SOURCE>"
# One in this many of the kernels' thousands of shapes is tested. The number is prime, so that all group sizes and list
# lengths are among them.
SHAPES = "17"
ENVIRONMENT = {
    **os.environ,
    # the CMake of this Python environment, if it has one, is found before the machine's
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}
PATIENCE_S = 600


def run(*command: str | Path, timeout_s: float = PATIENCE_S) -> str:
    """Run a command and return what it printed. Fail the test with that output if the exit status is not 0."""
    done = subprocess.run(
        [str(part) for part in command],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))}\nended with status {done.returncode}\n{done.stdout[-8000:]}")
    return done.stdout


def build(sanitizer: str, *programs: str) -> Path:
    """Build programs, and return their directory, which is kept for the next run. Skip without a working sanitizer."""
    directory = SOURCE.parents[1] / "build" / f"sanitizer-{sanitizer}"
    directory.mkdir(parents=True, exist_ok=True)
    configure = ("cmake", "-S", SOURCE, "-B", directory, "-DCMAKE_BUILD_TYPE=None", "-DSGLANG_HYBRID_TESTS=ON")
    run(*configure, f"-DSGLANG_HYBRID_SANITIZER={sanitizer}", f"-DCMAKE_CXX_COMPILE_OBJECT={COMPILE}")
    _skip_unless_it_runs(directory, sanitizer)
    run("cmake", "--build", directory, "--parallel", str(min(os.cpu_count() or 1, 8)), "--target", *programs)
    return directory


def _skip_unless_it_runs(directory: Path, sanitizer: str) -> None:
    """Skip unless the compiler that CMake found builds a program that runs under the sanitizer.

    The sanitizer's library may be missing, and TSan does not support the address space of some Linux kernels.
    """
    cache = (directory / "CMakeCache.txt").read_text().splitlines()
    (compiler,) = (line.split("=", 1)[1] for line in cache if line.startswith("CMAKE_CXX_COMPILER:"))
    source, program = directory / "probe.cpp", directory / "probe"
    source.write_text("int main() { return 0; }\n")
    for command in ([compiler, f"-fsanitize={sanitizer}", str(source), "-o", str(program)], [str(program)]):
        tried = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if tried.returncode:
            why = (tried.stdout.strip().splitlines() or [f"status {tried.returncode}"])[-1]
            pytest.skip(f"{compiler} has no {sanitizer} sanitizer that works here: {why}")


@pytest.fixture(scope="module")
def under_address_sanitizer() -> Path:
    return build("address", "kernel_check", "engine_check", "mailbox_fuzz")


def test_kernels_read_and_write_only_what_is_theirs(under_address_sanitizer: Path) -> None:
    printed = run(under_address_sanitizer / "kernel_check", "--every", SHAPES)
    assert " 0 failures" in printed


def test_mailbox_and_engine_read_and_write_only_what_is_theirs(under_address_sanitizer: Path) -> None:
    assert "posts" in run(under_address_sanitizer / "engine_check", "0.5")


# The long run has another seed each time. The program prints its seed, and the round that fails. To repeat that round:
# mailbox_fuzz SEED SECONDS FIRST_ROUND.
@pytest.mark.parametrize(
    ("seed", "seconds"), [(1, 15), pytest.param(None, 600, marks=pytest.mark.full)], ids=["short", "long"]
)
def test_a_hostile_mailbox_neither_crashes_nor_hangs_an_engine_or_a_client(
    under_address_sanitizer: Path, seed: int | None, seconds: int
) -> None:
    chosen = random.getrandbits(32) if seed is None else seed
    program = under_address_sanitizer / "mailbox_fuzz"
    printed = run(program, str(chosen), str(seconds), timeout_s=seconds + PATIENCE_S)
    print(printed)
    assert f"seed {chosen}: " in printed and " hostile writes" in printed


def test_mailbox_and_engine_have_no_data_races() -> None:
    directory = build("thread", "engine_check")
    assert "posts" in run(directory / "engine_check", "0.5")
