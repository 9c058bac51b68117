"""The cores that a worker chooses, on invented machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.protocol.cores import (
    Core,
    CoresError,
    Placement,
    Topology,
    cpus_of_node,
    format_cpus,
    other_cpus,
    parse_cpus,
    pci_node,
    place,
    read_topology,
)


def machine(nodes: int, cores: int, hyperthreads: bool = True, quota: float | None = None) -> Topology:
    """Return a topology with Linux's CPU numbers: the first hardware threads of all cores, then the second ones."""
    total = nodes * cores
    siblings = (0, total) if hyperthreads else (0,)
    return Topology(
        tuple(Core(tuple(core + other for other in siblings), core // cores) for core in range(total)), quota
    )


def node_of(topology: Topology, cpu: int) -> int:
    return next(core.node for core in topology.cores if cpu in core.cpus)


def test_auto_takes_one_hardware_thread_of_every_core_and_leaves_some_cores_to_the_server() -> None:
    assert place(machine(1, 16), "auto", 0, 0) == Placement(12, 4, tuple(range(1, 13)))
    assert place(machine(1, 8), "auto", 0, 0) == Placement(6, 4, (1, 2, 3, 4, 5, 6))
    assert place(machine(1, 3), "auto", 0, 0) == Placement(2, 2, (1, 2))
    assert place(machine(1, 64), "auto", 0, 0).threads == 60


def test_every_further_rank_has_a_scheduler_which_needs_a_core() -> None:
    assert place(machine(1, 64), "auto", 0, 0, ranks=8).threads == 53
    assert place(machine(1, 16), "auto", 0, 0, ranks=8).threads == 12


@pytest.mark.parametrize("cores", [1, 2])
def test_a_host_with_few_cores_gets_one_thread_that_is_not_bound(cores: int) -> None:
    assert place(machine(1, cores), "auto", 0, 0) == Placement(1, 1)


def test_more_threads_than_cores_are_not_bound() -> None:
    assert place(machine(1, 8), "auto", 9, 0) == Placement(9, 4)


def test_as_many_threads_as_cores_use_all_of_them() -> None:
    assert place(machine(1, 4), "auto", 4, 2) == Placement(4, 2, (0, 1, 2, 3))


def test_cores_of_the_gpus_node_come_first() -> None:
    placed = place(replace(machine(2, 8), near=1), "auto", 0, 0)
    assert placed.cores == (*range(8, 16), *range(1, 5)), "core 0 serves interrupts and the scheduler"
    assert place(replace(machine(2, 8), near=1), "auto", 4, 0).cores == (8, 9, 10, 11)
    assert place(replace(machine(2, 8), near=0), "auto", 0, 0) == place(machine(2, 8), "auto", 0, 0)
    assert place(replace(machine(2, 8), near=7), "auto", 0, 0) == place(machine(2, 8), "auto", 0, 0)


def test_cores_of_other_workers_are_left_alone_unless_they_are_listed() -> None:
    sixteen = replace(machine(1, 16), taken=frozenset(range(1, 9)))
    assert place(sixteen, "auto", 0, 0) == Placement(6, 4, tuple(range(9, 15)))
    assert place(sixteen, "0-3", 0, 0).cores == (0, 1, 2, 3)
    assert place(replace(sixteen, taken=sixteen.cpus), "auto", 0, 0) == Placement(1, 1)
    # a core counts as taken if one of its hardware threads is taken
    assert 1 not in place(replace(machine(1, 8), taken=frozenset({9})), "auto", 0, 0).cores


def test_memory_comes_from_a_node_only_where_there_are_several() -> None:
    assert cpus_of_node(machine(2, 2, hyperthreads=False), 1) == {2, 3}
    assert cpus_of_node(machine(1, 4), 0) == cpus_of_node(machine(2, 2), None) == frozenset()


def test_what_is_left_beside_bound_threads_are_whole_cores() -> None:
    assert other_cpus(machine(1, 4), [1, 2]) == {0, 3, 4, 7}


def test_the_node_of_a_pci_device_may_be_unknown(tmp_path: Path) -> None:
    for address, text in (("0000:3b:00.0", "1\n"), ("0000:af:00.0", "-1\n")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    assert pci_node("0000:3b:00.0", tmp_path) == 1
    assert pci_node("0000:af:00.0", tmp_path) is pci_node("0000:d8:00.0", tmp_path) is None


def test_none_binds_nothing() -> None:
    assert place(machine(1, 8), "none", 0, 0) == Placement(6, 4)


def test_a_cpu_quota_bounds_the_default_number_of_threads() -> None:
    assert place(machine(1, 64, quota=4.5), "auto", 0, 0).threads == 3
    assert place(machine(1, 64, quota=0.5), "auto", 0, 0).threads == 1
    assert place(machine(1, 64, quota=4.5), "auto", 16, 0).threads == 16


@given(nodes=st.integers(1, 4), cores=st.integers(1, 24), threads=st.integers(0, 100), group_threads=st.integers(0, 16))
def test_a_placement_is_consistent_and_whole_groups_stay_on_one_node(
    nodes: int, cores: int, threads: int, group_threads: int
) -> None:
    topology = machine(nodes, cores)
    placed = place(topology, "auto", threads, group_threads)
    left = max(1, min(4, nodes * cores // 4))
    assert placed.threads == (threads or max(1, nodes * cores - left))
    assert 1 <= placed.group_threads <= placed.threads
    assert len(placed.cores) in (0, placed.threads)
    assert len({core.cpus for core in topology.cores if set(core.cpus) & set(placed.cores)}) == len(placed.cores)

    groups = [
        {node_of(topology, cpu) for cpu in placed.cores[first : first + placed.group_threads]}
        for first in range(0, len(placed.cores), placed.group_threads)
    ]
    crossing = [len(group) > 1 for group in groups]
    # only the last groups may cross nodes: they take the cores left over on each node, fewer than a group per node
    assert not any(crossing[: len(crossing) - nodes])


def test_listed_cores_are_used_in_their_order() -> None:
    assert place(machine(1, 8), "4-6,0", 0, 2) == Placement(4, 2, (4, 5, 6, 0))
    assert place(machine(1, 8), "4-6,0", 2, 0) == Placement(2, 2, (4, 5))


@pytest.mark.parametrize(
    ("cores", "threads", "says"),
    [
        ("6-9", 0, "8-9 cannot be used by this process, which may run on 0-7"),
        ("0-3", 5, "list more cores"),
        ("", 0, "neither a number nor a range"),
        ("all", 0, '"auto", "none" or a list'),
        ("3-1", 0, "not a range"),
        ("0,0-1", 0, "named twice"),
        ("0-99999", 0, "not a range"),
        ("-1", 0, "neither"),
        ("0,", 0, "neither"),
        ("٣", 0, "neither"),
    ],
)
def test_cores_that_cannot_be_had_are_refused_with_those_that_can(cores: str, threads: int, says: str) -> None:
    with pytest.raises(CoresError) as refused:
        place(machine(1, 8, hyperthreads=False), cores, threads, 0)
    assert says in str(refused.value)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_formatted_list_reads_back_as_the_same_cpus(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == sorted(cpus)


@given(st.text(alphabet="0123456789-, x", max_size=30))
def test_any_text_is_a_list_of_cpus_or_refused(text: str) -> None:
    try:
        cpus = parse_cpus(text)
    except ValueError:
        return
    assert cpus and len(set(cpus)) == len(cpus)


def test_the_topology_is_read_from_sysfs_for_allowed_cpus_only(tmp_path: Path) -> None:
    for cpu in range(8):
        directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        (directory / "topology").mkdir(parents=True)
        (directory / "topology/thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
        (directory / f"node{cpu % 4 // 2}").mkdir()
    assert read_topology({0, 1, 3, 5, 6}, tmp_path) == Topology(
        (Core((0,), 0), Core((1, 5), 0), Core((3,), 1), Core((6,), 1))
    )


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/system.slice/server.service", {"system.slice/cpu.max": "150000 100000", "cpu.max": "max 100000"}),
        (
            "0::/kubepods/pod1/server",
            {"kubepods/pod1/server/cpu.max": "150000 100000", "kubepods/cpu.max": "9000 1000"},
        ),
        ("0::/", {"cpu.max": "150000 100000"}),
        (
            "4:cpu,cpuacct:/docker/1",
            {"cpu/docker/1/cpu.cfs_quota_us": "3000", "cpu/docker/1/cpu.cfs_period_us": "2000"},
        ),
    ],
    ids=["slice", "pod", "container", "version 1"],
)
def test_the_quota_of_the_process_or_of_a_cgroup_around_it_bounds_the_threads(
    cgroup: str, files: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    (tmp_path / "sys/fs/cgroup" / cgroup.split(":/")[1]).mkdir(parents=True)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    topology = read_topology(range(8), tmp_path)
    assert topology.quota == 1.5
    assert place(topology, "auto", 0, 0).threads == 1


def test_where_the_system_tells_nothing_every_cpu_counts_as_a_core(tmp_path: Path) -> None:
    assert read_topology({2, 3}, tmp_path) == Topology((Core((2,)), Core((3,))))


def test_this_machine_has_a_topology_that_can_be_used() -> None:
    topology = read_topology()
    assert place(topology, format_cpus(topology.cpus), 0, 0).threads == len(topology.cpus)
