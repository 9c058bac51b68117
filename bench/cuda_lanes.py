#!/usr/bin/env python3
"""Times of what begins the scout lane and ends the main lane on the GPU, inside a CUDA graph.

    python bench/cuda_lanes.py [--out FILE] [--pool 4] [--threads N]

Shapes as in cuda_kernels.py, a Qwen3-14B layer: hidden size 5120, 8 KV heads, 5 query heads each, head_dim 128,
bfloat16. Replies of the worker are there when a layer is finished: what is left is reading them over PCIe.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuda_kernels import (
    BLOCK_BYTES,
    DIM,
    DTYPE,
    GROUP,
    HEADS,
    SCALE,
    TOKENS,
    HostPool,
    Row,
    copy_rate,
    host_copy_rate,
    row,
    timed,
    worker,
)
from cuda_selection import BUDGET, DIGEST_BYTES, RESIDENT, code_bytes, random_digests, step_of, table_of
from record import write_result

from sglang_hybrid.cuda import digests as device
from sglang_hybrid.cuda.attention import merge
from sglang_hybrid.cuda.missed import attend_missed, finish_late
from sglang_hybrid.cuda.prediction import finish_queries, unit_rms
from sglang_hybrid.cuda.scoring import shift_lse
from sglang_hybrid.cuda.selection import Misses, RecallPlan, select_blocks
from sglang_hybrid.gpu.predicting import DevicePredictor
from sglang_hybrid.native.library import variants
from sglang_hybrid.scout.predictor import Correction, QueryWeights

HIDDEN, WIDTH, POSITIONS, CHANNELS = 5120, HEADS * GROUP * DIM, 40960, 32
LAYERS = 8  # launches of a graph, each with weights or buffers of its own


def random_values(*shape: int, size: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda") * size


# -- prediction ------------------------------------------------------------------------------


def norms(batch: int) -> Row:
    gain, launches = random_values(HIDDEN), []
    for _ in range(LAYERS):
        hidden, residual, unit, normed = (random_values(batch, HIDDEN) for _ in range(4))
        launches.append(
            lambda hidden=hidden, residual=residual, unit=unit, normed=normed: unit_rms(
                hidden, residual, 1e-6, unit=unit, normed=normed, gain=gain
            )
        )
    return row("unit_rms", timed(launches), 4 * batch * HIDDEN * 2, None, batch=batch, width=HIDDEN)


def heads(batch: int) -> Row:
    rotary, gain = torch.randn(POSITIONS, DIM, device="cuda"), torch.ones(DIM, device="cuda")
    positions = torch.randint(0, POSITIONS, (batch,), device="cuda")
    launches = []
    for _ in range(LAYERS):
        projected, out = random_values(batch, WIDTH), random_values(batch, WIDTH // DIM, DIM)
        launches.append(
            lambda projected=projected, out=out: finish_queries(
                projected, rotary, positions, out, neox=True, head_norm=gain, head_norm_eps=1e-6
            )
        )
    return row("finish_queries", timed(launches), 2 * batch * WIDTH * 2, None, batch=batch, heads=WIDTH // DIM)


def predicting(batch: int, kind: str, rank: int) -> list[Row]:
    """``prepare`` and ``finish`` of a predictor, raw or corrected by thin or full matrices."""
    rotary = torch.randn(POSITIONS, DIM, device="cuda")
    positions = torch.randint(0, POSITIONS, (batch,), device="cuda")
    hidden, residual = random_values(batch, HIDDEN), random_values(batch, HIDDEN)
    out = random_values(batch, WIDTH // DIM, DIM)
    predictors = []
    for _ in range(LAYERS):
        projection = random_values(WIDTH, HIDDEN, size=HIDDEN**-0.5)
        norm, head_norm = random_values(HIDDEN), random_values(DIM)
        weights = QueryWeights(norm, 1e-6, projection, None, DIM, head_norm, 1e-6, rotary, True)
        correction = None
        if kind != "raw":
            left = random_values(WIDTH, rank if kind == "thin" else HIDDEN)
            right = random_values(rank, HIDDEN) if kind == "thin" else None
            correction = Correction(left, right, random_values(WIDTH))
        predictors.append(DevicePredictor(weights, correction, max_batch=batch))
    moved = WIDTH * HIDDEN * 2 + (rank * (WIDTH + HIDDEN) * 2 if kind == "thin" else 0)
    shape = {"batch": batch, "correction": kind, "rank": rank if kind == "thin" else 0}
    before = timed([lambda one=one: one.prepare(hidden, residual) for one in predictors])
    behind = timed([lambda one=one: one.finish(positions, out) for one in predictors])
    return [
        row("prediction, prepare", before, 3 * batch * HIDDEN * 2, None, **shape),
        row("prediction, finish", behind, moved, None, **shape),
    ]


# -- selection -------------------------------------------------------------------------------


def selecting(batch: int, blocks: int, split: bool, most: int = 16) -> Row:
    step, table = step_of(batch, blocks, batch * blocks), table_of(batch, blocks, RESIDENT)
    misses, total = Misses(batch, HEADS, most), torch.zeros(2, dtype=torch.int64, device="cuda")
    share = torch.full((1,), 0.4, device="cuda")
    more = {}
    if split:
        gathered = RecallPlan(batch * HEADS * 4)
        more = {"gathered": gathered, "gather_share": share, "most_gathered": 4, "totals": total}
    launches = []
    for _ in range(LAYERS):
        scores = torch.randn(batch, HEADS, blocks, device="cuda") * 3 - 6
        launches.append(
            lambda scores=scores: select_blocks(
                scores, table, step, BUDGET, misses, pool_pages=batch * blocks, bonus=1.0, worth=-3.0, **more
            )
        )
    return row(
        "select_blocks", timed(launches), batch * HEADS * blocks * 4, None, batch=batch, blocks=blocks, split=split
    )


# -- the end of a layer ----------------------------------------------------------------------


def finishing(pool: HostPool, batch: int, misses: int, threads: int, from_host: float) -> list[Row]:
    shape = (batch, HEADS * GROUP, DIM)
    real, ahead = random_values(*shape), random_values(*shape)
    local = torch.randn(shape, device="cuda"), torch.randn(shape[:2], device="cuda")
    worker_out, worker_lse = torch.empty(shape, device="cuda"), torch.empty(shape[:2], device="cuda")
    out = random_values(*shape)
    served = torch.empty(batch, dtype=torch.int32, device="cuda")
    counts = torch.full((batch, HEADS), misses, dtype=torch.int32, device="cuda")
    last_fill = torch.full_like(counts, TOKENS)
    pages = torch.randint(0, pool.pages, (batch, HEADS, misses), dtype=torch.int32, device="cuda")
    layers = [random_digests(pool.pages, CHANNELS) for _ in range(2)] * (LAYERS // 2)
    replies = batch * HEADS * GROUP * (DIM + 1) * 4
    looked = batch * HEADS * misses * (DIGEST_BYTES + code_bytes(CHANNELS))
    with worker(pool, batch, misses, threads) as (client, mailbox):
        receipt = client.new_receipt(batch)
        mailbox.wake()
        client.post(ahead, pages, counts, last_fill, 0, SCALE, receipt, begins_step=True)
        client.wait(receipt, 1.0, worker_out, worker_lse, served)
        if not bool(served.all()):
            raise RuntimeError(f"the worker did not answer: {client.outcomes()}")

        # replies stay where they are until their slot is posted again
        def finish(digests: device.LayerDigests) -> None:
            client.wait(receipt, 1.0, worker_out, worker_lse, served)
            shift_lse(real, ahead, digests, pages, counts, SCALE, worker_lse)
            merge(local, (worker_out, worker_lse), out=out)

        seconds = timed([lambda digests=digests: finish(digests) for digests in layers])
        shape_of = {"batch": batch, "misses": misses, "digests_KiB": looked >> 10}
        rows = [row("wait, shift_lse, merge", seconds, replies, from_host, **shape_of)]

    host = device.HostPool(pool.region, pool.keys, pool.values)
    for late in (0, 1, batch):
        served.fill_(1)
        served[:late] = 0
        moved = late * HEADS * misses * BLOCK_BYTES
        launches: dict[str, Callable[[], None]] = {
            "finish_late": lambda: finish_late(real, host, pages, counts, SCALE, local, out, served=served),
            "attend_missed": lambda: attend_missed(
                real, host, pages, counts, SCALE, worker_out, worker_lse, served=served
            ),
        }
        for name, launch in launches.items():
            seconds = timed([launch] * LAYERS)
            rows.append(row(name, seconds, moved, from_host, batch=batch, late=late, misses=misses))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: bench/results/cuda-lanes.json")
    parser.add_argument("--pool", type=int, default=4, help="GiB of host memory for keys and values of a layer")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="of the CPU worker")
    args = parser.parse_args()

    torch.manual_seed(0)
    copied = copy_rate()  # brings the clocks up
    rows = [norms(batch) for batch in (64, 8, 1)] + [heads(batch) for batch in (64, 8, 1)]
    for batch in (64, 8):
        for kind in ("raw", "thin", "full"):
            rows += predicting(batch, kind, HIDDEN // 8)
    rows += [selecting(64, 1024, split) for split in (False, True)]
    torch.cuda.empty_cache()
    pool = HostPool(args.pool)
    from_host = host_copy_rate(pool)
    print(f"registered host memory to device, in one piece: {from_host / 1e9:.1f} GB/s", flush=True)
    for batch, misses in ((64, 4), (64, 16), (32, 4), (8, 4), (1, 4)):
        rows += finishing(pool, batch, misses, args.threads, from_host)

    result = {
        "ceilings": {"device copy GB/s": round(copied / 1e9), "host to device copy GB/s": round(from_host / 1e9, 1)},
        "shape": {"hidden": HIDDEN, "kv_heads": HEADS, "group": GROUP, "head_dim": DIM, "dtype": "bfloat16"},
        "pool_gib": args.pool,
        "cpu_variant": variants()[0],
        "worker_threads": args.threads,
        "torch": torch.__version__,
        "rows": rows,
    }
    print(f"written to {write_result('cuda-lanes', result, args.out)}")


if __name__ == "__main__":
    main()
