"""``sglang-hybrid doctor`` about CPU kernels, cores and NUMA nodes, on machines that a test describes."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_machines import H200, machine, write, write_cores

from sglang_hybrid.commands.doctor import cpu
from sglang_hybrid.commands.doctor.report import Status
from sglang_hybrid.protocol.core_claims import CoreClaims

XEON = "flags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512dq avx512vl amx_tile amx_bf16\n"


def has_kernels(monkeypatch: pytest.MonkeyPatch, chosen: str | None, *offered: str) -> None:
    monkeypatch.setattr(cpu, "chosen_variant", lambda: chosen)
    monkeypatch.setattr(cpu, "offered_variants", lambda: list(offered))


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_the_fastest_kernels_of_the_cpu_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"proc/cpuinfo": XEON})
    has_kernels(monkeypatch, "amx", "amx", "avx512", "avx2", "portable")
    found = cpu.kernels(machine(tmp_path))
    assert found.status is Status.OK
    assert "kernels amx; the CPU has amx_bf16 amx_tile avx2" in found.found


def test_kernels_that_the_cpu_could_run_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"proc/cpuinfo": XEON})
    has_kernels(monkeypatch, "avx512", "avx512", "avx2", "portable")
    found = cpu.kernels(machine(tmp_path))
    assert found.status is Status.ADVICE
    assert "The CPU can run amx" in found.to_do


def test_a_variant_that_cannot_run_is_a_problem_with_those_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_kernels(monkeypatch, None, "neon", "portable")
    found = cpu.kernels(machine(tmp_path, environment={"SGLANG_HYBRID_CPU_VARIANT": "amx"}))
    assert found.status is Status.PROBLEM
    assert found.to_do == "Unset SGLANG_HYBRID_CPU_VARIANT, or set it to one of neon, portable."


def test_a_slower_variant_that_the_environment_asks_for_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_kernels(monkeypatch, "portable", "neon", "portable")
    found = cpu.kernels(machine(tmp_path, environment={"SGLANG_HYBRID_CPU_VARIANT": "portable"}))
    assert found.to_do == "Unset SGLANG_HYBRID_CPU_VARIANT: neon is faster than portable."


def test_a_cpu_without_vectors_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"proc/cpuinfo": "flags : fpu sse2\n"})
    has_kernels(monkeypatch, "portable", "portable")
    found = cpu.kernels(machine(tmp_path))
    assert found.status is Status.ADVICE
    assert "AVX2" in found.to_do


def test_the_real_library_chooses_one_of_the_variants_that_it_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HYBRID_CPU_VARIANT", raising=False)
    assert cpu.chosen_variant() in cpu.offered_variants()


# -- cores -------------------------------------------------------------------------------------------------------------


def test_cores_are_those_that_the_process_may_use(tmp_path: Path) -> None:
    write_cores(tmp_path, [range(16)])
    write(tmp_path, {"sys/devices/system/cpu/online": "0-15\n"})
    found = cpu.cores(machine(tmp_path, H200, cpus=8))
    assert found.status is Status.OK
    assert found.found == "8 cores: CPUs 0-7 of 0-15; a worker would have 6 threads, on CPUs 1-6"


def test_cores_of_running_workers_are_told_and_not_taken(tmp_path: Path) -> None:
    write_cores(tmp_path, [range(16)])
    described = machine(tmp_path, H200, cpus=16)
    running = CoreClaims(described.claims)
    running.claim(described.topology, "auto", 0, 0)
    found = cpu.cores(machine(tmp_path, H200, cpus=16))
    assert found.found.endswith("running workers have CPUs 1-12; a worker would have 3 threads, on CPUs 13-15")
    running.release()
    assert "running workers" not in cpu.cores(machine(tmp_path, H200, cpus=16)).found


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    siblings = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0,1\n" for cpu in (0, 1)}
    write(tmp_path, siblings)
    found = cpu.cores(machine(tmp_path, cpus=2))
    assert found.found.startswith("1 cores: CPUs 0-1;")
    assert found.status is Status.ADVICE


def test_three_cores_are_few_beside_a_gpu(tmp_path: Path) -> None:
    assert cpu.cores(machine(tmp_path, cpus=3)).status is Status.OK
    found = cpu.cores(machine(tmp_path, H200, cpus=3))
    assert found.status is Status.ADVICE
    assert "4 cores or more" in found.to_do


# -- quota -------------------------------------------------------------------------------------------------------------


def test_cpu_time_without_a_limit_is_fine(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert cpu.quota(machine(tmp_path)).status is Status.OK
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "800000 100000\n"})
    assert cpu.quota(machine(tmp_path, cpus=8)).status is Status.OK


def test_a_worker_that_fits_into_its_cpu_time_may_still_be_stopped(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"})
    found = cpu.quota(machine(tmp_path, cpus=8))
    assert found.status is Status.ADVICE
    assert found.found == "CPU time of 4 cores for 8 CPUs"
    assert "--cpuset-cpus" in found.to_do
    assert "worker_threads" not in found.to_do


def test_a_number_of_threads_beyond_the_cpu_time_is_told_with_one_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}
    write(tmp_path, {"proc/self/cgroup": "1:cpu:/\n"} | {f"sys/fs/cgroup/cpu/{k}": v for k, v in files.items()})
    assert machine(tmp_path, cpus=8).placement.threads == 3
    monkeypatch.setenv("SGLANG_HYBRID_SET", '["worker_threads=6"]')
    assert "worker_threads=3" in cpu.quota(machine(tmp_path, cpus=8)).to_do


# -- NUMA --------------------------------------------------------------------------------------------------------------


def test_one_node_is_fine_and_so_are_two_without_balancing(tmp_path: Path) -> None:
    assert cpu.numa(machine(tmp_path)).found == "one NUMA node"
    write_cores(tmp_path, [range(4), range(4, 8)])
    write(tmp_path, {"proc/sys/kernel/numa_balancing": "0\n"})
    found = cpu.numa(machine(tmp_path, cpus=4))
    assert (found.status, found.found) == ("ok", "2 NUMA nodes; this process may use cores of 0")


def test_balancing_between_nodes_should_be_off(tmp_path: Path) -> None:
    write_cores(tmp_path, [range(4), range(4, 8)])
    write(tmp_path, {"proc/sys/kernel/numa_balancing": "1\n"})
    assert "kernel.numa_balancing=0" in cpu.numa(machine(tmp_path)).to_do
