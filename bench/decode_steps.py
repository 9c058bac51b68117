"""Measure prefill and decode steps in one process, without a server or a scheduler: only the work of the GPU.

    python -m bench.decode_steps --model DIR --points 32k:8,8k:32 --out FILE -- --attention-backend flashinfer ...
    python -m bench.decode_steps --model DIR --points 32k:64 --out FILE \\
        --variants "scout.cpu_share=1;scout.cpu_share=1,prediction=none" \\
        -- --attention-backend hybrid --hybrid prediction=raw ...

SGLang's flags follow `--`. A point is tokens:rows; every row has its own prompt (side_by_side.prompts), prefilled in
one piece. A step is timed by CUDA events around SGLang's forward pass, so that the scheduler, which a server runs in
parallel, does not count. Variants change settings of the hybrid backend and decode behind the same prompts; the first
measurement always has the settings of the flags. throughput.py measures whole servers and takes longer.

`--turn FILE`: load the model, then wait until no other run holds a lock on the file, so that runs can start together.
With `--rounds N` these runs measure N times, in turn, so that a change on the machine meanwhile affects all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.record import write_result
from bench.side_by_side.prompts import Prompts
from sglang_hybrid.config import config_from_environment, load_config
from sglang_hybrid.engines.cuda.decode import DeviceScout
from sglang_hybrid.engines.cuda.engine import CudaEngine
from sglang_hybrid.integration.model_session import ModelSession

NAME = "decode-steps"


def point_of(text: str) -> tuple[int, int]:
    tokens, rows = text.split(":")
    return int(tokens[:-1]) * 1024 if tokens.endswith("k") else int(tokens), int(rows)


@contextlib.contextmanager
def turn(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


class Rows:
    """A batch of rows that decode together, each behind its own prompt.

    Rows join one by one with a decode step in between, as in a server, so they do not all recall in the same step.
    """

    def __init__(self, session: ModelSession, prompts: list[list[int]]) -> None:
        from sglang.benchmark import one_batch

        self._session = session
        self.prefill_seconds: list[float] = []
        # Milliseconds of steps that a row joined. A row joins at every step: with more rows than first steps, the extra
        # time of such a step is the extra time of all first steps of one row.
        self.joined_ms: list[float] = []
        session._bench.clear()
        for number, prompt in enumerate(prompts):
            self._check_pages(f"before prompt {number}")
            requests = one_batch.prepare_synthetic_inputs_for_latency_test(1, len(prompt), [prompt])
            torch.cuda.synchronize()
            begun = time.perf_counter()
            try:
                token, _, batch = session._bench.extend(requests)
            except ValueError as error:
                raise RuntimeError(f"prompt {number}: {error}; {self._damage()}") from error
            torch.cuda.synchronize()
            self.prefill_seconds.append(time.perf_counter() - begun)
            if number == 0:
                self._batch, self._tokens = batch, token
            else:
                self._batch.merge_batch(batch)
                self._tokens = torch.cat((self._tokens, token))
            self.joined_ms += self.steps(1)

    def _check_pages(self, when: str) -> None:
        """Raise RuntimeError if SGLang's list of free pages is damaged: a stray write of a kernel shows here first."""
        allocator = self._session.runner.token_to_kv_pool_allocator
        free = getattr(allocator, "free_pages", None)  # an allocator whose pages are single tokens has none
        if free is not None and len(free) and not (free.min() >= 0 and free.max() <= allocator.size):
            raise RuntimeError(f"SGLang's list of free pages is damaged {when}: {int(free.min())} to {int(free.max())}")

    def _damage(self) -> str:
        """Describe the numbers in SGLang's table of token indices that are no token indices, and their positions."""
        runner = self._session.runner
        table, free = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool_allocator.free_pages
        wrong = (table < 0) | (table > runner.max_total_num_tokens + 64)
        found = [f"free pages {int(free.min())} to {int(free.max())}"]
        for row in wrong.any(dim=1).nonzero().flatten().tolist()[:4]:
            places = wrong[row].nonzero().flatten()
            sample = [f"{value & 0xFFFFFFFF:08x}" for value in table[row][places[:8]].tolist()]
            found.append(f"row {row}: {len(places)} from {int(places[0])} to {int(places[-1])}, {' '.join(sample)}")
        return "; ".join(found)

    def steps(self, count: int) -> list[float]:
        """Decode ``count`` steps and return the milliseconds of each."""
        runner, forward = self._session.runner, self._session.runner.forward
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = forward(*args, **kwargs)
            end.record()
            events.append((begin, end))
            return result

        runner.forward = timed
        try:
            for _ in range(count):
                self._tokens, _ = self._session._bench.decode(self._tokens, self._batch)
            torch.cuda.synchronize()
        finally:
            runner.forward = forward
        return [begin.elapsed_time(end) for begin, end in events]


class Counts:
    """Counters of the CUDA engine since this object was created. Empty unless its step program is a DeviceScout."""

    def __init__(self, session: ModelSession) -> None:
        engine = getattr(session.runner.attn_backend, "engine", None)
        self._engine = engine if isinstance(engine, CudaEngine) else None
        program = self._engine.program if self._engine else None
        self._scout = program if isinstance(program, DeviceScout) else None
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        if self._engine is None or self._scout is None:
            return {}
        scout, mailbox = self._scout, self._engine._mailbox
        misses, recalled = scout.counted[:, :2].cpu().unbind(1)
        return {"misses": misses, "recalled": recalled, "rows": mailbox.outcomes() if mailbox else {}}

    def since(self, steps: int, rows: int) -> dict[str, Any]:
        if self._engine is None or self._scout is None:
            return {}
        now, shape, scout = self._now(), self._engine._shape, self._scout
        lists = steps * rows * shape.heads
        misses, recalled = ((now[name] - self._before[name]).double() / lists for name in ("misses", "recalled"))
        budget = config_from_environment().budget_tokens // 32
        shares = scout.gather_shares
        outcomes = {name: value - self._before["rows"].get(name, 0) for name, value in now["rows"].items()}
        return {
            "cpu_compute_ratio": round(float(misses.mean()) / budget, 4),
            "misses_per_list": [round(value, 2) for value in misses.tolist()],
            "recalled_per_list": round(float(recalled.mean()), 3),
            "gather_shares": None if shares is None else [round(share, 3) for share in shares.tolist()],
            "rows_by_outcome": {name: value for name, value in outcomes.items() if value},
            "refused": int(scout.refused),
        }


def measure(session: ModelSession, rows: Rows, tokens: int, count: int, label: str, args: Any) -> dict[str, Any]:
    # 8 steps at a time, so that the host does not run far ahead, as in a server: counters of past steps change settings
    for _ in range(args.warm // 8):
        rows.steps(8)
    counts = Counts(session)
    milliseconds = sorted(rows.steps(args.steps))
    median = statistics.median(milliseconds)
    point = {
        "tokens": tokens,
        "rows": count,
        "variant": label,
        "step_ms": round(median, 3),
        "step_ms_p10": round(milliseconds[len(milliseconds) // 10], 3),
        "step_ms_p90": round(milliseconds[-1 - len(milliseconds) // 10], 3),
        "tokens_per_second": round(1000 * count / median, 1),
        "prefill_s": round(statistics.median(rows.prefill_seconds), 4),
        "prefill_tokens_per_second": round(tokens / statistics.median(rows.prefill_seconds)),
        "joined_step_ms": round(statistics.median(rows.joined_ms[len(rows.joined_ms) // 2 :]), 3),
        "gpu_gb_allocated": round(torch.cuda.memory_allocated() / 1e9, 2),
        **counts.since(args.steps, count),
    }
    print(point, flush=True)
    return point


@contextlib.contextmanager
def main_lane_alone(session: ModelSession) -> Iterator[None]:
    """Switch off prediction, scoring, selection, posts, gathers and recalls, to time layers without them.

    Attention still runs over the resident blocks.
    """
    scout = session.runner.attn_backend.engine.program
    kept = scout._begin_layer, scout._mailbox, scout._make_resident
    scout._begin_layer, scout._mailbox, scout._make_resident = lambda *_: None, None, lambda *_: None
    for lane in scout._lanes:
        lane._misses.counts.zero_()
    yield
    scout._begin_layer, scout._mailbox, scout._make_resident = kept


def settings_of(flags: list[str]) -> list[str]:
    """Return the hybrid backend's settings (``--hybrid KEY=VALUE``) among SGLang's ``flags``."""
    return [value for flag, value in itertools.pairwise(flags) if flag == "--hybrid"]


def trace(rows: Rows, path: Path) -> None:
    """Write a trace of three steps, every kernel on its stream, for commands.report.session.gpu_trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        rows.steps(3)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(path))


def measure_points(
    session: ModelSession, prompts: Prompts, points: list[dict[str, Any]], args: argparse.Namespace
) -> None:
    """Measure all points, append them to ``points``, and write the result file after each point and its variants."""
    for number, (tokens, count) in enumerate(map(point_of, args.points.split(","))):
        rows = Rows(session, prompts.rows(tokens, count, count))
        points.append(measure(session, rows, tokens, count, "", args))
        if args.trace:
            trace(rows, args.trace / f"trace-{tokens}-{count}.json.gz")
        for variant in filter(None, args.variants.split(";") if number == 0 else []):
            session.use(load_config(None, [*settings_of(args.flags), *variant.split(",")]))
            points.append(measure(session, rows, tokens, count, variant, args))
        if args.main_lane:
            settings = [*settings_of(args.flags), "prediction=none", "scout.cpu_share=1", "whole_requests=never"]
            session.use(load_config(None, settings))
            rows.steps(2)  # makes blocks resident
            with main_lane_alone(session):
                session.runner.init_cuda_graphs()
                points.append(measure(session, rows, tokens, count, "main lane alone", args))
        if args.main_lane or (args.variants and number == 0):
            session.use(config_from_environment())
        write_result(NAME, {"flags": args.flags, "points": points}, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--points", required=True, help="tokens:rows, separated by commas, such as 32k:64,8k:100")
    parser.add_argument("--variants", default="", help="settings behind the first point: key=value,... ; key=value,...")
    parser.add_argument("--warm", type=int, default=32, help="steps before those that are measured (default 32)")
    parser.add_argument("--steps", type=int, default=48, help="measured steps (default 48)")
    parser.add_argument("--turn", type=Path)
    parser.add_argument("--rounds", type=int, default=1, help="measure everything that often, letting others go first")
    parser.add_argument("--trace", type=Path, help="write traces of three steps of each point into this folder")
    parser.add_argument(
        "--main-lane", action="store_true", help="measure each point also without scout, gather and recall lanes"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="SGLang's, after --")
    args = parser.parse_args()

    fixed = ("--skip-tokenizer-init", "--sampling-backend", "pytorch", "--cuda-graph-backend-prefill", "disabled")
    session = ModelSession(["--model-path", str(args.model), *fixed, *args.flags])
    prompts = Prompts(args.model, seed=0)
    points: list[dict[str, Any]] = []
    print("loaded", flush=True)
    for _ in range(args.rounds):
        with turn(args.turn):
            measure_points(session, prompts, points, args)
        time.sleep(1)  # another run that waits for the lock gets it


if __name__ == "__main__":
    main()
