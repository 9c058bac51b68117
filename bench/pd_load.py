"""Measure stock prefill with hybrid or stock decode, on one GPU with real transfers: speed and pauses.

    python -m bench.pd_load [--model DIR] [--transfer nixl] [--decode hybrid,stock] [--lease 560] --out FILE
    python -m bench.pd_load --quick                      a smoke test on a CPU, with mooncake over TCP

For each kind of decode instance a prefill instance and a decode instance start together, and three parts run. The
stock decode instance has `--gpu-limit` for its KV cache and is the reference.

    alone     one request: time to the first token, tokens a second
    full      as many requests as fit, at most `--rows`, sent together: time to the first tokens, requests admitted a
              second, tokens a second while all of them decode
    arriving  `--running` requests decode, then `--arriving` others of the same length are sent: the longest pause of
              the running requests until all others have their first tokens

Each request is sent to both instances as a router sends it, so sglang_router is not needed. Both instances share the
GPU and the host's cores: prefill slows decode down more than on two hosts. `gpu_bytes_measured` counts both instances
together. `bench.gpu_pd` compares answers. Results are written after every part.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import aiohttp

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
from bench.pd.asking import ask_both
from bench.pd.figures import batch_figures, pause_figures
from bench.pd.instances import Instances
from bench.pd.transfer import HELP, require_transfer
from bench.record import write_result
from bench.serving.watching import wait_until_idle
from bench.side_by_side import configurations
from bench.side_by_side.capacity import GB, KVModel, Limits, stock_tokens
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.gpu_memory import ServerMemory
from bench.side_by_side.load import rows_of, send_rows
from bench.side_by_side.prompts import Prompts
from bench.side_by_side.server_flags import cache_flags, common_flags, graph_sizes
from bench.side_by_side.statistics import Arrivals
from bench.side_by_side.telling import log_tail, say
from bench.synthetic_model import TINY, Shape

NAME = "pd-load"
START_SECONDS, PART_SECONDS = 150, 40  # left out if the lease has less left: two instances, a part
SPARE_TOKENS = 128  # per request: pages are whole, and SGLang keeps some free
PARTS = ("alone", "full", "arriving")


class PdLoad:
    """One run of this program: starts each pair of instances, runs the parts, collects the result."""

    def __init__(self, args: argparse.Namespace, logs: Path) -> None:
        self._args, self._logs, self._lease = args, logs, Lease(args.lease)
        self._model = model_of(args.model, TINY if args.quick else Shape(layers=args.layers))
        self._kv = KVModel.of(self._model, itemsize=4 if args.device == "cpu" else 2)
        self._asked = 0  # batches of prompts so far, each with its own seed: a prefill instance caches prompts
        self.result: dict[str, Any] = {
            "model": self._model.name, "transfer": args.transfer, "input_tokens": args.input,
            "gpu_limit_gb": args.gpu_limit, "decode": {},
        }  # fmt: skip

    def run(self) -> None:
        self.save()  # before memory is measured: origin() asks for the GPU's name, which may allocate GPU memory
        for configuration in self._args.configurations:
            if self._lease.allows(START_SECONDS):
                self._serve(configuration)
            else:
                self._tell(configuration, {"left_out": f"{self._lease.left():.0f} s of the lease are left"})

    def _serve(self, configuration: Configuration) -> None:
        args, memory = self._args, ServerMemory()
        rows = self._rows(configuration)
        say(f"decode by {configuration.name}: at most {rows} requests of {args.input} tokens")
        instances = Instances(
            self._prefill_flags(), self._decode_flags(configuration), configuration, args.stock_backend, args.transfer,
            self._logs, args.device,
        )  # fmt: skip
        told: dict[str, Any] = {"most_rows": rows, "command": instances.decode.command[1:]}
        self._tell(configuration, told)
        try:
            with instances:
                told |= {"start_seconds": round(instances.start_seconds, 1), "gpu_bytes_measured": memory.taken()}
                say(f"both instances serve after {instances.start_seconds:.0f} s")
                self._send(instances, 1, 8)  # compiles kernels and opens connections
                for part in args.parts:
                    if self._lease.allows(PART_SECONDS):
                        told[part] = self._part(part, instances, rows)
                        told[part]["held_afterwards"] = wait_until_idle(instances.decode.url)
                        say(f"{configuration.name}, {part}: {told[part]}")
                    else:
                        told[part] = {"left_out": "the lease ends"}
                    self._tell(configuration, told)
        except Exception as error:  # a decode instance that fails must not cost the results of the other
            told["error"] = f"{type(error).__name__}: {str(error)[-1500:]}"
            say(f"{configuration.name} failed: {told['error'][:600]}")
            print("\n".join(log_tail(instances.decode.log) + log_tail(instances.prefill.log)), flush=True)
        self._tell(configuration, told)

    def _part(self, part: str, instances: Instances, rows: int) -> dict[str, Any]:
        args = self._args
        if part == "alone":
            return batch_figures(self._send(instances, 1, args.alone_tokens))
        if part == "full":
            return batch_figures(self._send(instances, rows, args.new_tokens))
        later: list[Arrivals] = []
        running = min(args.running, max(1, rows // 2))
        others = ask_both(instances, self._prompts(args.arriving), args.alone_tokens)

        async def arrive(session: aiohttp.ClientSession) -> None:
            later.extend(await rows_of(session, others, args.arriving))

        ask = ask_both(instances, self._prompts(running), args.new_tokens)
        seconds = self._lease.at_most(args.timeout)
        first = send_rows(ask, running, arrive, beside_after=args.new_tokens // 16, seconds=seconds)
        return pause_figures(first, later)

    def _send(self, instances: Instances, rows: int, new_tokens: int) -> list[Arrivals]:
        ask = ask_both(instances, self._prompts(rows), new_tokens)
        return send_rows(ask, rows, seconds=self._lease.at_most(self._args.timeout))

    def _prompts(self, count: int) -> list[list[int]]:
        self._asked += 1
        return Prompts(self._model, seed=self._asked).rows(self._args.input, count, count)

    def _rows(self, configuration: Configuration) -> int:
        per_row: int = self._args.input + self._args.new_tokens + SPARE_TOKENS
        in_host = int(self._args.host_limit * GB) // self._kv.token_bytes
        pool = in_host if configuration.is_hybrid else self._stock_tokens()
        return max(1, min(int(self._args.rows), pool // per_row))

    def _stock_tokens(self) -> int:
        return stock_tokens(self._kv, Limits(int(self._args.gpu_limit * GB), 0, None))

    def _prefill_flags(self) -> list[str]:
        args = self._args
        at_once = 8  # prompts: the one that is computed, and those that wait for their transfer
        tokens = at_once * (args.input + SPARE_TOKENS)
        return [
            *common_flags(self._model, args.device, [1, at_once]), "--max-total-tokens", str(tokens),
            *self._memory_flags(args.prefill_memory), *args.flag,
        ]  # fmt: skip

    def _decode_flags(self, configuration: Configuration) -> list[str]:
        args, pool = self._args, f"{self._args.host_limit}GB"
        most = max(self._rows(configuration), args.running + args.arriving)
        return [
            *common_flags(self._model, args.device, graph_sizes(most)),
            *cache_flags(configuration, self._stock_tokens(), pool), *self._memory_flags(args.decode_memory),
            *args.flag,
        ]  # fmt: skip

    def _memory_flags(self, share: float) -> list[str]:
        return [] if self._args.device == "cpu" else ["--mem-fraction-static", str(share)]

    def _tell(self, configuration: Configuration, told: dict[str, Any]) -> None:
        self.result["decode"][configuration.name] = told
        self.save()

    def save(self) -> Path:
        return write_result(NAME, self.result, self._args.out)


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    add_server_flags(parser)
    add_run_flags(parser, NAME)
    parser.add_argument("--transfer", default="nixl", help=f"default nixl; {HELP}")
    parser.add_argument("--decode", default="hybrid,stock", help="decode instances (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    parser.add_argument("--input", default="32k", help="tokens of every prompt (default %(default)s)")
    parser.add_argument("--rows", type=int, default=32, help="most requests at once (default %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=4096,
        help="of answers in full and arriving: long enough that the first still decodes when the last has begun "
        "(default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--alone-tokens", type=int, default=512, help="of other answers (default %(default)s)")
    parser.add_argument("--running", type=int, default=4, help="requests that decode in arriving (default %(default)s)")
    parser.add_argument("--arriving", type=int, default=8, help="requests that arrive then (default %(default)s)")
    parser.add_argument("--gpu-limit", type=float, default=11.0, help="GB of GPU memory for stock's KV cache")
    parser.add_argument("--host-limit", type=float, default=60.0, help="GB of host memory for hybrid's pool")
    parser.add_argument("--prefill-memory", type=float, default=0.3, help="--mem-fraction-static of prefill")
    parser.add_argument("--decode-memory", type=float, default=0.4, help="--mem-fraction-static of decode")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of one part (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny model, CPU, short prompts, hybrid alone")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(
            device="cpu", stock_backend="torch_native", transfer="mooncake", decode="hybrid", input="256", rows=3,
            new_tokens=48, alone_tokens=8, running=2, arriving=2, host_limit=0.2, gpu_limit=0.02,
            hybrid=["budget_tokens=256"],
        )  # fmt: skip
        args = parser.parse_args(argv)
    args.input, args.parts = tokens_of(args.input), args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: take of {', '.join(PARTS)}")
    try:
        args.configurations = configurations.named(args.decode, args.stock_backend, args.hybrid)
    except ValueError as error:
        parser.error(f"--decode: {error}")
    if any(one.kv_dtype for one in args.configurations):
        parser.error("--decode: the prefill instance writes the model's dtype: take hybrid or stock")
    return args


def main() -> None:
    args = parsed()
    require_transfer(args.transfer)
    require_plugin()
    with log_folder(args.logs) as folder:
        load = PdLoad(args, folder)
        load.run()
    say(f"written to {load.save()}")
    sys.exit(any("error" in told for told in load.result["decode"].values()))


if __name__ == "__main__":
    main()
