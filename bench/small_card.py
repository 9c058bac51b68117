"""Measure very long contexts on a small card: one to four requests of 128k and 256k tokens in 24 GB of GPU memory.

    python -m bench.small_card --lengths 128k --lease 580 --out FILE     in one command of a GPU lease
    python -m bench.small_card --lengths 256k --runs hybrid --lease 580 --with FILE --out FILE       in the next one
    python -m bench.small_card --quick                                   a smoke test on a CPU

Another process allocates the rest of the GPU's memory (ballast), so that a server that wants more than `--card-gb` in
all fails; nvidia-smi measures memory while requests run, too. Memory is a small card's; compute, PCIe and host are this
machine's. `--mem-fraction-static` follows from the free memory: all but `--reserve-gb` for activations and graphs.
Prefill chunks have the size that SGLang takes on a card of 24 GB. Weights are synthetic, in Qwen3-8B's shape with all
of its 36 layers: 16 GB, which are written to --model once and need as much disk.

As many requests run as fit, by the arithmetic that a server uses: `why` has the numbers. A hybrid server that does not
start is tried again with one request less and a larger reserve. For each number of requests the result has the time to
the first token, the milliseconds of a decode step, and GPU and host memory. Stock gets one request of each length, and
its error is recorded (`refused`). Results are written after every point.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
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
from bench.serving.killing import decode_rate
from bench.serving.watching import Watch, held
from bench.side_by_side import configurations
from bench.side_by_side.ballast import Ballast
from bench.side_by_side.capacity import GB, KVModel
from bench.side_by_side.card import SPARE_TOKENS, Fit, fit_of, memory_fraction
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.gpu_memory import ServerMemory, total_bytes, used_bytes
from bench.side_by_side.load import send_together
from bench.side_by_side.prompts import Prompts
from bench.side_by_side.server import Server
from bench.side_by_side.server_flags import common_flags
from bench.side_by_side.telling import log_tail, say
from bench.synthetic_model import QWEN3_8B, TINY
from sglang_hybrid import container

NAME = "small-card"
START_SECONDS = 150  # left out if the lease has less left: a server
ATTEMPTS = 3
CPU_TOKENS = 768  # of stock's pool on a CPU: in a smoke test stock must refuse a request of 1k
Point = dict[str, Any]


class SmallCard:
    """One run of this program: allocates the ballast, starts the servers, measures the points, collects the result."""

    def __init__(self, args: argparse.Namespace, logs: Path) -> None:
        self._args, self._logs, self._lease = args, logs, Lease(args.lease)
        self._model = model_of(args.model, TINY if args.quick else replace(QWEN3_8B, layers=args.layers))
        self._kv = KVModel.of(self._model, itemsize=4 if args.device == "cpu" else 2)
        self._weights = sum(file.stat().st_size for file in self._model.glob("*.safetensors"))
        self._card = int(args.card_gb * GB)
        self.result: dict[str, Any] = {
            "model": {"directory": self._model.name, **asdict(self._kv), "weights_bytes": self._weights},
            "card_bytes": self._card, "servers": [], "points": [], "left_out": [],
        }  # fmt: skip
        if args.earlier:
            earlier = json.loads(args.earlier.read_text())
            self.result |= {key: earlier[key] for key in ("servers", "points", "left_out")}
            self.result["earlier"] = earlier["origin"]

    def run(self) -> None:
        self.save()  # before the ballast: origin() asks for the GPU's name, which may allocate GPU memory
        ballast: AbstractContextManager[Any] = nullcontext()
        if self._args.device != "cpu":
            ballast = Ballast(self._card, self._logs)
        with ballast as taken:
            self.result |= {"gpu_total_bytes": total_bytes(), "ballast_bytes": getattr(taken, "bytes", None)}
            self._used_before = used_bytes()
            for configuration in self._args.configurations:
                # one stock server gets the requests of all lengths, because it is expected to refuse
                lengths = [[one] for one in self._args.lengths] if configuration.is_hybrid else [self._args.lengths]
                for some in lengths:
                    if self._lease.allows(START_SECONDS):
                        self._serve(configuration, some)
                    else:
                        self._leave_out(f"{configuration.name}, {some}: {self._lease.left():.0f} s are left")
        self.save()

    def _serve(self, configuration: Configuration, lengths: list[int]) -> None:
        reserve, most = int(self._args.reserve_gb * GB), max(self._args.requests)
        for attempt in range(ATTEMPTS if configuration.is_hybrid else 1):
            fit = self._fit(configuration, lengths, most, reserve)
            if configuration.is_hybrid:
                say(f"{configuration.name}, {lengths}: {fit.why}")
                if not fit.requests:
                    self._leave_out(f"{configuration.name}, {lengths}: nothing fits: {fit.why}")
                    return
            if self._attempt(configuration, lengths, fit, reserve, attempt):
                return
            most, reserve = max(1, fit.requests - 1), reserve + int(0.7 * GB)
            if not self._lease.allows(START_SECONDS):
                return

    def _attempt(self, configuration: Configuration, lengths: list[int], fit: Fit, reserve: int, attempt: int) -> bool:
        """Start a server and measure its points. Return True if the server started, even if a point failed."""
        memory = ServerMemory()
        log = self._logs / f"{configuration.name.replace(' ', '-')}-{lengths[0]}-{attempt}.log"
        server = Server(configuration, self._flags(configuration, lengths, fit, reserve), log, self._logs)
        told: dict[str, Any] = {
            "configuration": configuration.name, "lengths": lengths, "fit": asdict(fit), "reserve_bytes": reserve,
            "command": server.command[1:],
        }  # fmt: skip
        self.result["servers"].append(told)
        started = False
        try:
            with server:
                started = True
                told |= {
                    "start_seconds": round(server.start_seconds, 1),
                    "gpu_bytes_measured": memory.taken(),
                    "pool_tokens": held(server.url).get("pool_tokens"),
                }
                say(f"{configuration.name} serves after {server.start_seconds:.0f} s, {told['pool_tokens']} tokens fit")
                for length in lengths:
                    self._points(configuration, server, length, fit)
        except Exception as error:  # a server that fails must not cost the results of the others
            told["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
            told["log"] = log_tail(log, 12)
            say(f"{configuration.name} failed: {told['error']} {told['log'][-1:]}")
        self.save()
        return started

    def _points(self, configuration: Configuration, server: Server, length: int, fit: Fit) -> None:
        wanted = sorted({min(one, fit.requests) for one in self._args.requests}) if configuration.is_hybrid else [1]
        for requests in wanted:
            if not self._lease.allows(1.2 * requests * self._seconds_of_one(length)):
                self._leave_out(f"{configuration.name}, {requests} of {length}: {self._lease.left():.0f} s are left")
                continue
            point: Point = {"configuration": configuration.name, "length": length, "requests": requests}
            try:
                point |= self._measure(server, length, requests)
                say(f"{configuration.name}: {point}")
            except Exception as error:
                point["refused"] = str(error)[:600]
                say(f"{configuration.name}, {requests} of {length}: {point['refused'][:300]}")
                server.check()
            finally:
                self.result["points"].append(point)
                self.save()

    def _seconds_of_one(self, length: int) -> float:
        """Return the longest seconds per request among the points of this length; 30 if there are none."""
        points = [one for one in self.result["points"] if one["length"] == length and "seconds" in one]
        return max((one["seconds"] / one["requests"] for one in points), default=30.0)

    def _measure(self, server: Server, length: int, requests: int) -> Point:
        # each number of requests has its own prompts: none is found in the cache
        prompts = Prompts(self._model, seed=requests).rows(length, requests, requests)
        new, seconds = self._args.new_tokens, self._lease.at_most(self._args.timeout)
        with Watch(server.url, 1.0) as watch:
            rows = send_together(server.url, prompts, new, seconds=seconds)
        seen, rate = watch.summary(), decode_rate(rows)
        most = seen["gpu_mib"] and (seen["gpu_mib"]["most"] << 20) - (self._used_before or 0)
        first = sorted(row.times[0] - row.sent for row in rows)
        server.flush_cache()
        return {
            "first_token_s": [round(one, 2) for one in first],
            "step_ms": round(1e3 * requests / rate, 3) if rate else None,
            "tokens_per_s": rate,
            "gpu_bytes_at_most": most,
            "within_card": None if most is None else most <= self._card,
            "host_bytes_of_requests": requests * (length + new) * self._kv.token_bytes,
            "tokens_held_at_most": seen["tokens"] and seen["tokens"]["most"],
            "seconds": round(max(row.times[-1] for row in rows) - rows[0].sent, 1),
        }

    def _fit(self, configuration: Configuration, lengths: list[int], most: int, reserve: int) -> Fit:
        host = container.memory().available
        if self._args.device == "cpu":
            return Fit(most, most, most, 0, "without a GPU")
        if not configuration.is_hybrid:
            return Fit(0, 0, 0, 0, "asked for one request")
        return fit_of(
            self._kv, configuration.parsed(), self._tokens(lengths), most,
            card=self._card, weights=self._weights, reserve=reserve, host=host,
        )  # fmt: skip

    def _flags(self, configuration: Configuration, lengths: list[int], fit: Fit, reserve: int) -> list[str]:
        args = self._args
        tokens = self._tokens(lengths)
        flags = common_flags(self._model, args.device, list(range(1, max(1, fit.requests) + 1)))
        flags += ["--context-length", str(tokens), "--chunked-prefill-size", str(args.chunk_tokens)]
        if args.device != "cpu":
            flags += ["--mem-fraction-static", str(memory_fraction(self._card, reserve))]
        elif not configuration.is_hybrid:
            flags += ["--max-total-tokens", str(CPU_TOKENS)]  # otherwise the pool takes all of the host's memory
        if configuration.is_hybrid:
            pool = max(fit.requests * tokens, configuration.parsed().budget_tokens) * self._kv.token_bytes
            flags += ["--hybrid", f"host_memory={int(1.01 * pool / 2**20) + 4 * self._kv.layers + 64}MiB"]
        if configuration.kv_dtype:
            flags += ["--kv-cache-dtype", configuration.kv_dtype]
        return [*flags, *args.flag]

    def _tokens(self, lengths: list[int]) -> int:
        """Return the tokens of the longest request: prompt, answer and SPARE_TOKENS."""
        return max(lengths) + int(self._args.new_tokens) + SPARE_TOKENS

    def _leave_out(self, why: str) -> None:
        self.result["left_out"].append(why)
        say(f"left out: {why}")
        self.save()

    def save(self) -> Path:
        return write_result(NAME, self.result, self._args.out)


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser, layers=QWEN3_8B.layers)
    add_server_flags(parser)
    add_run_flags(parser, NAME)
    parser.add_argument(
        "--card-gb", type=float, default=24.0, help="GPU memory in all, 10^9 bytes (default %(default)s)"
    )
    parser.add_argument("--lengths", default="128k,256k", help="input tokens (default %(default)s)")
    parser.add_argument("--requests", default="1,2,4", help="at once, as far as they fit (default %(default)s)")
    parser.add_argument("--runs", default="stock,stock-fp8,hybrid", help="(default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=256, help="of every answer (default %(default)s)")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="of prefill (default %(default)s)")
    parser.add_argument(
        "--reserve-gb", type=float, default=1.5, help="for activations and graphs (default %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=500, help="seconds of one point (default %(default)s)")
    parser.add_argument("--with", dest="earlier", type=Path, help="earlier result whose points are kept")
    parser.add_argument("--quick", action="store_true", help="tiny model, CPU, short prompts")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(
            device="cpu", stock_backend="torch_native", lengths="512,1k", requests="1,2", runs="stock,hybrid",
            new_tokens=16, chunk_tokens=512, hybrid=["budget_tokens=256"],
        )  # fmt: skip
        args = parser.parse_args(argv)
    try:
        args.configurations = configurations.named(args.runs, args.stock_backend, args.hybrid)
    except ValueError as error:
        parser.error(f"--runs: {error}")
    args.lengths = [tokens_of(one) for one in args.lengths.split(",")]
    args.requests = [int(one) for one in args.requests.split(",")]
    return args


def main() -> None:
    args = parsed()
    if any(one.is_hybrid for one in args.configurations):
        require_plugin()
    with log_folder(args.logs) as folder:
        card = SmallCard(args, folder)
        card.run()
    say(f"written to {card.save()}")
    measured = [one for one in card.result["points"] if one["configuration"] == "hybrid" and "refused" not in one]
    sys.exit(any(one.is_hybrid for one in args.configurations) and not measured)


if __name__ == "__main__":
    main()
