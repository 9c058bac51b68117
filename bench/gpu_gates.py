"""Gates 1 and 2 in one run: compare logits of the hybrid backend with stock SGLang's, in a few processes, no server.

    python -m bench.gpu_gates --model DIR [--dtype float16] --out FILE
    python -m bench.gpu_gates --random qwen3 --out FILE           a small random model: heads of 128 channels
    python -m bench.gpu_gates --random llama --flag=--quantization=fp8 --out FILE
    python -m bench.gpu_gates --model DIR --kv-cache-dtype fp8_e4m3 --out FILE        all backends with an FP8 KV cache
    python -m bench.gpu_gates --model DIR --device cpu --lengths 10,33,150 --steps 6 --out FILE

There is one process for each of: stock (FlashInfer), a control (Triton, another stock kernel), hybrid. Stock decodes
greedily; the others are fed stock's tokens, so that logits can be compared at every step. The log probability of
stock's token may differ by 1.5 times the control's difference, and another best token must be a near tie by the same
measure (gates.comparing).

    gate1-budget      the budget is above the context: everything is resident
    gate2-worker      everything but sink and tail is computed by the CPU worker alone, with real queries
    gate2-gather      the same, but the best 16 misses of a list are copied to the GPU (scout.cpu_share=0)
    too-small         a budget of 128 tokens: must differ by more than rounding, or the comparison detects nothing
    gate2-no-worker   gate2-gather without a worker: the GPU reads the other misses from host memory

Without a GPU stock is torch_native, and TOLERANCE replaces the control. Exit status 1: a gate is red.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.free_port import free_port
from bench.gates.cases import ALONE, LENGTHS, cases
from bench.gates.comparing import Comparison, Reading, compare, judge, rows_with_misses, served_by_worker
from bench.gates.random_models import ARCHITECTURES, write_random_model
from bench.gates.spec import MARK, Spec, write_whole
from bench.gates.variants import ALL_ON_WORKER, MUST_DIFFER, ON_CPU, START, VARIANTS
from bench.record import write_result
from bench.side_by_side.configurations import FP8
from bench.side_by_side.telling import log_tail, say
from sglang_hybrid.commands.pd.processes import ServerProcess, end_all
from sglang_hybrid.origin import ROOT

NAME = "gpu-gates"


class Run:
    """Runs the processes of one model and dtype, and collects their results."""

    def __init__(self, args: argparse.Namespace, workspace: Path, model: Path) -> None:
        self._args, self._workspace, self._model = args, workspace, model
        self._shown: dict[str, int] = {}  # number of marked lines of each log that were printed
        self.failures: dict[str, str] = {}

    def _flags(self, role: str) -> list[str]:
        args = self._args
        backend = {"stock": args.stock, "control": args.control, "hybrid": "hybrid"}[role]
        rows = max(16, len(args.lengths))
        flags = [
            "--model-path", str(self._model), "--attention-backend", backend, "--device", args.device,
            "--dtype", args.dtype, "--skip-tokenizer-init", "--random-seed", "1", "--log-level", "warning",
            "--max-running-requests", str(rows), "--sampling-backend", "pytorch", "--nccl-port", str(free_port()),
        ]  # fmt: skip
        tokens = sum(args.lengths) + rows * (args.steps + 64)
        if role == "hybrid":
            settings = (*START, f"host_memory={args.host_memory}")
            flags += [word for setting in settings for word in ("--hybrid", setting)]
        else:
            flags += ["--max-total-tokens", str(tokens + 4096), "--page-size", "1"]
        if args.device == "cuda":
            # graphs for one row and for a padded batch; each process leaves memory for others that load at once
            flags += ["--cuda-graph-bs-decode", "1", str(rows), "--cuda-graph-backend-prefill", "disabled"]
            flags += ["--mem-fraction-static", "0.4"]
        if args.kv_cache_dtype != "auto":
            flags += ["--kv-cache-dtype", args.kv_cache_dtype]
        return [*flags, *args.flag]

    def _spec(self, role: str) -> Spec:
        args, folder = self._args, self._workspace
        return Spec(
            role=role, device=args.device, flags=self._flags(role),
            variants=[(name, list(VARIANTS[name])) for name in args.variants], steps=args.steps,
            cases=str(folder / "cases.json"), reference=str(folder / "stock.json"),
            out=str(folder / f"{role}.json"), turn=str(args.turn or folder / "turn"), timeout=args.timeout,
            is_fp8=args.kv_cache_dtype == FP8,
        )  # fmt: skip

    def _start(self, role: str) -> ServerProcess:
        spec = self._workspace / f"{role}.spec.json"
        spec.write_text(json.dumps(asdict(self._spec(role))))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if role != "hybrid" and self._args.device == "cuda":
            environment["SGLANG_PLUGINS"] = "none"
        return ServerProcess(
            role, [sys.executable, "-m", "bench.gates.child", str(spec)], self._workspace / f"{role}.log", environment
        )

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run all processes with the cases ``asked``, and return their results by role or variant."""
        write_whole(self._workspace / "cases.json", asked)
        roles = ["stock", *(["control"] if self._args.control else []), "hybrid"]
        groups = [[role] for role in roles] if self._args.one_by_one else [roles]
        for group in groups:
            members = [self._start(role) for role in group]
            try:
                self._watch(members)
            finally:
                end_all(members)
        found: dict[str, Any] = {}
        for role in roles:
            with contextlib.suppress(FileNotFoundError):
                found |= json.loads((self._workspace / f"{role}.json").read_text())
        return found

    def _watch(self, members: list[ServerProcess]) -> None:
        deadline, left = time.monotonic() + self._args.timeout, list(members)
        while left:
            for member in list(left):
                status = member.process.poll()
                self._pass_on(member)
                if status is None and time.monotonic() < deadline:
                    continue
                left.remove(member)
                if status != 0:
                    self._failed(member, "timed out" if status is None else f"ended with status {status}")
                    if member.name == "stock":
                        return  # without stock there is nothing to compare with
            time.sleep(0.3)  # other programs work, so there is no event to wait for

    def _pass_on(self, member: ServerProcess) -> None:
        lines = [line for line in member.log.read_text(errors="replace").splitlines() if line.startswith(MARK)]
        for line in lines[self._shown.get(member.name, 0) :]:
            say(line.removeprefix(MARK))
        self._shown[member.name] = len(lines)

    def _failed(self, member: ServerProcess, why: str) -> None:
        self.failures[member.name] = why
        say(f"{member.name} {why}")
        print("\n".join(log_tail(member.log)), flush=True)


def readings(read: dict[str, Any]) -> list[Reading]:
    return [Reading(name, one["best"], one["logprob"], one["gap"]) for name, one in read["cases"].items()]


def judged(found: dict[str, Any], asked: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Judge the results of all processes; return the result file's content without its origin."""
    if "stock" not in found:
        return {"passed": False, "error": "stock read nothing"}
    stock = readings(found["stock"])
    highest = max(abs(logit) for one in found["stock"]["cases"].values() for row in one["logit"] for logit in row)
    control: Comparison | None = compare(stock, readings(found["control"])) if "control" in found else None
    variants: dict[str, Any] = {}
    for name in args.variants:
        read = found.get(name, {"error": "read nothing"})
        if "error" in read:
            variants[name] = {"passed": False, "error": read["error"]}
            continue
        comparison = compare(stock, readings(read))
        shown = judge(comparison, control, args.dtype, highest) | comparison.summary()
        shown |= {key: read[key] for key in ("rows", "refused") if key in read}
        if name == MUST_DIFFER:
            shown["passed"] = not shown["passed"]
        if name == ALL_ON_WORKER:
            lengths = [len(prompt) for prompts in asked.values() for prompt in prompts]
            arithmetic = rows_with_misses(lengths, args.steps - 1, found["layers"])
            shown["worker"] = served_by_worker(read["rows"], arithmetic if args.device == "cuda" else None)
            shown["passed"] = shown["passed"] and shown["worker"]["passed"]
        variants[name] = shown
    return {
        # if a requested control failed, rounding was not measured
        "passed": all(one["passed"] for one in variants.values()) and bool(control) == bool(args.control),
        "highest_stock_logit": round(highest, 3),
        "control": control.summary() if control else None,
        "variants": variants,
    }


def tell(result: dict[str, Any]) -> None:
    keys = ("positions", "equal_best_share", "worst_logprob", "mean_logprob", "worst_gap_change", "flips")
    if result.get("control"):
        print("control          ", {key: result["control"][key] for key in keys})
    for name, one in result.get("variants", {}).items():
        shown = {key: one[key] for key in (*keys, "allowed_logprob", "near_tie_below", "worker") if key in one}
        print(f"{name:17}", "green" if one["passed"] else "RED", one.get("error", shown))
    print("all green" if result["passed"] else f"RED: {result.get('error', 'see above')}", flush=True)


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face model")
    parser.add_argument("--random", choices=ARCHITECTURES, help="make a small random model of it and take that")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--dtype", default="", help="float16 (default), bfloat16; float32 (default) on a CPU")
    parser.add_argument("--kv-cache-dtype", choices=("auto", FP8), default="auto", help="of all backends, on a GPU")
    parser.add_argument("--stock", default="", help="backend to compare with (flashinfer; torch_native on a CPU)")
    parser.add_argument("--control", default="", help="another stock backend (triton; none on a CPU); none: without")
    parser.add_argument("--variants", default="", help=f"of {', '.join(VARIANTS)} (default: all that there are)")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="of the prompts that decode together")
    parser.add_argument("--alone", default="", help="which of them also decode alone (default: 33,700,6000)")
    parser.add_argument("--steps", type=int, default=40, help="greedy tokens behind each prompt (default 40)")
    parser.add_argument("--host-memory", default="4GiB", help="of hybrid's pool (default 4GiB)")
    parser.add_argument("--one-by-one", action="store_true", help="start processes after each other, for small hosts")
    parser.add_argument("--timeout", type=float, default=420, help="seconds for processes that run together")
    parser.add_argument("--flag", action="append", default=[], help="flag of all processes, as --flag=--log-level=info")
    parser.add_argument("--turn", type=Path, help="file of several runs that start together and compute in turns")
    parser.add_argument("--logs", type=Path, help="where logs and readings stay; default: nowhere")
    parser.add_argument("--out", type=Path, help=f"default: bench/results/{NAME}.json")
    args = parser.parse_args(argv)
    if bool(args.model) == bool(args.random):
        parser.error("give either --model or --random")
    on_cpu = args.device == "cpu"
    if on_cpu and args.kv_cache_dtype != "auto":
        parser.error("--kv-cache-dtype: on a CPU stock serves no FP8, so there is nothing to compare with")
    args.dtype = args.dtype or ("float32" if on_cpu else "float16")
    args.stock = args.stock or ("torch_native" if on_cpu else "flashinfer")
    args.control = args.control or ("none" if on_cpu else "triton")
    args.control = None if args.control == "none" else args.control
    args.variants = args.variants.split(",") if args.variants else [*(ON_CPU if on_cpu else VARIANTS)]
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}")
    # the order of VARIANTS: the one without a worker comes last, because a worker cannot be attached again
    args.variants = [name for name in VARIANTS if name in args.variants]
    args.lengths = [int(one) for one in args.lengths.split(",")]
    args.alone = [int(one) for one in args.alone.split(",")] if args.alone else [n for n in ALONE if n in args.lengths]
    if strange := set(args.alone) - set(args.lengths):
        parser.error(f"--alone has lengths that --lengths has not: {strange}")
    return args


def main() -> None:
    args = parsed()
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workspace = args.logs or temporary
        workspace.mkdir(parents=True, exist_ok=True)
        for old in workspace.glob("*.json"):
            old.unlink()  # otherwise children would read results of an earlier run
        model = args.model
        if args.random:
            model = write_random_model(temporary / f"random-{args.random}", args.random)
        asked = cases(model, args.lengths, args.alone)
        say(f"{model.name}, {args.dtype}: {len(asked)} cases of {args.steps} tokens; processes start")
        run = Run(args, workspace, model)
        result = judged(run.run(asked), asked, args)
    result["passed"] = result["passed"] and not run.failures
    shown = {
        "model": model.name, "dtype": args.dtype, "kv_cache_dtype": args.kv_cache_dtype, "device": args.device,
        "stock": args.stock, "control_backend": args.control, "lengths": args.lengths, "alone": args.alone,
        "steps": args.steps, "failures": run.failures, **result,
    }  # fmt: skip
    path = write_result(NAME, shown, args.out)
    tell(result)
    say(f"written to {path}")
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
