"""The table of checks, and their execution one after another. A check that raises counts as a problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_hybrid.commands.doctor import cpu, gpu, memory, software
from sglang_hybrid.commands.doctor.machine import Machine
from sglang_hybrid.commands.doctor.report import Finding, Report, Status, problem, skipped


@dataclass(frozen=True)
class Check:
    """One check of the machine. ``after`` names an earlier check whose problem makes this check pointless."""

    name: str
    find: Callable[[Machine], Finding]
    needs_gpu: bool = False
    is_slow: bool = False  # takes seconds
    after: str | None = None


CHECKS = (
    Check("Python", software.python),
    Check("torch", software.torch),
    Check("SGLang", software.sglang),
    Check("FlashInfer", software.flashinfer, needs_gpu=True),
    Check("settings", software.check_settings),
    Check("hooks", software.hooks, is_slow=True, after="SGLang"),
    Check("CPU library", software.cpu_library),
    Check("CPU kernels", cpu.kernels, after="CPU library"),
    Check("cores", cpu.cores),
    Check("CPU quota", cpu.quota),
    Check("NUMA nodes", cpu.numa),
    Check("memory", memory.host_pool),
    Check("/dev/shm", memory.shared_memory),
    Check("huge pages", memory.huge_pages),
    Check("locked memory", memory.memlock),
    Check("memory bandwidth", memory.bandwidth, is_slow=True, after="CPU library"),
    Check("GPU driver", gpu.driver),
    Check("CUDA", gpu.cuda, needs_gpu=True),
    Check("compute capability", gpu.capability, needs_gpu=True),
    Check("GPU's NUMA node", gpu.numa, needs_gpu=True),
    Check("PCIe link", gpu.link, needs_gpu=True),
    Check("PCIe copies", gpu.copies, needs_gpu=True, is_slow=True, after="CUDA"),
    Check("CUDA kernels", gpu.kernels, needs_gpu=True),
)


def examine(
    machine: Machine,
    *,
    quick: bool = False,
    checks: Sequence[Check] = CHECKS,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run ``checks`` in order. ``quick`` skips slow checks. ``tell`` is called with the name of each check first."""
    findings: dict[str, Finding] = {}
    for check in checks:
        tell(check.name)
        findings[check.name] = _run(check, machine, quick, findings)
    return Report(software.versions(machine), findings)


def _run(check: Check, machine: Machine, quick: bool, before: dict[str, Finding]) -> Finding:
    try:
        if check.needs_gpu and not machine.gpus:
            return gpu.NO_GPU
        if quick and check.is_slow:
            return skipped("--quick", "Run sglang-hybrid doctor without --quick.")
        if check.after and (cause := before.get(check.after)) and cause.status is Status.PROBLEM:
            return skipped(f"needs {check.after}", f"Solve the problem of {check.after} first.")
        return check.find(machine)
    except (Exception, SystemExit) as error:
        return problem(
            f"the check failed: {type(error).__name__}: {error}",
            "Read the error; if this machine is not to blame for it, report it with the archive of "
            "sglang-hybrid report-problem.",
        )
