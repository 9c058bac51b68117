"""Execute the steps of Dockerfiles with a container builder, or in a chroot over a fresh Debian.

Without a builder, the tests need root and debootstrap. ``SGLANG_HYBRID_CLEAN_ROOT`` may name a directory that
debootstrap made earlier: bookworm with python3, python3-pip, python3-venv and ca-certificates.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_files import DOCKER, ROOT, Dockerfile, Instruction, Stage, substitute

from sglang_hybrid import __version__

BUILDERS = ("docker", "podman", "buildah")
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
CHECKS = {  # Python code that the finished image runs as its user
    "cpu": "import torch, sglang, sglang_router, mooncake; from sglang_hybrid.ops.cpu.library import variants; "
    "print(variants(), torch.version.cuda)",
    "worker": "from sglang_hybrid.ops.cpu.library import variants; import cpu_worker.main; print(variants(), None)",
}


@functools.cache
def builder() -> list[str] | None:
    """Return the build command of a container builder that works on this machine, or None."""
    for name in BUILDERS:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return [name, "build"]
    return None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root directory that replaces the image python:3.11-slim-bookworm."""
    if os.geteuid() != 0:
        pytest.skip("no docker, podman or buildah works here, and a chroot needs root")
    if given := os.environ.get("SGLANG_HYBRID_CLEAN_ROOT"):
        return Path(given)
    if not shutil.which("debootstrap"):
        pytest.skip("neither docker, podman or buildah nor debootstrap works here")
    root = tmp_path_factory.mktemp("bookworm")
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"debootstrap cannot make a root here: {made.stdout.strip().splitlines()[-1]}")
    return root


class CleanRoot:
    """An overlay over the base, in which the steps of one stage run. The base is not written to."""

    def __init__(self, base: Path, work: Path, stage: Stage, arguments: dict[str, str]) -> None:
        self.path = work / "root"
        self.path.mkdir(parents=True)
        for name in ("upper", "scratch"):
            (work / name).mkdir()
        layers = f"lowerdir={base},upperdir={work / 'upper'},workdir={work / 'scratch'}"
        self._mounted: list[Path] = []
        self._mount(self.path, "-t", "overlay", "overlay", "-o", layers)
        # No bind mounts of this machine: removing the directory must not remove their files. debootstrap made /dev.
        self._mount(self.path / "proc", "-t", "proc", "proc")
        self._mount(self.path / "sys", "-t", "sysfs", "sysfs", "-o", "ro")
        self._mount(self.path / "dev/shm", "-t", "tmpfs", "tmpfs")
        self._stage = stage
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self._arguments = {**stage.arguments(), **arguments}
        self._folder = "/"
        self._take_network_settings()

    def _mount(self, at: Path, *arguments: str) -> None:
        at.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *arguments, str(at)], check=True)
        self._mounted.append(at)

    def _take_network_settings(self) -> None:
        """Copy this machine's settings of name server, certificates, apt and package index, as a builder uses them."""
        for file in ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
            if Path(file).exists():
                shutil.copy(file, self.path / file[1:])
        for folder in ("etc/apt/apt.conf.d", "etc/apt/sources.list.d", "etc/apt/auth.conf.d"):
            if Path("/", folder).is_dir():
                shutil.copytree(Path("/", folder), self.path / folder, dirs_exist_ok=True)
        for name, value in os.environ.items():
            if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy") or name == "SSL_CERT_FILE":
                self.environment[name] = value
        locations = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
        ).stdout
        for place in {Path(word) for word in locations.replace("file://", "").replace("'", " ").split()}:
            # a package index of local files must be readable in the chroot
            above = place.parent if place.name == "simple" else place
            if place.is_absolute() and place.is_dir() and above not in map(Path, ("/", "/etc")):
                self._mount(self.path / str(above)[1:], "-o", "bind,ro", str(above))
        for marker in self.path.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()  # only Debian has this file; the python image does not

    def do(self, stages: dict[str, CleanRoot]) -> None:
        for step in self._stage.instructions:
            match step.name:
                case "RUN":
                    self._run_step(step, stages)
                case "COPY":
                    self._copy(step, stages)
                case "WORKDIR":
                    self._folder = step.text
                    (self.path / step.text[1:]).mkdir(parents=True, exist_ok=True)
                case "ENV":
                    values = self.environment | self._arguments
                    for word in step.words():
                        name, _, value = word.partition("=")
                        self.environment[name] = substitute(value, values)

    def _run_step(self, step: Instruction, stages: dict[str, CleanRoot]) -> None:
        for _, mount in (flag for flag in step.flags if flag[0] == "mount"):
            options = dict(option.split("=") for option in mount.split(","))
            if options["type"] == "bind":
                origin = stages[options["from"]].path if "from" in options else ROOT
                target = self.path / options["target"][1:]
                shutil.copytree(origin / options["source"].lstrip("/"), target)
        self.run(["/bin/sh", "-c", step.text], {**self.environment, **self._arguments})

    def _copy(self, step: Instruction, stages: dict[str, CleanRoot]) -> None:
        *sources, target = step.words()
        origin = stages[name].path if (name := step.flag("from")) else ROOT
        for source in sources:
            from_, to = origin / source.lstrip("/"), self.path / (Path(self._folder) / target).as_posix()[1:]
            if from_.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so", ".built-from") if origin == ROOT else None
                shutil.copytree(from_, to, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy2(from_, to / from_.name)

    def run(self, command: list[str], environment: dict[str, str] | None = None, user: str = "0:0") -> str:
        inside = f"cd {shlex.quote(self._folder)} && exec {shlex.join(command)}"
        done = subprocess.run(
            [shutil.which("chroot") or "chroot", f"--userspec={user}", str(self.path), "/bin/sh", "-c", inside],
            env=environment or self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-4000:]}"
        return done.stdout

    def close(self) -> None:
        for at in reversed(self._mounted):
            subprocess.run(["umount", "--lazy", str(at)], check=True)
        shutil.rmtree(self.path.parent)


@pytest.fixture
def opened() -> Iterator[list[CleanRoot]]:
    roots: list[CleanRoot] = []
    yield roots
    for root in reversed(roots):
        root.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["worker", "cpu"])
@pytest.mark.skipif(builder() is None, reason="no docker, podman or buildah works here")
def test_an_image_is_built_by_a_builder_and_has_its_kernels(name: str) -> None:
    command = builder()
    assert command is not None
    tag = f"sglang-hybrid-test:{name}"
    subprocess.run([*command, "--file", str(DOCKER / f"Dockerfile.{name}"), "--tag", tag, str(ROOT)], check=True)
    if command[0] != "buildah":  # buildah cannot run an image like this
        asked = [command[0], "run", "--rm", "--read-only", "--entrypoint", "sglang-hybrid", tag, "--version"]
        assert subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip() == __version__


@pytest.mark.full
@pytest.mark.parametrize("name", ["worker", "cpu"])
@pytest.mark.skipif(builder() is not None, reason="a container builder works here and is used instead")
@pytest.mark.skipif(sys.platform != "linux", reason="a chroot over another system is none")
def test_the_steps_of_an_image_work_in_a_clean_root(
    name: str, base: Path, tmp_path: Path, opened: list[CleanRoot]
) -> None:
    file = Dockerfile.read(DOCKER / f"Dockerfile.{name}")
    stages: dict[str, CleanRoot] = {}
    for stage in file.stages:
        root = CleanRoot(base, tmp_path / (stage.name or "final"), stage, {})
        opened.append(root)
        root.do(stages)
        stages[stage.name] = root
    user = file.final.last("USER").text
    said = root.run(["python3", "-c", CHECKS[name]], user=user)
    assert said.strip().endswith("None")  # torch.version.cuda: built without CUDA
    assert root.run(["sglang-hybrid", "--version"], user=user).strip() == __version__
