"""``sglang-hybrid size`` from the command line: JSON, notes, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from size_cases import LLAMA

from sglang_hybrid import cli
from sglang_hybrid.commands.size.main import main

MACHINE = ["--gpu-memory", "48GB", "--host-memory", "512GB", "--context", "32k", "--answer", "1k"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_HYBRID_CONFIG", "SGLANG_HYBRID_SET"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def sized(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_json_has_requests_limits_bytes_rates_and_purchases_of_both(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = sized(capsys, model, *MACHINE)
    for side in (answer["stock"], answer["hybrid"]):
        assert side["requests"] > 0 and side["limited_by"] in ("GPU memory", "host memory")
        assert side["decode_estimate"]["tokens_per_s"] > 0 and side["to_double"]["requests"] == 2 * side["requests"]
        on_gpu = [count for kind, count in side["bytes"].items() if kind != "host_kv"]
        assert sum(on_gpu) == 48 * 10**9 and min(on_gpu) >= 0
    assert answer["hybrid"]["bytes"]["host_kv"] == answer["hybrid"]["requests"] * answer["request"]["kv_bytes"]
    assert {"resident_slots", "scores", "digests", "sketches", "staging"} < set(answer["hybrid"]["bytes"])
    assert answer["assumptions"]["mem_fraction_static"] == 0.85
    assert all(abs(one["error"]) < 0.15 for one in answer["basis"]["results"])


def test_the_flags_of_the_server_that_the_numbers_hold_for_are_given(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = sized(capsys, model, *MACHINE, "--tp", "2", "--hybrid", "budget_tokens=1024")
    flags = " ".join(answer["serve"])
    assert f"--max-running-requests {answer['hybrid']['requests']} --context-length 33792" in flags
    assert flags.endswith("--mem-fraction-static 0.85 --tp-size 2 --hybrid budget_tokens=1024")


def test_a_smaller_budget_lets_more_requests_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    default = sized(capsys, model, *MACHINE)
    smaller = sized(capsys, model, *MACHINE, "--hybrid", "budget_tokens=512")
    assert smaller["hybrid"]["requests_by_gpu_memory"] > default["hybrid"]["requests_by_gpu_memory"]
    assert smaller["stock"] == default["stock"]


def test_rates_of_other_hardware_change_the_estimate_and_are_named(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    default = sized(capsys, model, *MACHINE)
    other = sized(capsys, model, *MACHINE, "--gpu-bandwidth", "1", "--pcie", "25", "--memory-bandwidth", "60")
    assert other["assumptions"]["rates_given"] == ["gpu_tb_s", "memory_gb_s", "pcie_gb_s"]
    assert other["hybrid"]["requests"] == default["hybrid"]["requests"]
    rates = [one["hybrid"]["decode_estimate"]["tokens_per_s"] for one in (other, default)]
    assert rates[0] < rates[1]
    assert any("rates are those of one H200" in note for note in default["notes"])


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        ({"--context": "256k"}, "the model was made for 131072"),
        ({"--gpu-memory": "12GB"}, "nothing is left for requests"),
        ({"--host-memory": "64GB"}, "host_memory=auto makes 44.8 of 64.0 GB the host pool"),
        ({"--host-memory": "4TB", "--context": "4k"}, "at most 77 requests were measured"),
        ({"--tp": "2"}, "several GPUs were never measured"),
    ],
)
def test_a_note_says_where_an_answer_is_less_than_it_seems(
    changed: dict[str, str], note: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = dict(zip(MACHINE[::2], MACHINE[1::2], strict=True)) | changed
    answer = sized(capsys, model, *(word for pair in flags.items() for word in pair))
    assert any(note in one for one in answer["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu-memory", "24"], "'24' is no size: write a number above 0 with its unit, such as 24GB"),
        (["--context", "much"], "such as 4000 or 32k"),
        (["--tp", "0"], "--tp 0 must be a whole number from 1 on"),
        (["--tp", "5"], "take one of 1, 2, 4, 8"),
        (["--pcie", "0"], "--pcie 0 must be above 0"),
        (["--gpu-bandwidth", "nan"], "--gpu-bandwidth nan must be above 0"),
        (["--mem-fraction-static", "1.5"], "must be above 0 and below 1"),
        (["--hybrid", "budgt_tokens=1"], "did you mean budget_tokens?"),
        (["--hybrid", "host_memory=1TB"], "asks for 931.32 GiB, but only 476.84 GiB"),
    ],
)
def test_wrong_input_ends_with_what_is_possible(
    arguments: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, *MACHINE, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang-hybrid size: ") and said in error


def test_the_command_loads_neither_torch_nor_sglang(model: str) -> None:
    look = (
        "import sys\nfrom sglang_hybrid import cli\ntry:\n    cli.main(sys.argv[1:])\nexcept SystemExit as end:\n"
        "    assert end.code == 0\nprint('LOADED', *({'torch', 'sglang', 'numpy'} & sys.modules.keys()))"
    )
    called = [sys.executable, "-c", look, "size", model, *MACHINE]
    done = subprocess.run(called, capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_the_command_is_in_the_table_of_commands() -> None:
    assert "  size " in cli.help_text()


def test_a_cache_in_fp8_halves_what_requests_take_on_both_sides(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ("--hybrid", "scout.slot_dtype=model")  # of a 16-bit cache; slots of 8 bits are halved already
    whole, half = (sized(capsys, model, *MACHINE, *plain, *more) for more in ([], ["--kv-cache-dtype", "fp8_e4m3"]))
    assert half["request"]["kv_bytes"] * 2 == whole["request"]["kv_bytes"]
    assert (whole["request"]["kv_cache_dtype"], half["request"]["kv_cache_dtype"]) == ("bfloat16", "fp8_e4m3")
    assert half["stock"]["requests"] >= 2 * whole["stock"]["requests"]
    assert half["hybrid"]["requests"] > whole["hybrid"]["requests"]
    assert "--kv-cache-dtype fp8_e4m3" in " ".join(half["serve"]) and any("FP8" in note for note in half["notes"])


def test_policies_that_have_no_kernels_for_fp8_are_not_sized_with_it(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, *MACHINE, "--kv-cache-dtype", "fp8_e4m3", "--hybrid", "policy=hgca"]) == 2
    assert "policy=hgca over an FP8 KV cache" in capsys.readouterr().err
