"""Memory and CPU time within a container's limits, read from cgroup files (versions 1 and 2) that a test writes."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sglang_hybrid import container
from sglang_hybrid.protocol.cgroups import cpu_quota

MIB = 1 << 20


def group(root: Path, name: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("_", ".", 1)).write_text(text)


def belongs_to(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    machine = psutil.virtual_memory()
    assert container.memory(tmp_path).total == machine.total
    belongs_to(tmp_path, "0::/")
    group(tmp_path, "", memory_max="max\n", memory_current="77\n")
    found = container.memory(tmp_path)
    assert found.total == machine.total
    assert abs(found.available - machine.available) < 512 * MIB


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    """If host_memory=auto takes 70 % of the machine's memory, a container that is granted a tenth of it is killed."""
    belongs_to(tmp_path, "0::/")
    stat = f"anon 5\nfile 9\ninactive_file {20 * MIB}\nactive_file 3\n"
    group(tmp_path, "", memory_max=f"{200 * MIB}\n", memory_current=f"{120 * MIB}\n", memory_stat=stat)
    assert container.memory(tmp_path) == container.Memory(total=200 * MIB, available=100 * MIB)


def test_the_tightest_of_the_groups_around_it_counts(tmp_path: Path) -> None:
    belongs_to(tmp_path, "0::/pods/server")
    group(tmp_path, "pods/server", memory_max="max\n", memory_current=f"{10 * MIB}\n")
    group(tmp_path, "pods", memory_max=f"{90 * MIB}\n", memory_current=f"{60 * MIB}\n")
    assert container.memory(tmp_path) == container.Memory(total=90 * MIB, available=30 * MIB)


def test_a_path_of_the_host_that_the_container_does_not_see_means_its_own_group(tmp_path: Path) -> None:
    belongs_to(tmp_path, "0::/docker/4711")
    group(tmp_path, "", memory_max=f"{90 * MIB}\n", memory_current=f"{60 * MIB}\n")
    assert container.memory(tmp_path).available == 30 * MIB


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    belongs_to(tmp_path, "3:cpu,cpuacct:/", "2:memory:/docker", "0::/")
    stat = f"inactive_file 1\ntotal_inactive_file {5 * MIB}\n"
    files = {"memory_limit_in_bytes": f"{90 * MIB}", "memory_usage_in_bytes": f"{60 * MIB}", "memory_stat": stat}
    group(tmp_path, "memory/docker", **files)
    group(tmp_path, "memory", memory_limit_in_bytes="9223372036854771712", memory_usage_in_bytes="1")
    assert container.memory(tmp_path) == container.Memory(total=90 * MIB, available=35 * MIB)


@pytest.mark.parametrize("used", [90, 95])
def test_more_in_use_than_granted_leaves_nothing(tmp_path: Path, used: int) -> None:
    belongs_to(tmp_path, "0::/")
    group(tmp_path, "", memory_max=f"{90 * MIB}", memory_current=f"{used * MIB}")
    assert container.memory(tmp_path).available == 0


def test_without_a_quota_cpu_time_is_not_limited(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    belongs_to(tmp_path, "1:cpu,cpuacct:/", "0::/")
    group(tmp_path, "", cpu_max="max 100000\n")
    group(tmp_path, "cpu", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert cpu_quota(tmp_path) is None


def test_the_smallest_quota_around_the_process_counts(tmp_path: Path) -> None:
    belongs_to(tmp_path, "0::/pods/server")
    group(tmp_path, "pods/server", cpu_max="800000 100000\n")
    group(tmp_path, "pods", cpu_max="350000 100000\n")
    assert cpu_quota(tmp_path) == 3.5


def test_a_quota_of_the_first_version_of_cgroups_counts_too(tmp_path: Path) -> None:
    belongs_to(tmp_path, "1:cpu,cpuacct:/docker")
    group(tmp_path, "cpu/docker", cpu_cfs_quota_us="200000\n", cpu_cfs_period_us="100000\n")
    assert cpu_quota(tmp_path) == 2.0
