"""Limits of lists, whose tasks all need space for results, and of threads, which a system may refuse to start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mailbox_host import Host, assert_same_bits, collected

from sglang_hybrid.protocol.mailbox import SERVED, Mailbox

# Runs in a separate process, whose address space is limited until another thread's stack does not fit.
WITHOUT_THREADS = """
import resource
from mailbox_host import Host, assert_same_bits, collected
from sglang_hybrid.ops.cpu.library import library
from sglang_hybrid.protocol.mailbox import Mailbox

host = Host(rows=64)
mailbox = Mailbox(host.geometry)
lists = host.full_lists(rows=64)
replied = host.on_host(lists)
expected = host.computed_here(lists)

def leave(more_bytes):
    used = 4096 * int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, resource.RLIM_INFINITY))

STACK = resource.getrlimit(resource.RLIMIT_STACK)[0]
STACK = 8 << 20 if STACK == resource.RLIM_INFINITY else STACK
{body}
"""
IN_THE_SERVER = """
host.local._threads = 16
leave(4 << 20)
assert_same_bits(host.computed_here(lists), expected)
print("computed")
"""
IN_THE_WORKER = """
leave(3 * STACK + (8 << 20))
with host.engine(mailbox, threads=16) as engine:
    print(library().sh_engine_threads(engine), "threads")
    assert 1 <= library().sh_engine_threads(engine) < 16
    assert collected(mailbox, replied, mailbox.post(replied, 1)) == 0
assert_same_bits(replied, expected)
"""
WITHOUT_ANY = """
other = Mailbox(host.geometry)
for stacks in range(1, 20):  # so few that one engine gets some and takes them all, also those of ended threads
    leave(stacks * STACK)
    try:
        with host.engine(mailbox, threads=64):
            with host.engine(other, threads=16):
                print("started")
    except Exception as error:
        print("refused:", error)
"""


def run_with_few_threads(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS.replace("{body}", body)],
        cwd=Path(__file__).parents[1],  # the directory of the helper modules
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize(("max_blocks", "task_blocks"), [(65, 1), (513, 8), (625, 8)])
def test_every_task_of_every_list_has_room_for_its_result(max_blocks: int, task_blocks: int) -> None:
    """Shorter lists can have more tasks than the longest list: space for the longest list's tasks is not enough.

    With lists of up to 65 blocks and one block per task, the longest list has 33 tasks per head, but lists of 64 blocks
    have 64. With too little space, 15 of 80 rows were wrong, and all of them were reported as served.
    """
    host = Host(rows=80, max_blocks=max_blocks, task_blocks=task_blocks)
    mailbox = Mailbox(host.geometry)
    with mailbox.region, host.engine(mailbox):
        for seed in range(4):
            lists = host.random_lists(80, max_blocks, seed)
            replied = host.on_host(lists)
            assert collected(mailbox, replied, mailbox.post(replied, generation=seed)) == 0
            assert (replied.outcome == SERVED).all()
            assert_same_bits(replied, host.computed_here(lists))


def test_the_server_computes_where_no_thread_can_be_started() -> None:
    """A thread that cannot be started must not leave the others unjoined: ``std::terminate`` would end the server."""
    assert "computed" in run_with_few_threads(IN_THE_SERVER)


def test_the_worker_goes_on_with_the_threads_that_it_gets() -> None:
    """If a thread cannot be started, the engine's constructor keeps those that it has started."""
    assert "threads" in run_with_few_threads(IN_THE_WORKER)


def test_a_worker_without_any_thread_is_refused_with_a_sentence() -> None:
    assert "refused: Resource temporarily unavailable" in run_with_few_threads(WITHOUT_ANY)
