"""Invented machines for tests of ``sglang-hybrid doctor``: a folder with /proc and /sys, and output of nvidia-smi."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hybrid.commands.doctor import gpu_query
from sglang_hybrid.commands.doctor.machine import CommandError, Machine

H200 = "GPU-11, NVIDIA H200, 580.1, 9.0, 00000000:3B:00.0, 1, 5, 16, 16"
A100 = "GPU-22, NVIDIA A100, 580.1, 8.0, 00000000:AF:00.0, 4, 4, 8, 16"
V100 = "GPU-33, NVIDIA V100, 580.1, 7.0, 00000000:D8:00.0, 3, 3, 16, 16"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def write_cores(root: Path, nodes: Sequence[Sequence[int]]) -> None:
    """Write the files of a CPU topology with one CPU per core. ``nodes`` lists the CPUs of each NUMA node."""
    for node, cpus in enumerate(nodes):
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        for cpu in cpus:
            write(root, {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu}\n"})
            (root / f"sys/devices/system/cpu/cpu{cpu}/node{node}").mkdir()


def write_memory(root: Path, total: int, available: int) -> None:
    """Write the files of a container that may use ``total`` bytes of memory, of which ``available`` are free.

    The real machine must have more memory than that.
    """
    write(
        root,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{total}\n",
            "sys/fs/cgroup/memory.current": f"{total - available}\n",
        },
    )


def machine(root: Path, *gpus: str, cpus: int = 8, **others: Any) -> Machine:
    """Return a machine whose files are in ``root``. All its commands fail, except nvidia-smi if there are ``gpus``.

    ``gpus`` are the lines that nvidia-smi prints.
    """

    def run(command: Sequence[str]) -> str:
        if tuple(command) == gpu_query.COMMAND and gpus:
            return "\n".join(gpus) + "\n"
        raise CommandError(f"{command[0]}: No such file or directory")

    given: dict[str, Any] = {"root": root, "cpus": frozenset(range(cpus)), "environment": {}, "run": run}
    given["claims"] = root / "claims"
    return Machine(**(given | others))
