"""Show where the time of decode steps goes, from a trace that decode_steps.py wrote.

    python -m bench.step_breakdown TRACE [--steps 3] [--step-ms 3.65] [--out FILE]

Kernels of different lanes overlap, so each category has two numbers; see gpu_trace.py. `waiting` is the time in which
only waits for the worker and copies over PCIe ran. `waiting` and `idle` together are the most that the GPU loses to the
CPU and to PCIe, since `idle` also has the gaps between launches. No gap is left out. With `--step-ms`, the length of a
step without a profiler, idle time is also printed without the time that a profiler adds.
`python -m bench.throughput --profile` does the same with a running server.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.record import write_result
from sglang_hybrid.commands.report.session.gpu_trace import breakdown, idle_without_profiler, read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=3, help="that the trace has (default 3)")
    parser.add_argument("--step-ms", type=float, help="of a step without a profiler")
    parser.add_argument("--out", type=Path, help="default: bench/results/step-breakdown.json")
    args = parser.parse_args()
    found = breakdown(read_trace(args.trace), args.steps)
    step = found["step_ms"]
    print(f"step {step:.3f} ms, idle {found['idle_ms'] / step:.1%}, waiting {found['waiting_ms'] / step:.1%}")
    print(f"gaps: {found['gaps']}")
    if args.step_ms:
        found["without_profiler"] = idle_without_profiler(found, args.step_ms)
        print(f"without profiler: {found['without_profiler']}")
    for name, category in found["categories"].items():
        print(f"{name:12s} {category['busy_ms']:8.3f} ms, alone {category['alone_ms']:8.3f} ms")
    print(f"written to {write_result('step-breakdown', found, args.out)}")


if __name__ == "__main__":
    main()
