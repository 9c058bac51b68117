"""Reads and writes a worker's mailbox from outside, unnoticed by worker and server."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Mapping
from pathlib import Path

import psutil

from sglang_hybrid.ops.cpu.library import library, mailbox_fields
from sglang_hybrid.ops.cpu.structs import MASKS, Geometry, MailboxLayout

SLOTS = 2
_ATTEND_MASKED = 1  # PostKind of mailbox.h
_FACTOR = 0x9E3779B97F4A7C15


class MailboxMemory:
    """A worker's mailbox in ``/proc/PID/mem``. Use as a context manager; raises OSError if the worker is not alive."""

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
        self._places = {  # record -> (offset of the first one, how many there are)
            "Header": (0, 1),
            "Bell": (layout.bell, 1),
            "WorkerLine": (layout.worker, 1),
            "ClientLine": (layout.client, 1),
            "Post": (layout.posts, SLOTS),
            "Request": (layout.requests, rows),
            "Reply": (layout.replies, rows),
            "List": (layout.lists, rows * heads),
        }
        self._checks = layout.checks
        self._pages = layout.pages, rows * heads * self.geometry.max_blocks
        self._masks = layout.masks, self._pages[1] if self.geometry.flags & MASKS else 0

    def posted(self) -> int:
        offset, size = self._fields["Bell"]["posted"]
        return int.from_bytes(self._read(self._places["Bell"][0] + offset, size), "little")

    def write_replies(self, **fields: int) -> None:
        """Write ``fields``, in this order, to every reply of both slots."""
        for record in range(self._places["Reply"][1]):
            self._write_reply(record, fields)

    def forge_replies(self, **wrong: int) -> None:
        """Make every reply to the newest post match its request, check included, except for the fields in ``wrong``."""
        newest = self.posted()
        for row in range(self._rows_of(newest)):
            record = newest % SLOTS * self.geometry.rows + row
            self._write(self._checks + 8 * record, self._check_of_request(newest, record).to_bytes(8, "little"))
            generation = self._number("Request", record, "generation")
            self._write_reply(record, {"generation": generation, "status": 0} | wrong | {"sequence": newest})

    def foretell_replies(self) -> None:
        """Turn the replies in the next post's slot into replies to the next post.

        They match if the next post has the slot's layer and lists, one step later: so it may be with two layers that
        are posted in turn.
        """
        coming = self.posted() + 1
        for row in range(self._rows_of(coming)):
            record = coming % SLOTS * self.geometry.rows + row
            generation = (self._number("Request", record, "generation") + 1) % (1 << 32)
            self._write_reply(record, {"generation": generation, "status": 0, "sequence": coming})

    def generation(self) -> int:
        """Return the generation of the newest post."""
        return self._number("Request", self.posted() % SLOTS * self.geometry.rows, "generation")

    def _rows_of(self, sequence: int) -> int:
        """Return the rows of a post, at most the mailbox's rows: a flipped bit may have made the number very large."""
        return min(self._number("Post", sequence % SLOTS, "rows"), int(self.geometry.rows))

    def _check_of_request(self, sequence: int, record: int) -> int:
        """Return the check of a request, as kernels/cpu/src/engine/checks.h defines it."""
        if not self._number("Request", record, "blocks"):
            return 0
        heads, most = self.geometry.kv_heads, self.geometry.max_blocks
        layer, scale, kind = (self._number("Post", sequence % SLOTS, name) for name in ("layer", "scale", "kind"))
        numbers, masks = [layer | kind << 32, scale], []
        for entry in range(record * heads, (record + 1) * heads):
            count, last_fill = (self._number("List", entry, name) for name in ("count", "last_fill"))
            count = min(count, most)
            pages = self._words(self._pages[0] + 4 * entry * most, count)
            numbers += [count, last_fill if count else 0, *pages, *[0] * (most - count)]
            if kind == _ATTEND_MASKED and self._masks[1]:
                masks += [*self._words(self._masks[0] + 4 * entry * most, count), *[0] * (most - count)]
        return sum(number * _FACTOR * (2 * place + 1) for place, number in enumerate(numbers + masks)) % (1 << 64)

    def _words(self, offset: int, count: int) -> list[int]:
        words = self._read(offset, 4 * count)
        return [int.from_bytes(words[4 * i : 4 * i + 4], "little") for i in range(count)]

    def _number(self, record: str, index: int, name: str) -> int:
        offset, width = self._fields[record][name]
        place = self._places[record][0] + index * self._fields[record][""][1] + offset
        return int.from_bytes(self._read(place, width), "little")

    def _write_reply(self, record: int, fields: Mapping[str, int]) -> None:
        for name, value in fields.items():
            offset, width = self._fields["Reply"][name]
            place = self._places["Reply"][0] + record * self._fields["Reply"][""][1] + offset
            self._write(place, value.to_bytes(width, "little"))

    def flip_bit(self, chance: random.Random) -> str:
        """Flip a random bit of a field, page number or mask. Return its name, such as ``Post.layer``."""
        record = chance.choice([*self._places, "page", *(["mask"] if self._masks[1] else [])])
        if record in ("page", "mask"):
            start, count = self._pages if record == "page" else self._masks
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
