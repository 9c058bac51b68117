"""Where the time of decode steps goes, from a trace that decode_steps.py wrote.

    python -m bench.step_breakdown TRACE [--steps 3] [--out FILE]

Kernels of different lanes overlap, so categories have two numbers; see gpu_trace.py. `waiting` is when nothing
ran but waits for the worker and copies over PCIe; with `idle` it is what the GPU loses to the CPU and to PCIe at most,
since `idle` also has the gaps between launches.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.record import write_result
from sglang_hybrid.commands.report.session.gpu_trace import breakdown, read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=3, help="that the trace has (default 3)")
    parser.add_argument("--out", type=Path, help="default: bench/results/step-breakdown.json")
    args = parser.parse_args()
    found = breakdown(read_trace(args.trace), args.steps)
    step = found["step_ms"]
    print(f"step {step:.3f} ms, idle {found['idle_ms'] / step:.1%}, waiting {found['waiting_ms'] / step:.1%}")
    for name, category in found["categories"].items():
        print(f"{name:12s} {category['busy_ms']:8.3f} ms, alone {category['alone_ms']:8.3f} ms")
    print(f"written to {write_result('step-breakdown', found, args.out)}")


if __name__ == "__main__":
    main()
