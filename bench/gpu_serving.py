"""Test one hybrid server under load: SGLang's benchmark, a killed worker, leaks and memory use.

    python -m bench.gpu_serving [--model DIR] [--parts openai,benchmark,kill] [--hybrid key=value ...] --out FILE
    python -m bench.gpu_serving --pd-fake [--model DIR] [--batches 1,8,32] --out FILE
    python -m bench.gpu_serving --device cpu --model DIR --prompts 4 --input 300 --output 8 --concurrency 2 \\
        --kill-rows 3 --kill-input 400 --kill-output 24 --hybrid budget_tokens=256 --hybrid scout.resident_tokens=128

openai     asks for the model's name, a completion, the same completion streamed, and a chat if the model has a chat
           template.
benchmark  runs `sglang-hybrid bench serving` and reports its times: random ids, all sent at once, at most
           --concurrency at a time.
kill       runs the same requests undisturbed, then --kills times undisturbed again (the control) and with the worker
           killed once every answer has a third of its tokens. Reports answers, speed, the longest pause and who served
           misses. Where an answer differs from the first run's, its two best tokens must have been about equally
           likely (--tie).
--pd-fake  replaces the parts: a decode instance with faked transfers gets growing batches of long prompts. Reports GPU
           memory and host pages.

After each part the server must have freed everything, and SGLang's log must not mention a leak. With the default
settings answers do not depend on who computes misses, up to rounding: queries are real, recalls come at fixed steps,
and there are misses at every step. Answers of a synthetic model (the default) hardly depend on attention: to compare
texts, give --parts kill another model. A part that fails is reported and the next one runs. The exit status is 1 if a
part failed or something leaked.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.arguments import add_model_flags, model_of, require_plugin, tokens_of
from bench.gates.cases import token_ids
from bench.record import write_result
from bench.serving.alone import grow, memory_verdict
from bench.serving.benchmark import Asked, Benchmark, Target
from bench.serving.killing import Load, kill_worker_under_load
from bench.serving.openai_api import ask_everything
from bench.serving.tokenizer import has_chat_template, tokenizer_of
from bench.serving.watching import Watch, gpu_mib, held, wait_until_idle
from bench.side_by_side.capacity import KVModel
from bench.side_by_side.configurations import Configuration
from bench.side_by_side.prompts import Prompts
from bench.side_by_side.server import Server
from bench.side_by_side.telling import log_tail, say
from bench.synthetic_model import Shape, read_model

NAME = "gpu-serving"
PARTS = ("openai", "benchmark", "kill")
# Recalls at fixed intervals: intervals that follow traffic change resident, and so attended, blocks from run to run.
EXACT = (
    "prediction=none",
    "scout.resident_tokens=1024",
    "scout.min_miss_attention=0",
    "scout.cpu_share=1",
    "scout.recall_interval=8",
    "whole_requests=never",
)
# SGLang checks its memory accounting when idle, with --strict also at every step, and exits if it does not add up
IDLE_CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
STEP_CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
# health checks must not generate tokens: with one a second, an instance would be busy generating
HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
STREAM_INTERVAL = 4  # tokens per message, for 32 rows: SGLang's HTTP process shares the host's cores with the worker


class Session:
    """One run of this program: starts the server, runs one part after the other, collects the result."""

    def __init__(self, args: argparse.Namespace, workspace: Path, model: Path) -> None:
        self._args, self._workspace, self._model = args, workspace, model
        self._benchmark: Benchmark | None = None
        self._tokenizer = tokenizer_of(model, workspace)
        self._kv = KVModel.of(model, itemsize=4 if args.device == "cpu" else 2)
        self._settings = (*EXACT, f"host_memory={self._pool_mib()}MiB", *args.hybrid)
        self.result: dict[str, Any] = {
            "model": model.name,
            "synthetic": read_model(model) is not None,
            "settings": list(self._settings),
            "parts": {},
        }
        self.save()  # before memory is measured: origin() asks for the GPU's name, which may allocate GPU memory
        self.result["gpu_mib"] = {"before": gpu_mib()}

    def run(self) -> None:
        configuration = Configuration("hybrid", "hybrid", self._settings)
        checks = IDLE_CHECKS | HEALTH | (STEP_CHECKS if self._args.strict else {})
        log = self._workspace / "server.log"
        server = Server(configuration, self._flags(), log, self._workspace / "trace", checks)
        self.result["command"] = server.command[1:]
        say(f"{self._model.name}: the server starts")
        try:
            with contextlib.ExitStack() as stack:
                self._benchmark = self._prepared(stack)
                stack.enter_context(server)
                self.result["start_seconds"] = round(server.start_seconds, 1)
                self.result["gpu_mib"]["serving"] = gpu_mib()
                self.result["held_at_start"] = wait_until_idle(server.url)
                say(f"serves after {server.start_seconds:.0f} s, holds {self.result['held_at_start']}")
                for name, part in self._parts(server).items():
                    self._part(server, name, part)
                self.result["gpu_mib"]["after_all_parts"] = gpu_mib()
        except Exception as error:
            self._report("server", error, log)
        finally:
            self.result["log"] = read_log(log)
            time.sleep(1.0)  # the driver frees memory a little later
            self.result["gpu_mib"]["after_the_end"] = gpu_mib()
        self.result["passed"] = self._passed()
        self.save()

    def _prepared(self, stack: contextlib.ExitStack) -> Benchmark | None:
        if self._args.pd_fake or "benchmark" not in self._args.parts:
            return None
        return stack.enter_context(Benchmark(self._workspace))

    def _parts(self, server: Server) -> dict[str, Callable[[], dict[str, Any]]]:
        args = self._args
        if args.pd_fake:
            return {"growing": lambda: self._growing(server)}

        def benchmark() -> dict[str, Any]:
            assert self._benchmark is not None
            asked = Asked(args.prompts, args.input, args.output, args.concurrency)
            done = self._benchmark.run(Target(server.url, self._model, self._tokenizer), asked, args.timeout)
            return {"passed": done["answered"] == done["completed"] == done["asked"], **done}

        def kill() -> dict[str, Any]:
            load = Load(server, self._kill_prompts(), args.kill_output, args.timeout)
            return kill_worker_under_load(load, args.kill_output, args.kills, args.tie)

        def openai() -> dict[str, Any]:
            has_words = self._tokenizer == self._model
            prompt = "The capital of France is" if has_words else " ".join(f"w{token}" for token in range(100, 200))
            return ask_everything(server.url, prompt, chats=has_chat_template(self._tokenizer), seconds=args.timeout)

        known = {"openai": openai, "benchmark": benchmark, "kill": kill}
        return {name: known[name] for name in args.parts}

    def _growing(self, server: Server) -> dict[str, Any]:
        args = self._args
        points = grow(server.url, args.batches, args.input, args.output, args.timeout)
        verdict = memory_verdict(points)
        good = all(point.get("finished") == point["rows"] for point in points)
        grows = verdict["host_pages_grow"] or len(points) == 1
        flat = verdict["gpu_stays_flat"] is not False
        return {"passed": good and grows and flat, "memory": verdict, "points": points}

    def _part(self, server: Server, name: str, part: Callable[[], dict[str, Any]]) -> None:
        begun = time.monotonic()
        say(f"{name} begins")
        try:
            server.check()
            with Watch(server.url) as watch:
                found = part()
            found["held"] = watch.summary()
            self.result["parts"][name] = found
            found["left"] = self._left(server)
            found["passed"] = found["passed"] and found["left"]["nothing"]
        except Exception as error:
            self._report(name, error, server.log)
        shown = self.result["parts"][name]
        shown["seconds"] = round(time.monotonic() - begun, 1)
        say(f"{name}: {'green' if shown['passed'] else 'RED'} after {shown['seconds']} s")
        self.save()

    def _left(self, server: Server) -> dict[str, Any]:
        """Return what the server holds, idle and with an empty cache. ``nothing`` is True if nothing leaked."""
        wait_until_idle(server.url)
        with contextlib.suppress(TimeoutError):  # what the server holds says more than a refused flush
            server.flush_cache(20)
        time.sleep(1.0)  # SGLang checks its memory accounting when it is idle
        server.check()
        now = held(server.url)
        before = self.result.get("held_at_start", {})
        return {**now, "nothing": now.get("tokens") == before.get("tokens") and now.get("running") == 0}

    def _report(self, name: str, error: Exception, log: Path) -> None:
        say(f"{name} failed: {type(error).__name__}: {str(error)[:600]}")
        print("\n".join(log_tail(log)), flush=True)
        known = self.result["parts"].get(name, {})
        self.result["parts"][name] = known | {"passed": False, "error": f"{type(error).__name__}: {str(error)[:2000]}"}

    def _passed(self) -> bool:
        parts = self.result["parts"]
        return bool(parts) and all(one["passed"] for one in parts.values()) and not self.result["log"]["leaks"]

    def _kill_prompts(self) -> list[list[int]]:
        rows, tokens = self._args.kill_rows, self._args.kill_input
        if (self._model / "tokenizer_config.json").is_file():
            with contextlib.suppress(ValueError):  # not enough text
                ids = token_ids(self._model, rows * tokens)
                return [ids[row * tokens : (row + 1) * tokens] for row in range(rows)]
        return Prompts(self._model, seed=0).rows(tokens, rows, rows)

    def _batches(self) -> list[int]:
        """Return the batch sizes for which CUDA graphs are recorded, rising; the last is the most rows at once."""
        args = self._args
        most = max(args.batches) if args.pd_fake else max(args.concurrency, args.kill_rows)
        return sorted({*(size for size in (1, 2, 4, 8, 16, 32, 64) if size < most), most})

    def _flags(self) -> list[str]:
        args = self._args
        flags = [
            "--model-path", str(self._model), "--tokenizer-path", str(self._tokenizer), "--device", args.device,
            "--max-running-requests", str(self._batches()[-1]), "--enable-metrics", "--random-seed", "1",
            "--sampling-backend", "pytorch",
        ]  # fmt: skip
        if args.device == "cpu":
            flags += ["--dtype", "float32"]
        else:
            flags += ["--cuda-graph-bs-decode", *map(str, self._batches()), "--cuda-graph-backend-prefill", "disabled"]
        if args.pd_fake:
            flags += ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"]
            flags += ["--stream-interval", str(STREAM_INTERVAL)]
        return [*flags, *args.flag]

    def _pool_mib(self) -> int:
        """Return the host pool's MiB for all concurrent requests and a third more: SGLang keeps pages free for them."""
        args = self._args
        if args.pd_fake:
            tokens = max(args.batches) * (args.input + args.output + 64)
        else:
            serving = args.concurrency * (args.input + args.output + 64)
            tokens = max(serving, args.kill_rows * (args.kill_input + args.kill_output + 64))
        least = 2 * 2048  # tokens: twice the default budget
        return int(1.35 * max(tokens, least) * self._kv.token_bytes / 2**20) + 4 * self._kv.layers + 64

    def save(self) -> Path:
        return write_result(NAME, self.result, self._args.out)


def read_log(log: Path) -> dict[str, Any]:
    """Return what SGLang's log says about leaks, retractions, errors and the worker."""
    if not log.is_file():
        return {"leaks": ["there is no log"], "retractions": 0}
    lines = [line for line in log.read_text(errors="replace").splitlines() if "ServerArgs(" not in line]
    worth = re.compile(r"CPU worker \d+|were computed in the server|were read from host memory|hybrid attention:")
    told = [line[:300] for line in lines if worth.search(line)]
    return {
        # torch's warning at the end of every process is not a leak
        "leaks": [line[:300] for line in lines if "leak" in line.lower() and "destroy_process_group" not in line][:8],
        "retractions": sum("Retract requests" in line for line in lines),
        "errors": [line[:300] for line in lines if "Traceback" in line or " ERROR" in line][:8],
        "of_the_worker": told[:4] + told[4:][-12:],
    }


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"in this order (default: {','.join(PARTS)})")
    parser.add_argument("--hybrid", metavar="KEY=VALUE", action="append", default=[], help="setting; may be repeated")
    parser.add_argument("--prompts", type=int, default=16, help="of the benchmark (default 16)")
    parser.add_argument("--input", default="32k", help="tokens of its prompts, and of --pd-fake (default 32k)")
    parser.add_argument("--output", type=int, default=0, help="new tokens of each (default 64; with --pd-fake 400)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--kill-rows", type=int, default=8, help="requests of part kill (default 8)")
    parser.add_argument("--kill-input", default="8k", help="tokens of their prompts (default 8k)")
    parser.add_argument("--kill-output", type=int, default=200, help="new tokens of each (default 200)")
    parser.add_argument("--kills", type=int, default=1, help="runs with a kill, each behind a control (default 1)")
    # two stock backends differ by 0.13 in a logprob in bfloat16, by 0.03 in float16 (bench/gpu_gates.py)
    parser.add_argument("--tie", type=float, default=0.3, help="logprobs so close are equal to rounding (default 0.3)")
    parser.add_argument("--pd-fake", action="store_true", help="a decode instance with faked transfers instead")
    parser.add_argument("--batches", default="1,8,32", help="requests at once with --pd-fake (default 1,8,32)")
    parser.add_argument("--strict", action="store_true", help="SGLang checks its books at every step, which is slow")
    parser.add_argument("--flag", action="append", default=[], help="flag of the server, as --flag=--log-level=debug")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one benchmark, run or batch")
    parser.add_argument("--logs", type=Path, help="where logs stay; default: nowhere")
    parser.add_argument("--out", type=Path, help=f"default: bench/results/{NAME}.json")
    args = parser.parse_args(argv)
    args.input, args.kill_input = tokens_of(args.input), tokens_of(args.kill_input)
    args.output = args.output or (400 if args.pd_fake else 64)
    args.batches = [int(one) for one in args.batches.split(",")]
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return args


def tell(result: dict[str, Any]) -> None:
    parts = result["parts"]
    if "text" in (one := parts.get("openai", {})):
        print("openai", {key: one.get(key) for key in ("text", "chat", "usage", "streamed_is_equal")})
    if "completed" in (one := parts.get("benchmark", {})):
        keys = (
            "asked",
            "completed",
            "answered",
            "output_throughput",
            "median_ttft_ms",
            "median_itl_ms",
            "p99_itl_ms",
            "left",
        )
        print("benchmark", {key: one.get(key) for key in keys})
    if "killed" in (one := parts.get("kill", {})):
        for name in ("undisturbed", "control", "killed"):
            for run in [one[name]] if name == "undisturbed" else one[name]:
                print(name, {key: value for key, value in run.items() if key != "metrics"})
        print("compared", one["compared"])
    if "memory" in (one := parts.get("growing", {})):
        print("memory", one["memory"])
    print("log", {key: value for key, value in result["log"].items() if key != "of_the_worker"})
    print("gpu_mib", result["gpu_mib"])
    print("all green" if result["passed"] else "RED", flush=True)


def main() -> None:
    args = parsed()
    require_plugin()
    with tempfile.TemporaryDirectory() as temporary:
        workspace = args.logs or Path(temporary)
        workspace.mkdir(parents=True, exist_ok=True)
        session = Session(args, workspace, model_of(args.model, Shape(layers=args.layers)))
        session.run()
    tell(session.result)
    say(f"written to {session.save()}")
    sys.exit(not session.result["passed"])


if __name__ == "__main__":
    main()
