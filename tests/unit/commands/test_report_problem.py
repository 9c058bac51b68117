"""``sglang-hybrid report-problem``: what the archive contains and what it must not contain."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from sglang_hybrid import __version__
from sglang_hybrid.commands.report_problem import archive, collect
from sglang_hybrid.commands.report_problem.main import main
from sglang_hybrid.commands.report_problem.redact import REMOVED, Redactor

HUB = "hf_" + "AbCdEfGhIjKlMnOpQrSt"
OPENAI = "sk-" + "proj-0123456789abcdefghij"
NAMES = Redactor(names={"/home/erika": "~", "erika": "USER", "gpu-box-7": "HOST"})


# -- what is removed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "server_args=ServerArgs(model_path='m', api_key='SECRETVALUE', port=30000)",
        "ServerArgs(admin_api_key='SECRETVALUE')",
        'command: ["serve", "--api-key", "SECRETVALUE", "--port", "30000"]',
        "python -m sglang.launch_server --api-key SECRETVALUE --port 30000",
        "--api-key=SECRETVALUE",
        "--ssl-keyfile-password SECRETVALUE",
        "HF_TOKEN=SECRETVALUE",
        "export WANDB_API_KEY='SECRETVALUE'",
        '{"password": "SECRETVALUE", "port": 1}',
        "my.aws_secret_access_key: SECRETVALUE",
        "Authorization: Bearer SECRETVALUE",
        "authorization: Basic SECRETVALUE==",
        "https://somebody:SECRETVALUE@index.example/simple",
        "https://SECRETVALUE@index.example/simple",
        "https://example/file?token=SECRETVALUE&x=1",
        "https://example/file?X=1&sig=SECRETVALUE",
        "Cookie: SECRETVALUE",
    ],
)
def test_a_secret_is_removed_from_a_line_and_the_rest_stays(line: str) -> None:
    told = Redactor().text(f"before {line} after")
    assert "SECRETVALUE" not in told and REMOVED in told
    assert told.startswith("before ") and told.endswith(" after")
    assert ("30000" in told) == ("30000" in line)


@pytest.mark.parametrize(
    "secret",
    [
        HUB,
        OPENAI,
        "ghp_" + "0123456789abcdefghijklmnop",
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "somebody@example.org",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_secret_is_known_by_its_form(secret: str) -> None:
    told = Redactor().text(f"the model was loaded with {secret}, see above")
    assert secret not in told and "MIIEow" not in told
    assert told.startswith("the model was loaded with [") and told.endswith("], see above")


@pytest.mark.parametrize(
    "line",
    [
        "budget_tokens=2048, max_total_num_tokens=123456, token_usage: 0.25, eos_token_id=2",
        "--max-total-tokens 24000 --chunked-prefill-size 512",
        "api_key=None, ssl_keyfile_password=None",
        "token usage: 0.01, gen throughput (token/s): 55.2",
        "#token: 812",
        "the token is missing; a key: value pair",
        "torch 2.13.0+cpu at http://127.0.0.1:30000/v1/models",
        "KeyError: 'model.layers.0.self_attn.k_proj.weight'",
    ],
)
def test_what_is_no_secret_stays(line: str) -> None:
    assert Redactor().text(line) == line


def test_values_of_variables_with_secret_names_are_removed_wherever_they_stand() -> None:
    redactor = Redactor.of_this_machine({"MY_TOKEN": "quite ordinary words", "EDITOR": "vi", "SHORT_TOKEN": "ab"})
    assert redactor.text("the server said: quite ordinary words; ab") == f"the server said: {REMOVED}; ab"


def test_names_of_user_home_and_host_are_replaced_as_whole_words() -> None:
    line = "gpu-box-7: /home/erika/models/m, user erika, erikas words, /home/somebody-else/x, /Users/him/y"
    assert NAMES.text(line) == "HOST: ~/models/m, user USER, erikas words, /home/USER/x, /Users/USER/y"


def test_the_names_of_this_machine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-17.example")
    redactor = Redactor.of_this_machine({"HOME": "/data/people/erika", "USER": "erika"})
    assert redactor.text("node-17.example:/data/people/erika/log by erika") == "HOST:~/log by USER"
    assert set(Redactor.of_this_machine({"HOME": "/", "USER": "root"}).names or {}) == {"node-17.example"}


def test_json_keeps_its_form_and_loses_its_secrets() -> None:
    found = {"api_key": "x", "HF_TOKEN": "", "list": [f"a {HUB}", 3, None], "deep": {"password": ["a"]}, "tokens": 5}
    assert Redactor().value(found) == {
        "api_key": REMOVED,
        "HF_TOKEN": "",
        "list": [f"a {REMOVED}", 3, None],
        "deep": {"password": REMOVED},
        "tokens": 5,
    }


# -- the archive -------------------------------------------------------------------------------------------------------


def unpacked(path: Path) -> dict[str, str]:
    found = {}
    with tarfile.open(path) as archive:
        for entry in archive.getmembers():
            assert (entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, "", "")
            assert entry.name.startswith("sglang-hybrid-report/")
            file = archive.extractfile(entry)
            assert file is not None
            found[Path(entry.name).name] = file.read().decode()
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return path and files of a report, made while environment and log contain secrets."""
    folder = tmp_path_factory.mktemp("report")
    log = folder / "server.log"
    log.write_text(f"server_args=ServerArgs(api_key='{OPENAI}')\nloading with {HUB}\nthe last line of the log\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", HUB)
        patch.setenv("SGLANG_API_KEY", "another one")
        patch.setenv("SGLANG_HYBRID_SET", '["recent_blocks=3"]')
        patch.setenv("SGLANG_HYBRID_CONFIG", "")
        patch.chdir(folder)
        arguments = ["--quick", "--log", str(log), "--out", "out.tar.gz", "--hybrid", "budget_tokens=4096"]
        assert main(arguments) == 0
    return folder / "out.tar.gz", unpacked(folder / "out.tar.gz")


def test_the_archive_has_what_a_bug_report_needs(report: tuple[Path, dict[str, str]]) -> None:
    _, files = report
    assert set(files) == {
        "versions.json", "doctor.json", "doctor.txt", "settings.yaml", "environment.json", "kernels.json", "log.txt",
    }  # fmt: skip
    versions = json.loads(files["versions.json"])
    assert versions["sglang-hybrid"] == __version__ and "torch" in versions["packages"]
    checks = {check["name"]: check["status"] for check in json.loads(files["doctor.json"])["checks"]}
    assert checks["CPU library"] == "ok" and checks["hooks"] == "skipped"
    assert "CPU library" in files["doctor.txt"]
    assert "budget_tokens: 4096  # override" in files["settings.yaml"]
    assert "recent_blocks: 3" in files["settings.yaml"]
    kernels = json.loads(files["kernels.json"])
    assert len(kernels["cpu"]["library"]["sha256"]) == 64 and kernels["cuda"]["sources"]
    assert files["log.txt"].rstrip().endswith("the last line of the log")


def test_the_archive_has_no_secrets_and_is_for_its_owner_only(report: tuple[Path, dict[str, str]]) -> None:
    path, files = report
    everything = "".join(files.values())
    assert HUB not in everything and OPENAI not in everything and "another one" not in everything
    assert json.loads(files["environment.json"])["SGLANG_API_KEY"] == REMOVED
    assert f"/home/{os.environ.get('USER', 'nobody')}" not in everything
    assert path.stat().st_mode & 0o077 == 0


def test_a_report_never_replaces_a_file(
    report: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = report
    before = path.read_bytes()
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(path)])
    assert ended.value.code == 2 and "there is a file already" in capsys.readouterr().err
    with pytest.raises(FileExistsError):  # a file that another process has made in the meantime
        archive.write(path, [])
    assert path.read_bytes() == before


def test_what_cannot_be_read_or_written_is_told_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, told in (
        (["--log", "/nowhere/server.log"], "there is no such file"),
        (["--out", "/nowhere/report.tar.gz"], "there is no such directory"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and told in capsys.readouterr().err


def test_a_part_that_cannot_be_had_says_why_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("illegal instruction")

    for name in ("versions", "run_doctor", "settings", "kernels"):
        monkeypatch.setattr(collect, name, broken)
    found = {part.name: part.text for part in collect.parts(collect.Wanted(log=Path("/nowhere")), Redactor())}
    for name in ("versions.json", "doctor.json", "doctor.txt", "settings.yaml", "kernels.json"):
        assert "illegal instruction" in found[name]
    assert "No such file" in found["log.txt"]
    assert isinstance(json.loads(found["environment.json"]), dict)


def test_of_a_long_log_the_end_is_kept_from_the_beginning_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "LOG_BYTES", 100)
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(100)))
    first, *lines = collect.end_of(tmp_path / "log").splitlines()
    assert "690 bytes are left out" in first
    assert lines[-1] == "line 99" and len(lines) == 12 and all(line.startswith("line ") for line in lines)


def test_settings_that_cannot_be_used_are_in_the_report_as_a_complaint() -> None:
    assert "did you mean policy?" in collect.settings(["--hybrid", "polcy=full"])
