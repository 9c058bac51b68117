"""``sglang-hybrid doctor`` about GPUs, with output of nvidia-smi and files of /sys that a test provides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from doctor_machines import A100, H200, V100, machine, write, write_cores

from sglang_hybrid.commands.doctor import gpu
from sglang_hybrid.commands.doctor.gpu_query import LIST, Link, parse_gpus, visible
from sglang_hybrid.commands.doctor.report import Status
from sglang_hybrid.ops.cuda.sources import source_hash
from sglang_hybrid.ops.cuda.toolchain import Nvcc

H200_FOLDER = "sys/bus/pci/devices/0000:3b:00.0"


# -- nvidia-smi --------------------------------------------------------------------------------------------------------


def test_nvidia_smi_is_understood() -> None:
    (found,) = parse_gpus(H200 + "\n")
    assert (found.name, found.driver, found.capability, found.bus_id) == ("NVIDIA H200", "580.1", 90, "0000:3b:00.0")
    assert (found.link, found.best_link) == (Link(1, 16), Link(5, 16))
    assert str(found.best_link) == "PCIe 5 x16"


def test_values_that_nvidia_smi_does_not_know_are_unknown() -> None:
    (found,) = parse_gpus("GPU-1, GRID, 550.1, [N/A], 00000000:00:05.0, [N/A], [N/A], [N/A], [N/A]")
    assert (found.capability, found.link, found.best_link) == (None, None, None)


def test_a_message_of_nvidia_smi_is_no_gpu(tmp_path: Path) -> None:
    assert machine(tmp_path, "No devices were found").gpus == ()
    assert machine(tmp_path).gpus == ()


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [(None, "HAV"), ("", ""), ("2,0", "VH"), ("1,7,0", "A"), ("GPU-33,GPU-2", "VA"), ("-1", "")],
)
def test_cuda_visible_devices_chooses_gpus(variable: str | None, chosen: str) -> None:
    gpus = parse_gpus("\n".join((H200, A100, V100)))
    assert "".join(found.name.removeprefix("NVIDIA ")[0] for found in visible(gpus, variable)[0]) == chosen


def test_a_mig_instance_is_on_the_gpu_that_has_it(tmp_path: Path) -> None:
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-11)\nGPU 1: NVIDIA A100 (UUID: GPU-22)\n  MIG 1g.5gb Device 0: (UUID: MIG-7)\n"
    )

    def run(command: Sequence[str]) -> str:
        return listing if tuple(command) == LIST else "\n".join((H200, A100))

    found = machine(tmp_path, environment={"CUDA_VISIBLE_DEVICES": "MIG-7"}, run=run)
    assert [gpu.name for gpu in found.gpus] == ["NVIDIA A100"]


@pytest.mark.parametrize("variable", ["GPU-9", "GPU-", "0,GPU-9"])
def test_a_uuid_that_names_no_gpu_or_several_is_a_problem(variable: str, tmp_path: Path) -> None:
    found = gpu.driver(machine(tmp_path, H200, A100, environment={"CUDA_VISIBLE_DEVICES": variable}))
    assert found.status is Status.PROBLEM
    assert f"names {variable.removeprefix('0,')}: not exactly one GPU" in found.found
    assert "nvidia-smi -L" in found.to_do


# -- driver and CUDA ---------------------------------------------------------------------------------------------------


def test_the_driver_is_told(tmp_path: Path) -> None:
    assert gpu.driver(machine(tmp_path, H200, A100)).found == "NVIDIA H200, NVIDIA A100; driver 580.1"


def test_a_machine_without_a_gpu_needs_no_driver(tmp_path: Path) -> None:
    write(tmp_path, {f"{H200_FOLDER}/vendor": "0x8086\n", f"{H200_FOLDER}/class": "0x030000\n"})
    assert gpu.driver(machine(tmp_path)) == gpu.NO_GPU


def test_a_gpu_without_a_driver_is_found_on_the_bus(tmp_path: Path) -> None:
    write(tmp_path, {f"{H200_FOLDER}/vendor": "0x10de\n", f"{H200_FOLDER}/class": "0x030200\n"})
    found = gpu.driver(machine(tmp_path))
    assert found.status is Status.ADVICE
    assert "0000:3b:00.0" in found.found
    assert "--gpus all" in found.to_do


def test_hidden_gpus_are_told(tmp_path: Path) -> None:
    write(tmp_path, {f"{H200_FOLDER}/vendor": "0x10de\n", f"{H200_FOLDER}/class": "0x030200\n"})
    hidden = machine(tmp_path, environment={"CUDA_VISIBLE_DEVICES": ""}, run=lambda _command: H200)
    assert hidden.gpus == ()
    assert gpu.driver(hidden).found == "no GPU: CUDA_VISIBLE_DEVICES='' hides them"


@pytest.mark.parametrize(
    ("torchs", "drivers", "status"),
    [("13.0", "13.0", "ok"), ("12.8", "13.0", "ok"), ("13.0", "12.4", "problem"), (None, "13.0", "problem"),
     ("13.0", None, "advice")],
)  # fmt: skip
def test_the_driver_must_run_torchs_cuda(
    torchs: str | None, drivers: str | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "torch_cuda", lambda: torchs)
    monkeypatch.setattr(gpu, "driver_cuda", lambda: drivers)
    assert gpu.cuda(machine(tmp_path, H200)).status == status


def test_a_gpu_that_is_too_old_is_a_problem(tmp_path: Path) -> None:
    assert gpu.capability(machine(tmp_path, H200, A100)).found == "compute capability 8.0"
    found = gpu.capability(machine(tmp_path, H200, V100))
    assert found.status is Status.PROBLEM
    assert found.found == "compute capability 7.0, and the CUDA kernels need 8.0 or newer"


# -- NUMA --------------------------------------------------------------------------------------------------------------


def test_a_worker_on_the_gpus_node_is_fine(tmp_path: Path) -> None:
    write_cores(tmp_path, [range(8), range(8, 16)])
    write(tmp_path, {f"{H200_FOLDER}/numa_node": "0\n"})
    found = gpu.numa(machine(tmp_path, H200, cpus=8))
    assert (found.status, found.found) == ("ok", "GPU on node 0; the worker's CPUs 1-6 on node 0")


def test_a_worker_takes_cores_of_the_gpus_node_first(tmp_path: Path) -> None:
    write_cores(tmp_path, [range(8), range(8, 16)])
    write(tmp_path, {f"{H200_FOLDER}/numa_node": "1\n"})
    found = gpu.numa(machine(tmp_path, H200, cpus=16))
    assert found.status is Status.OK
    assert found.found.startswith("GPU on node 1; the worker's CPUs 1-4,8-15 on node 0,1; the GPU's node first")
    assert machine(tmp_path, H200, cpus=16).placement.cores == (*range(8, 16), *range(1, 5))


def test_a_worker_away_from_the_gpu_is_told_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cores(tmp_path, [range(8), range(8, 16)])
    write(tmp_path, {f"{H200_FOLDER}/numa_node": "1\n"})
    far = gpu.numa(machine(tmp_path, H200, cpus=8))
    assert far.to_do.startswith("Let this process use cores of node 1")
    monkeypatch.setenv("SGLANG_HYBRID_SET", '["worker_cores=0-3"]')
    listed = gpu.numa(machine(tmp_path, H200, cpus=16))
    assert listed.status is Status.ADVICE and "worker_cores=auto" in listed.to_do


@pytest.mark.parametrize("text", ["-1\n", None])
def test_a_gpu_whose_node_is_unknown_is_no_reason_to_worry(text: str | None, tmp_path: Path) -> None:
    if text:
        write(tmp_path, {f"{H200_FOLDER}/numa_node": text})
    assert gpu.numa(machine(tmp_path, H200)).status is Status.OK


# -- PCIe --------------------------------------------------------------------------------------------------------------


def test_an_idle_gpu_with_a_slow_link_is_fine_and_one_with_few_lanes_is_not(tmp_path: Path) -> None:
    idle = gpu.link(machine(tmp_path, H200))
    assert (idle.status, idle.found) == ("ok", "PCIe 1 x16, at best PCIe 5 x16")
    narrow = gpu.link(machine(tmp_path, H200, A100))
    assert (narrow.status, narrow.found) == ("advice", "PCIe 4 x8, at best PCIe 4 x16")


@pytest.mark.parametrize(("rate", "status"), [(55.04, "ok"), (12.0, "advice"), (None, "problem")])
def test_copies_are_compared_with_what_the_link_carries(
    rate: float | None, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "copy_rate", lambda: rate)
    found = gpu.copies(machine(tmp_path, H200))
    assert found.status == status
    assert found.measurements == ({} if rate is None else {"pcie_copy_gb_s": round(rate, 1)})


# -- CUDA kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nvcc", "is_built", "status", "word"),
    [
        (Nvcc(Path("nvcc"), "13.0.88"), True, "ok", ""),
        (None, True, "ok", ""),
        (Nvcc(Path("nvcc"), "13.0.88"), False, "advice", "--arch 90"),
        (None, False, "problem", "CUDA_HOME"),
    ],
)
def test_kernels_must_be_compiled_or_a_compiler_be_there(
    nvcc: Nvcc | None, is_built: bool, status: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(gpu, "find_built", lambda architecture: Path("there.so") if is_built else None)
    found = gpu.kernels(machine(tmp_path, H200))
    assert found.status == status
    assert word in found.to_do


def test_kernels_are_found_in_the_cache_and_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_hybrid.ops.cuda import build

    monkeypatch.setenv("SGLANG_HYBRID_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("something was compiled"))
    assert build.find_built(90) is None
    elsewhere = tmp_path / "cuda" / f"{source_hash()}-sm90-nvcc13.0.88.so"
    write(tmp_path, {f"cuda/{elsewhere.name}": ""})
    assert build.find_built(90) == elsewhere == build.built(90)
    monkeypatch.setattr(build, "find_nvcc", lambda: Nvcc(Path("nvcc"), "12.8.1"))  # needs its own library
    assert build.find_built(90) is None
