"""The machine as checks see it. A test describes another machine by a folder and a few functions."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path

from sglang_hybrid import container, env
from sglang_hybrid.commands.doctor import gpu_query
from sglang_hybrid.commands.doctor.gpu_query import Gpu
from sglang_hybrid.config import ConfigError, HybridConfig, load_with_sources
from sglang_hybrid.host import Host
from sglang_hybrid.protocol.alignment import ALIGNMENT
from sglang_hybrid.protocol.core_claims import directory_of_user, taken_cpus
from sglang_hybrid.protocol.cores import CoresError, Placement, Topology, pci_node, place, read_topology

_COMMAND_SECONDS = 300  # time limit of a command that hangs; importing SGLang takes a minute on a slow disk


class CommandError(RuntimeError):
    """A command is missing, failed, or did not end in time. The message has the last line of its output."""


def run_command(command: Sequence[str]) -> str:
    """Run a command and return its standard output. Raise CommandError if the command fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS)
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{command[0]} did not end within {_COMMAND_SECONDS} seconds") from error
    if done.returncode:
        lines = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        raise CommandError(lines[-1].strip() if lines else f"{command[0]} ended with status {done.returncode}")
    return done.stdout


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(package: str) -> Sequence[str]:
    try:
        return metadata.requires(package) or ()
    except metadata.PackageNotFoundError:
        return ()


def gives_huge_pages() -> bool:
    """Return whether a small region of shared memory gets a huge page."""
    try:
        from sglang_hybrid.protocol import region  # which needs torch, and the doctor runs without it too
    except ImportError:
        return False
    try:
        with region.SharedRegion(ALIGNMENT, "sglang-hybrid-doctor") as small:
            return small.huge_bytes() > 0
    except (region.RegionError, OSError):  # there is no room, or no /proc
        return False


@dataclass(frozen=True)
class Machine:
    """This machine, as this process sees it, unless a test gives other values."""

    root: Path = Path("/")  # folder that contains proc, sys and dev
    cpus: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], str] = run_command
    version: Callable[[str], str | None] = installed_version
    requirements: Callable[[str], Sequence[str]] = requirements_of
    gives_huge_pages: Callable[[], bool] = gives_huge_pages
    claims: Path = field(default_factory=directory_of_user)  # directory of the workers' claims to cores
    # limit of locked memory in bytes; resource.RLIM_INFINITY: no limit
    memlock: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])

    def read(self, path: str) -> str | None:
        """Return the stripped text of a file below ``root``, or None if the file cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs that CUDA_VISIBLE_DEVICES leaves to this process; empty if nvidia-smi does not answer."""
        return self._gpus[0]

    @property
    def unknown_gpus(self) -> tuple[str, ...]:
        """UUIDs in CUDA_VISIBLE_DEVICES that do not name exactly one GPU or MIG instance of this machine."""
        return self._gpus[1]

    @cached_property
    def _gpus(self) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
        variable = self.environment.get("CUDA_VISIBLE_DEVICES")
        try:
            found = gpu_query.parse_gpus(self.run(gpu_query.COMMAND))
            if variable and "MIG-" in variable:
                found = gpu_query.with_instances(found, self.run(gpu_query.LIST))
        except (CommandError, ValueError):
            return (), ()
        return gpu_query.visible(found, variable)

    @cached_property
    def topology(self) -> Topology:
        near = self.node_of(self.gpus[0]) if self.gpus else None
        taken = taken_cpus(self.cpus, self.claims)
        return replace(read_topology(self.cpus, self.root), near=near, taken=taken)

    def node_of(self, gpu: Gpu) -> int | None:
        return pci_node(gpu.bus_id, self.root / "sys")

    @cached_property
    def memory(self) -> container.Memory:
        return container.memory(self.root)

    @cached_property
    def host(self) -> Host:
        return Host(tuple(gpu.name for gpu in self.gpus), self.topology, self.memory.total, self.memory.available)

    @cached_property
    def config(self) -> HybridConfig:
        """Settings of the environment, or the defaults if the environment's settings are invalid."""
        try:
            return settings()[0]
        except ConfigError:
            return HybridConfig()

    @cached_property
    def placement(self) -> Placement:
        """Threads and cores of the worker that a server with these settings would start."""
        threads = 0 if self.config.worker_threads == "auto" else self.config.worker_threads
        try:
            return place(self.topology, self.config.worker_cores, threads, group_threads=0)
        except CoresError:  # invalid settings are the subject of another check
            return place(self.topology, "auto", 0, group_threads=0)

    @property
    def pool_bytes(self) -> int:
        """Size of the host pool that a server with these settings would take now."""
        return self.config.host_memory_bytes(self.memory.available)


def settings() -> tuple[HybridConfig, dict[str, str]]:
    """Return the settings of the environment and the source of each value. Raise ConfigError for invalid settings."""
    return load_with_sources(env.CONFIG.get(), list(env.SET.get()))
