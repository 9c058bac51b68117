"""Real worker processes for tests, and a client's side of mailbox and pool."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang_hybrid.ops.cpu.dtypes import code_of
from sglang_hybrid.ops.cpu.library import checked, library
from sglang_hybrid.ops.cpu.lists import HostWork
from sglang_hybrid.ops.cpu.structs import Geometry, MailboxLayout
from sglang_hybrid.ops.reference import FP8
from sglang_hybrid.protocol.messages import Attach, Hello
from sglang_hybrid.worker.control_client import ControlClient

ROOT = Path(__file__).resolve().parents[2]
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PATIENCE_S = 30.0  # limit of every wait, far longer than any of them takes: a test that reaches it fails
BLOCK_TOKENS = 32
QUERY_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
QUERY_DTYPES |= {f"fp8 {name}": dtype for name, dtype in QUERY_DTYPES.items()}  # queries over a pool of FP8
POOL_DTYPES = {name: FP8 if name.startswith("fp8") else dtype for name, dtype in QUERY_DTYPES.items()}


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """Provide a directory for Unix sockets: the paths of pytest's own directories are too long for them."""
    path = Path(tempfile.mkdtemp(prefix="shw-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class WorkerProcess:
    """A process of ``python -m cpu_worker``, or of the Python source ``code``, with the same arguments.

    The process is killed at the end of the context if it still runs.
    """

    def __init__(self, *arguments: str, directory: Path | None = None, code: str = "") -> None:
        given = [] if directory is None else ["--dir", str(directory)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *(["-c", code] if code else ["-m", "cpu_worker"]), *given, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.directory = directory

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> WorkerProcess:
        assert self.directory is not None
        with ControlClient(self.directory) as client:
            client.ask(Hello(), PATIENCE_S)
        return self

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def tasks(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def eventually(holds: Callable[[], bool]) -> bool:
    """Poll until ``holds`` is true, and return whether it became true. For effects that no event announces."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def ends(pid_descriptor: int) -> bool:
    waiting = select.poll()
    waiting.register(pid_descriptor, select.POLLIN)
    return bool(waiting.poll(PATIENCE_S * 1000))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def memory_file(size: int, seals: int = SEALS, content: bytes = b"") -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if content:
        os.pwrite(fd, content, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def new_token() -> str:
    return secrets.token_hex(16)


def is_closed_by_worker(connection: socket.socket) -> bool:
    """Wait for the end of the connection. Return False if the worker sent something instead."""
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@dataclass
class Regions:
    """Mailbox and host pool of a tiny model, in shared memory, with a client's side of the mailbox.

    Keys and values are random; page 0, which must not be read, is NaN.
    """

    dtype: str = "float32"
    rows: int = 4
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    max_blocks: int = 20
    layers: int = 2
    pages: int = 32
    flags: int = 0
    token: str = field(default_factory=new_token)

    def __post_init__(self) -> None:
        kind = POOL_DTYPES[self.dtype]
        shape = (2, self.layers, self.pages, self.kv_heads, BLOCK_TOKENS, self.head_dim)
        layer = self.pages * self.kv_heads * BLOCK_TOKENS * self.head_dim * kind.itemsize
        size = 2 * self.layers * layer
        self.geometry = Geometry(
            self.rows, self.kv_heads, self.group, self.head_dim, code_of(kind, QUERY_DTYPES[self.dtype]),
            self.max_blocks, self.layers, self.pages, 0, self.layers * layer, layer, size, self.flags,
        )  # fmt: skip
        layout = MailboxLayout()
        checked(library().sh_mailbox_layout, ctypes.byref(self.geometry), ctypes.byref(layout))
        self.pool_fd, self.mailbox_fd = memory_file(size), memory_file(layout.bytes)
        self._pool, self._mailbox = mmap.mmap(self.pool_fd, size), mmap.mmap(self.mailbox_fd, layout.bytes)
        self.pool = torch.frombuffer(self._pool, dtype=kind).view(shape)  # [key or value][layer][page]...
        self.pool.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(7)))
        self.pool[:, :, 0] = torch.nan
        self._held = ctypes.c_char.from_buffer(self._mailbox)
        self.mailbox_address = ctypes.addressof(self._held)
        checked(library().sh_mailbox_create, self.mailbox_address, layout.bytes, ctypes.byref(self.geometry))
        self.client = checked(library().sh_client_open, self.mailbox_address, ctypes.byref(self.geometry))

    def attach(self, client: ControlClient) -> socket.socket:
        connection = client.send_regions(self.token, self.mailbox_fd, self.pool_fd)
        client.ask(Attach(token=self.token), PATIENCE_S)
        return connection

    def post(self, lists: HostWork) -> int:
        sequence = ctypes.c_uint64()
        checked(library().sh_client_post, self.client, ctypes.byref(lists.struct), 1, ctypes.byref(sequence))
        return sequence.value

    def collect(self, lists: HostWork, sequence: int, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the answers to a post, and write them to ``lists``. Return the number of rows without an answer."""
        gone = ctypes.c_uint32()
        missing: int = library().sh_client_collect(
            self.client, sequence, lists.rows, int(timeout_s * 1e9), ctypes.byref(gone), *lists.results,
            ctypes.c_void_p(lists.outcome.data_ptr()),
        )  # fmt: skip
        return missing

    def close(self) -> None:
        library().sh_client_close(self.client)
        os.close(self.pool_fd)
        os.close(self.mailbox_fd)

    def __enter__(self) -> Regions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
