"""Set-up by `make serve` before an environment exists: pip's settings for uv, the choice of an installer, steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import build_native
import clean
import compile_bytecode
import install
import installers
import pip_settings
import pytest
import steps
from installers import InstallError, Pip, Uv
from packaging.requirements import Requirement
from packaging.version import Version

from sglang_hybrid.integration.versions import INSTALLED, NEWEST_TESTED, OLDEST_TESTED, TESTED
from sglang_hybrid.ops.cpu import build as cpu_build

ROOT = Path(__file__).resolve().parents[2]
CPU_PLAN = " + torch==2.13.0+cpu\n + numpy==2.4.0\n"
CUDA_PLAN = " + torch==2.13.0\n + nvidia-cublas==13.1\n + cuda-toolkit==13.0\n"


def program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_settings_of_pips_environment_win_over_those_of_its_files() -> None:
    listed = "global.index-url='https://one/simple'\ninstall.find-links='/a /b'\n:env:.index-url='https://two/simple'\n"
    assert pip_settings.parse(listed) == {"index-url": "https://two/simple", "find-links": "/a /b"}


def test_lines_of_pip_that_are_no_settings_are_ignored() -> None:
    assert pip_settings.parse("WARNING: something=else\nglobal.retries=3\nwheel.find-links='/a'\n\n") == {}


def test_uv_gets_the_package_sources_that_pip_has(tmp_path: Path) -> None:
    settings = {
        "index-url": "https://own/simple",
        "extra-index-url": f"https://more/simple file://{tmp_path}",
        "find-links": f"{tmp_path} https://wheels/",
        "trusted-host": "own more",
        "cert": str(tmp_path),
        "proxy": "http://proxy:3128",
    }
    given = pip_settings.for_uv(settings, {})
    assert given["UV_DEFAULT_INDEX"] == "https://own/simple"
    assert given["UV_INDEX"] == f"https://more/simple file://{tmp_path}"
    assert given["UV_FIND_LINKS"] == f"{tmp_path},https://wheels/"
    assert given["UV_INSECURE_HOST"] == "own more"
    assert given["SSL_CERT_FILE"] == str(tmp_path)
    assert given["ALL_PROXY"] == "http://proxy:3128"
    assert given["UV_INDEX_STRATEGY"] == "unsafe-best-match"  # how pip chooses among indexes


def test_local_paths_that_do_not_exist_are_left_out(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    settings = {"find-links": f"{gone} {tmp_path}", "extra-index-url": f"file://{gone}", "cert": str(gone)}
    given = pip_settings.for_uv(settings, {})
    assert given["UV_FIND_LINKS"] == str(tmp_path)
    assert not {"UV_INDEX", "SSL_CERT_FILE"} & set(given)


def test_what_the_user_has_set_for_uv_stays() -> None:
    given = pip_settings.for_uv({"index-url": "https://pip/simple"}, {"UV_DEFAULT_INDEX": "https://uv/simple"})
    assert "UV_DEFAULT_INDEX" not in given


def test_without_pip_its_variables_are_read() -> None:
    environ = {"PIP_FIND_LINKS": "/wheels", "PIP_INDEX_URL": "", "HOME": "/root"}
    assert pip_settings.read(None, environ) == {"find-links": "/wheels"}


@pytest.fixture
def with_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that replaces uv and pip by the given shell commands."""

    def put(uv: str, pip: str) -> None:
        monkeypatch.setattr(installers, "find_uv", lambda python: program(tmp_path / "uv", uv))
        monkeypatch.setattr(installers, "pip_for", lambda python: [program(tmp_path / "pip", pip)])
        monkeypatch.setattr(installers, "pip_of_this_python", lambda: None)

    return put


def plan(text: str) -> str:
    return f"printf '{text}'".replace("\n", "\\n")


def report(*needed_by_torch: str) -> str:
    torch = {
        "name": "torch",
        "requires_dist": [f"{name}==13.0; platform_system == 'Linux'" for name in needed_by_torch],
    }
    text = json.dumps({"install": [{"metadata": torch}]}, indent=1)
    return f'cat << "END"\nWARNING: of pip\n{text}\nEND'


def test_uv_is_chosen_when_it_finds_a_torch_without_cuda(with_programs: Callable[[str, str], None]) -> None:
    with_programs(plan(CPU_PLAN), "exit 1")
    chosen, remark = installers.choose(Path("python"), ["torch"], without_cuda=True)
    assert (chosen.name, remark) == ("uv", "")


def test_uvs_own_source_of_cpu_builds_is_asked_before_cuda_is_taken(with_programs: Callable[[str, str], None]) -> None:
    with_programs(f'case "$*" in *--torch-backend=cpu*) {plan(CPU_PLAN)};; *) {plan(CUDA_PLAN)};; esac', "exit 1")
    chosen, _ = installers.choose(Path("python"), ["torch"], without_cuda=True)
    assert chosen.name == "uv --torch-backend=cpu"


def test_pip_is_chosen_when_only_pip_finds_a_torch_without_cuda(with_programs: Callable[[str, str], None]) -> None:
    with_programs(plan(CUDA_PLAN), report("numpy"))
    chosen, remark = installers.choose(Path("python"), ["torch"], without_cuda=True)
    assert isinstance(chosen, Pip)
    assert "would install torch with 2 CUDA packages" in remark


def test_a_cpu_host_never_gets_cuda_packages_unasked(with_programs: Callable[[str, str], None]) -> None:
    with_programs(plan(CUDA_PLAN), report("nvidia-cublas"))
    with pytest.raises(InstallError) as refused:
        installers.choose(Path("python"), ["torch"], without_cuda=True)
    assert refused.value.output.count("would install torch") == 3
    assert "--any-torch" in str(refused.value.hint)
    chosen, _ = installers.choose(Path("python"), ["torch"], without_cuda=False)
    assert chosen.name == "uv"


def test_pip_is_chosen_when_uv_does_not_work(with_programs: Callable[[str, str], None]) -> None:
    with_programs("echo 'error: no route'; exit 2", report())
    chosen, remark = installers.choose(Path("python"), ["torch"], without_cuda=True)
    assert isinstance(chosen, Pip)
    assert "error: no route" in remark


def test_an_old_uv_on_the_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "uv", "echo uv 0.4.30")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = program(tmp_path / "pip", f'echo "$@" > {tmp_path}/asked')
    monkeypatch.setattr(installers, "pip_for", lambda python: [asked])
    assert installers.find_uv(tmp_path / "venv" / "bin" / "python") == str(tmp_path / "venv" / "bin" / "uv")
    assert (tmp_path / "asked").read_text().split()[-1] == "uv"
    program(tmp_path / "uv", "echo uv 1.0.2")
    assert installers.find_uv(tmp_path / "venv" / "bin" / "python") == str(tmp_path / "uv")


def test_uv_gets_the_environments_python_and_pips_settings(tmp_path: Path) -> None:
    uv = program(tmp_path / "uv", 'echo "$@ $UV_FIND_LINKS"')
    said = Uv(uv, Path("/venv/bin/python"), {"UV_FIND_LINKS": "/wheels"}).install("--no-deps", "sglang")
    assert said.strip() == "pip install --python /venv/bin/python --no-deps sglang /wheels"


def test_a_step_takes_one_line_and_hides_what_commands_write(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    noisy = program(tmp_path / "noisy", "echo WARNING: noise; echo more >&2")

    def do() -> str:
        installers.run([noisy])
        return "built"

    steps.run_steps([steps.Step("kernels", do, "nothing")])
    assert capfd.readouterr().out.splitlines() == ["[1/1] kernels ... 0 s (built)", "ready after 0 s"]


def test_a_step_that_fails_shows_output_command_and_what_to_try(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = program(tmp_path / "broken", "echo no such index; exit 3")
    with pytest.raises(SystemExit) as ended:
        steps.run_steps([steps.Step("packages", lambda: installers.run([broken, "torch"]), "another index")])
    assert capfd.readouterr().out.startswith("[1/1] packages ... failed")
    assert str(ended.value).splitlines() == ["no such index", "", f"failed: {broken} torch", "try: another index"]


def test_the_cuda_version_of_an_installed_torch_is_read_without_importing_it(tmp_path: Path) -> None:
    version = tmp_path / "lib/python3.11/site-packages/torch/version.py"
    version.parent.mkdir(parents=True)
    version.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert install.cuda_of_torch(tmp_path / "bin" / "python") is None
    version.write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n")
    assert install.cuda_of_torch(tmp_path / "bin" / "python") == "13.0"


def test_parts_are_remembered_until_an_input_changes(tmp_path: Path) -> None:
    stamp = install.Stamp(tmp_path / "stamp", "one")
    assert stamp.parts() == []
    stamp.add(["serve"])
    stamp.add(["test", "pd"])
    assert stamp.parts() == ["pd", "serve", "test"]
    assert install.Stamp(tmp_path / "stamp", "two").parts() == []
    (tmp_path / "stamp").write_text("0123abcd")  # the format of older versions
    assert stamp.parts() == []


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path]]:
    """Return a source folder and a list of build directories, to which a stand-in for the compiler adds each build."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "a.cpp").write_text("one")
    builds: list[Path] = []

    def build(build_dir: Path, target: Path, jobs: int, *definitions: str) -> None:
        builds.append(build_dir)
        target.mkdir(exist_ok=True)
        (target / build_native.LIBRARY).write_text((folder / "a.cpp").read_text())

    monkeypatch.setattr(cpu_build, "SOURCE", folder)
    monkeypatch.setattr(build_native, "build", build)
    return folder, builds


def test_a_second_checkout_takes_the_library_from_the_cache(tmp_path: Path, sources: tuple[Path, list[Path]]) -> None:
    folder, builds = sources
    cache = tmp_path / "cache"
    for checkout, done in (("first", "built"), ("second", "from the cache"), ("second", "up to date")):
        target = tmp_path / checkout / "native"
        target.mkdir(parents=True, exist_ok=True)
        assert build_native.provide(tmp_path / checkout / "build", target, 1, cache) == done
        assert build_native.is_current(target)
        assert (target / build_native.LIBRARY).read_text() == "one"
    assert len(builds) == 1
    (folder / "a.cpp").write_text("two")
    assert not build_native.is_current(tmp_path / "second" / "native")
    assert build_native.provide(tmp_path / "second" / "build", tmp_path / "second" / "native", 1, cache) == "built"
    assert (tmp_path / "second" / "native" / build_native.LIBRARY).read_text() == "two"


def test_a_build_directory_that_moved_with_its_checkout_is_configured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "CMakeCache.txt"
    seen = []
    monkeypatch.setattr(cpu_build, "_run", lambda command: seen.append(cache.exists()))
    for place, kept in ((tmp_path, True), ("/elsewhere", False)):
        cache.write_text(f"CMAKE_CACHEFILE_DIR:INTERNAL={place}\n")
        build_native.build(tmp_path, tmp_path / "target", 1)
        assert seen[0] is kept
        seen.clear()


def test_clean_removes_what_the_checkout_made_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for made in (".venv/bin", ".venv-0.5.17", "build/native", "sglang_hybrid/ops/cpu/__pycache__", "kept"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "sglang_hybrid/ops/cpu/libsglang_hybrid_cpu.so").touch()
    (tmp_path / "sglang_hybrid/ops/cpu/library.py").touch()
    clean.clean_checkout(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["sglang_hybrid/ops/cpu/library.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "sglang_hybrid"]
    said = capsys.readouterr().out
    for removed in (".venv", ".venv-0.5.17", "build", "libsglang_hybrid_cpu.so"):
        assert f"removed {tmp_path / removed}" in said or removed in said


def test_clean_cache_removes_only_what_this_package_put_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("models/SmolLM2", "native", "cuda", "of somebody else"):
        (tmp_path / folder).mkdir(parents=True)
    clean.clean_cache(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["of somebody else"]
    assert capsys.readouterr().out.count("removed") == 3


def test_the_set_up_needs_nothing_but_the_standard_library() -> None:
    for program in ("install.py", "clean.py"):
        subprocess.run([sys.executable, "-E", "-S", ROOT / "tools" / program, "--help"], check=True)


def test_bytecode_is_made_once_for_what_servers_import(tmp_path: Path) -> None:
    for name in ("sglang/srt/server.py", "sglang/test/test_it.py", "transformers/models/bert/bert.py", "torch/nn.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("answer = 42\n")
    found = sorted(compile_bytecode.sources(tmp_path))
    assert found == [str(tmp_path / "sglang/srt/server.py"), str(tmp_path / "torch/nn.py")]
    assert not any(map(compile_bytecode.is_compiled, found))
    assert compile_bytecode.compile_files(found) == 2
    assert all(map(compile_bytecode.is_compiled, found))
    (tmp_path / "torch/nn.py").write_text("answer = 1234\n")
    assert not compile_bytecode.is_compiled(found[1])


def test_versions_are_those_of_sglangs_metadata_unless_we_name_them(tmp_path: Path) -> None:
    information = tmp_path / "lib/python3.11/site-packages/sglang-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        "Name: sglang\nRequires-Dist: torch==2.14.1\nRequires-Dist: Apache_TVM.ffi==0.1.11\nRequires-Dist: numpy\n"
        'Requires-Dist: some[cu13]==1.2; sys_platform == "linux"\nRequires-Dist: pytest==9; extra == "test"\n\nSGLang\n'
    )
    own = tmp_path / "cpu.txt"
    own.write_text("# for a CPU: ==\ntorch==2.13.0\napache-tvm-ffi==0.1.9\nnumpy>=2\n")
    pins = install.write_pins(tmp_path, own).read_text()
    assert pins.splitlines() == ["numpy", 'some==1.2; sys_platform == "linux"']


def test_every_place_with_a_version_of_sglang_agrees_with_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (accepted,) = (needed.specifier for needed in map(Requirement, project["dependencies"]) if needed.name == "sglang")
    newest = Version(NEWEST_TESTED)
    assert all(version in accepted for version in (*TESTED, f"{newest}.post1"))
    assert f"{newest.major}.{newest.minor}.{newest.micro + 1}" not in accepted
    assert list(TESTED) == sorted(TESTED, key=Version)
    assert set(INSTALLED.values()) <= set(TESTED)
    tried = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| SGLang |"))
    assert all(version in tried for version in (OLDEST_TESTED, NEWEST_TESTED, *INSTALLED.values()))


def test_a_step_that_uv_cannot_do_is_done_by_pip_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = program(tmp_path / "uv", "echo 'error: connection reset'; exit 2")
    pip = program(tmp_path / "pip", f'echo "$@" >> {tmp_path}/asked')
    monkeypatch.setattr(install, "pip_for", lambda python: [pip])
    setup = install.Setup(tmp_path, "cpu", NEWEST_TESTED, any_torch=False)
    setup._installer = Uv(uv, tmp_path / "bin" / "python", {})
    assert setup._install("sglang") == "by pip, because uv failed: error: connection reset"
    assert setup._install("pytest") is None  # pip is used from then on
    assert [line.split()[-1] for line in (tmp_path / "asked").read_text().splitlines()] == ["sglang", "pytest"]
