"""Overwrite the host pool of a running server, without the server's knowledge."""

from __future__ import annotations

from pathlib import Path

import psutil
from real_server import Server

BLOCK = 1 << 20  # bytes that are overwritten at a time


def fill_pool(server: Server, byte: bytes) -> None:
    """Set every byte of the server's host pool to ``byte``."""
    for process in server.family():
        places = [place for place in process.memory_maps(grouped=False) if "memfd:sglang-hybrid-kv" in place.path]
        if places and "cpu_worker" not in process.cmdline():  # the worker maps the pool read-only
            _fill(process, [tuple(int(end, 16) for end in place.addr.split("-")) for place in places], byte)
            return
    raise AssertionError("nobody has the pool")


def _fill(process: psutil.Process, ranges: list[tuple[int, ...]], byte: bytes) -> None:
    with Path(f"/proc/{process.pid}/mem").open("r+b", buffering=0) as memory:
        for start, end in ranges:
            memory.seek(start)
            for first in range(start, end, BLOCK):
                memory.write(byte * min(BLOCK, end - first))
