"""Dockerfiles copy files that exist, pin versions that agree with the package, and run commands that exist."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from docker_files import DOCKER, DOCKERFILES, ROOT, Dockerfile, Stage
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from worker_process import WorkerProcess, eventually, short_directory

from sglang_hybrid import __version__
from sglang_hybrid.integration.versions import INSTALLED

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [Requirement(text) for text in PROJECT["dependencies"]]
WORKER_DIRECTORY = "/run/sglang-hybrid/worker"
LABELS = ("title", "description", "licenses", "version", "revision")

each_file = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def is_sent(path: Path) -> bool:
    """Return True if .dockerignore leaves ``path`` in the build context. The last matching pattern decides."""
    sent = True
    name = path.relative_to(ROOT).as_posix()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        parts = [name, *(parent.as_posix() for parent in Path(name).parents)]
        inner = pattern.removeprefix("**/")
        tried = [Path(part).name for part in parts] if pattern != inner else [p for p in parts if "/" not in p]
        if any(fnmatch.fnmatch(part, inner) for part in tried if part not in (".", "")):
            sent = line.startswith("!")
    return sent


def pinned(requirements: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / requirements).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {one.name: one for one in found}


@each_file
def test_what_is_copied_exists_and_is_sent_to_the_builder(path: Path) -> None:
    file = Dockerfile.read(path)
    for stage in file.stages:
        for copy in stage.all("COPY"):
            *sources, _ = copy.words()
            if (name := copy.flag("from")) is not None:
                assert file.stage(name) in file.stages[: file.stages.index(stage)]
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                assert is_sent(ROOT / source), source
        for step in stage.all("RUN"):
            for mount in (
                dict(o.split("=") for o in value.split(",")) for name, value in step.flags if name == "mount"
            ):
                assert mount["type"] in ("cache", "bind")
                if mount["type"] == "bind" and "from" not in mount:
                    assert is_sent(ROOT / mount["source"]) and (ROOT / mount["source"]).is_dir()
                elif mount["type"] == "bind":
                    file.stage(mount["from"])


def test_what_was_built_on_this_machine_and_what_no_image_needs_stays_here() -> None:
    built = ("libsglang_hybrid_cpu.so", ".built-from", "__pycache__/library.cpython-311.pyc")
    for name in (*(f"sglang_hybrid/ops/cpu/{file}" for file in built), ".git", ".venv", "tests/conftest.py", "bench"):
        assert not is_sent(ROOT / name), name
    assert is_sent(ROOT / "kernels/cpu/CMakeLists.txt")


def sources(stage: Stage) -> set[str]:
    return {source for copy in stage.all("COPY") if not copy.flag("from") for source in copy.words()[:-1]}


@each_file
def test_all_that_a_wheel_or_the_installer_reads_is_copied(path: Path) -> None:
    needed = {"pyproject.toml", "setup.py", "MANIFEST.in", PROJECT["readme"], "LICENSE"}
    needed |= {"requirements", "tools", "configs", "kernels", "cpu_worker", "sglang_hybrid"}
    assert sources(Dockerfile.read(path).stage("build")) == needed


@each_file
def test_the_user_is_not_root_and_has_a_number(path: Path) -> None:
    final = Dockerfile.read(path).final
    user, group = final.last("USER").text.split(":")
    assert int(user) > 0 and int(group) > 0
    created = " ".join(step.text for step in final.all("RUN"))
    assert f"--gid {group} hybrid" in created and f"--uid {user} " in created
    after = final.instructions[final.instructions.index(final.last("USER")) :]
    assert not {"RUN", "COPY", "ADD"} & {one.name for one in after}
    assert {Dockerfile.read(other).final.last("USER").text for other in DOCKERFILES} == {f"{user}:{group}"}


@each_file
def test_labels_tell_what_the_image_is_and_of_which_version(path: Path) -> None:
    final = Dockerfile.read(path).final
    labels = dict(word.split("=", 1) for word in final.last("LABEL").words())
    assert set(labels) == {f"org.opencontainers.image.{name}" for name in LABELS}
    assert final.arguments()["VERSION"] == __version__ == PROJECT["version"]
    assert labels["org.opencontainers.image.version"] == "${VERSION}"
    assert labels["org.opencontainers.image.licenses"] == PROJECT["license"]


@each_file
def test_base_images_have_a_version(path: Path) -> None:
    for stage in Dockerfile.read(path).stages:
        image, _, tag = stage.base.partition(":")
        if image == "python":
            assert Version(tag.split("-")[0] + ".0") in SpecifierSet(PROJECT["requires-python"])
        else:
            assert (image, tag) == ("lmsysorg/sglang", f"v{INSTALLED['cuda']}")


def test_sglang_is_the_version_that_the_installer_takes() -> None:
    (wanted,) = (one.specifier for one in REQUIREMENTS if one.name == "sglang")
    assert Dockerfile.read(DOCKER / "Dockerfile.gpu").arguments["SGLANG_VERSION"] == INSTALLED["cuda"]
    cpu = Dockerfile.read(DOCKER / "Dockerfile.cpu").stage("build")
    assert cpu.arguments()["SGLANG_VERSION"] == INSTALLED["cpu"]
    assert all(Version(version) in wanted for version in INSTALLED.values())


def test_packages_beside_sglang_are_those_of_the_project() -> None:
    (step,) = Dockerfile.read(DOCKER / "Dockerfile.gpu").final.all("RUN")
    named = [word for word in step.words() if re.match(r"[a-z]+(>=[\d.]+)?$", word) and word in step.text]
    asked = {str(one) for one in REQUIREMENTS if one.name != "sglang"}
    assert asked <= set(named)
    assert {word for word in named if ">=" in word} <= asked


def test_pins_agree_with_the_projects_requirements() -> None:
    gpu = Dockerfile.read(DOCKER / "Dockerfile.gpu").final.arguments()
    assert str(pinned("cpu-no-deps.txt")["sglang-router"].specifier) == f"=={gpu['SGLANG_ROUTER_VERSION']}"
    worker = Dockerfile.read(DOCKER / "Dockerfile.worker").final.arguments()
    for argument, name in (("MSGSPEC_VERSION", "msgspec"), ("PYZMQ_VERSION", "pyzmq")):
        (wanted,) = (one.specifier for one in REQUIREMENTS if one.name == name)
        assert Version(worker[argument]) in wanted
    from installers import OLDEST_UV

    assert Version(worker["UV_VERSION"]) >= Version(".".join(map(str, OLDEST_UV)))
    assert worker["IPEX"] == "0"


@each_file
def test_all_arguments_are_used(path: Path) -> None:
    file = Dockerfile.read(path)
    for stage in file.stages:
        used = " ".join(one.text for one in stage.instructions if one.name != "ARG")
        assert {name for name in stage.arguments() if f"${{{name}}}" not in used} == set()


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_programs_write_below_volumes_only(name: str) -> None:
    final = Dockerfile.read(DOCKER / f"Dockerfile.{name}").final
    volumes = final.last("VOLUME").words()
    variables = final.variables()
    assert variables["HOME"] in volumes and final.last("WORKDIR").text in volumes
    for variable in ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        assert any(variables[variable].startswith(f"{volume}/") for volume in volumes)


def test_the_workers_health_check_succeeds_while_a_worker_runs() -> None:
    final = Dockerfile.read(DOCKER / "Dockerfile.worker").final
    assert final.last("ENTRYPOINT").words() == ["sglang-hybrid", "worker", "--dir", WORKER_DIRECTORY]
    with short_directory() as above:
        place = above / "w"
        check = [word.replace(WORKER_DIRECTORY, str(place)) for word in final.health_check()[1:]]
        assert subprocess.run([sys.executable, *check], cwd=ROOT, capture_output=True, check=False).returncode != 0
        with WorkerProcess(*final.last("CMD").words(), directory=place) as worker:
            assert eventually((place / "control.sock").exists)
            worker.ready()
            asked = subprocess.run([sys.executable, *check], cwd=ROOT, capture_output=True, text=True, check=False)
            assert (asked.returncode, asked.stdout) == (0, "idle\n"), asked.stderr
