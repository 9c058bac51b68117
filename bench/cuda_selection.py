"""Measure the times of digests, scores and selection on the GPU, inside a CUDA graph.

    python -m bench.cuda_selection [--out FILE]

Shapes are those of cuda_kernels.py: 8 KV heads, 5 query heads each, head_dim 128, bfloat16. Digests and codes are read
with a cold L2 cache: the buffers of a graph are several times its size. Rates count each byte of digests and codes
once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.cuda_kernels import COLD_BYTES, DIM, DTYPE, GROUP, HEADS, SCALE, TOKENS, Row, copy_rate, row, timed
from bench.record import write_result
from sglang_hybrid.blocks import compact_bytes
from sglang_hybrid.ops import reference
from sglang_hybrid.ops.cuda.digests import HostPool, LayerDigests, SlotTable, append, digest_pages
from sglang_hybrid.ops.cuda.host_memory import RegisteredRegion
from sglang_hybrid.ops.cuda.scoring import ScoreWorkspace, score_blocks, shift_lse
from sglang_hybrid.ops.cuda.selection import Misses, RecallPlan, select_blocks
from sglang_hybrid.ops.cuda.step import Step
from sglang_hybrid.ops.cuda.structs import TOTALS
from sglang_hybrid.protocol.region import SharedRegion

BUDGET, SINK, RECENT = 64, 1, 2
RESIDENT = BUDGET - SINK - RECENT - 1
DIGEST_BYTES = 2 * DIM * 2


def code_bytes(channels: int) -> int:
    return TOKENS * channels // 2


def digest_bytes(channels: int, compact: bool) -> int:
    return compact_bytes(DIM, channels) if compact else DIGEST_BYTES


def random_digests(pages: int, channels: int, compact: bool = False) -> LayerDigests:
    middle = torch.randn(pages, HEADS, 1, DIM, dtype=DTYPE, device="cuda")
    radius = torch.rand(pages, HEADS, 1, DIM, dtype=DTYPE, device="cuda")
    digests = torch.cat((middle + radius, middle - radius), dim=2)
    if not channels:
        return LayerDigests(digests)
    codes = torch.randint(0, 256, (pages, HEADS, TOKENS, channels // 2), dtype=torch.uint8, device="cuda")
    order = torch.rand(HEADS, DIM, device="cuda").argsort(dim=1)
    chosen = order[:, :channels].contiguous()
    if compact:
        # in parts: compact_digest() computes in float32, which takes memory
        parts = [reference.compact_digest(some, chosen) for some in digests.split(4096)]
        return LayerDigests(torch.cat(parts), codes, chosen, (DTYPE, DIM))
    return LayerDigests(digests, codes, chosen)


def step_of(batch: int, blocks: int, pages: int) -> Step:
    order = torch.randperm(pages, device="cuda")[: batch * blocks].view(batch, blocks)
    lengths = torch.full((batch,), blocks * TOKENS - 5, dtype=torch.int32, device="cuda")
    return Step(order.int(), lengths, torch.arange(batch, dtype=torch.int32, device="cuda"))


def queries(batch: int) -> torch.Tensor:
    return torch.randn(batch, HEADS * GROUP, DIM, dtype=DTYPE, device="cuda")


# -- times -----------------------------------------------------------------------------------


def scoring(batch: int, blocks: int, channels: int, ceiling: float, compact: bool = False) -> Row:
    moved = batch * HEADS * blocks * (digest_bytes(channels, compact) + code_bytes(channels))
    layers = [random_digests(batch * blocks, channels, compact) for _ in range(max(1, -(-COLD_BYTES // moved)))]
    step, query = step_of(batch, blocks, batch * blocks), queries(batch)
    workspace = ScoreWorkspace(batch, HEADS, GROUP, blocks)
    scores = torch.empty(batch, HEADS, blocks, device="cuda")
    shape = {"batch": batch, "blocks": blocks, "channels": channels}
    launches = [partial(score_blocks, query, layer, step, SCALE, workspace, scores) for layer in layers]
    return row("score_blocks", timed(several(launches)), moved, ceiling, **shape, compact=compact)


def several(launches: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Repeat ``launches`` up to eight: launching a graph takes time too. Each buffer is read again after all others."""
    return list(launches) * max(1, 8 // len(launches))


def table_of(batch: int, blocks: int, resident: int) -> SlotTable:
    always = SINK + RECENT + 1
    positions = torch.full((batch, HEADS, always + resident), -1, dtype=torch.int32)
    positions[:, :, :SINK] = torch.arange(SINK)
    positions[:, :, SINK:always] = torch.arange(blocks - 1 - RECENT, blocks)
    some = torch.rand(batch, HEADS, blocks - always).argsort(dim=2)[..., :resident] + SINK
    positions[:, :, always:] = some
    return SlotTable(positions.int().cuda(), SINK, RECENT)


def selecting(batch: int, blocks: int, due: bool, most: int = 16) -> Row:
    """Time ``select_blocks`` with scores in the L2 cache, where the scoring kernel leaves them."""
    step = step_of(batch, blocks, batch * blocks)
    table = table_of(batch, blocks, RESIDENT)
    misses, plan = Misses(batch, HEADS, most), RecallPlan(batch * HEADS * table.positions.shape[2])
    flags = torch.full((batch,), int(due), dtype=torch.int32, device="cuda")
    launches = []
    for _ in range(8):
        scores = torch.randn(batch, HEADS, blocks, device="cuda") * 3 - 6
        launches.append(
            partial(
                select_blocks, scores, table, step, BUDGET, misses, pool_pages=batch * blocks, bonus=1.0,
                min_miss_score=-3.0, plan=plan, recall=flags,
            )
        )  # fmt: skip
    moved = batch * HEADS * blocks * 4
    return row("select_blocks", timed(launches), moved, None, batch=batch, blocks=blocks, recall=due)


def selecting_in_a_step(batch: int, blocks: int, most: int = 64) -> Row:
    """Time ``select_blocks`` as a decode step launches it: from estimates, with gathers, bias and counters."""
    step, query = step_of(batch, blocks, batch * blocks), queries(batch)
    digests, table = random_digests(batch * blocks, 32, compact=True), table_of(batch, blocks, RESIDENT)
    workspace = ScoreWorkspace(batch, HEADS, GROUP, blocks)
    misses, gathered = Misses(batch, HEADS, most), RecallPlan(batch * HEADS * 16)
    scores = torch.empty(batch, HEADS, blocks, device="cuda")
    put_off = score_blocks(query, digests, step, SCALE, workspace, scores, by_row=True)
    share = torch.full((1,), 0.5, device="cuda")
    bias = torch.zeros(batch, HEADS, GROUP, device="cuda")
    totals = torch.zeros(len(TOTALS), dtype=torch.int64, device="cuda")
    launch = partial(
        select_blocks, scores, table, step, BUDGET, misses, pool_pages=batch * blocks, bonus=1.0,
        min_miss_score=-3.0, gathered=gathered, gather_share=share, most_gathered=16, totals=totals, by_row=True,
        put_off=put_off, near_bias=bias,
    )  # fmt: skip
    moved = batch * HEADS * blocks * GROUP * 4
    return row("select_blocks in a step", timed([launch] * 8), moved, None, batch=batch, blocks=blocks)


def appending(batch: int, blocks: int, channels: int, compact: bool = False) -> Row:
    pages = batch * blocks
    shape = (pages, HEADS, TOKENS, DIM)
    size = pages * HEADS * TOKENS * DIM * 2
    memory = SharedRegion(SharedRegion.size_for(size, size))
    pool = HostPool(RegisteredRegion(memory), *(memory.take(shape, DTYPE) for _ in range(2)))
    step = step_of(batch, blocks, pages)
    launches = []
    for _ in range(8):
        table = table_of(batch, blocks, 8)
        slots = (*table.positions.shape, TOKENS, DIM)
        key_slots, value_slots = (torch.randn(slots, dtype=DTYPE, device="cuda") for _ in range(2))
        keys, values = (torch.randn(batch, HEADS, DIM, dtype=DTYPE, device="cuda") for _ in range(2))
        digests = random_digests(pages, channels, compact)
        launches.append(partial(append, digests, table, step, keys, values, key_slots, value_slots, pool))
    moved = batch * HEADS * TOKENS * DIM * 2  # keys of the tail blocks
    result = row("append", timed(launches), moved, None, batch=batch, channels=channels, compact=compact)
    pool.region.close()
    memory.close()
    return result


def digesting(pages: int, channels: int, ceiling: float, compact: bool = False) -> Row:
    digests = random_digests(pages, channels, compact)
    keys = torch.randn(pages, TOKENS, HEADS, DIM, dtype=DTYPE, device="cuda").transpose(1, 2)  # in prefill's layout
    at = torch.randperm(pages, device="cuda").int()
    filled = torch.full((pages,), TOKENS, dtype=torch.int32, device="cuda")
    moved = pages * HEADS * (TOKENS * DIM * 2 + digest_bytes(channels, compact) + code_bytes(channels))
    seconds = timed([lambda: digest_pages(digests, keys, at, filled)] * 2)
    return row("digest_pages", seconds, moved, ceiling, pages=pages, channels=channels, compact=compact)


def shifting(batch: int, misses: int, channels: int, compact: bool = False) -> Row:
    pages = 64 * 1024
    digests = random_digests(pages, channels, compact)
    real, ahead = queries(batch), queries(batch)
    counts = torch.full((batch, HEADS), misses, dtype=torch.int32, device="cuda")
    lse = torch.zeros(batch, HEADS * GROUP, device="cuda")
    launches = []
    for _ in range(8):
        listed = torch.randint(0, pages, (batch, HEADS, misses), dtype=torch.int32, device="cuda")
        launches.append(partial(shift_lse, real, ahead, digests, listed, counts, SCALE, lse))
    moved = batch * HEADS * misses * (digest_bytes(channels, compact) + code_bytes(channels))
    shape = {"batch": batch, "misses": misses, "channels": channels, "compact": compact}
    return row("shift_lse", timed(launches), moved, None, **shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: bench/results/cuda-selection.json")
    args = parser.parse_args()

    torch.manual_seed(0)
    copied = copy_rate()
    print(f"device to device: {copied / 1e9:.0f} GB/s", flush=True)
    rows = [scoring(batch, 1024, 32, copied) for batch in (64, 32, 8, 1)]
    rows += [scoring(batch, 1024, 32, copied, compact=True) for batch in (64, 32, 8, 1)]
    rows += [scoring(8, 8192, 32, copied, compact=True)]
    rows += [scoring(64, 1024, 0, copied), scoring(64, 1024, 64, copied), scoring(8, 8192, 32, copied)]
    rows += [selecting(64, 1024, due) for due in (False, True)] + [selecting(8, 8192, False), selecting(1, 1024, False)]
    rows += [selecting_in_a_step(*shape) for shape in ((77, 1024), (64, 1024), (39, 2048), (8, 1024), (1, 1024))]
    rows += [appending(64, 32, 32), appending(8, 32, 32), appending(64, 32, 0)]
    rows += [appending(64, 32, 32, compact=True)]
    rows += [digesting(8192, 32, copied, compact) for compact in (False, True)]
    rows += [shifting(64, 4, 32), shifting(64, 16, 32), shifting(64, 16, 32, compact=True)]
    result = {
        "ceilings": {"device copy GB/s": round(copied / 1e9)},
        "shape": {"kv_heads": HEADS, "group": GROUP, "head_dim": DIM, "dtype": "bfloat16", "budget_blocks": BUDGET},
        "torch": torch.__version__,
        "rows": rows,
    }
    print(f"written to {write_result('cuda-selection', result, args.out)}")


if __name__ == "__main__":
    main()
