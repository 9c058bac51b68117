"""Decode throughput of hybrid against stock full attention: same model, same GPU, same GPU memory for the KV cache.

    python -m bench.throughput [--model DIR] [--lengths 8k,16k,32k,64k] [--ablation] [--profile] [--out FILE]
    python -m bench.throughput --quick                    a smoke test on a CPU, in a minute
    python -m bench.throughput --from FILE                tables and figures of a result

For each configuration this program starts one server and sends it requests over HTTP. For every input length the batch
is the largest that fits in `--gpu-limit`, by arithmetic that the result repeats (`capacity`). The result also has the
GPU memory that the driver reports for each server (`gpu_bytes_measured`). `--batches 1,max` also measures a single row.
All rows of a batch are sent at once, and throughput counts the time in which all of them decode. If this time would be
under two seconds, answers become longer than `--new-tokens`. Hybrid has default settings, except for the pool's size.

    python -m bench.throughput --runs stock,stock-fp8 --out FILE          in one command of a GPU lease; hybrid-fp8 too
    python -m bench.throughput --runs hybrid --server-per-length --with FILE --out FILE       in the next one

`--prompts N` lets rows share N prompts, because prefill takes long: 64 rows of 32k are 2 million tokens. Rows that
share a prompt share its pages in SGLang's radix cache. Batches are still those that fit without sharing, and attention
reads as much for every row, but hardware caches help: stock a little (a layer of 32k tokens is 134 MB), hybrid more
(digests and sketches of 1,024 pages are 8 MB, and the worker finds blocks of other rows in its caches). So by default
no two rows share a prompt.

The default model is synthetic (synthetic_model.py): Qwen3-14B's shape with 10 layers, written once to --model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.arguments import (
    add_model_flags,
    add_run_flags,
    add_server_flags,
    log_folder,
    model_of,
    require_plugin,
    tokens_of,
)
from bench.lease import Lease
from bench.record import write_result
from bench.side_by_side import claims, configurations
from bench.side_by_side.capacity import (
    GB,
    Capacity,
    KVModel,
    Limits,
    hybrid_capacity,
    hybrid_server_bytes,
    stock_capacity,
    stock_tokens,
)
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.gpu_memory import ServerMemory
from bench.side_by_side.measuring import LEAST_WINDOW_SECONDS, MeasurementPlan, measure, profile
from bench.side_by_side.prompts import Prompts
from bench.side_by_side.server import STREAM_INTERVAL, Server
from bench.side_by_side.server_flags import cache_flags, common_flags
from bench.side_by_side.statistics import NotSteady
from bench.synthetic_model import TINY, Shape, read_model

NAME = "throughput"
MAX = "max"
START_SECONDS = 120  # that a lease must have left to start a server and measure a first point
POINT_SECONDS = 30  # that a lease must have left to measure each further point


class Benchmark:
    def __init__(self, args: argparse.Namespace, workspace: Path) -> None:
        self.args, self._workspace = args, workspace
        self._lease = Lease(args.lease)
        self._model = model_of(args.model, TINY if args.quick else Shape(layers=args.layers))
        self._kv = KVModel.of(self._model, itemsize=4 if args.device == "cpu" else 2)
        self._limits = Limits(int(args.gpu_limit * GB), int(args.host_limit * GB), args.most_rows or None)
        self._prompts = Prompts(self._model, seed=0)
        self._memory: ServerMemory | None = None  # GPU memory of the running server
        self._plan = MeasurementPlan(
            args.new_tokens,
            args.warm_tokens,
            args.repeats,
            args.slices,
            args.prompts or None,
            args.device,
            LEAST_WINDOW_SECONDS if args.device != "cpu" else 0.0,
        )
        self.result: dict[str, Any] = {
            "model": {"directory": self._model.name, **asdict(self._kv), "token_bytes": self._kv.token_bytes},
            "limits": asdict(self._limits),
            "plan": asdict(self._plan),
            "notes": notes(args, read_model(self._model) is not None),
            "servers": [],
            "points": [],
            "ablation": [],
            "claims": [],
        }
        if args.earlier:
            self._take_over(json.loads(args.earlier.read_text()))

    def run(self) -> None:
        """Measure all runs. Write the result file after every point, so that an interrupted run leaves its points."""
        self._save()  # asks for the GPU's name, which may take GPU memory, so do it before memory is measured
        given = self.args.hybrid
        known: dict[str, tuple[Configuration, list[int | str]]] = {
            "stock": (configurations.stock(self.args.stock_backend), self.args.batches),
            "stock-fp8": (configurations.stock_fp8(self.args.stock_backend), self.args.batches),
            "hybrid": (configurations.hybrid(given), self.args.batches),
            "hybrid-fp8": (configurations.hybrid_fp8(given), self.args.batches),
            "raw": (configurations.raw(given), [MAX]),
        }
        known |= {name: (configurations.paper(name, given), self.args.batches) for name in configurations.PAPERS}
        if unknown := set(self.args.runs) - {*known, "ablation"}:
            sys.exit(f"--runs {', '.join(sorted(unknown))}: there are {', '.join(known)}, ablation")
        if not {"stock", "stock-fp8"}.issuperset(self.args.runs):
            require_plugin()
        for name, (configuration, batches) in known.items():
            for lengths in self._together() if name in self.args.runs else []:
                self._serve(configuration, lengths, batches)
        for configuration in configurations.ablation(given) if "ablation" in self.args.runs else []:
            self._serve(configuration, [self.args.ablation_length], [MAX])
        self._save()

    def _together(self) -> list[list[int]]:
        """Return the input lengths in groups; one server serves a group."""
        return [[length] for length in self.args.lengths] if self.args.server_per_length else [self.args.lengths]

    def _take_over(self, earlier: dict[str, Any]) -> None:
        """Copy points of an earlier run that this run does not measure again. Exit if model or limits differ."""
        for key in ("model", "limits"):
            if earlier[key] != self.result[key]:
                sys.exit(f"--with: {key} was {earlier[key]}, now it is {self.result[key]}")
        names = {name.replace("-", " ") for name in self.args.runs if name != "ablation"}
        again = {(name, length) for name in names for length in self.args.lengths}
        if "ablation" in self.args.runs:
            again |= {(one.name, self.args.ablation_length) for one in configurations.ablation(self.args.hybrid)}
        kept = [one for one in earlier["points"] if (one["configuration"], one["length"]) not in again]
        self.result["points"] += kept
        self.result["servers"] += earlier["servers"]
        self.result["earlier"] = earlier["origin"]
        told = dict.fromkeys(f"{one['configuration']} at {claims.tokens_label(one['length'])}" for one in kept)
        self.result["notes"].append(f"From an earlier run (`earlier` has its origin): {', '.join(told)}.")

    def _serve(self, configuration: Configuration, lengths: list[int], batches: list[int | str]) -> None:
        capacities = {length: self._capacity(configuration, length) for length in lengths}
        rows = {length: _rows(batches, capacities[length]) for length in lengths}
        for length, capacity in capacities.items():
            fits = f"{capacity.rows} rows fit, limited by {capacity.limited_by} ({capacity.why})"
            (self._say if rows[length] else self._note)(f"{configuration.name}, {length} tokens: {fits}")
        if not any(rows.values()):
            return
        if not self._lease.allows(START_SECONDS):
            self._note(f"{configuration.name}, {lengths}: left out, {self._lease.left():.0f} s of the lease are left")
            return
        taken = self._gpu_bytes(configuration, rows)
        if len(lengths) > 1 and taken > self._limits.gpu_bytes:
            self._note(
                f"{configuration.name}: one server for all of {lengths} takes {taken / GB:.2f} GB by arithmetic, more "
                "than the limit, though each batch alone is within it; --server-per-length keeps servers within it too"
            )
        number = len(self.result["servers"])
        log = self._workspace / f"server-{number}.log"
        server = Server(configuration, self._flags(configuration, rows), log, self._workspace / f"trace-{number}")
        self._memory = ServerMemory()
        try:
            with server:
                shown = {"configuration": configuration.name, "settings": configuration.settings}
                self.result["servers"].append(
                    {
                        **shown,
                        "gpu_bytes_by_arithmetic": taken,
                        "gpu_bytes_measured": self._memory.taken(),
                        "start_seconds": round(server.start_seconds, 1),
                        "command": server.command[1:],
                    }
                )
                self._say(f"{configuration.name} serves after {server.start_seconds:.0f} s")
                for length in lengths:
                    self._measure(server, configuration, length, rows[length], capacities[length])
                self.result["servers"][-1]["gpu_bytes_measured_at_the_end"] = self._memory.taken()
        except Exception as error:  # a configuration that fails must not cost the results of the others
            self.result["servers"].append({"configuration": configuration.name, "error": str(error)[-2000:]})
            self._note(f"{configuration.name} failed: {str(error)[:300]}")
            print(error, file=sys.stderr)
            self._save()

    def _measure(
        self, server: Server, configuration: Configuration, length: int, batches: list[int], capacity: Capacity
    ) -> None:
        for rows in batches:  # the largest first: smaller ones find their prompts cached
            if not self._lease.allows(POINT_SECONDS):
                self._note(f"{configuration.name}, {length} tokens, {rows} rows: left out, the lease ends")
                continue
            begin = time.monotonic()
            point = {
                "configuration": configuration.name,
                "settings": configuration.settings,
                "capacity": asdict(capacity),
                **self._measure_about(server, configuration, length, rows),
            }
            assert self._memory is not None
            point["gpu_bytes_measured"] = self._memory.taken()
            self.result["points"].append(point)
            self._save()
            if (window := point["steady_seconds"] / self._plan.repeats) < self._plan.least_window:
                self._note(
                    f"{configuration.name}, {length} tokens, {point['rows']} rows: windows of {window:.1f} s, for "
                    "answers that are long enough do not fit in the pool"
                )
            self._say(
                f"{configuration.name}, {length} tokens, {point['rows']} rows: {point['tokens_per_s']:,.1f} tokens/s, "
                f"{point['step_ms']:.2f} ms a step ({time.monotonic() - begin:.0f} s)"
            )
            if self.args.profile and length == self.args.ablation_length and rows == max(batches):
                # after the point is safe: a profiler may take the server down with it
                point["breakdown"] = profile(server, self._prompts, self._plan, length, point["rows"], point["step_ms"])
                self._save()
        server.flush_cache()

    def _measure_about(self, server: Server, configuration: Configuration, length: int, rows: int) -> dict[str, Any]:
        """Measure a batch of ``rows``, or of one or two rows less if SGLang does not run all of them at once.

        Raises NotSteady if none of these batches runs at once.
        """
        for fewer in range(min(3, rows)):
            try:
                return measure(server, self._prompts, self._plan, length, rows - fewer)
            except NotSteady as error:
                self._note(f"{configuration.name}, {length} tokens, {rows - fewer} rows: {error}")
        raise NotSteady(f"{configuration.name} does not run {rows} rows of {length} tokens at once, nor a few less")

    def _capacity(self, configuration: Configuration, length: int) -> Capacity:
        tokens = length + self._plan.new_tokens
        if not configuration.is_hybrid:
            return stock_capacity(self._kv_of(configuration), self._limits, tokens)
        kv = self._kv_of(configuration)
        return hybrid_capacity(kv, self._limits, configuration.parsed(), tokens, self.args.device)

    def _kv_of(self, configuration: Configuration) -> KVModel:
        return replace(self._kv, itemsize=1) if configuration.kv_dtype == configurations.FP8 else self._kv

    def _gpu_bytes(self, configuration: Configuration, rows: dict[int, list[int]]) -> int:
        """Return the server's GPU memory by the same arithmetic, for the largest batch and the pool of all inputs."""
        kv = self._kv_of(configuration)
        if not configuration.is_hybrid:
            return stock_tokens(kv, self._limits) * kv.token_bytes
        most = max(one for many in rows.values() for one in many)
        tokens = (self._pool_mib(rows, kv) << 20) // kv.token_bytes
        return hybrid_server_bytes(kv, configuration.parsed(), most, tokens, self.args.device)

    def _flags(self, configuration: Configuration, rows: dict[int, list[int]]) -> list[str]:
        batches = sorted({one for many in rows.values() for one in many})
        kv = self._kv_of(configuration)
        tokens = stock_tokens(kv, self._limits)
        return [
            *common_flags(self._model, self.args.device, batches), "--stream-interval", str(STREAM_INTERVAL),
            *cache_flags(configuration, tokens, f"{self._pool_mib(rows, kv)}MiB"), *self.args.flag,
        ]  # fmt: skip

    def _pool_mib(self, rows: dict[int, list[int]], kv: KVModel) -> int:
        """Return the pool's size in MiB: the most that any length needs, plus what SGLang keeps free and rounds up."""
        most = 0
        for length, batches in rows.items():
            for one in batches:
                different = self._plan.different_of(one)
                most = max(most, different * length + one * (self._plan.new_tokens + 4 * 32))
        least = configurations.hybrid(self.args.hybrid).parsed().budget_tokens
        return int(1.02 * max(most, least) * kv.token_bytes / 2**20) + 4 * kv.layers + 64

    def _note(self, note: str) -> None:
        self.result["notes"].append(note)
        self._say(note)

    def _say(self, text: str) -> None:
        print(text, flush=True)

    def _save(self) -> None:
        points = self.result["points"]
        self.result["speed_ups"] = claims.speed_ups(points)
        aimed = (self._kv, self._limits.gpu_bytes) == (claims.AIMED_MODEL, claims.AIMED_GPU_BYTES)
        self.result["claims"] = [*(claims.claims(points) if aimed else []), *claims.against_papers(points)]
        self.result["ablation"] = ablation_of(points, self.args.ablation_length)
        self.path = write_result(NAME, self.result, self.args.out)


def ablation_of(points: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Return the ablation's points of one length and batch, in the order from no part to all parts of hybrid."""
    others = ("stock", "stock fp8", "hybrid", "hybrid fp8", "raw", *configurations.PAPERS)
    parts = [one for one in points if one["configuration"] not in others and one["length"] == length]
    if not parts:
        return []
    whole = [
        one
        for one in points
        if one["configuration"] == "hybrid" and one["length"] == length and one["rows"] == parts[0]["rows"]
    ]
    kept = ("length", "rows", "settings", "tokens_per_s", "step_ms", "metrics")
    named = [(one["configuration"], one) for one in parts] + [(configurations.LAST_PART, one) for one in whole]
    return [{"part": name, **{key: one[key] for key in kept}} for name, one in named]


def _rows(batches: list[int | str], capacity: Capacity) -> list[int]:
    """Return the batch sizes that fit, the largest first."""
    wanted = {capacity.rows if one == MAX else int(one) for one in batches}
    return sorted((one for one in wanted if 0 < one <= capacity.rows), reverse=True)


def notes(args: argparse.Namespace, synthetic: bool) -> list[str]:
    """Return sentences for the result that a reader needs to interpret the numbers."""
    found = [
        f"GPU memory for what grows with rows or tokens: {args.gpu_limit} GB on both sides. Batches follow from that "
        "by arithmetic (capacity). gpu_bytes_measured is what the driver counts, weights and graphs included.",
        "Hybrid has its default settings" + (f" but for {', '.join(args.hybrid)}." if args.hybrid else "."),
    ]
    if synthetic:
        found.append(
            "Weights are synthetic. A small model of their kind changes 12 % of its selection of 16 of 256 blocks at a "
            "step and 16 % in 8 steps (python -m bench.synthetic_model --check)."
        )
    if args.prompts:
        found.append(
            f"Rows share {args.prompts} different prompts: caches (L2 of the GPU, last-level cache of the CPU) help "
            "both sides, hybrid more."
        )
    return found


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    add_server_flags(parser)
    add_run_flags(parser, NAME)
    parser.add_argument("--lengths", default="8k,16k,32k,64k", help="input tokens")
    parser.add_argument("--batches", default="1,max", help="rows; max is what fits")
    parser.add_argument("--gpu-limit", type=float, default=11.0, help="GB of GPU memory for the KV cache, both sides")
    parser.add_argument("--host-limit", type=float, default=84.0, help="GB of host memory for hybrid's pool")
    parser.add_argument("--most-rows", type=int, default=0, help="at once; 0 (default): as many as memory holds")
    parser.add_argument("--prompts", type=int, default=0, help="different prompts of a batch; 0: all are different")
    parser.add_argument("--new-tokens", type=int, default=512, help="of every answer, at least (default %(default)s)")
    parser.add_argument("--warm-tokens", type=int, default=24, help="of every answer that are not measured")
    parser.add_argument("--repeats", type=int, default=3, help="of each batch")
    parser.add_argument("--slices", type=int, default=4, help="of a repeat, for median and spread")
    parser.add_argument(
        "--runs",
        default="stock,hybrid",
        help="of stock, stock-fp8, hybrid, raw, ablation, and policies: scoutattention, hgca, hcattention, infinigen",
    )
    parser.add_argument("--ablation", action="store_true", help="short for --runs stock,hybrid,ablation")
    parser.add_argument("--ablation-length", default="32k", help="also the length that is profiled")
    parser.add_argument("--profile", action="store_true", help="trace ten steps and sum kernels by what they are for")
    parser.add_argument("--server-per-length", action="store_true", help="a server of its own for every input length")
    parser.add_argument("--quick", action="store_true", help="tiny model, CPU, short prompts")
    parser.add_argument("--with", dest="earlier", type=Path, help="earlier result whose other runs are taken over")
    parser.add_argument("--from", dest="source", type=Path, help="a result file to show, without measuring")
    args = parser.parse_args(argv)
    if args.quick:
        # these limits give stock 2 and 4 rows
        parser.set_defaults(
            lengths="256,512", gpu_limit=0.005, host_limit=0.1, most_rows=6, new_tokens=32, warm_tokens=8, repeats=1,
            ablation_length="512", stock_backend="torch_native", device="cpu", batches=MAX,
            hybrid=["budget_tokens=256"],
        )  # fmt: skip
        args = parser.parse_args(argv)
    args.lengths = [tokens_of(one) for one in args.lengths.split(",")]
    args.ablation_length = tokens_of(args.ablation_length)
    args.batches = [MAX if one == MAX else int(one) for one in args.batches.split(",")]
    args.runs = ["stock", "hybrid", "ablation"] if args.ablation else args.runs.split(",")
    return args


def show(result: dict[str, Any], path: Path) -> None:
    """Print tables and draw figures, as far as this host has the packages; ``--from`` does it on another host."""
    try:
        from rich.console import Console

        from bench.side_by_side import plots, report

        report.print_result(result, Console(width=150))

        for figure in plots.draw(result, path):
            print(f"drawn: {figure}")
    except ImportError as error:
        print(f"{error}: python -m bench.throughput --from {path} shows the rest where it is installed")


def main() -> None:
    args = parsed()
    if args.source:
        show(json.loads(args.source.read_text()), args.source)
        return
    with log_folder(args.logs) as workspace:
        benchmark = Benchmark(args, workspace)
        benchmark.run()
    print(f"written to {benchmark.path}")
    show(benchmark.result, benchmark.path)


if __name__ == "__main__":
    main()
