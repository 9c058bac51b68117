"""Find decode steps that write to GPU memory that has been freed.

    python -m bench.stray_writes --model DIR [--rows 1,2,17,20] -- --attention-backend hybrid \\
        --cuda-graph-bs-decode 1 16 32

A recorded CUDA graph keeps writing to the addresses that it was recorded with. If a tensor at such an address has been
freed, its memory may belong to another tensor by then. So this program fills all free blocks of torch's allocator with
a pattern, decodes steps, and reports the bytes that changed, with the stacks of the allocations that had this memory
before. Memory that the steps allocate themselves does not count. The free blocks are filled and read without torch,
which would allocate.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_hybrid.integration.model_session import ModelSession

PATTERN = 0xA5
LARGEST = 1 << 30  # bytes; larger free blocks are not checked
TO_HOST = 2  # cudaMemcpyDeviceToHost


@dataclass(frozen=True)
class Free:
    address: int
    size: int


class Runtime:
    """The few functions of the CUDA runtime library that this program calls, through ctypes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(next(self._loaded()))

    @staticmethod
    def _loaded() -> Iterator[str]:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "libcudart.so" in line:
                yield line.split(maxsplit=5)[5]

    def fill(self, block: Free) -> None:
        self._checked(self._library.cudaMemset(ctypes.c_void_p(block.address), PATTERN, ctypes.c_size_t(block.size)))

    def read(self, block: Free) -> np.ndarray:
        found = np.empty(block.size, dtype=np.uint8)
        to, source = ctypes.c_void_p(found.ctypes.data), ctypes.c_void_p(block.address)
        self._checked(self._library.cudaMemcpy(to, source, ctypes.c_size_t(block.size), TO_HOST))
        return found

    @staticmethod
    def _checked(error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error}")


def events() -> list[dict[str, Any]]:
    return [event for device in torch.cuda.memory._snapshot()["device_traces"] for event in device]


def free_blocks() -> list[Free]:
    """Return the free blocks of torch's default memory pool, without the pools of CUDA graphs."""
    found = []
    for segment in torch.cuda.memory._snapshot()["segments"]:
        if tuple(segment["segment_pool_id"]) != (0, 0):
            continue
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive" and block["size"] <= LARGEST:
                found.append(Free(at, block["size"]))
            at += block["size"]
    return found


def changed_bytes(runtime: Runtime, block: Free, taken: list[Free]) -> np.ndarray:
    """Return offsets of bytes in ``block`` that no longer hold the pattern; bytes inside ``taken`` do not count."""
    changed = runtime.read(block) != PATTERN
    for one in taken:
        first, last = one.address - block.address, one.address + one.size - block.address
        if first < block.size and last > 0:
            changed[max(first, 0) : last] = False
    return np.flatnonzero(changed)


def frames(event: dict[str, Any]) -> str:
    own = [f"{Path(frame['filename']).name}:{frame['line']}:{frame['name']}" for frame in event.get("frames", [])]
    return " < ".join([frame for frame in own if not frame.startswith("module.py")][:12])


def watch(runtime: Runtime, decode: Callable[[], None], name: str) -> int:
    """Decode three steps and return the number of free blocks that were written to."""
    torch.cuda.synchronize()
    before, blocks = len(events()), free_blocks()
    for block in blocks:
        runtime.fill(block)
    for _ in range(3):
        decode()
    torch.cuda.synchronize()
    all_events = events()
    taken = [Free(event["addr"], event["size"]) for event in all_events[before:] if event["action"] == "alloc"]
    damaged = 0
    for block in blocks:
        places = changed_bytes(runtime, block, taken)
        if not len(places):
            continue
        damaged += 1
        first, last = block.address + int(places[0]), block.address + int(places[-1])
        print(f"{name}: {len(places)} bytes from {first:#x} to {last:#x}, in a free block of {block.size}", flush=True)
        owners = [
            e for e in all_events[:before] if e["action"] == "alloc" and e["addr"] <= first < e["addr"] + e["size"]
        ]
        for event in owners[-3:]:
            print(f"    {event['size']} bytes at {event['addr']:#x}: {frames(event)}", flush=True)
    print(f"{name}: {len(blocks)} free blocks, {damaged} of them written to", flush=True)
    return damaged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", default="1,2,17,20", help="numbers of rows at which steps are watched")
    parser.add_argument("--tokens", type=int, default=3000, help="of a prompt (default 3000)")
    parser.add_argument("flags", nargs="*", help="SGLang's, after --")
    args = parser.parse_args()
    torch.cuda.memory._record_memory_history(max_entries=3_000_000, stacks="python")
    fixed = ("--skip-tokenizer-init", "--sampling-backend", "pytorch", "--cuda-graph-backend-prefill", "disabled")
    session = ModelSession(["--model-path", str(args.model), *fixed, *args.flags])
    from sglang.benchmark import one_batch

    runtime, bench = Runtime(), session._bench
    watched = set(map(int, args.rows.split(",")))
    random = torch.Generator().manual_seed(0)
    bench.clear()
    batch: Any = None
    tokens = torch.empty(0)
    damaged = 0

    def decode() -> None:
        nonlocal tokens
        tokens, _ = bench.decode(tokens, batch)

    for number in range(1, max(watched) + 1):
        prompt = torch.randint(10, 30_000, (args.tokens,), generator=random).tolist()
        token, _, new = bench.extend(one_batch.prepare_synthetic_inputs_for_latency_test(1, len(prompt), [prompt]))
        if batch is None:
            batch, tokens = new, token
        else:
            batch.merge_batch(new)
            tokens = torch.cat((tokens, token))
        if number in watched:
            damaged += watch(runtime, decode, f"{number} rows")
        else:
            decode()
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
