"""The report of ``sglang-hybrid eval``: table, file and figures."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import io
import json
import math
import struct
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import record
from sglang_hybrid import origin as origin_module
from sglang_hybrid.commands.eval import plots
from sglang_hybrid.commands.eval.report import document, print_report, write_json, write_report
from sglang_hybrid.commands.eval.result import NeedleGrid, Run, TaskResult

ROOT = Path(__file__).resolve().parents[3]
GRID = NeedleGrid((512, 1024, 6000), (0.0, 0.5, 1.0), ((1.0, 1.0, 0.5), (0.0, 0.25, None), (1.0, 0.75, 1.0)))
FULL = Run(
    "full",
    {"policy": "full"},
    (TaskResult("needle", "found", (1.0,) * 20, {512: 1.0, 1024: 1.0}), TaskResult("lines", "found", (1.0, 0.0))),
    perplexity=5.0,
    loss_by_prompt=(1.6, 1.6),
    kl_mean=0.0,
    kl_p95=0.0,
    top1_agreement=1.0,
    needle=GRID,
)
SCOUT = Run(
    "scout [1024]",  # brackets are markup for rich
    {"policy": "scout", "budget_tokens": 1024},
    (TaskResult("needle", "found", (1.0, 0.0) * 10, {512: 0.75, 1024: 0.25}),),
    perplexity=5.5,
    loss_by_prompt=(1.7, 1.7),
    kl_mean=0.0123,
    kl_p95=0.0456,
    top1_agreement=0.97,
    cpu_ratio=0.081,
    needle=GRID,
)


def printed(*runs: Run) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_report(runs, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.removeprefix("│").strip().startswith(name))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


# -- table -------------------------------------------------------------------------------------------------------------


def test_the_table_has_a_column_for_each_run_and_its_difference_from_the_first() -> None:
    text = printed(FULL, SCOUT)
    assert "Accuracy against full" in text and "scout [1024]" in text
    full, scout = row(text, "needle (found, 20 prompts)")
    assert full == "100.0%"
    assert scout.startswith("50.0% -50.0 [-7") and scout.endswith("]")
    assert row(text, "1k tokens") == ["100.0%", "25.0%"]
    assert row(text, "perplexity") == ["5.000", "5.500 +10.52% [+10.52%, +10.52%]"]
    assert row(text, "KL mean") == ["0.0000", "0.0123"]
    assert row(text, "same best token") == ["100.0%", "97.0%"]
    assert "scout [1024]: policy=scout, budget_tokens=1024" in text


def test_what_a_run_has_not_measured_is_a_dash_and_what_none_has_is_no_row() -> None:
    text = printed(FULL, SCOUT)
    assert row(text, "lines") == ["50.0%", "-"]
    assert row(text, "CPU ratio") == ["-", "8.1%"]
    alone = printed(Run("full", perplexity=4.0))
    assert row(alone, "perplexity") == ["4.000"]
    assert "KL" not in alone and "needle" not in alone and "full: default settings" in alone
    assert row(printed(Run("full"), Run("other", perplexity=4.0)), "perplexity") == ["-", "4.000"]


def test_two_runs_of_one_name_and_no_runs_are_refused() -> None:
    for runs in ((FULL, FULL), ()):
        with pytest.raises(ValueError, match="a different name for each"):
            printed(*runs)
        with pytest.raises(ValueError, match="a different name for each"):
            document(runs)


# -- file --------------------------------------------------------------------------------------------------------------


def test_the_file_says_where_it_comes_from_and_has_everything(tmp_path: Path) -> None:
    read = json.loads(
        write_json(tmp_path / "new" / "eval.json", [FULL, SCOUT], "sglang-hybrid eval --quick").read_text()
    )
    assert read["origin"]["command"] == "sglang-hybrid eval --quick"
    assert {"commit", "date", "machine", "python"} <= set(read["origin"])
    assert read["baseline"] == "full"
    full, scout = read["runs"]
    assert {field.name for field in dataclasses.fields(Run)} <= set(scout)
    assert full["difference_from_baseline"] is None
    assert scout["difference_from_baseline"]["tasks"]["needle"]["mean"] == -0.5
    assert scout["tasks"][0]["score"] == 0.5 and len(scout["tasks"][0]["scores"]) == 20
    assert scout["needle"]["accuracy"][1] == [0.0, 0.25, None]


def test_infinities_and_paths_become_what_json_has(tmp_path: Path) -> None:
    run = Run("full", {"model": tmp_path}, perplexity=math.inf, loss_by_prompt=(math.inf,))
    (entry,) = json.loads(write_json(tmp_path / "eval.json", [run]).read_text())["runs"]
    assert entry["perplexity"] is None and entry["settings"] == {"model": str(tmp_path)}


def test_an_installed_package_does_not_ask_the_repository_around_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RESULT_COMMIT", "abc1234")
    assert origin_module.origin()["commit"] == "abc1234"
    monkeypatch.delenv("RESULT_COMMIT")
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(origin_module, "ROOT", tmp_path)
    assert not origin_module.origin()["commit"]
    assert origin_module.origin()["uncommitted_changes"] is None


@pytest.mark.parametrize(
    ("module", "command"), [("bench.throughput", "bench.throughput"), ("pytest.__main__", "pytest")]
)
def test_the_origin_of_a_module_that_was_run_names_the_module(
    module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", importlib.machinery.ModuleSpec(module, None))
    monkeypatch.setattr(sys, "argv", ["/anywhere/throughput.py", "--quick"])
    assert origin_module.origin()["command"] == f"python -m {command} --quick"


def test_bench_record_writes_results_with_the_same_origin(tmp_path: Path) -> None:
    assert record.RESULTS == ROOT / "bench" / "results"
    path = record.write_result("any", {"value": 1}, tmp_path / "result.json")
    read = json.loads(path.read_text())
    assert list(read) == ["origin", "value"] and set(read["origin"]) == set(origin_module.origin())


# -- figures -----------------------------------------------------------------------------------------------------------


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_report_writes_the_figures_that_it_has_values_for(tmp_path: Path) -> None:
    written = write_report(tmp_path / "all", [FULL, SCOUT])
    assert [path.name for path in written] == ["eval.json", "needle.png", "perplexity.png"]
    assert all(min(size(path)) > 200 for path in written[1:])
    assert [path.name for path in write_report(tmp_path / "few", [Run("full")])] == ["eval.json"]


def test_bars_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    runs = [Run("full"), Run("scout", perplexity=math.inf, kl_mean=0.1)]
    assert min(size(plots.text_bars(tmp_path / "bars.png", runs))) > 100


def test_ratio_curves_need_a_value_for_every_step(tmp_path: Path) -> None:
    curves = {"without recall": [0.1, 0.2, 0.3], "with recall": [0.1, 0.05, 0.1]}
    assert min(size(plots.ratio_curves(tmp_path / "ratio.png", range(3), curves, 0.12))) > 200
    with pytest.raises(ValueError, match="'without recall' has 3 values for 2 steps"):
        plots.ratio_curves(tmp_path / "ratio.png", range(2), curves, 0.12)


def test_lengths_are_labelled_in_units_of_1024_where_they_are_such() -> None:
    assert [plots.tokens_label(tokens) for tokens in (512, 1024, 6000, 131072)] == ["512", "1k", "6000", "128k"]
