"""Servers under requests that arrive at random: throughput, time to the first token, time per token, pauses.

    python -m bench.arrivals [--model DIR] [--workloads 32k:500,8k:1k] [--rates 0.25,0.5,1,2] [--runs stock,hybrid]

Each configuration is one server with the same GPU memory for its KV cache (`--gpu-limit`), asked by SGLang's own
benchmark: random tokens, Poisson arrivals at each rate, `--seconds` of arrivals for each point. A server with long
prompts and short answers is bound by prefill, which hybrid does not make faster: rates at which no server keeps up
show that as a first-token time that grows with the queue. ``sustained`` is the largest rate with a 99th percentile of
pauses between tokens within `--limit-ms` and every answer complete.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.arguments import model_of, require_plugin, tokens_of
from bench.record import write_result
from bench.serving.benchmark import Asked, Benchmark
from bench.serving.tokenizer import tokenizer_of
from bench.side_by_side import configurations, gpu_memory
from bench.side_by_side.capacity import GB, KVModel
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.server import Server
from bench.side_by_side.telling import say
from bench.synthetic_model import TINY, Shape

NAME = "arrivals"


@dataclass(frozen=True)
class Workload:
    input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, text: str) -> Workload:
        asked, answered = text.split(":")
        return cls(tokens_of(asked), tokens_of(answered))

    def __str__(self) -> str:
        return f"{self.input_tokens} in, {self.output_tokens} out"


def sustained(points: list[dict[str, Any]], limit_ms: float) -> dict[str, dict[str, float | None]]:
    """For each configuration and workload the largest rate that was served within the limit; None: none was."""
    found: dict[str, dict[str, float | None]] = {}
    for point in points:
        rates = found.setdefault(point["configuration"], {})
        rates.setdefault(point["workload"], None)
        complete = point.get("answered") == point["asked"] if "asked" in point else False
        if complete and point["p99_itl_ms"] <= limit_ms:
            rates[point["workload"]] = max(rates[point["workload"]] or 0.0, point["rate"])
    return found


def configurations_of(args: argparse.Namespace) -> list[Configuration]:
    known = {
        "stock": configurations.stock(args.stock_backend),
        "stock-fp8": configurations.stock_fp8(args.stock_backend),
        "hybrid": configurations.hybrid(args.hybrid),
    }
    return [known[name] for name in args.runs.split(",")]


def flags_of(
    args: argparse.Namespace, model: Path, tokenizer: Path, kv: KVModel, configuration: Configuration
) -> list[str]:
    # with a tokenizer: SGLang's benchmark takes the time of an answer's first text
    flags = [
        "--model-path", str(model), "--tokenizer-path", str(tokenizer), "--device", args.device, "--enable-metrics",
        "--max-running-requests", str(args.most_rows), "--sampling-backend", "pytorch", "--random-seed", "1",
    ]  # fmt: skip
    if args.device == "cpu":
        flags += ["--dtype", "float32"]
    else:
        sizes = sorted({1, 2, 4, *range(8, args.most_rows + 1, 8), args.most_rows})
        flags += ["--cuda-graph-bs-decode", *map(str, sizes), "--cuda-graph-backend-prefill", "disabled"]
    if configuration.is_hybrid:
        return [*flags, "--hybrid", f"host_memory={args.host_limit}GB", *args.flag]
    itemsize = 1 if configuration.kv_dtype else kv.itemsize
    tokens = int(args.gpu_limit * GB) // (kv.token_bytes // kv.itemsize * itemsize)
    flags += ["--kv-cache-dtype", configuration.kv_dtype] if configuration.kv_dtype else []
    return [*flags, "--max-total-tokens", str(tokens), *args.flag]


def measure(
    args: argparse.Namespace,
    model: Path,
    tokenizer: Path,
    server: Server,
    configuration: Configuration,
    workspace: Path,
) -> list[dict[str, Any]]:
    points = []
    for workload in map(Workload.of, args.workloads.split(",")):
        for rate in map(float, args.rates.split(",")):
            count = max(args.least_requests, round(rate * args.seconds))
            asked = Asked(count, workload.input_tokens, workload.output_tokens, 10 * args.most_rows, rate)
            point: dict[str, Any] = {"configuration": configuration.name, "workload": str(workload), "rate": rate}
            try:
                with Benchmark(server.url, model, tokenizer, asked, workspace) as benchmark:
                    point |= benchmark.run(args.point_seconds)
                say(
                    f"{configuration.name}, {workload}, {rate:g} a second: {point['output_throughput']:,.0f} tokens/s, "
                    f"first token {point['median_ttft_ms'] / 1000:.2f} s, token {point['median_tpot_ms']:.1f} ms, "
                    f"p99 pause {point['p99_itl_ms']:.0f} ms"
                )
            except Exception as error:  # a rate that fails must not cost the results of the others
                point["error"] = f"{type(error).__name__}: {str(error)[-500:]}"
                say(f"{configuration.name}, {workload}, {rate:g} a second failed: {point['error']}")
                server.check()
            points.append(point)
    return points


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="model directory; a synthetic one is made there if it does not exist"
    )
    parser.add_argument("--layers", type=int, default=10, help="of the model that is made")
    parser.add_argument("--workloads", default="32k:500,8k:1k", help="input:output tokens")
    parser.add_argument("--rates", default="0.25,0.5,1,2", help="requests a second")
    parser.add_argument("--runs", default="stock,hybrid", help="of stock, stock-fp8, hybrid")
    parser.add_argument("--seconds", type=float, default=40, help="of arrivals, for each point")
    parser.add_argument("--least-requests", type=int, default=16, help="of each point, however low its rate")
    parser.add_argument("--point-seconds", type=float, default=300, help="after which a point is given up")
    parser.add_argument(
        "--limit-ms", type=float, default=100, help="p99 of pauses between tokens that counts as served"
    )
    parser.add_argument("--gpu-limit", type=float, default=11.0, help="GB of GPU memory for stock's KV cache")
    parser.add_argument("--host-limit", type=float, default=84.0, help="GB of host memory for hybrid's pool")
    parser.add_argument("--most-rows", type=int, default=64)
    parser.add_argument("--stock-backend", default="flashinfer")
    parser.add_argument("--hybrid", metavar="KEY=VALUE", action="append", default=[], help="setting; may be repeated")
    parser.add_argument("--flag", action="append", default=[], help="flag of all servers, as --flag=--log-level=debug")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny synthetic model")
    parser.add_argument("--out", type=Path, help=f"default: bench/results/{NAME}.json")
    return parser.parse_args(argv)


def main() -> None:
    args = parsed()
    if "hybrid" in args.runs:
        require_plugin()
    model = model_of(args.model, TINY if args.quick else Shape(layers=args.layers))
    kv = KVModel.of(model, itemsize=4 if args.device == "cpu" else 2)
    result: dict[str, Any] = {"model": model.name, "gpu_limit_gb": args.gpu_limit, "servers": [], "points": []}
    with tempfile.TemporaryDirectory() as temporary:
        workspace = Path(temporary)
        tokenizer = tokenizer_of(model, workspace)
        for one in configurations_of(args):
            before = gpu_memory.used_bytes()
            server = Server(one, flags_of(args, model, tokenizer, kv, one), workspace / f"{one.name}.log", workspace)
            with server:
                after = gpu_memory.used_bytes()
                taken = None if before is None or after is None else after - before
                result["servers"].append(
                    {"configuration": one.name, "command": server.command[1:], "gpu_bytes_measured": taken}
                )
                result["points"] += measure(args, model, tokenizer, server, one, workspace)
            result["sustained"] = sustained(result["points"], args.limit_ms)
            path = write_result(NAME, result, args.out)
    print(f"written to {path}; sustained within {args.limit_ms:g} ms: {result['sustained']}")


if __name__ == "__main__":
    main()
