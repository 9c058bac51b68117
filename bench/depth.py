"""Sweep over depth: measure decode steps of 10 and 20 layers, estimate 48 layers, TP 8 and other GPUs by arithmetic.

    python -m bench.depth --depths 10 --lease 560 --out FILE                 in one command of a GPU lease
    python -m bench.depth --depths 20 --lease 560 --with FILE --out FILE     in the next one
    python -m bench.depth --depths "" [--with FILE]                          arithmetic alone, on any machine

Each depth is one run of bench.throughput with GPU memory in proportion to the layers (`--gpu-limit-per-layer`), so that
stock holds the same rows at every depth. Hybrid also runs the same rows at every depth: as many as fit in host memory
with the deepest model. The result of each run stays beside `--out`, as FILE-10-layers.json. Rows of `arithmetic` say
that they are not measured, what they assume, and how far the same arithmetic is from each measured step
(`estimate_errors`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench import throughput
from bench.arguments import add_run_flags, add_server_flags, tokens_of
from bench.lease import Lease
from bench.record import RESULTS, write_result
from bench.side_by_side.depth_arithmetic import ARITHMETIC, ASSUMPTIONS, estimate_errors, machines, other_depths
from bench.side_by_side.telling import say

NAME = "depth"
START_SECONDS = 250  # left out if the lease has less left: the two servers of a depth
_KEPT = (
    "configuration", "length", "rows", "step_ms", "tokens_per_s", "tokens_per_s_p10", "tokens_per_s_p90",
    "steady_seconds", "gpu_bytes_measured",
)  # fmt: skip


def measured_of(result: dict[str, Any], layers: int) -> list[dict[str, Any]]:
    """Return the points of ``result``, a result of bench.throughput with ``layers`` layers, without their metrics."""
    points: list[dict[str, Any]] = result["points"]
    most = {one["configuration"]: max(p["rows"] for p in points if p["configuration"] == one["configuration"])
            for one in points}  # fmt: skip
    return [
        {"layers": layers, "most_rows": most[one["configuration"]], **{key: one[key] for key in _KEPT}}
        for one in points
    ]


def throughput_flags(args: argparse.Namespace, layers: int, lease: Lease, out: Path) -> list[str]:
    flags = [
        "--layers", str(layers), "--lengths", args.length, "--batches", args.batches,
        "--gpu-limit", f"{layers * args.gpu_limit_per_layer:g}", "--host-limit", f"{args.host_limit:g}",
        "--device", args.device, "--stock-backend", args.stock_backend, "--out", str(out),
        *(word for one in args.hybrid for word in ("--hybrid", one)), *(f"--flag={one}" for one in args.flag),
    ]  # fmt: skip
    if args.lease:
        flags += ["--lease", f"{lease.left():.0f}"]
    if args.logs:
        flags += ["--logs", str(args.logs / f"{layers}-layers")]
    return flags


def arithmetic(points: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "kind": ARITHMETIC,
        "assumptions": list(ASSUMPTIONS),
        "estimate_errors": estimate_errors(points),
        "depths": other_depths(points, args.further),
        "machines": [row for layers in args.further for row in machines(layers, tokens_of(args.length), args.answer)],
    }


def show(result: dict[str, Any]) -> None:
    for one in result["measured"]:
        print(
            f"measured    {one['configuration']:8} {one['layers']:3} layers, {one['rows']:3} rows: "
            f"{one['step_ms']:8.2f} ms, {one['tokens_per_s']:10,.0f} tokens/s"
        )
    for one in result["arithmetic"]["depths"]:
        print(
            f"arithmetic  {one['configuration']:8} {one['layers']:3} layers, {one['rows']:3} rows: "
            f"{one['step_ms']:8.2f} ms, {one['tokens_per_s']:10,.0f} tokens/s"
        )
    for one in result["arithmetic"]["machines"]:
        sides = ", ".join(
            f"{name} {one[name]['requests']} requests, {one[name]['tokens_per_s'] or 0:,.0f} tokens/s"
            for name in ("stock", "hybrid")
        )
        print(f"arithmetic  {one['layers']} layers on {one['machine']['name']}: {sides}, {one['speed_up']} times")


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_flags(parser)
    add_run_flags(parser, NAME)
    parser.add_argument("--depths", default="10,20", help="layers to measure; empty: none (default %(default)s)")
    parser.add_argument("--further", default="40,48", help="layers of the arithmetic (default %(default)s)")
    parser.add_argument("--length", default="32k", help="input tokens (default %(default)s)")
    parser.add_argument("--answer", type=int, default=1024, help="tokens, of the arithmetic (default %(default)s)")
    parser.add_argument("--batches", default="1,8,30", help="rows, the same at every depth (default %(default)s)")
    parser.add_argument("--gpu-limit-per-layer", type=float, default=1.1, help="GB for the KV cache (default 1.1)")
    parser.add_argument("--host-limit", type=float, default=84.0, help="GB of host memory for hybrid's pool")
    parser.add_argument("--with", dest="earlier", type=Path, help="earlier result whose other depths are taken over")
    args = parser.parse_args(argv)
    args.depths = [int(one) for one in args.depths.split(",") if one]
    args.further = [int(one) for one in args.further.split(",")]
    return args


def main() -> None:
    args = parsed()
    lease, out = Lease(args.lease), args.out or RESULTS / f"{NAME}.json"
    result: dict[str, Any] = {"measured": [], "left_out": []}
    if args.earlier:
        earlier = json.loads(args.earlier.read_text())
        result["measured"] = [one for one in earlier["measured"] if one["layers"] not in args.depths]
        result["earlier"] = earlier["origin"]
    for layers in args.depths:
        if not lease.allows(START_SECONDS):
            result["left_out"].append(f"{layers} layers: {lease.left():.0f} s of the lease are left")
            say(f"left out: {result['left_out'][-1]}")
            continue
        say(f"{layers} layers")
        flags = throughput_flags(args, layers, lease, out.with_name(f"{out.stem}-{layers}-layers.json"))
        chosen = throughput.parsed(flags)
        with nullcontext(chosen.logs) if chosen.logs else tempfile.TemporaryDirectory() as folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            benchmark = throughput.Benchmark(chosen, Path(folder))
            benchmark.run()
        result["measured"] += measured_of(benchmark.result, layers)
        write_result(NAME, {**result, "arithmetic": arithmetic(result["measured"], args)}, out)
    result["arithmetic"] = arithmetic(result["measured"], args)
    path = write_result(NAME, result, out)
    show(result)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
