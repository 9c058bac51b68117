#!/usr/bin/env python3
"""Test provider ipex of the CPU worker, in a Python environment of the worker's own: ``make test-ipex``.

    python tools/check_ipex.py [--venv .venv-ipex] [--out build/ipex/bench-worker.json] [--any-torch]

Run this program in the environment of the server (.venv). It sets up the worker's environment with Intel's extension
for PyTorch (requirements/ipex.txt), compares the answers of a server that uses a worker from that environment with
those of stock SGLang, and measures the provider beside the native kernels and torch. The extension exists for x86_64
only: on other machines the program says so and ends with status 0. SGLANG_HYBRID_TEST_IPEX_PROVIDER=torch tests
provider torch of the current environment instead of ipex, for tests of this program.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import build_wheel
from installers import InstallError, Pip, choose, pip_for, run
from steps import Step, run_steps

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = "SGLANG_HYBRID_TEST_IPEX_PROVIDER"
_REQUIREMENTS = ROOT / "requirements" / "ipex.txt"
# the worker's dependencies, and the benchmark's other dependencies
_SMALL = ("msgspec", "pyzmq", "pyyaml", "psutil", "packaging", "rich", "numpy")
_NETWORK = "a package index with intel-extension-for-pytorch 2.8.0 and torch 2.8.0 for this Python"
_PYTHONS = ((3, 11), (3, 12))  # versions for which the extension has wheels, of those that this project supports


def unsupported(machine: str, python: tuple[int, int]) -> str | None:
    """Return why the extension cannot be installed here; None if it can."""
    if machine != "x86_64":
        return f"Intel's extension for PyTorch exists for x86_64 only, and this machine is {machine}"
    if python not in _PYTHONS:
        return f"there is no IPEX 2.8.0 for Python {python[0]}.{python[1]}"
    return None


@dataclass(frozen=True)
class Trial:
    """One run of this program: the provider, the Python of the worker's environment, and the result file."""

    provider: str
    python: Path
    out: Path
    any_torch: bool = False  # allow a torch with CUDA, for when no package index has a CPU build

    def set_up(self) -> str | None:
        """Install torch, the extension and this package in the worker's environment. Raise InstallError on failure.

        Return the installer's remark for the step's line, or None.
        """
        folder = self.python.parent.parent
        if not self.python.exists():
            venv.create(folder, with_pip=False, symlinks=True)
        packages = [*_SMALL, f"-r{_REQUIREMENTS}"]
        installer, remark = choose(self.python, packages, without_cuda=not self.any_torch)
        installer.install(*packages)
        try:
            _, wheel = build_wheel.build(ROOT / "build" / "ipex", Path(sys.executable))
        except build_wheel.WheelError as error:
            raise InstallError(["tools/build_wheel.py"], str(error)) from error
        Pip(pip_for(self.python)).install("--no-deps", "--force-reinstall", str(wheel))
        return remark

    def load(self) -> str:
        """Import the extension and create the provider. Return torch's version.

        Raise InstallError, with the provider's own message, on failure.
        """
        program = (
            "import sys; from cpu_worker import providers; import torch\n"
            "providers.create(sys.argv[1]).kernel(); print('torch', torch.__version__)"
        )
        # run outside the checkout, so that Python imports the installed package
        return run([str(self.python), "-c", program, self.provider], cwd=self.python.parent).strip().splitlines()[-1]

    def compare(self) -> str:
        """Test that a server with a worker from the worker's environment answers like stock SGLang.

        Return pytest's summary line. Raise InstallError on failure.
        """
        environment = {
            "SGLANG_HYBRID_TEST_WORKER_PYTHON": str(self.python),
            "SGLANG_HYBRID_TEST_WORKER_PROVIDER": self.provider,
        }
        tests = str(ROOT / "tests" / "server" / "test_worker_by_hand.py")
        said = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests], environment, ROOT)
        return said.strip().splitlines()[-1]

    def measure(self) -> str:
        """Run the benchmark with this provider, the native kernels and torch. Return the best rate, in words.

        Raise InstallError on failure, or if the benchmark has no result for the provider.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        providers = ",".join(dict.fromkeys(("torch", self.provider)))
        command = [str(self.python), "-m", "bench.worker", "--quick", "--providers", providers, "--out", str(self.out)]
        environment = {"PYTHONPATH": str(ROOT)}  # bench is in the checkout only
        said = run([*command, *os.environ.get("BENCH_ARGS", "").split()], environment, ROOT)
        rows = json.loads(self.out.read_text()).get(self.provider, [])
        if not rows:
            raise InstallError(command, said)
        best = max(rows, key=lambda row: float(row["median_gb_s"]))
        ratio = best[f"native_to_{self.provider}"]
        return f"{best['median_gb_s']} GB/s with {best['threads']} threads, native is {ratio} times as fast; {self.out}"

    def steps(self) -> list[Step]:
        steps = [
            Step(f"provider {self.provider} loads", self.load, "the words of the error"),
            Step("the same answers as stock", self.compare, "pytest tests/server/test_worker_by_hand.py"),
            Step("a row beside native and torch", self.measure, "sglang-hybrid bench worker --providers torch,ipex"),
        ]
        if self.provider != "ipex":
            return steps
        return [Step("the worker's environment", self.set_up, _NETWORK), *steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-ipex", help="default: .venv-ipex")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "ipex" / "bench-worker.json")
    parser.add_argument("--any-torch", action="store_true", help="take a torch with CUDA too: several GB")
    args = parser.parse_args()
    if stand_in := os.environ.get(STAND_IN):
        trial = Trial(stand_in, Path(sys.executable), args.out.absolute())
    else:
        if reason := unsupported(platform.machine(), sys.version_info[:2]):
            print(f"skipped: {reason}")
            return
        trial = Trial("ipex", args.venv.absolute() / "bin" / "python", args.out.absolute(), args.any_torch)
    run_steps(trial.steps())


if __name__ == "__main__":
    main()
