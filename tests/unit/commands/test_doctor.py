"""``sglang-hybrid doctor``: its report, the order of its checks, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_machines import H200, machine

from sglang_hybrid import cli
from sglang_hybrid.commands.doctor import main as doctor
from sglang_hybrid.commands.doctor.examine import CHECKS, Check, examine
from sglang_hybrid.commands.doctor.machine import CommandError, Machine, run_command
from sglang_hybrid.commands.doctor.report import Finding, Report, Status, advice, ok, problem, skipped

STATUSES = {"ok", "advice", "problem", "skipped"}


def fails(_machine: Machine) -> Finding:
    raise OSError("the disk is gone")


def exits(_machine: Machine) -> Finding:
    sys.exit("sglang-hybrid: no")


# -- report ------------------------------------------------------------------------------------------------------------


def test_whatever_is_not_ok_says_what_to_do() -> None:
    for status in (Status.ADVICE, Status.PROBLEM, Status.SKIPPED):
        with pytest.raises(ValueError, match="with the advice ''"):
            Finding(status, "something")
    with pytest.raises(ValueError, match="is ok with the advice"):
        Finding(Status.OK, "something", "Do nothing.")


def test_only_a_problem_makes_the_exit_status_one() -> None:
    fine = {"a": ok("x"), "b": advice("x", "Do y."), "c": skipped("x", "Do y.")}
    assert Report({}, fine).exit_status == 0
    assert Report({}, fine | {"d": problem("x", "Do y.")}).exit_status == 1


def test_measurements_of_all_checks_come_together() -> None:
    report = Report({"torch": None}, {"a": ok("x", read_gb_s=2.5), "b": advice("x", "Do y.", copy_gb_s=1.0)})
    assert report.as_json() == {
        "versions": {"torch": None},
        "checks": [
            {"name": "a", "status": "ok", "found": "x", "to_do": None},
            {"name": "b", "status": "advice", "found": "x", "to_do": "Do y."},
        ],
        "measurements": {"read_gb_s": 2.5, "copy_gb_s": 1.0},
    }


# -- order of checks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("find", "error"), [(fails, "OSError: the disk is gone"), (exits, "SystemExit: sglang-hybrid: no")]
)
def test_a_check_that_raises_is_a_problem_and_the_others_go_on(find: object, error: str, tmp_path: Path) -> None:
    checks = [Check("bad", find), Check("good", lambda _: ok("fine"))]  # type: ignore[arg-type]
    report = examine(machine(tmp_path), checks=checks)
    assert report.findings["bad"].status is Status.PROBLEM
    assert report.findings["bad"].found == f"the check failed: {error}"
    assert report.findings["good"] == ok("fine")


def test_checks_of_a_gpu_are_skipped_without_one(tmp_path: Path) -> None:
    report = examine(machine(tmp_path), quick=True)
    for check in CHECKS:
        if check.needs_gpu:
            assert (report.findings[check.name].status, report.findings[check.name].found) == ("skipped", "no GPU")


def test_a_quick_examination_runs_nothing_slow(tmp_path: Path) -> None:
    slow = [Check("slow", fails, is_slow=True), Check("slow, on a GPU", fails, needs_gpu=True, is_slow=True)]
    for finding in examine(machine(tmp_path, H200), quick=True, checks=slow).findings.values():
        assert (finding.status, finding.found) == ("skipped", "--quick")
        assert "without --quick" in finding.to_do
    assert {"memory bandwidth", "PCIe copies", "hooks"} == {check.name for check in CHECKS if check.is_slow}


def test_one_cause_is_one_problem(tmp_path: Path) -> None:
    checks = [Check("cause", fails), Check("effect", fails, after="cause")]
    report = examine(machine(tmp_path), checks=checks)
    assert report.count(Status.PROBLEM) == 1
    assert report.findings["effect"].to_do == "Solve the problem of cause first."


def test_a_check_comes_after_those_that_it_needs() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for check in CHECKS:
        assert check.after is None or check.after in names[: names.index(check.name)]


def test_an_empty_machine_is_examined_without_an_error_of_a_check(tmp_path: Path) -> None:
    """The machine has neither /proc nor /sys nor /dev, as in a sandbox."""
    report = examine(machine(tmp_path, "GPU-1, GPU, 1, [N/A], 0:0:0.0, [N/A], [N/A], [N/A], [N/A]"), quick=True)
    assert [found for finding in report.findings.values() if "check failed" in (found := finding.found)] == []


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_command_that_fails_is_quoted_by_its_last_line() -> None:
    with pytest.raises(CommandError, match=r"^that is why$"):
        run_command([sys.executable, "-c", "import sys; print('a line'); sys.exit('first\\nthat is why')"])
    with pytest.raises(CommandError, match="ended with status 3"):
        run_command([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(CommandError, match="No such file"):
        run_command(["/no/such/program"])


def test_the_table_lists_problems_before_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = {"pages": advice("small [ones]", "Use [huge] ones."), "torch": problem("none", "Install torch.")}
    monkeypatch.setattr(doctor, "_examine", lambda *, quick: Report({}, findings))
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "small [ones]" in printed  # brackets are text, not markup
    assert printed.index("torch: Install torch.") < printed.index("pages: Use [huge] ones.")
    assert printed.endswith("0 ok, 1 advice, 1 problem, 0 skipped\n")


def test_what_libraries_print_is_kept_out_of_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def noisy(*, quick: bool) -> Report:
        print("loading kernels")
        return Report({}, {"quick": ok(str(quick))})

    monkeypatch.setattr(doctor, "_examine", noisy)
    assert doctor.main(["--json", "--quick"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["checks"][0]["found"] == "True"
    assert printed.err == "loading kernels\n"


def test_ctrl_c_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*, quick: bool) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_examine", interrupted)
    assert doctor.main([]) == 130


def test_help_describes_the_json_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for word in ("--quick", '"versions"', '"checks"', '"measurements"', '"to_do"', "exit status"):
        assert word in printed


def test_this_machine_is_examined_as_json() -> None:
    command = [sys.executable, "-m", "sglang_hybrid.cli", "doctor", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    report = json.loads(done.stdout)
    assert report.keys() == {"versions", "checks", "measurements"}
    assert report["measurements"] == {}
    assert {"sglang-hybrid", "python", "torch", "sglang"} <= report["versions"].keys()
    assert [check["name"] for check in report["checks"]] == [check.name for check in CHECKS]
    for check in report["checks"]:
        assert check.keys() == {"name", "status", "found", "to_do"}
        assert check["status"] in STATUSES
        assert check["found"]
        assert (check["to_do"] is None) == (check["status"] == "ok")
        assert "the check failed" not in check["found"]
    assert done.returncode == int(any(check["status"] == "problem" for check in report["checks"]))
    assert "Traceback" not in done.stderr
