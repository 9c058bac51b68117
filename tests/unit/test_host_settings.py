"""The value of each setting that is ``auto`` on a host, and values that a host refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from sglang_hybrid import host
from sglang_hybrid.config import ConfigError, HybridConfig, describe, load_config
from sglang_hybrid.host import GIB, Host
from sglang_hybrid.host_settings import check, resolved
from sglang_hybrid.protocol.cores import Core, Topology

TWO_CORES = Topology((Core((0,)), Core((1,))))
LAPTOP = Host((), TWO_CORES, memory=16 * GIB, available=10 * GIB)
SIXTEEN_CORES = Topology(tuple(Core((cpu,)) for cpu in range(16)))
TWO_GPUS = (
    host.InstalledGpu("A", "0000:3b:00.0", ("GPU-3a00",)),
    host.InstalledGpu("B", "0000:af:00.0", ("GPU-3f21", "MIG-77")),
)
GPU_SERVER = Host(("NVIDIA H200",), SIXTEEN_CORES, memory=256 * GIB, available=200 * GIB)


def problem_of(where: Host, *overrides: str, ranks: int = 1) -> str:
    config = load_config(None, list(overrides))
    with pytest.raises(ConfigError) as caught:
        check(config, where, dict.fromkeys(config.by_key(), "override"), ranks)
    (problem,) = caught.value.problems
    return problem


# -- auto --------------------------------------------------------------------------------------------------------------


def test_every_setting_that_is_auto_is_resolved() -> None:
    config = HybridConfig()
    open_choices = {key for key, value in config.by_key().items() if value in ("auto", "default")}
    for where in (LAPTOP, GPU_SERVER):
        assert open_choices == resolved(config, where).keys()


def test_a_host_without_a_gpu_leaves_gpu_settings_unused() -> None:
    here = resolved(HybridConfig(), LAPTOP)
    assert here["digest_dtype"] == "model"
    assert here["scout.cpu_share"] == here["whole_requests"] == "unused: no GPU"
    assert here["host_memory"] == "7.00 GiB"  # 70 % of what is available
    without_profile = {"resident_bonus": "1.0", "recall_interval": "8", "min_miss_attention": "0.001"}
    assert {name: here[f"scout.{name}"] for name in without_profile} == without_profile


def test_recalls_are_rarer_where_misses_are_copied_to_a_gpu() -> None:
    for settings, interval in (([], "32"), (["scout.cpu_share=1"], "8"), (["profile=/p"], "what the profile says")):
        assert resolved(load_config(None, settings), GPU_SERVER)["scout.recall_interval"].startswith(interval)
    paper = resolved(load_config(None, ["policy=scoutattention"]), GPU_SERVER)
    assert paper["scoutattention.recall_interval"] == "8"


def test_predictions_are_calibrated_on_a_gpu_host_and_elsewhere_when_asked_for() -> None:
    default, asked = HybridConfig(), HybridConfig(profile="auto")
    assert resolved(default, GPU_SERVER)["prediction"] == resolved(asked, LAPTOP)["prediction"] == "calibrated"
    assert resolved(default, LAPTOP)["profile"] == "none"
    assert "fits" in resolved(default, GPU_SERVER)["profile"]


def test_a_gpu_host_gets_the_kernels_values() -> None:
    here = resolved(load_config(None, ["budget_tokens=1024"]), GPU_SERVER)
    assert here["scout.resident_tokens"] == "1024"
    assert here["digest_dtype"].startswith("int8")


def test_the_workers_threads_and_cores_are_those_it_would_start_with() -> None:
    here = resolved(load_config(None, ["worker=start"]), GPU_SERVER)
    assert (here["worker_threads"], here["worker_cores"]) == ("12", "1-12")
    without = resolved(load_config(None, ["worker=none"]), GPU_SERVER)
    assert without["worker_threads"] == without["worker_cores"] == "unused: no worker"


def test_what_a_profile_decides_is_left_to_the_profile() -> None:
    here = resolved(load_config(None, ["profile=/some/file"]), LAPTOP)
    assert here["prediction"] == "calibrated"
    for name in ("recall_interval", "min_miss_attention", "resident_bonus"):
        assert here[f"scout.{name}"] == "what the profile says, by layer"


def test_full_attention_uses_none_of_the_choices_but_memory_and_whole_requests() -> None:
    here = resolved(load_config(None, ["policy=full"]), GPU_SERVER)
    assert here.pop("host_memory") == "140.00 GiB"
    assert here.pop("whole_requests") == "while the running requests fit the resident blocks' memory"
    assert set(here.values()) == {"unused by policy full"}


def test_infinigen_predicts_without_a_worker() -> None:
    found = resolved(HybridConfig(policy="infinigen"), GPU_SERVER)
    assert (found["prediction"], found["worker"]) == ("raw", "unused by policy infinigen")
    assert found["profile"] == "what the server fits at its first start with a model"


def test_a_percentage_is_resolved_and_a_size_needs_no_resolution() -> None:
    assert resolved(load_config(None, ["host_memory=50%"]), LAPTOP)["host_memory"] == "5.00 GiB"
    assert "host_memory" not in resolved(load_config(None, ["host_memory=4GiB"]), LAPTOP)


def test_the_printed_settings_show_both_values_and_load_again(tmp_path: Path) -> None:
    config = load_config(None, ["worker=start"])
    text = describe(config, dict.fromkeys(config.by_key(), "default"), resolved(config, LAPTOP))
    assert "worker_threads: auto  # auto -> 1; default\n" in text
    file = tmp_path / "printed.yaml"
    file.write_text(text)
    assert load_config(file, []) == config


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_more_threads_than_cores_are_refused_with_the_legal_range() -> None:
    assert problem_of(LAPTOP, "worker_threads=99") == (
        "worker_threads=99 (override): this process may use 2 cores (0-1): must be auto, or 1 to 2"
    )
    check(load_config(None, ["worker_threads=2"]), LAPTOP)


def test_ranks_of_one_host_share_its_cores() -> None:
    check(load_config(None, ["worker_threads=8"]), GPU_SERVER, ranks=2)
    assert "must be auto, or 1 to 8 for each of 2 ranks" in problem_of(GPU_SERVER, "worker_threads=9", ranks=2)


def test_cores_that_do_not_exist_are_refused_with_those_that_do() -> None:
    assert "2-7 cannot be used by this process, which may run on 0-1" in problem_of(LAPTOP, "worker_cores=0-7")
    assert "list such as" in problem_of(LAPTOP, "worker_cores=first")


def test_more_memory_than_the_machine_has_is_refused_with_what_it_has() -> None:
    assert "has only 16.00 GiB of memory: must be less" in problem_of(LAPTOP, "host_memory=40GiB")
    check(load_config(None, ["host_memory=12GiB"]), LAPTOP)  # not available now, but perhaps when the server starts


def test_a_worker_started_by_hand_may_have_other_cores_than_this_process() -> None:
    check(load_config(None, ["worker=/run/w", "worker_threads=12", "worker_cores=2-13"]), LAPTOP)


def test_a_file_for_another_host_can_be_read_here() -> None:
    assert load_config(None, ["worker_threads=512", "worker_cores=0-511"]).worker_threads == 512


# -- the host ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "left"),
    [
        (None, ("A", "B")),
        ("", ()),
        ("-1", ()),
        ("1", ("B",)),
        ("1,0", ("B", "A")),
        ("0,7,1", ("A",)),
        ("GPU-3f", ("B",)),
        ("GPU-3f21,GPU-3a", ("B", "A")),
        ("MIG-77", ("B",)),
        ("MIG-GPU-3f21/1/0", ("B",)),
        ("GPU-3f,7,0", ("B",)),
    ],
)
def test_the_environment_hides_gpus_as_cuda_does(variable: str | None, left: tuple[str, ...]) -> None:
    assert tuple(gpu.name for gpu in host._visible(TWO_GPUS, variable)) == left


@pytest.mark.parametrize("uuid", ["GPU-3", "GPU-9", "MIG-7"], ids=["two GPUs", "none", "two instances"])
def test_a_uuid_that_names_no_known_gpu_is_told_once_and_no_node_is_near_it(
    uuid: str, caplog: pytest.LogCaptureFixture
) -> None:
    host._warn_of_unresolved.cache_clear()
    gpus = (*TWO_GPUS, host.InstalledGpu("C", "0000:d8:00.0", ("GPU-55", "MIG-78")))
    for _ in range(2):
        (found,) = host._visible(gpus, uuid)
        assert found == host.InstalledGpu(uuid, "")
    (message,) = caplog.messages
    assert f"CUDA_VISIBLE_DEVICES names {uuid}," in message and "nvidia-smi -L" in message


class OldNvml:
    """NVML of one GPU, of a driver that knows no MIG instances. A handle is a number."""

    UUIDS: ClassVar = {1: b"GPU-3f21", 2: b"MIG-77", 4: b"MIG-78"}  # by handle

    def nvmlDeviceGetHandleByIndex_v2(self, _index: Any, device: Any) -> int:
        device._obj.value = 1
        return 0

    def nvmlDeviceGetName(self, _device: Any, name: Any, _length: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetPciInfo_v3(self, _device: Any, pci: Any) -> int:
        pci._obj.bus = 0x3B
        return 0

    def nvmlDeviceGetUUID(self, device: Any, uuid: Any, _length: Any) -> int:
        uuid.value = self.UUIDS[device.value]
        return 0


class Nvml(OldNvml):
    """NVML of a GPU that has two of three possible MIG instances: instance 0 has handle 2, instance 2 has handle 4."""

    def nvmlDeviceGetMaxMigDeviceCount(self, _device: Any, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _device: Any, index: Any, instance: Any) -> int:
        instance._obj.value = index.value + 2
        return 6 if index.value == 1 else 0  # 6: NVML_ERROR_NOT_FOUND


@pytest.mark.parametrize(("nvml", "instances"), [(OldNvml(), ()), (Nvml(), ("MIG-77", "MIG-78"))], ids=["old", "new"])
def test_a_gpu_has_its_uuid_and_those_of_its_instances(nvml: OldNvml, instances: tuple[str, ...]) -> None:
    assert host._gpu(nvml, 0) == host.InstalledGpu("NVIDIA H200", "0000:3b:00.0", ("GPU-3f21", *instances))


def test_the_gpus_found_without_torch_are_as_many_as_torch_finds() -> None:
    import torch

    assert len(host.gpu_names()) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("line", "bfloat16", "float16"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 amx_bf16 amx_tile", True, False),
        ("flags : avx2 avx512_fp16", False, True),
        ("Features\t: fp asimd fphp asimdhp", False, False),
        ("Features : fp asimd i8mm bf16", True, False),
        ("", False, False),
    ],
)
def test_matrix_instructions_are_read_from_the_cpus_flags(
    tmp_path: Path, line: str, bfloat16: bool, float16: bool
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\n{line}\n")
    assert (host.multiplies_fast("bfloat16", file), host.multiplies_fast("float16", file)) == (bfloat16, float16)
