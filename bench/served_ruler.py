"""Run RULER on servers side by side: stock twice, to measure noise, and hybrid with its default settings.

    python -m bench.served_ruler --model DIR --prompts FILE [--out DIR]
    python -m bench.served_ruler --policies --lengths 16k ...             scout and the papers' policies instead

`--prompts` is a file that ``sglang-hybrid eval --ruler 8k,16k,32k --ruler-make FILE`` wrote, so that a GPU host needs
neither RULER's package nor a network. All servers load at the same time and get their requests at the same time. Their
pools have a given size, since the free memory that SGLang measures while it loads is shared with the other servers.
Whole requests are off: so few requests would fit in GPU memory as a whole, where attention is exact. Hybrid servers
divide the cores among their workers. Lengths run one after the other, and each writes its results: ``LENGTH/eval.json``
in `--out` has every score; ``bars.json`` has the means, the differences from stock and which bars they meet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import write_result
from bench.side_by_side.configurations import PAPERS, Configuration, paper
from bench.side_by_side.server import Server
from sglang_hybrid.origin import ROOT

STOCK = "stock"
NOISE = "stock-triton"


@dataclass(frozen=True)
class Bar:
    """Limits of how far below stock a run may score, in points of 100: the mean of all tasks, and any one task."""

    mean: float
    task: float | None = None


BARS = {"budget-2048": Bar(mean=1.0, task=5.0), "budget-1024": Bar(mean=2.0)}


def configurations_of(more: list[str], device: str, workers: int) -> list[Configuration]:
    """Return the servers to compare, stock first.

    ``more``: further settings of both hybrid servers. ``workers``: their worker threads; 0 is the default.
    """
    backends = ("torch_native", "torch_native") if device == "cpu" else ("flashinfer", "triton")
    settings = ["whole_requests=never", *([f"worker_threads={workers}"] if workers else []), *more]
    return [
        Configuration(STOCK, backends[0]),
        Configuration(NOISE, backends[1]),
        Configuration("budget-2048", "hybrid", tuple(settings)),
        Configuration("budget-1024", "hybrid", ("budget_tokens=1024", *settings)),
    ]


def policies_of(more: list[str], device: str, workers: int) -> list[Configuration]:
    """Return stock, the default policy, and the papers' policies with as many tokens per row in GPU memory."""
    stock, _, scout, _ = configurations_of(more, device, workers)
    return [
        stock,
        Configuration("scout", scout.backend, scout.settings),
        *(paper(name, scout.settings) for name in PAPERS),
    ]


def flags_of(args: argparse.Namespace, one: Configuration) -> list[str]:
    flags = [
        "--model-path", str(args.model), "--device", args.device, "--max-running-requests", str(args.concurrency),
        "--sampling-backend", "pytorch", "--random-seed", "1",
    ]  # fmt: skip
    if not one.is_hybrid:
        flags += ["--max-total-tokens", str(args.tokens)]
    if args.device == "cpu":
        return [*flags, "--dtype", "float32", *args.flag]
    sizes = ["1", "4", "8", "12", str(args.concurrency)]
    return [*flags, "--cuda-graph-bs-decode", *sizes, "--cuda-graph-backend-prefill", "disabled", *args.flag]


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means of tasks by length, differences from stock, and which bars are met. ``runs``: from eval.json."""
    scores = {run["name"]: _by_length(run) for run in runs}
    stock = scores[STOCK]
    found: dict[str, Any] = {}
    for name, by_length in scores.items():
        found[name] = {}
        for length, tasks in by_length.items():
            mean, reference = _mean(tasks), _mean(stock[length])
            differences = {task: round(score - stock[length][task], 2) for task, score in tasks.items()}
            told: dict[str, Any] = {
                "mean": round(mean, 2), "below_stock": round(reference - mean, 2), "tasks": differences,
            }  # fmt: skip
            if bar := BARS.get(name):
                worst = min(differences.values())
                told["met"] = reference - mean <= bar.mean and (bar.task is None or worst >= -bar.task)
            found[name][length] = told
    return found


def _by_length(run: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return length -> task -> score from 0 to 100."""
    found: dict[str, dict[str, float]] = {}
    for task in run["tasks"]:
        for length, score in task["by_length"].items():
            found.setdefault(length, {})[task["task"].removeprefix("ruler:")] = 100 * score
    return found


def _mean(tasks: dict[str, float]) -> float:
    return sum(tasks.values()) / len(tasks)


def show(found: dict[str, Any]) -> str:
    lines = []
    for name, by_length in found.items():
        for length, told in by_length.items():
            lost = ", ".join(f"{task} {points:+.1f}" for task, points in told["tasks"].items() if points <= -5)
            met = {True: "met", False: "MISSED", None: ""}[told.get("met")]
            lines.append(f"{name:14}{length:>7}{told['mean']:8.2f}{-told['below_stock']:+8.2f}  {met:7}{lost}")
    return "\n".join(lines)


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="of eval --ruler-make")
    parser.add_argument("--lengths", default="32k,16k,8k", help="of the file's, in this order (default: %(default)s)")
    parser.add_argument("--samples", type=int, help="prompts of each task and length (default: all of the file)")
    parser.add_argument("--policies", action="store_true", help="serve stock, scout and the papers' policies")
    parser.add_argument("--only", help="servers, such as stock,budget-2048; stock is always there")
    parser.add_argument("--hybrid", metavar="KEY=VALUE", action="append", default=[], help="setting of hybrid servers")
    parser.add_argument("--concurrency", type=int, default=16, help="requests that each server has at a time")
    parser.add_argument("--tokens", type=int, default=600_000, help="in a stock server's pool (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--flag", action="append", default=[], help="flag of all servers, as --flag=--log-level=debug")
    parser.add_argument("--out", type=Path, default=Path("ruler"))
    return parser.parse_args(argv)


def chosen_of(args: argparse.Namespace, cores: int) -> list[Configuration]:
    """Return the servers that ``args`` select.

    Hybrid servers divide three quarters of ``cores`` among their workers; one alone takes its default.
    """
    of_kind = policies_of if args.policies else configurations_of
    known = [one.name for one in of_kind([], args.device, 0)]
    names = known if args.only is None else [STOCK, *args.only.split(",")]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"--only {', '.join(unknown)}: there are {', '.join(known)}")
    hybrids = sum(1 for one in of_kind([], args.device, 0) if one.is_hybrid and one.name in names)
    workers = max(1, cores * 3 // 4 // hybrids) if hybrids > 1 else 0
    return [one for one in of_kind(args.hybrid, args.device, workers) if one.name in names]


def main() -> None:
    args = parsed()
    chosen = chosen_of(args, os.cpu_count() or 1)
    args.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as running:
        servers = {}
        for one in chosen:
            servers[one.name] = Server(one, flags_of(args, one), args.out / f"{one.name}.log", args.out)
            servers[one.name].start()
            running.push(servers[one.name])
        for name, server in servers.items():
            server.wait()
            print(f"{name} serves after {server.start_seconds:.0f} s", flush=True)
        command = [sys.executable, "-m", "sglang_hybrid.cli", "eval", "--stock-url", servers[STOCK].url]
        for name, server in servers.items():
            command += ["--url", f"{name}={server.url}"] if name != STOCK else []
        command += ["--ruler-prompts", str(args.prompts), "--concurrency", str(args.concurrency)]
        command += ["--samples", str(args.samples)] if args.samples else []
        settings = {one.name: list(one.settings) for one in chosen if one.is_hybrid}
        found: dict[str, dict[str, Any]] = {one.name: {} for one in chosen}
        for length in args.lengths.split(","):
            out = args.out / length
            status = subprocess.run([*command, "--ruler", length, "--out", str(out)], cwd=ROOT, check=False).returncode
            if not (out / "eval.json").is_file():
                sys.exit(f"nothing was evaluated (status {status}): see the servers' logs in {args.out}")
            for name, told in judge(json.loads((out / "eval.json").read_text())["runs"]).items():
                found[name] |= told
            write_result("served-ruler", {"settings": settings, "runs": found}, args.out / "bars.json")
            print(show(found), flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
