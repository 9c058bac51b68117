"""Real worker processes, which get valid messages and regions from a server, and invalid ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from worker_process import (
    BLOCK_TOKENS,
    PATIENCE_S,
    QUERY_DTYPES,
    ROOT,
    SEALS,
    Regions,
    WorkerProcess,
    ends,
    eventually,
    is_closed_by_worker,
    is_stopped,
    memory_file,
    new_token,
    short_directory,
)

from sglang_hybrid import __version__
from sglang_hybrid.ops import reference, reference_weights
from sglang_hybrid.ops.cpu.library import mailbox_fields, variants
from sglang_hybrid.ops.cpu.lists import HostLists, HostSums
from sglang_hybrid.ops.cpu.structs import MAILBOX_VERSION, MASKS, VALUE_SUMS
from sglang_hybrid.protocol import messages
from sglang_hybrid.protocol.messages import (
    Answer,
    Attach,
    Done,
    Drain,
    Failed,
    Health,
    Hello,
    Request,
    Stats,
    Stop,
    ThreadPlan,
    WarmUp,
)
from sglang_hybrid.worker.control_client import ControlClient, ControlError, ControlTimeout

PLAN = ThreadPlan(threads=2, group_threads=1, task_blocks=3, spin_us=50, cores="none")


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """A worker that is started by hand and shared by this module's tests. Each test leaves the worker idle."""
    with short_directory() as path, WorkerProcess(directory=path) as process:
        yield process.ready()


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[ControlClient]:
    assert worker.directory is not None
    with ControlClient(worker.directory) as control:
        yield control
        assert control.ask(Health(), PATIENCE_S).state == "idle"
    assert worker.process.poll() is None


@pytest.fixture
def regions() -> Iterator[Regions]:
    with Regions() as made:
        yield made


@pytest.fixture
def other_client(worker: WorkerProcess) -> Iterator[ControlClient]:
    assert worker.directory is not None
    with ControlClient(worker.directory) as control:
        yield control


@pytest.fixture
def stranger(worker: WorkerProcess) -> Iterator[zmq.Socket[bytes]]:
    """A ZMQ socket that is connected to the worker but does not follow its protocol."""
    assert worker.directory is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        peer.connect(f"ipc://{worker.directory}/control.sock")
        yield peer


def answer_to(stranger: zmq.Socket[bytes], *frames: bytes) -> Answer:
    stranger.send_multipart(frames)
    return messages.decode_answer(stranger.recv())


def connected(worker: WorkerProcess) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"{worker.directory}/regions.sock")
    return connection


# -- who it is ---------------------------------------------------------------------------------


def test_hello_is_answered_with_version_process_and_kernels(worker: WorkerProcess, client: ControlClient) -> None:
    welcome = client.ask(Hello(), PATIENCE_S)
    assert (welcome.version, welcome.pid, welcome.attached) == (__version__, worker.pid, False)
    assert welcome.variants == variants()


def test_the_mailbox_version_in_the_welcome_is_that_of_the_header(client: ControlClient, regions: Regions) -> None:
    offset, size = mailbox_fields()["Header"]["version"]
    assert os.pread(regions.mailbox_fd, size, offset) == MAILBOX_VERSION.to_bytes(size, "little")
    assert client.ask(Hello(), PATIENCE_S).mailbox_version == MAILBOX_VERSION


def test_a_hello_of_another_protocol_is_answered_with_ours(stranger: zmq.Socket[bytes]) -> None:
    assert answer_to(stranger, messages.encode(Hello(protocol=99))).protocol == messages.PROTOCOL


def test_a_worker_that_serves_natively_loads_neither_torch_nor_numpy(directory: Path, regions: Regions) -> None:
    with WorkerProcess(directory=directory) as process, ControlClient(directory) as client:
        process.ready()
        with regions.attach(client):
            client.ask(PLAN, PATIENCE_S)
            client.ask(WarmUp(), PATIENCE_S)
            loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libsglang_hybrid_cpu" in loaded
        assert "torch" not in loaded and "numpy" not in loaded
        assert Path(f"/proc/{process.pid}/comm").read_text() == "hybrid-worker\n"


# -- messages that nobody should send ----------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"\x00\xff garbage",),
        (b"\x91" * 60000,),
        (messages.encode(Done()),),
        (messages.encode(Stop(protocol=99)),),
        (msgspec.msgpack.encode({"type": "plan", "threads": -1}),),
        (msgspec.msgpack.encode({"type": "attach", "token": "../../etc/passwd"}),),
        (b"", messages.encode(Stop())),
        (messages.encode(Stop()), messages.encode(Stop())),
        tuple(b"x" for _ in range(300)),
    ],
    ids=["empty", "garbage", "nested", "answer", "protocol", "range", "token", "delimiter", "two", "many"],
)
def test_a_malformed_message_is_answered_with_a_reason_and_changes_nothing(
    stranger: zmq.Socket[bytes], client: ControlClient, frames: tuple[bytes, ...]
) -> None:
    answer = answer_to(stranger, *frames)
    assert isinstance(answer, Failed) and answer.reason
    assert client.ask(Health(), PATIENCE_S).state == "idle"


def test_a_message_that_is_too_long_ends_its_connection_and_nothing_else(
    stranger: zmq.Socket[bytes], client: ControlClient
) -> None:
    stranger.send(b"x" * (messages.MAX_MESSAGE_BYTES + 1))
    assert client.ask(Health(), PATIENCE_S).state == "idle"


def test_bytes_that_are_not_even_zmq_disturb_nobody(worker: WorkerProcess, client: ControlClient) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, bytes(range(256)) * 10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(f"{worker.directory}/control.sock")
            with contextlib.suppress(ConnectionError):  # the worker may end the connection before all is sent
                peer.sendall(data)
        assert client.ask(Health(), PATIENCE_S).state == "idle"


@pytest.mark.parametrize("request_", [PLAN, WarmUp(), Stats(), Drain()], ids=lambda request: type(request).__name__)
def test_what_needs_regions_is_refused_before_they_are_attached(
    client: ControlClient, request_: ThreadPlan | WarmUp | Stats | Drain
) -> None:
    with pytest.raises(ControlError, match="needs attached regions"):
        client.ask(request_, PATIENCE_S)


@pytest.mark.parametrize("request_", [WarmUp(), Stats()], ids=lambda request: type(request).__name__)
def test_what_needs_threads_is_refused_before_they_are_planned(
    client: ControlClient, regions: Regions, request_: WarmUp | Stats
) -> None:
    with regions.attach(client):
        with pytest.raises(ControlError, match="needs a plan"):
            client.ask(request_, PATIENCE_S)
        client.ask(Drain(), PATIENCE_S)


def test_a_token_that_brought_no_regions_is_refused(client: ControlClient, regions: Regions) -> None:
    connection = client.send_regions(regions.token, regions.mailbox_fd, regions.pool_fd)
    with connection, pytest.raises(ControlError, match="no regions came"):
        client.ask(Attach(token=new_token()), PATIENCE_S)


# -- descriptors that nobody should send -------------------------------------------------------


def a_pipe(_regions: Regions) -> int:
    return os.pipe()[0]


def a_file(_regions: Regions) -> int:
    return os.open(__file__, os.O_RDONLY)


def unsealed(regions: Regions) -> int:
    return memory_file(regions.geometry.pool_bytes, seals=0)


def sealed_against_growing_only(regions: Regions) -> int:
    return memory_file(regions.geometry.pool_bytes, seals=fcntl.F_SEAL_GROW)


def of_no_size(_regions: Regions) -> int:
    return memory_file(0)


def too_small(_regions: Regions) -> int:
    return memory_file(50)


def cut_short(regions: Regions) -> int:
    return memory_file(4096, content=os.pread(regions.mailbox_fd, 4096, 0))


def a_bit_too_small(regions: Regions) -> int:
    return memory_file(regions.geometry.pool_bytes - 1)


def write_protected(regions: Regions) -> int:
    return memory_file(regions.geometry.pool_bytes, SEALS | fcntl.F_SEAL_WRITE)


def of_zeros(regions: Regions) -> int:
    return memory_file(regions.geometry.pool_bytes)


@pytest.mark.parametrize(
    ("place", "make", "says"),
    [
        ("mailbox", a_pipe, "not a memory file"),
        ("mailbox", a_file, "not a memory file"),
        ("mailbox", unsealed, "not sealed against shrinking"),
        ("mailbox", sealed_against_growing_only, "not sealed against shrinking"),
        ("mailbox", of_no_size, "empty"),
        ("mailbox", too_small, "too small"),
        ("mailbox", cut_short, "its geometry needs"),
        ("mailbox", write_protected, "cannot be mapped"),
        ("mailbox", of_zeros, "not a mailbox"),
        ("pool", a_pipe, "not a memory file"),
        ("pool", unsealed, "not sealed against shrinking"),
        ("pool", a_bit_too_small, "for a pool of"),
    ],
)
def test_a_region_that_cannot_be_trusted_is_refused_and_let_go(
    worker: WorkerProcess,
    client: ControlClient,
    regions: Regions,
    place: str,
    make: Callable[[Regions], int],
    says: str,
) -> None:
    client.ask(Hello(), PATIENCE_S)
    before = worker.descriptors()
    fd = make(regions)
    pair = (fd, regions.pool_fd) if place == "mailbox" else (regions.mailbox_fd, fd)
    with client.send_regions(regions.token, *pair) as connection:
        os.close(fd)
        with pytest.raises(ControlError, match=says):
            client.ask(Attach(token=regions.token), PATIENCE_S)
        assert is_closed_by_worker(connection)
    # a connection of an earlier client may end meanwhile
    assert eventually(lambda: worker.descriptors() <= before), (worker.descriptors(), before)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"0" * 32, 0),
        (b"0" * 32, 1),
        (b"0" * 32, 3),
        (b"0" * 32, 253),
        (b"0" * 31, 2),
        (b"0" * 33, 2),
        (b"0" * 5000, 2),
        (b"g" * 32, 2),
        (b"", 2),
        (b"", 0),
    ],
)
def test_a_packet_that_is_not_a_token_with_two_descriptors_ends_the_connection_and_leaks_none(
    worker: WorkerProcess, client: ControlClient, data: bytes, count: int
) -> None:
    client.ask(Hello(), PATIENCE_S)
    before = worker.descriptors()
    with connected(worker) as connection:
        socket.send_fds(connection, [data], [connection.fileno()] * count)
        assert is_closed_by_worker(connection)
    # a connection of an earlier client may end meanwhile
    assert eventually(lambda: worker.descriptors() <= before), (worker.descriptors(), before)


def test_a_second_packet_ends_the_connection_and_leaks_none(
    worker: WorkerProcess, client: ControlClient, regions: Regions
) -> None:
    client.ask(Hello(), PATIENCE_S)
    before = worker.descriptors()
    with client.send_regions(regions.token, regions.mailbox_fd, regions.pool_fd) as connection:
        socket.send_fds(connection, [b"more"], [regions.pool_fd] * 3)
        assert is_closed_by_worker(connection)
    # a connection of an earlier client may end meanwhile
    assert eventually(lambda: worker.descriptors() <= before), (worker.descriptors(), before)


def test_of_five_connections_that_wait_the_oldest_is_dropped(
    worker: WorkerProcess, client: ControlClient, regions: Regions
) -> None:
    waiting = []
    for _ in range(5):
        waiting.append(connected(worker))
        client.ask(Health(), PATIENCE_S)  # the worker accepts this connection before the next one comes
    assert is_closed_by_worker(waiting[0])
    # the newest connection still works
    socket.send_fds(waiting[4], [regions.token.encode()], [regions.mailbox_fd, regions.pool_fd])
    client.ask(Attach(token=regions.token), PATIENCE_S)
    client.ask(Drain(), PATIENCE_S)
    for connection in waiting:
        connection.close()


# -- one server at a time ----------------------------------------------------------------------


def test_while_one_server_is_attached_another_is_refused(
    client: ControlClient, other_client: ControlClient, regions: Regions
) -> None:
    with (
        regions.attach(client),
        Regions() as others,
        other_client.send_regions(others.token, others.mailbox_fd, others.pool_fd),
    ):
        with pytest.raises(ControlError, match="serves another server"):
            other_client.ask(Attach(token=others.token), PATIENCE_S)
        refused: list[Request] = [PLAN, WarmUp(), Drain(), Stop()]
        for request in refused:
            with pytest.raises(ControlError, match="serves another one"):
                other_client.ask(request, PATIENCE_S)
        assert other_client.ask(Hello(), PATIENCE_S).attached
        assert other_client.ask(Health(), PATIENCE_S).state == "attached"
        with pytest.raises(ControlError, match="attached already"):
            client.ask(Attach(token=others.token), PATIENCE_S)
        client.ask(Drain(), PATIENCE_S)
        # the regions that were refused before can still be attached
        other_client.ask(Attach(token=others.token), PATIENCE_S)
        other_client.ask(Drain(), PATIENCE_S)


def test_when_a_server_goes_its_worker_lets_go_of_everything_and_serves_the_next(
    worker: WorkerProcess, client: ControlClient, regions: Regions
) -> None:
    client.ask(Hello(), PATIENCE_S)
    before, tasks_before = worker.descriptors(), worker.tasks()
    for _ in range(3):
        with regions.attach(client):
            client.ask(PLAN, PATIENCE_S)
            assert client.ask(Health(), PATIENCE_S).state == "serving"
        assert client.ask(Health(), PATIENCE_S).state == "idle"
    # a connection of an earlier client may end meanwhile
    assert eventually(lambda: worker.descriptors() <= before), (worker.descriptors(), before)
    assert "memfd:test" not in Path(f"/proc/{worker.pid}/maps").read_text()
    assert worker.tasks() == tasks_before


def test_the_pool_is_mapped_for_reading_only(worker: WorkerProcess, client: ControlClient, regions: Regions) -> None:
    with regions.attach(client):
        lines = Path(f"/proc/{worker.pid}/maps").read_text().splitlines()
        rights = sorted(line.split()[1] for line in lines if "memfd:test" in line)
        client.ask(Drain(), PATIENCE_S)
    assert rights == ["r--s", "rw-s"]


def test_a_drained_session_is_closed_by_the_worker(client: ControlClient, regions: Regions) -> None:
    with regions.attach(client) as connection:
        client.ask(Drain(), PATIENCE_S, gone=connection)
        assert is_closed_by_worker(connection)


def test_a_client_waits_for_its_turn_to_hand_over_regions_but_not_for_ever(
    worker: WorkerProcess, client: ControlClient, regions: Regions
) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    connections = []
    try:
        with pytest.raises(ControlTimeout, match="no worker takes regions"):
            for _ in range(100):  # more connections than can wait to be accepted
                connections.append(client.send_regions(regions.token, regions.mailbox_fd, regions.pool_fd, 0.05))
    finally:
        os.kill(worker.pid, signal.SIGCONT)
        for connection in connections:
            connection.close()
    with regions.attach(client):
        client.ask(Drain(), PATIENCE_S)


def test_a_client_that_gave_up_waiting_gets_the_right_answer_the_next_time(
    worker: WorkerProcess, client: ControlClient
) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ControlTimeout):
            client.ask(Hello(), 0.05)
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    assert client.ask(Health(), PATIENCE_S).state == "idle"


# -- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (ThreadPlan(cores="4000"), "cannot be used by this process"),
        (ThreadPlan(cores="every"), '"auto", "none" or a list'),
        (ThreadPlan(provider="ipex"), "optional extra"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_leaves_the_one_before(
    client: ControlClient, regions: Regions, plan: ThreadPlan, says: str
) -> None:
    with regions.attach(client):
        client.ask(PLAN, PATIENCE_S)
        with pytest.raises(ControlError, match=says):
            client.ask(plan, PATIENCE_S)
        assert client.ask(Health(), PATIENCE_S).state == "serving"
        assert_answers_are_exact(regions)
        client.ask(Drain(), PATIENCE_S)


def test_threads_run_on_the_cores_they_were_planned_for(
    worker: WorkerProcess, client: ControlClient, regions: Regions
) -> None:
    core = max(os.sched_getaffinity(worker.pid))
    with regions.attach(client):
        planned = client.ask(ThreadPlan(cores=str(core)), PATIENCE_S)
        assert (planned.threads, planned.cores) == (1, [core])
        tasks = [int(task) for task in os.listdir(f"/proc/{worker.pid}/task")]
        assert eventually(lambda: {core} in [os.sched_getaffinity(task) for task in tasks])
        client.ask(Drain(), PATIENCE_S)


def test_two_workers_know_of_each_others_cores(worker: WorkerProcess, client: ControlClient, regions: Regions) -> None:
    """Each worker is a separate process, like the workers of two servers."""
    core = max(os.sched_getaffinity(worker.pid))
    with short_directory() as path, WorkerProcess(directory=path) as other, Regions() as others:
        other.ready()
        theirs = ControlClient(path)
        with regions.attach(client), others.attach(theirs):
            assert core not in client.ask(ThreadPlan(cores=str(core)), PATIENCE_S).taken
            left_over = theirs.ask(ThreadPlan(cores="auto"), PATIENCE_S)
            assert core in left_over.taken and core not in left_over.cores
            asked_for = theirs.ask(ThreadPlan(cores=str(core)), PATIENCE_S)
            assert core in asked_for.cores and core in asked_for.taken
            client.ask(Drain(), PATIENCE_S)
            assert core not in theirs.ask(ThreadPlan(cores=str(core)), PATIENCE_S).taken
            theirs.ask(Drain(), PATIENCE_S)
        theirs.close()


# -- attention ---------------------------------------------------------------------------------


def random_lists(regions: Regions, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, pages and fill. Lists have random lengths; one list and one row are empty, one list is full.

    No other list has the page of a list's last block, so the tokens behind the last one may have any value.
    """
    random = torch.Generator().manual_seed(seed)
    shape = (regions.rows, regions.kv_heads)
    query = torch.randn(regions.rows, regions.kv_heads * regions.group, regions.head_dim, generator=random)
    counts = torch.randint(1, regions.max_blocks + 1, shape, generator=random)
    counts[0, 0], counts[1], counts[2, 0] = 0, 0, regions.max_blocks
    own = regions.pages - regions.rows * regions.kv_heads
    shared = torch.rand(*shape, own - 1, generator=random).argsort(dim=2)[..., : regions.max_blocks] + 1
    own_pages = own + torch.arange(regions.rows * regions.kv_heads).view(*shape, 1)
    position = torch.arange(regions.max_blocks)
    is_last = position == counts[..., None] - 1
    pages = torch.where(is_last, own_pages, shared).masked_fill(position >= counts[..., None], reference.NO_BLOCK)
    last_fill = torch.randint(1, BLOCK_TOKENS + 1, (*shape, 1), generator=random)
    fill = torch.where(is_last, last_fill, BLOCK_TOKENS).masked_fill(pages == reference.NO_BLOCK, 0)
    return query.to(QUERY_DTYPES[regions.dtype]), pages, fill


def assert_answers_are_exact(regions: Regions) -> None:
    tolerance = 1e-5 if regions.dtype.endswith("float32") else 1e-2
    for layer in range(regions.layers):
        query, pages, fill = random_lists(regions, seed=layer)
        for row, head, place in ((fill > 0) & (fill < BLOCK_TOKENS)).nonzero().tolist():
            regions.pool[:, layer, pages[row, head, place], head, fill[row, head, place] :] = torch.nan
        masks = None
        if regions.flags & MASKS:
            masks = torch.randint(-(2**31), 2**31, pages.shape, generator=torch.Generator().manual_seed(layer)).int()
        lists = HostLists(query, pages, fill, layer, 0.125, QUERY_DTYPES[regions.dtype], masks)
        assert regions.collect(lists, regions.post(lists)) == 0
        keys, values = regions.pool[:, layer]
        out, lse = reference.attend_blocks(query, keys, values, pages, fill, 0.125, masks=masks)
        torch.testing.assert_close(lists.out, out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lists.lse, lse, rtol=0, atol=1e-3)
        if regions.flags & VALUE_SUMS:
            shape = (*pages.shape[:2], regions.group, regions.max_blocks, BLOCK_TOKENS)
            weights = torch.rand(shape, generator=torch.Generator().manual_seed(layer))
            weights *= (torch.arange(BLOCK_TOKENS) < fill[:, :, None, :, None]).float()
            sums = HostSums(weights, pages, layer, regions.head_dim)
            assert regions.collect(sums, regions.post(sums)) == 0
            expected = reference_weights.sum_values(weights, values, pages)
            torch.testing.assert_close(sums.out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8 float32", "fp8 bfloat16"])
@pytest.mark.parametrize("provider", ["native", "torch"])
@pytest.mark.parametrize("flags", [0, MASKS | VALUE_SUMS], ids=["whole blocks", "masks and sums"])
def test_posts_are_answered_as_the_reference_computes_them(
    client: ControlClient, provider: str, dtype: str, flags: int
) -> None:
    with Regions(dtype=dtype, flags=flags) as regions, regions.attach(client) as connection:
        planned = client.ask(msgspec.structs.replace(PLAN, provider=provider), PATIENCE_S, gone=connection)
        assert (planned.provider, planned.threads, planned.cores) == (provider, 2, [])
        assert planned.variant in (*variants(), "torch")
        client.ask(WarmUp(), PATIENCE_S, gone=connection)
        assert_answers_are_exact(regions)

        stats = client.ask(Stats(), PATIENCE_S)
        of_layer = 2 if flags else 1  # posts per layer
        assert stats.posts == of_layer * regions.layers
        assert stats.rows + stats.refused_rows <= of_layer * regions.layers * regions.rows
        assert stats.blocks == of_layer * sum(
            int((random_lists(regions, seed=layer)[1] != reference.NO_BLOCK).sum()) for layer in range(regions.layers)
        )
        assert client.ask(Health(), PATIENCE_S).completed == of_layer * regions.layers
        client.ask(Drain(), PATIENCE_S)


def test_a_new_plan_takes_over_where_the_one_before_was(client: ControlClient, regions: Regions) -> None:
    with regions.attach(client):
        for threads in (1, 3, 2):
            client.ask(msgspec.structs.replace(PLAN, threads=threads), PATIENCE_S)
            assert_answers_are_exact(regions)
        client.ask(Drain(), PATIENCE_S)


def test_drain_answers_what_is_posted_first(client: ControlClient, regions: Regions) -> None:
    query, pages, fill = random_lists(regions, seed=0)
    lists = HostLists(query, pages, fill, 0, 0.125, torch.float32)
    with regions.attach(client):
        sequence = regions.post(lists)
        client.ask(PLAN, PATIENCE_S)
        client.ask(Drain(), PATIENCE_S)
    assert regions.collect(lists, sequence, timeout_s=0) == 0


# -- beginning and end -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_well_and_leaves_an_empty_directory(directory: Path, number: signal.Signals) -> None:
    with WorkerProcess(directory=directory) as process:
        process.ready()
        assert {entry.name for entry in directory.iterdir()} == {"control.sock", "regions.sock"}
        os.kill(process.pid, number)
        assert process.wait() == 0
        assert list(directory.iterdir()) == []
        assert f"sglang-hybrid worker[{process.pid}]: ending: received {number.name}\n" in process.log()


def test_stop_is_answered_and_ends_a_worker_that_is_computing(directory: Path, regions: Regions) -> None:
    with WorkerProcess(directory=directory) as process, ControlClient(directory) as client:
        process.ready()
        with regions.attach(client) as connection:
            client.ask(PLAN, PATIENCE_S)
            client.ask(Stop(), PATIENCE_S, gone=connection)
            assert process.wait() == 0
    assert list(directory.iterdir()) == []


def test_started_without_a_directory_it_makes_one_says_what_to_give_to_the_server_and_removes_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    with WorkerProcess() as process:
        assert process.process.stdout is not None
        line = process.process.stdout.readline()
        (made,) = directory.iterdir()
        assert line.endswith(f"start it with: --hybrid worker={made}\n")
        assert made.stat().st_mode & 0o777 == 0o700
        with ControlClient(made) as client:
            client.ask(Stop(), PATIENCE_S)
        assert process.wait() == 0
    assert list(directory.iterdir()) == []


def test_it_ends_with_the_process_it_was_given(directory: Path) -> None:
    parent = subprocess.Popen(["sleep", "600"])
    with WorkerProcess("--parent", str(parent.pid), directory=directory) as process:
        process.ready()
        parent.kill()
        assert process.wait() == 0
        assert f"process {parent.pid} is gone" in process.log()
    parent.wait()
    assert not directory.exists()


def test_where_the_system_has_no_process_descriptors_it_ends_with_its_parent_all_the_same(directory: Path) -> None:
    code = (
        "import os, sys, errno, cpu_worker.main\n"
        "def missing(pid): raise OSError(errno.ENOSYS, 'no pidfds')\n"
        "os.pidfd_open = missing\n"
        "sys.exit(cpu_worker.main.main())"
    )
    parent = subprocess.Popen(["sleep", "600"])
    with WorkerProcess("--parent", str(parent.pid), directory=directory, code=code) as process:
        process.ready()
        parent.kill()
        parent.wait()
        assert process.wait() == 0


def test_it_does_not_start_for_a_process_that_is_gone(directory: Path) -> None:
    parent = subprocess.Popen(["true"])
    parent.wait()
    with WorkerProcess("--parent", str(parent.pid), directory=directory) as process:
        assert process.wait() == 0
    assert not directory.exists()


def test_even_a_stopped_worker_ends_with_its_parent(directory: Path) -> None:
    script = f"{sys.executable} -m cpu_worker --dir {directory} --parent $$ & echo $!; read forever"
    parent = subprocess.Popen(
        ["sh", "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    with parent.stdin, parent.stdout, ControlClient(directory) as client:
        pid = int(parent.stdout.readline())
        client.ask(Hello(), PATIENCE_S)
        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: is_stopped(pid))
        parent.kill()
        parent.wait()
        assert ends(process)
        os.close(process)
    assert not directory.exists()


def test_with_a_parent_it_ends_when_its_server_lets_go(directory: Path, regions: Regions) -> None:
    with (
        WorkerProcess("--parent", str(os.getpid()), directory=directory) as process,
        ControlClient(directory) as client,
    ):
        process.ready()
        regions.attach(client).close()
        assert process.wait() == 0
    assert not directory.exists()


def test_a_provider_that_fails_ends_the_worker_with_its_reason(directory: Path, regions: Regions) -> None:
    code = (
        "import sys, cpu_worker.main, cpu_worker.providers.torch as provider\n"
        "def broken(*_): raise RuntimeError('out of luck')\n"
        "provider.TorchProvider.kernel = lambda self: broken\n"
        "sys.exit(cpu_worker.main.main())"
    )
    query, pages, fill = random_lists(regions, seed=0)
    lists = HostLists(query, pages, fill, 0, 0.125, torch.float32)
    with WorkerProcess(directory=directory, code=code) as process, ControlClient(directory) as client:
        process.ready()
        with regions.attach(client):
            client.ask(ThreadPlan(provider="torch", threads=1, cores="none"), PATIENCE_S)
            regions.post(lists)
            assert process.wait() == 1
            assert "ending: provider torch failed: out of luck" in process.log()
    assert list(directory.iterdir()) == []


def test_two_workers_in_two_directories_do_not_meet(worker: WorkerProcess, directory: Path, regions: Regions) -> None:
    with WorkerProcess(directory=directory) as second, ControlClient(directory) as client:
        second.ready()
        assert client.ask(Hello(), PATIENCE_S).pid == second.pid
        with regions.attach(client):
            assert client.ask(Health(), PATIENCE_S).state == "attached"
            assert worker.directory is not None
            with ControlClient(worker.directory) as first:
                assert first.ask(Health(), PATIENCE_S).state == "idle"


def test_a_directory_with_a_live_worker_is_refused_and_that_worker_goes_on(
    worker: WorkerProcess, client: ControlClient
) -> None:
    with WorkerProcess(directory=worker.directory) as second:
        assert second.wait() == 1
        assert "another worker is alive" in second.log()
    assert client.ask(Hello(), PATIENCE_S).pid == worker.pid


def test_the_sockets_of_a_killed_worker_are_replaced(directory: Path) -> None:
    with WorkerProcess(directory=directory) as first:
        first.ready()
        first.process.kill()
        first.wait()
    assert len(list(directory.iterdir())) == 2
    with WorkerProcess(directory=directory) as second, ControlClient(directory) as client:
        second.ready()
        assert client.ask(Hello(), PATIENCE_S).pid == second.pid


def open_to_others(directory: Path) -> Path:
    directory.chmod(0o755)
    return directory


def of_another_user(directory: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(directory, 12345, 12345)
    return directory


def too_long(directory: Path) -> Path:
    return directory / ("x" * 100)


def not_a_directory(directory: Path) -> Path:
    (directory / "file").touch()
    return directory / "file"


def with_a_file_in_the_way(directory: Path) -> Path:
    (directory / "control.sock").write_text("precious")
    return directory


def that_cannot_be_made(directory: Path) -> Path:
    return directory / "missing" / "too"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (open_to_others, "chmod 700"),
        (of_another_user, "belongs to user 12345"),
        (too_long, "bytes too long"),
        (not_a_directory, "not a directory"),
        (with_a_file_in_the_way, "in the way"),
        (that_cannot_be_made, "cannot be made"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused_with_what_to_do(
    directory: Path, make: Callable[[Path], Path], says: str
) -> None:
    bad = make(directory)
    before = sorted(directory.iterdir())
    with WorkerProcess(directory=bad) as process:
        assert process.wait() == 1
        assert f"sglang-hybrid worker[{process.pid}]: cannot start: " in process.log()
        assert says in process.log()
    assert sorted(directory.iterdir()) == before


def test_a_client_hands_nothing_to_a_directory_that_others_can_reach(directory: Path, regions: Regions) -> None:
    with WorkerProcess(directory=directory) as process, ControlClient(directory) as client:
        process.ready()
        directory.chmod(0o770)
        for talk in (
            lambda: client.ask(Hello(), PATIENCE_S),
            lambda: client.send_regions(regions.token, regions.mailbox_fd, regions.pool_fd),
        ):
            with pytest.raises(ControlError, match="chmod 700"):
                talk()
        directory.chmod(0o700)
        client.ask(Stop(), PATIENCE_S)
        assert process.wait() == 0
