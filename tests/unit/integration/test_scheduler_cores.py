"""On a GPU host the scheduler leaves the cores that its worker is bound to."""

from __future__ import annotations

import os
import threading

import pytest

from sglang_hybrid.integration import gpu_node, scheduler_cores
from sglang_hybrid.integration.scheduler_cores import SchedulerCores, move_threads
from sglang_hybrid.protocol.cores import Core, Topology


def test_the_scheduler_gets_the_other_cores_and_all_of_them_while_there_is_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = Topology(tuple(Core((cpu, cpu + 4)) for cpu in range(4)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(scheduler_cores, "read_topology", lambda allowed: four)
    moved: list[set[int]] = []
    cores = SchedulerCores(lambda cpus: moved.append(set(cpus)))
    for bound in ((1, 2), (), (0, 1, 2, 3)):
        cores.leave(bound)
    assert moved == [{0, 3, 4, 7}, set(range(8)), set(range(8))]


def test_all_threads_of_the_process_are_moved_and_later_ones_follow() -> None:
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    found: list[set[int]] = []
    go, done = threading.Event(), threading.Event()

    def older() -> None:
        go.wait()
        found.append(os.sched_getaffinity(0))
        done.wait()

    thread = threading.Thread(target=older)
    thread.start()
    try:
        move_threads(one)
        go.set()
        later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        later.start()
        later.join()
    finally:
        done.set()
        go.set()
        thread.join()
        move_threads(allowed)
    assert found == [one, one]
    assert os.sched_getaffinity(0) == allowed


def test_cores_that_cannot_be_had_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    allowed = os.sched_getaffinity(0)
    move_threads({4000})
    assert os.sched_getaffinity(0) == allowed
    assert "the scheduler may run on the worker's cores" in caplog.text


def test_a_cpu_has_no_node_to_be_near_to() -> None:
    assert gpu_node.gpu_node("cpu") is None


def test_the_gpus_node_is_that_of_its_place_on_the_pci_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Properties)
    monkeypatch.setattr(gpu_node, "pci_node", lambda address: {"0000:3b:00.0": 1}[address])
    assert gpu_node.gpu_node("cuda:0") == 1
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: object())
    assert gpu_node.gpu_node("cuda:0") is None
