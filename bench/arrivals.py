"""Measure servers while requests arrive at random: throughput, time to the first token, time per token, pauses.

    python -m bench.arrivals [--workloads "32k:500@0.25,0.5,1,1.5 8k:1k@1,2,4,6 mix@4,16"] [--runs stock,hybrid]
    python -m bench.arrivals --runs stock --lease 560 --out FILE                    one command of a GPU lease
    python -m bench.arrivals --runs hybrid --lease 560 --with FILE --out FILE       the next one
    python -m bench.arrivals --quick                                                a smoke test on a CPU

Each configuration is one server, with the same GPU memory for its KV cache (`--gpu-limit`). SGLang's own benchmark
(sglang.bench_serving) sends the requests: Poisson arrivals at each rate, for `--seconds` per point. Prompts are random
tokens, or with `mix` conversations with lengths like ShareGPT's; `--sharegpt FILE` uses the data set itself. The result
is written after every point. `--lease` divides the time among servers and leaves out points that do not fit; `--with`
keeps the points of an earlier result and measures the others.

`sustained` has two rates for each configuration and workload. `by_pauses` is the largest rate with every answer
complete and a 99th percentile of pauses between tokens within `--limit-ms`. `by_pauses_and_first_token` also demands a
median time to the first token within `--limit-first-token`, because the queue of a server that does not keep up grows.
After a rate that was not sustained, higher rates of the workload are left out (`--all-rates` measures them). With long
prompts and short answers, prefill limits a server, and hybrid does not make prefill faster.

All servers prefill in chunks of `--chunk-tokens`: one chunk of 8,192 tokens, SGLang's default on an H200, takes longer
than the limit of 100 ms for a model of this size.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.arguments import add_model_flags, add_run_flags, add_server_flags, log_folder, model_of, require_plugin
from bench.lease import Lease
from bench.record import write_result
from bench.serving.benchmark import Benchmark, Target
from bench.serving.tokenizer import tokenizer_of
from bench.serving.workloads import Workload
from bench.side_by_side import configurations
from bench.side_by_side.capacity import GB, KVModel
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.gpu_memory import ServerMemory
from bench.side_by_side.server import Server
from bench.side_by_side.server_flags import cache_flags, common_flags, graph_sizes
from bench.side_by_side.telling import say
from bench.synthetic_model import TINY, Shape

NAME = "arrivals"
START_SECONDS = 120  # left out if the lease has less left: a server and its first point
DRAIN_SECONDS = 20  # for the answers of a point after the last arrival
Point = dict[str, Any]


class Arrivals:
    """One run of this program: starts the servers, measures the points, collects the result."""

    def __init__(self, args: argparse.Namespace, workspace: Path) -> None:
        self._args, self._workspace = args, workspace
        self._lease = Lease(args.lease)
        self._model = model_of(args.model, TINY if args.quick else Shape(layers=args.layers))
        self._tokenizer = tokenizer_of(self._model, workspace)
        self._kv = KVModel.of(self._model, itemsize=4 if args.device == "cpu" else 2)
        self.result: dict[str, Any] = {
            "model": self._model.name, "gpu_limit_gb": args.gpu_limit, "host_limit_gb": args.host_limit,
            "chunk_tokens": args.chunk_tokens, "servers": [], "points": [], "left_out": [],
        }  # fmt: skip
        if args.earlier:
            earlier = json.loads(args.earlier.read_text())
            self.result |= {key: earlier[key] for key in ("servers", "points")} | {"earlier": earlier["origin"]}

    def run(self) -> None:
        self._save()  # before memory is measured: origin() asks for the GPU's name, which may allocate GPU memory
        with Benchmark(self._workspace) as benchmark:
            for number, one in enumerate(self._args.configurations):
                todo = [(work, rate) for work in self._args.workloads for rate in self._missing(one, work)]
                share = self._lease.left() / (len(self._args.configurations) - number)
                if todo and share >= START_SECONDS:
                    self._serve(one, benchmark, Lease(share))
                elif todo:
                    self._leave_out(f"{one.name}: {share:.0f} s of the lease are left")

    def _missing(self, configuration: Configuration, workload: Workload) -> list[float]:
        """Return the rates of ``workload`` for which ``configuration`` has no point yet."""
        had = {
            point["rate"]
            for point in self.result["points"]
            if (point["configuration"], point["workload"]) == (configuration.name, workload.name)
        }
        return [rate for rate in workload.rates if rate not in had]

    def _serve(self, configuration: Configuration, benchmark: Benchmark, lease: Lease) -> None:
        memory = ServerMemory()
        log = (self._args.logs or self._workspace) / f"{configuration.name.replace(' ', '-')}.log"
        flags = flags_of(self._args, self._model, self._tokenizer, self._kv, configuration)
        server = Server(configuration, flags, log, self._workspace)
        told: dict[str, Any] = {"configuration": configuration.name, "command": server.command[1:]}
        self.result["servers"].append(told)
        say(f"{configuration.name} starts, {lease.left():.0f} s for it")
        try:
            with server:
                told |= {"start_seconds": round(server.start_seconds, 1), "gpu_bytes_measured": memory.taken()}
                say(f"{configuration.name} serves after {server.start_seconds:.0f} s")
                for workload in self._args.workloads:
                    self._rates(configuration, workload, server, benchmark, lease)
                told["gpu_bytes_measured_at_the_end"] = memory.taken()
        except Exception as error:  # a configuration that fails must not cost the results of the others
            told["error"] = str(error)[-2000:]
            say(f"{configuration.name} failed: {str(error)[-600:]}")
        self._save()

    def _rates(
        self, configuration: Configuration, workload: Workload, server: Server, benchmark: Benchmark, lease: Lease
    ) -> None:
        args, missing = self._args, self._missing(configuration, workload)
        for index, rate in enumerate(missing):
            count = max(args.least_requests, round(rate * args.seconds))
            if not lease.allows(count / rate + DRAIN_SECONDS):
                self._leave_out(f"{configuration.name}, {workload.name} at {rate:g}: {lease.left():.0f} s are left")
                continue
            asked = workload.asked(rate, count, 10 * args.most_rows, self._tokenizer, self._workspace, args.sharegpt)
            point: Point = {"configuration": configuration.name, "workload": workload.name, "rate": rate}
            try:
                target = Target(server.url, self._model, self._tokenizer)
                point |= benchmark.run(target, asked, lease.at_most(args.point_seconds))
                say(told_of(point))
            except Exception as error:  # a rate that fails must not cost the results of the others
                point["error"] = f"{type(error).__name__}: {str(error)[-500:]}"
                say(f"{configuration.name}, {workload.name} at {rate:g} failed: {point['error']}")
                server.check()
            self.result["points"].append(point)
            self._save()
            if not args.all_rates and not is_sustained(point, args.limit_ms, args.limit_first_token):
                for higher in missing[index + 1 :]:
                    self._leave_out(f"{configuration.name}, {workload.name} at {higher:g}: {rate:g} was not sustained")
                return

    def _leave_out(self, why: str) -> None:
        self.result["left_out"].append(why)
        say(f"left out: {why}")
        self._save()

    def _save(self) -> None:
        self.result["sustained"] = sustained(self.result["points"], self._args.limit_ms, self._args.limit_first_token)
        self.path = write_result(NAME, self.result, self._args.out)


def told_of(point: Point) -> str:
    return (
        f"{point['configuration']}, {point['workload']} at {point['rate']:g} a second: {point['answered']} of "
        f"{point['asked']} answered, {point['output_throughput']:,.0f} tokens/s, first token "
        f"{point['median_ttft_ms'] / 1000:.2f} s, token {point['median_tpot_ms']:.1f} ms, p99 pause "
        f"{point['p99_itl_ms']:.0f} ms"
    )


def is_sustained(point: Point, limit_ms: float, first_token_s: float | None = None) -> bool:
    """Return True if every request was answered within the limits. ``first_token_s``: None if only pauses count."""
    if "error" in point or point["answered"] != point["asked"] or point["p99_itl_ms"] > limit_ms:
        return False
    return first_token_s is None or point["median_ttft_ms"] <= 1e3 * first_token_s


def sustained(points: list[Point], limit_ms: float, first_token_s: float) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the largest rates within the limits, for each configuration and workload; None where no rate was."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for point in points:
        limits = {"by_pauses": None, "by_pauses_and_first_token": first_token_s}
        rates = found.setdefault(point["configuration"], {}).setdefault(point["workload"], dict.fromkeys(limits))
        for name, limit in limits.items():
            if is_sustained(point, limit_ms, limit):
                rates[name] = max(rates[name] or 0.0, point["rate"])
    return found


def flags_of(
    args: argparse.Namespace, model: Path, tokenizer: Path, kv: KVModel, configuration: Configuration
) -> list[str]:
    # with a tokenizer: SGLang's benchmark times the first text of an answer
    itemsize = 1 if configuration.kv_dtype else kv.itemsize
    tokens = int(args.gpu_limit * GB) // (kv.token_bytes // kv.itemsize * itemsize)
    chunks = ["--chunked-prefill-size", str(args.chunk_tokens)] if args.chunk_tokens else []
    return [
        *common_flags(model, args.device, graph_sizes(args.most_rows), tokenizer), *chunks,
        *cache_flags(configuration, tokens, f"{args.host_limit}GB"), *args.flag,
    ]  # fmt: skip


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    add_server_flags(parser)
    add_run_flags(parser, NAME)
    parser.add_argument(
        "--workloads", default="32k:500@0.25,0.5,1,1.5 8k:1k@1,2,4,6 mix@4,16",
        help="input:output@requests a second, by spaces; mix: lengths like ShareGPT's (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--sharegpt", type=Path, help="ShareGPT's JSON file, for mix; default: lengths like its own")
    parser.add_argument("--runs", default="stock,hybrid", help="of stock, stock-fp8, hybrid (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="of arrivals, for each point (default %(default)s)")
    parser.add_argument("--least-requests", type=int, default=10, help="of each point, however low its rate")
    parser.add_argument("--point-seconds", type=float, default=240, help="after which a point is given up")
    parser.add_argument("--limit-ms", type=float, default=100, help="p99 of pauses that counts as served")
    parser.add_argument("--limit-first-token", type=float, default=5, help="seconds, median (default %(default)s)")
    parser.add_argument("--all-rates", action="store_true", help="also rates above one that was not sustained")
    parser.add_argument("--chunk-tokens", type=int, default=4096, help="of prefill; 0: SGLang's default")
    parser.add_argument("--gpu-limit", type=float, default=11.0, help="GB of GPU memory for stock's KV cache")
    parser.add_argument("--host-limit", type=float, default=84.0, help="GB of host memory for hybrid's pool")
    parser.add_argument("--most-rows", type=int, default=64, help="requests that run at once (default %(default)s)")
    parser.add_argument("--with", dest="earlier", type=Path, help="earlier result whose points are taken over")
    parser.add_argument("--quick", action="store_true", help="tiny model, CPU, short prompts")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(
            device="cpu", stock_backend="torch_native", workloads="256:8@2 mix@2", seconds=2, least_requests=4,
            gpu_limit=0.02, host_limit=0.1, most_rows=4, chunk_tokens=512, hybrid=["budget_tokens=256"],
        )  # fmt: skip
        args = parser.parse_args(argv)
    try:
        args.workloads = [Workload.of(text) for text in args.workloads.split()]
        args.configurations = configurations.named(args.runs, args.stock_backend, args.hybrid)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parsed()
    if any(one.is_hybrid for one in args.configurations):
        require_plugin()
    with log_folder(args.logs) as folder:
        arrivals = Arrivals(args, folder)
        arrivals.run()
    print(f"written to {arrivals.path}; sustained within {args.limit_ms:g} ms:")
    print(json.dumps(arrivals.result["sustained"], indent=1))
    sys.exit(any("error" in one for one in arrivals.result["servers"]))


if __name__ == "__main__":
    main()
