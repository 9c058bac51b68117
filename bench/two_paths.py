#!/usr/bin/env python3
"""How many misses two ways serve together: the worker computes some, the GPU gathers the others over PCIe.

    python bench/two_paths.py [--threads 2,4,8,12,15] [--pool 16] [--out FILE]

A graph of layers, each posted and gathered while the one before it is waited for, as in a decode step: 64 rows, 8 KV
heads, 16 misses a list, 134 MB a layer. For every number of worker threads: all misses by the worker, all of them
gathered, and splits between. Both read the same host memory, so what two ways gain depends on what one leaves of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cuda_kernels import BLOCK_BYTES, DIM, DTYPE, GROUP, HEADS, SCALE, TOKENS, HostPool, host_copy_rate, timed, worker
from record import write_result

from sglang_hybrid.cuda.gathering import gather_blocks
from sglang_hybrid.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.native.library import variants

BATCH, MISSES, LAYERS = 64, 16, 8
LAYER_BYTES = BATCH * HEADS * MISSES * BLOCK_BYTES


class Layers:
    """Misses of some layers, split between the two ways."""

    def __init__(self, pool: HostPool, client: DeviceMailboxClient, gathered: int) -> None:
        self._pool, self._client, self._posted, self._gathered = pool, client, MISSES - gathered, gathered

        def pages(count: int) -> torch.Tensor:
            return torch.randint(0, pool.pages, (BATCH, HEADS, count), dtype=torch.int32, device="cuda")

        self._lists = [(pages(self._posted), pages(gathered)) for _ in range(LAYERS)]
        self._query = torch.randn(BATCH, HEADS * GROUP, DIM, dtype=DTYPE, device="cuda")
        self._counts = torch.full((BATCH, HEADS), self._posted, dtype=torch.int32, device="cuda")
        self._fill = torch.full_like(self._counts, TOKENS)
        self._out = torch.empty(self._query.shape, device="cuda"), torch.empty(self._query.shape[:2], device="cuda")
        self.served = torch.empty(BATCH, dtype=torch.int32, device="cuda")
        shape = (BATCH, HEADS, max(1, gathered), TOKENS, DIM)
        self._staged = [[torch.empty(shape, dtype=DTYPE, device="cuda") for _ in range(2)] for _ in range(2)]
        self._receipts = [client.new_receipt(BATCH) for _ in range(2)]
        self._lane = torch.cuda.Stream()

    def _begin(self, layer: int) -> torch.cuda.Event:
        posted, gathered = self._lists[layer]
        if self._posted:
            self._client.post(
                self._query, posted, self._counts, self._fill, 0, SCALE, self._receipts[layer % 2],
                begins_step=layer == 0,
            )  # fmt: skip
        self._lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._lane):
            if self._gathered:
                gather_blocks(self._pool.region, self._pool.keys, self._pool.values, gathered, *self._staged[layer % 2])
            event = torch.cuda.Event()
            event.record()
        return event

    def run(self) -> None:
        event = self._begin(0)
        for layer in range(LAYERS):
            ahead = self._begin(layer + 1) if layer + 1 < LAYERS else event
            if self._posted:
                self._client.wait(self._receipts[layer % 2], 1.0, *self._out, self.served)
            torch.cuda.current_stream().wait_event(event)
            event = ahead
        torch.cuda.current_stream().wait_stream(self._lane)


def measure(pool: HostPool, threads: int, gathered: int) -> dict[str, Any]:
    with worker(pool, BATCH, MISSES, threads) as (client, mailbox):
        mailbox.wake()
        layers = Layers(pool, client, gathered)
        seconds = timed([layers.run], repeats=9, before=mailbox.wake) / LAYERS
        if gathered < MISSES and not bool(layers.served.all()):
            raise RuntimeError(f"the worker did not answer: {client.outcomes()}")
    rate = LAYER_BYTES / seconds / 1e9
    print(f"{threads:3d} threads, {gathered:2d} of {MISSES} gathered: {rate:6.1f} GB/s", flush=True)
    return {"threads": threads, "gathered": gathered, "of": MISSES, "GB/s": round(rate, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="2,4,6,8,12,15", help="of the worker (default 2,4,6,8,12,15)")
    parser.add_argument("--splits", default="0,2,4,6,8,10,12,16", help="gathered misses of 16")
    parser.add_argument("--pool", type=int, default=16, help="GiB of host memory for keys and values (default 16)")
    parser.add_argument("--out", type=Path, help="default: bench/results/two-paths.json")
    args = parser.parse_args()

    pool = HostPool(args.pool)
    ceiling = host_copy_rate(pool) / 1e9
    print(f"registered host memory to device, in one piece: {ceiling:.1f} GB/s", flush=True)
    rows = []
    splits = [int(text) for text in args.splits.split(",")]
    for threads in (int(text) for text in args.threads.split(",")):
        found = [measure(pool, threads, gathered) for gathered in splits]
        alone = max(one["GB/s"] for one in found if one["gathered"] in (0, MISSES))
        best = max(found, key=lambda one: float(one["GB/s"]))
        print(f"{threads:3d} threads: two ways {best['GB/s'] / alone:.2f} times the better one", flush=True)
        rows.append(
            {"threads": threads, "splits": found, "better_alone": alone, "gain": round(best["GB/s"] / alone, 3)}
        )
    result = {"layer_mb": LAYER_BYTES / 1e6, "pool_gib": args.pool, "cpu_variant": variants()[0], "rows": rows}
    print(f"written to {write_result('two-paths', result | {'host to device copy GB/s': ceiling}, args.out)}")


if __name__ == "__main__":
    main()
