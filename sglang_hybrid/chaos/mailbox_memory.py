"""A worker's mailbox, seen and written to behind everybody's back."""

from __future__ import annotations

import ctypes
import os
import random
from pathlib import Path

import psutil

from sglang_hybrid.native.library import library, mailbox_fields
from sglang_hybrid.native.structs import Geometry, MailboxLayout

SLOTS = 2


class MailboxMemory:
    """Use as a context, while the worker lives. Raises OSError when it does not."""

    def __init__(self, worker: psutil.Process) -> None:
        maps = Path(f"/proc/{worker.pid}/maps").read_text()
        mapped = [line for line in maps.splitlines() if "memfd:sglang-hybrid-mailbox" in line]
        if not mapped:
            raise ProcessLookupError(f"worker {worker.pid} has no mailbox")
        self._start = int(mapped[0].split("-")[0], 16)
        self._memory = os.open(f"/proc/{worker.pid}/mem", os.O_RDWR)
        self._fields = mailbox_fields()
        offset, size = self._fields["Header"]["geometry"]
        self.geometry = Geometry.from_buffer_copy(self._read(offset, size))
        layout = MailboxLayout()
        if library().sh_mailbox_layout(ctypes.byref(self.geometry), ctypes.byref(layout), None):
            raise ProcessLookupError(f"the mailbox of worker {worker.pid} has no geometry")
        rows, heads = SLOTS * self.geometry.rows, self.geometry.kv_heads
        self._places = {  # record -> where the first one is, and how many there are
            "Header": (0, 1),
            "Bell": (layout.bell, 1),
            "WorkerLine": (layout.worker, 1),
            "ClientLine": (layout.client, 1),
            "Post": (layout.posts, SLOTS),
            "Request": (layout.requests, rows),
            "Reply": (layout.replies, rows),
            "List": (layout.lists, rows * heads),
        }
        self._pages = layout.pages, rows * heads * self.geometry.max_blocks

    def posted(self) -> int:
        offset, size = self._fields["Bell"]["posted"]
        return int.from_bytes(self._read(self._places["Bell"][0] + offset, size), "little")

    def write_replies(self, **fields: int) -> None:
        """Every reply of both slots gets these values, in this order."""
        start, count = self._places["Reply"]
        _, size = self._fields["Reply"][""]
        for record in range(count):
            for name, value in fields.items():
                offset, width = self._fields["Reply"][name]
                self._write(start + record * size + offset, value.to_bytes(width, "little"))

    def flip_bit(self, chance: random.Random) -> str:
        """Some bit of some field, or of a page number in a list. Says which."""
        record = chance.choice([*self._places, "page"])
        if record == "page":
            start, count = self._pages
            place, size, name = start + 4 * chance.randrange(count), 4, ""
        else:
            start, count = self._places[record]
            name = chance.choice([name for name in self._fields[record] if name])
            offset, size = self._fields[record][name]
            _, record_size = self._fields[record][""]
            place = start + chance.randrange(count) * record_size + offset
        bit = chance.randrange(8 * size)
        byte = self._read(place + bit // 8, 1)[0]
        self._write(place + bit // 8, bytes([byte ^ 1 << bit % 8]))
        return f"{record}.{name}" if name else record

    def _read(self, offset: int, size: int) -> bytes:
        return os.pread(self._memory, size, self._start + offset)

    def _write(self, offset: int, data: bytes) -> None:
        os.pwrite(self._memory, data, self._start + offset)

    def __enter__(self) -> MailboxMemory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._memory)
