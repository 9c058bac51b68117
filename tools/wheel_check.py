"""Checks an installed wheel in the environment of ``smoke_wheel.py``: the CPU library, and one attention by a worker.

The script needs what the worker needs, msgspec and pyzmq, and no torch: plain Python computes the expected softmax.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import importlib.util
import math
import mmap
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sglang_hybrid
from sglang_hybrid.ops.cpu.library import FILE, checked, library, variants
from sglang_hybrid.ops.cpu.structs import DTYPES, Geometry, Lists, MailboxLayout
from sglang_hybrid.ops.cuda import sources
from sglang_hybrid.protocol.messages import Attach, Hello, Stop, ThreadPlan, WarmUp
from sglang_hybrid.worker.control_client import ControlClient

PATIENCE_S = 60.0
BLOCK = 32
HEADS, GROUP, DIM, PAGES = 2, 3, 64, 8
BLOCKS = (5, 2, 7)  # page numbers in each list
LAST_FILL = 20  # tokens in the last page of a list
SCALE = 0.125
TOLERANCE = 1e-4
# variants in the library of each architecture, including variants that this processor cannot run
VARIANTS = {"x86_64": ("amx", "avx512", "avx2", "portable"), "aarch64": ("neon-bf16", "neon", "portable")}


def check_library() -> None:
    package = Path(sglang_hybrid.__file__).parent
    assert sys.prefix in str(package), f"{package} is not in the environment"
    assert importlib.util.find_spec("torch") is None, "this environment has torch"
    assert not any(map(shutil.which, ("c++", "g++", "gcc", "cmake"))), "there is a compiler on the PATH"
    content = FILE.read_bytes()
    expected = VARIANTS.get(os.uname().machine, ("portable",))
    missing = [name for name in expected if name.encode() + b"\0" not in content]
    assert not missing, f"{FILE.name} has no {missing}"
    assert set(variants()) <= set(expected) and variants()[-1] == "portable", variants()
    assert sources.translation_units() and (package / "kernels/cpu/CMakeLists.txt").is_file()
    print(f"{FILE.name} has {', '.join(expected)}; here {variants()[0]} is used")


def memory_file(size: int) -> tuple[int, mmap.mmap]:
    descriptor = os.memfd_create("wheel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor, mmap.mmap(descriptor, size)


def attention(query: list[float], keys: list[list[float]], values: list[list[float]]) -> tuple[list[float], float]:
    """Return the softmax attention of one query, and its log-sum-exp."""
    logits = [SCALE * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    most = max(logits)
    weights = [math.exp(logit - most) for logit in logits]
    total = sum(weights)
    output = [sum(w * value[i] for w, value in zip(weights, values, strict=True)) / total for i in range(DIM)]
    return output, most + math.log(total)


class Post:
    """One row's block lists over a pool of random numbers, as a server posts them, and the expected answer."""

    def __init__(self) -> None:
        half = PAGES * HEADS * BLOCK * DIM  # numbers of all keys, and of all values
        self.pool_fd, self._pool = memory_file(2 * half * 4)
        draw = random.Random(7)
        self._numbers = array.array("f", (draw.gauss(0, 1) for _ in range(2 * half)))
        self._pool[:] = self._numbers.tobytes()
        layer = half * 4
        self.geometry = Geometry(
            1, HEADS, GROUP, DIM, DTYPES["float32"], len(BLOCKS), 1, PAGES, 0, layer, layer, 2 * layer
        )
        layout = MailboxLayout()
        checked(library().sh_mailbox_layout, ctypes.byref(self.geometry), ctypes.byref(layout))
        self.mailbox_fd, self._mailbox = memory_file(layout.bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mailbox))
        checked(library().sh_mailbox_create, address, layout.bytes, ctypes.byref(self.geometry))
        self._client = checked(library().sh_client_open, address, ctypes.byref(self.geometry))
        self._query = array.array("f", (draw.gauss(0, 1) for _ in range(HEADS * GROUP * DIM)))

    def exchange(self) -> tuple[list[float], list[float]]:
        """Post the lists and return the worker's answer: output [HEADS][GROUP][DIM] and log-sum-exp [HEADS][GROUP]."""
        pages = array.array("q", BLOCKS * HEADS)
        fill = array.array("q", (BLOCK, BLOCK, LAST_FILL) * HEADS)
        addresses = (part.buffer_info()[0] for part in (self._query, pages, fill))
        lists = Lists(*addresses, None, None, 1, len(BLOCKS), 0, SCALE)  # neither masks nor weights
        sequence, gone = ctypes.c_uint64(), ctypes.c_uint32()
        checked(library().sh_client_post, self._client, ctypes.byref(lists), 1, ctypes.byref(sequence))
        out, lse = (ctypes.c_float * len(self._query))(), (ctypes.c_float * (HEADS * GROUP))()
        served = ctypes.c_uint8()
        missing = library().sh_client_collect(
            self._client, sequence, 1, int(PATIENCE_S * 1e9), ctypes.byref(gone), out, lse, ctypes.byref(served)
        )
        assert missing == 0 and served.value == 1, "the worker did not answer"
        return list(out), list(lse)

    def expected(self) -> tuple[list[float], list[float]]:
        half = len(self._numbers) // 2
        outputs: list[float] = []
        sums: list[float] = []
        for head in range(HEADS):
            keys, values = (
                [
                    list(self._numbers[(start := kind + ((page * HEADS + head) * BLOCK + token) * DIM) : start + DIM])
                    for index, page in enumerate(BLOCKS)
                    for token in range(LAST_FILL if index == len(BLOCKS) - 1 else BLOCK)
                ]
                for kind in (0, half)
            )
            for member in range(GROUP):
                start = (head * GROUP + member) * DIM
                output, lse = attention(list(self._query[start : start + DIM]), keys, values)
                outputs += output
                sums.append(lse)
        return outputs, sums

    def close(self) -> None:
        library().sh_client_close(self._client)


def check_worker() -> None:
    folder = Path(tempfile.mkdtemp(prefix="shw-"))
    worker = subprocess.Popen([str(Path(sys.executable).with_name("sglang-hybrid")), "worker", "--dir", str(folder)])
    try:
        with ControlClient(folder) as client:
            client.ask(Hello(), PATIENCE_S)
            post, token = Post(), secrets.token_hex(16)
            connection = client.send_regions(token, post.mailbox_fd, post.pool_fd)
            client.ask(Attach(token=token), PATIENCE_S)
            planned = client.ask(ThreadPlan(threads=1, group_threads=1, cores="none"), PATIENCE_S)
            client.ask(WarmUp(), PATIENCE_S)
            for found, right in zip(post.exchange(), post.expected(), strict=True):
                worst = max(abs(a - b) for a, b in zip(found, right, strict=True))
                assert worst < TOLERANCE, f"the worker's answer is wrong by {worst}"
            post.close()
            connection.close()
            client.ask(Stop(), PATIENCE_S)
        assert worker.wait(PATIENCE_S) == 0
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"a worker with {planned.provider} kernels ({planned.variant}) computes attention")


if __name__ == "__main__":
    check_library()
    check_worker()
