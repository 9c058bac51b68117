"""``sglang-hybrid doctor`` about memory, on machines that a test describes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from doctor_machines import H200, machine, write_memory

from sglang_hybrid.commands.doctor import memory
from sglang_hybrid.commands.doctor.machine import gives_huge_pages
from sglang_hybrid.commands.doctor.report import Status
from sglang_hybrid.protocol import region

MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_HYBRID_CONFIG", "SGLANG_HYBRID_SET"):
        monkeypatch.setenv(name, "")


# -- host pool ---------------------------------------------------------------------------------------------------------


def test_the_host_pool_is_told_within_the_containers_limit(tmp_path: Path) -> None:
    write_memory(tmp_path, total=3072 * MIB, available=2048 * MIB)
    found = memory.host_pool(machine(tmp_path))
    assert found.status is Status.OK
    assert found.found == (
        "2.0 GiB of the 3.0 GiB that the container may use are available; host_memory=auto gives a host pool of 1.4 GiB"
    )


def test_a_pool_that_does_not_fit_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_memory(tmp_path, total=3072 * MIB, available=2048 * MIB)
    monkeypatch.setenv("SGLANG_HYBRID_SET", '["host_memory=2.5GiB"]')
    found = memory.host_pool(machine(tmp_path))
    assert found.status is Status.PROBLEM
    assert "Lower host_memory" in found.to_do


def test_a_small_pool_gets_advice(tmp_path: Path) -> None:
    write_memory(tmp_path, total=1024 * MIB, available=512 * MIB)
    assert memory.host_pool(machine(tmp_path)).status is Status.ADVICE


# -- /dev/shm ----------------------------------------------------------------------------------------------------------


def with_shared_memory(monkeypatch: pytest.MonkeyPatch, size: int, free: int) -> None:
    values = (4096, 4096, size // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(values))


def test_dockers_default_of_shared_memory_is_too_small_for_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_shared_memory(monkeypatch, 64 * MIB, 64 * MIB)
    found = memory.shared_memory(machine(tmp_path))
    assert found.status is Status.ADVICE
    assert "--shm-size=1g" in found.to_do


def test_the_host_pool_may_be_larger_than_dev_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_memory(tmp_path, total=3072 * MIB, available=2048 * MIB)
    with_shared_memory(monkeypatch, 1100 * MIB, 1050 * MIB)
    found = memory.shared_memory(machine(tmp_path))
    assert found.status is Status.OK
    assert found.found.endswith("the host pool of 1.4 GiB needs none of it")


def test_without_dev_shm_nothing_runs(tmp_path: Path) -> None:
    found = memory.shared_memory(machine(tmp_path))
    assert found.status is Status.PROBLEM
    assert "mount -t tmpfs" in found.to_do


# -- huge pages --------------------------------------------------------------------------------------------------------


def test_huge_pages_are_tried(tmp_path: Path) -> None:
    assert memory.huge_pages(machine(tmp_path, gives_huge_pages=lambda: True)).status is Status.OK
    found = memory.huge_pages(machine(tmp_path, gives_huge_pages=lambda: False))
    assert found.status is Status.ADVICE
    assert "Linux 6.1" in found.to_do
    assert "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in found.to_do


def test_a_machine_without_room_for_a_region_gives_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise region.RegionError("full")

    monkeypatch.setattr(region, "SharedRegion", refuse)
    assert not gives_huge_pages()


# -- locked memory -----------------------------------------------------------------------------------------------------


def test_locked_memory_matters_with_a_gpu_only(tmp_path: Path) -> None:
    write_memory(tmp_path, total=3072 * MIB, available=2048 * MIB)
    assert memory.memlock(machine(tmp_path, memlock=8 * MIB)).status is Status.OK
    found = memory.memlock(machine(tmp_path, H200, memlock=8 * MIB))
    assert found.status is Status.ADVICE
    assert found.found == "8,192 KiB of memory may be locked; the host pool has 1.4 GiB"
    assert "ulimit -l unlimited" in found.to_do
    for enough in (2048 * MIB, resource.RLIM_INFINITY):
        assert memory.memlock(machine(tmp_path, H200, memlock=enough)).status is Status.OK


# -- bandwidth ---------------------------------------------------------------------------------------------------------


def test_a_cpu_that_reads_slower_than_pcie_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "read_rate", lambda _nbytes, _threads: 40.04)
    alone = memory.bandwidth(machine(tmp_path))
    assert (alone.status, alone.found) == ("ok", "8 cores read 40 GB/s")
    beside = memory.bandwidth(machine(tmp_path, H200))
    assert beside.status is Status.ADVICE
    assert "less than PCIe 5 x16 carries (63 GB/s)" in beside.found
    assert alone.measurements == beside.measurements == {"memory_read_gb_s": 40.0}


def test_little_memory_is_not_used_up_by_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(memory, "read_rate", lambda nbytes, _threads: asked.append(nbytes) or 1.0)  # type: ignore[func-returns-value]
    write_memory(tmp_path, total=1024 * MIB, available=800 * MIB)
    memory.bandwidth(machine(tmp_path))
    assert asked == [100 * MIB]


def test_reading_is_really_measured() -> None:
    assert memory.read_rate(8 * MIB, 2) > 0
