"""Measure the times of the CUDA kernels, inside a CUDA graph and with a cold L2 cache.

    python -m bench.cuda_kernels [--out FILE] [--pool 4] [--threads N]

Shapes are those of a Qwen3-14B layer: 8 KV heads, 5 query heads each, head_dim 128, bfloat16; attention over FP8 and
over slots of 8-bit codes too, and gathers into such slots, also while attention runs on the same GPU. A graph holds
many launches. Each launch has its own buffers; together the buffers are several times the L2 cache, like
the layers of a step. Rates count each byte once.

Two ceilings are measured too: copying device memory to device memory (read and written bytes), and copying registered
host memory to the device with the copy engine, in one piece.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.record import write_result
from sglang_hybrid.ops.cpu.library import checked, library, variants
from sglang_hybrid.ops.cpu.structs import DTYPES, EngineOptions, Geometry
from sglang_hybrid.ops.cuda.attention import AttendWorkspace, attend_slots, merge
from sglang_hybrid.ops.cuda.copies import gather_blocks
from sglang_hybrid.ops.cuda.host_memory import RegisteredRegion
from sglang_hybrid.ops.cuda.mailbox import DeviceMailboxClient
from sglang_hybrid.ops.cuda.slot_codes import SlotCodes, no_factors
from sglang_hybrid.ops.reference import FP8, with_reciprocals
from sglang_hybrid.protocol.mailbox import Mailbox
from sglang_hybrid.protocol.region import SharedRegion

HEADS, GROUP, DIM, TOKENS, SLOTS = 8, 5, 128, 32, 64
BLOCK_BYTES = 2 * TOKENS * DIM * 2  # keys and values
COLD_BYTES = 320 << 20  # buffers of all launches of a graph: five times an H200's L2 cache
WARM_UP_COPIES = 1500  # about 1.5 s
SCALE = DIM**-0.5
DTYPE = torch.bfloat16

Row = dict[str, Any]
Slots = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # keys, values, positions
CODES = torch.uint8


def timed(
    launches: Sequence[Callable[[], object]], repeats: int = 15, before: Callable[[], None] = lambda: None
) -> float:
    """Return the median seconds of one launch, all of them in one graph. ``before`` runs before each replay."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times: list[float] = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(launches))
    return sorted(times[2:])[repeats // 2]


def row(name: str, seconds: float, moved: int, ceiling: float | None, **more: Any) -> Row:
    rate = moved / seconds
    share = None if ceiling is None else round(rate / ceiling, 3)
    result = {"kernel": name, **more, "us": round(seconds * 1e6, 2), "GB/s": round(rate / 1e9, 1), "share": share}
    extra = " ".join(f"{key} {value}" for key, value in more.items())
    percent = "" if share is None else f"{share:6.0%}"
    print(f"{name:22s} {extra:44s} {seconds * 1e6:9.2f} us {rate / 1e9:8.1f} GB/s {percent}", flush=True)
    return result


# -- attention and merging -------------------------------------------------------------------


def copy_rate() -> float:
    """Return the rate of copies within device memory, in bytes read and written per second.

    Copies run first until the clocks of an idle GPU have come up.
    """
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(WARM_UP_COPIES):
        target.copy_(source)
    # not in a graph, where a copy engine would do the copy
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        target.copy_(source)
    end.record()
    end.synchronize()
    seconds: float = start.elapsed_time(end) / 1e3
    return 20 * 2 * source.numel() / seconds


def random_slots(owners: int, dtype: torch.dtype = DTYPE) -> Slots:
    shape = (owners, HEADS, SLOTS, TOKENS, DIM)
    if dtype == CODES:
        keys, values = (torch.randint(1, 256, shape, dtype=CODES, device="cuda") for _ in range(2))
    else:
        keys, values = (torch.randn(shape, dtype=DTYPE, device="cuda").to(dtype) for _ in range(2))
    positions = torch.arange(SLOTS, dtype=torch.int32, device="cuda").expand(owners, HEADS, SLOTS)
    return keys, values, positions.contiguous()


def codes_of(slots: torch.Tensor) -> SlotCodes | None:
    """Return steps and factors if ``slots`` are of codes, else None."""
    if slots.dtype != CODES:
        return None
    steps = with_reciprocals(0.01 + torch.rand(2, HEADS, DIM, device="cuda") / 20)
    return SlotCodes(steps, no_factors(slots).fill_(0.5))


def attention_launches(batch: int, active: int, moved: int, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Return launches over slots of their own, which read ``moved`` bytes each. ``dtype`` of keys and values."""
    layers = max(2, -(-COLD_BYTES // moved))
    workspace = AttendWorkspace(batch, HEADS, GROUP, DIM, pool=dtype)
    query = torch.randn(batch, HEADS * GROUP, DIM, dtype=DTYPE, device="cuda")
    out, lse = torch.empty(query.shape, device="cuda"), torch.empty(query.shape[:2], device="cuda")
    lengths = torch.full((batch,), SLOTS * TOKENS - 5, dtype=torch.int32, device="cuda")
    row_of = torch.arange(batch, dtype=torch.int32, device="cuda")
    count = torch.tensor([active], dtype=torch.int32, device="cuda")

    def launch_on(kept: Slots) -> Callable[[], None]:
        codes = codes_of(kept[0])

        def launch() -> None:
            attend_slots(
                query, *kept, lengths, row_of, SCALE,
                active_rows=count, workspace=workspace, out=out, lse=lse, codes=codes,
            )  # fmt: skip

        return launch

    launches = [launch_on(random_slots(batch, dtype)) for _ in range(layers)]
    return launches * max(1, 16 // layers)  # launching a graph takes time too; a buffer is read again after all others


def attention(batch: int, active: int, ceiling: float, dtype: torch.dtype = DTYPE) -> Row:
    """``dtype`` of keys and values."""
    moved = active * HEADS * SLOTS * BLOCK_BYTES * dtype.itemsize // DTYPE.itemsize
    launches = attention_launches(batch, active, moved, dtype)
    more = {} if dtype == DTYPE else {"kv": "codes" if dtype == CODES else str(dtype).removeprefix("torch.")}
    return row("attend_slots", timed(launches), moved, ceiling, batch=batch, active=active, slots=SLOTS, **more)


def merging(batch: int, ceiling: float) -> Row:
    shape = (batch, HEADS * GROUP, DIM)
    values = batch * HEADS * GROUP * DIM
    moved = 2 * 4 * values + 2 * values
    launches = []
    for _ in range(max(2, min(256, -(-COLD_BYTES // moved)))):
        sides = [(torch.randn(shape, device="cuda"), torch.randn(shape[:2], device="cuda")) for _ in range(2)]
        out = torch.empty(shape, dtype=DTYPE, device="cuda")
        launches.append(partial(merge, *sides, out=out))
    return row("merge", timed(launches), moved, ceiling, batch=batch)


# -- host memory -----------------------------------------------------------------------------


class HostPool:
    """Keys and values of one layer in registered host memory."""

    def __init__(self, gigabytes: int) -> None:
        self.pages = (gigabytes << 30) // (HEADS * BLOCK_BYTES)
        shape = (self.pages, HEADS, TOKENS, DIM)
        half = self.pages * HEADS * BLOCK_BYTES // 2
        self.memory = SharedRegion(SharedRegion.size_for(half, half))
        self.keys, self.values = (self.memory.take(shape, DTYPE) for _ in range(2))
        for part in (self.keys, self.values):  # random numbers for 64 pages, repeated over the pool
            some = torch.randn(64, *shape[1:]).to(DTYPE)
            part.view(torch.int16)[:] = some.view(torch.int16).repeat(-(-self.pages // 64), 1, 1, 1)[: self.pages]
        self.region = RegisteredRegion(self.memory)


def host_copy_rate(pool: HostPool) -> float:
    source = pool.keys[: (1 << 30) // (HEADS * BLOCK_BYTES // 2)]
    target = torch.empty(source.shape, dtype=DTYPE, device="cuda")
    times: list[float] = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return target.numel() * target.itemsize / sorted(times)[2]


def gathering(
    pool: HostPool,
    batch: int,
    listed: int,
    ctas: int,
    ceiling: float,
    dtype: torch.dtype = DTYPE,
    beside: Callable[[], None] = lambda: None,
) -> Row:
    """``dtype`` of slots. ``beside`` launches work on another stream that takes longer than the gathers."""
    shape = (batch, HEADS, listed)
    keys, values = (torch.empty(*shape, TOKENS, DIM, dtype=dtype, device="cuda") for _ in range(2))
    codes = codes_of(keys)
    launches = []
    for _ in range(4):
        pages = torch.randint(0, pool.pages, shape, dtype=torch.int32, device="cuda")
        launches.append(
            partial(gather_blocks, pool.region, pool.keys, pool.values, pages, keys, values, ctas=ctas, codes=codes)
        )
    moved = batch * HEADS * listed * BLOCK_BYTES
    more = {"kv": "codes"} if dtype == CODES else {}
    seconds = timed(launches, repeats=7, before=beside)
    torch.cuda.synchronize()
    return row("gather_blocks", seconds, moved, ceiling, batch=batch, blocks=listed, ctas=ctas, **more)


def gathering_beside_attention(pool: HostPool, ceiling: float) -> list[Row]:
    moved = 64 * HEADS * SLOTS * BLOCK_BYTES
    attend, stream = attention_launches(64, 64, moved, DTYPE), torch.cuda.Stream()

    def beside() -> None:
        with torch.cuda.stream(stream):
            for launch in attend * 4:  # about 130 us each
                launch()

    rows = []
    for dtype in (DTYPE, CODES):
        for ctas in (8, 16, 32):
            rows.append(gathering(pool, 64, 2, ctas, ceiling, dtype, beside) | {"beside": "attend_slots"})
    return rows


# -- mailbox ---------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(pool: HostPool, rows: int, most: int, threads: int) -> Iterator[tuple[DeviceMailboxClient, Mailbox]]:
    half = pool.values.data_ptr() - pool.keys.data_ptr()
    geometry = Geometry(
        rows, HEADS, GROUP, DIM, DTYPES["bfloat16"], most, 1, pool.pages, 0, half, half, pool.memory.size
    )
    mailbox = Mailbox(geometry)
    client = DeviceMailboxClient(geometry)
    client.attach(mailbox)
    options = EngineOptions(threads, 4, 8, 1_000_000, None, None)
    engine = checked(
        library().sh_engine_start, mailbox.region.address, pool.memory.address, ctypes.byref(geometry),
        ctypes.byref(options),
    )  # fmt: skip
    try:
        yield client, mailbox
    finally:
        torch.cuda.synchronize()
        library().sh_engine_stop(engine)
        client.attach(None)
        mailbox.region.close()


def round_trips(pool: HostPool, batch: int, threads: int, from_host: float) -> list[Row]:
    """Time a post and the wait for its replies, alone and in a layer: post, attention over 64 slots, wait, merge.

    The wait runs after the attention, or on its own stream, so that replies cross PCIe during the attention.
    """
    most = 8
    shape = (batch, HEADS * GROUP, DIM)
    query = torch.randn(shape, dtype=DTYPE, device="cuda")
    out, lse = torch.empty(shape, device="cuda"), torch.empty(shape[:2], device="cuda")
    served = torch.empty(batch, dtype=torch.int32, device="cuda")
    last_fill = torch.full((batch, HEADS), TOKENS, dtype=torch.int32, device="cuda")
    layers = [random_slots(batch) for _ in range(8)]
    attended = torch.empty(shape, device="cuda"), torch.empty(shape[:2], device="cuda")
    merged = torch.empty(shape, dtype=DTYPE, device="cuda")
    lengths = torch.full((batch,), SLOTS * TOKENS, dtype=torch.int32, device="cuda")
    row_of = torch.arange(batch, dtype=torch.int32, device="cuda")
    workspace = AttendWorkspace(batch, HEADS, GROUP, DIM)
    rows = []
    with worker(pool, batch, most, threads) as (client, mailbox):
        receipt = client.new_receipt(batch)
        beside = torch.cuda.Stream()

        def layer_of(kept: Slots, counts: torch.Tensor, attends: str) -> Callable[[], None]:
            pages = torch.randint(0, pool.pages, (batch, HEADS, most), dtype=torch.int32, device="cuda")

            def attend() -> None:
                attend_slots(
                    query, *kept, lengths, row_of, SCALE, workspace=workspace, out=attended[0], lse=attended[1]
                )

            def layer() -> None:
                main = torch.cuda.current_stream()
                client.post(query, pages, counts, last_fill, 0, SCALE, receipt, begins_step=False)
                if attends == "beside":
                    beside.wait_stream(main)
                    with torch.cuda.stream(beside):
                        client.wait(receipt, 1.0, out, lse, served)
                    attend()
                    main.wait_stream(beside)
                else:
                    if attends:
                        attend()
                    client.wait(receipt, 1.0, out, lse, served)
                if attends:
                    merge(attended, (out, lse), out=merged)

            return layer

        for attends, blocks, heads in (
            ("", 0, HEADS),
            ("", 1, 1),
            ("", 1, HEADS),
            ("", 8, HEADS),
            ("before", 0, HEADS),
            ("before", 1, HEADS),
            ("beside", 1, HEADS),
            ("before", 4, HEADS),
            ("beside", 4, HEADS),
        ):
            counts = torch.zeros(batch, HEADS, dtype=torch.int32, device="cuda")
            counts[:, :heads] = blocks
            seconds = timed([layer_of(kept, counts, attends) for kept in layers], before=mailbox.wake)
            read = batch * heads * blocks * BLOCK_BYTES
            name = f"attention {attends} wait" if attends else "post, wait"
            rows.append(row(name, seconds, read, None, batch=batch, blocks=blocks, lists=heads))
        outcomes = client.outcomes()
        # replies stay where they are until their slot is posted again
        seconds = timed([lambda: client.wait(receipt, 1.0, out, lse, served)] * 8)
        moved = batch * HEADS * GROUP * (DIM + 1) * 4
        rows.append(row("wait, replies there", seconds, moved, from_host, batch=batch, lists=HEADS))
        pages = torch.zeros(batch, HEADS, most, dtype=torch.int32, device="cuda")
        seconds = timed(
            [lambda: client.post(query, pages, counts, last_fill, 0, SCALE, receipt, begins_step=False)] * 8,
            before=mailbox.wake,
        )
        rows.append(row("post", seconds, query.numel() * 2, None, batch=batch, lists=HEADS))
    print(f"rows by outcome: {outcomes}", flush=True)
    for one in rows:
        one["rows by outcome, of all with this batch"] = outcomes
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: bench/results/cuda-kernels-1.json")
    parser.add_argument("--pool", type=int, default=4, help="GiB of host memory for keys and values of a layer")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="of the CPU worker")
    args = parser.parse_args()

    torch.manual_seed(0)
    copied = copy_rate()
    print(f"device to device: {copied / 1e9:.0f} GB/s", flush=True)
    rows = [attention(batch, batch, copied) for batch in (64, 48, 40, 32, 24, 16, 8, 4, 1)]
    rows += [attention(64, 8, copied), attention(64, 1, copied)]
    rows += [attention(batch, batch, copied, dtype) for dtype in (FP8, CODES) for batch in (64, 32, 8, 1)]
    rows += [merging(batch, copied) for batch in (64, 8)]
    torch.cuda.empty_cache()

    pool = HostPool(args.pool)
    from_host = host_copy_rate(pool)
    print(f"registered host memory to device, in one piece: {from_host / 1e9:.1f} GB/s", flush=True)
    rows += [gathering(pool, 64, 4, ctas, from_host) for ctas in (8, 16, 32, 64)]
    rows += [gathering(pool, batch, listed, 32, from_host) for batch, listed in ((64, 1), (8, 4), (1, 4))]
    rows += [gathering(pool, 64, 4, ctas, from_host, CODES) for ctas in (8, 16, 32)]
    rows += gathering_beside_attention(pool, from_host)
    for batch in (8, 32, 64):
        rows += round_trips(pool, batch, args.threads, from_host)

    result = {
        "ceilings": {"device copy GB/s": round(copied / 1e9), "host to device copy GB/s": round(from_host / 1e9, 1)},
        "shape": {"kv_heads": HEADS, "group": GROUP, "head_dim": DIM, "dtype": "bfloat16", "block_bytes": BLOCK_BYTES},
        "pool_gib": args.pool,
        "cpu_variant": variants()[0],
        "worker_threads": args.threads,
        "torch": torch.__version__,
        "rows": rows,
    }
    print(f"written to {write_result('cuda-kernels-1', result, args.out)}")


if __name__ == "__main__":
    main()
