"""Settings on one host: what ``auto`` becomes there, and which values are impossible there.

A configuration file may be written for another host, so ``sglang_hybrid.config`` accepts every value that is possible
on some host. The functions here are for a known host: for ``sglang-hybrid config`` and for the start of a server. They
import neither torch nor SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang_hybrid.config import ConfigError, HybridConfig
from sglang_hybrid.engines.choice import unsupported_by_cpu_engine
from sglang_hybrid.engines.cuda.settings import gather_share_of
from sglang_hybrid.host import GIB, Host
from sglang_hybrid.policies.registry import (
    calibrates_at_start,
    keeps_codes_in_slots,
    policy_named,
    prediction_of,
)
from sglang_hybrid.policies.scout.tuning import (
    COPYING_INTERVAL,
    DEFAULT_BONUS,
    DEFAULT_INTERVAL,
    DEFAULT_MISS_SHARE,
    DEFAULT_TARGET,
    resident_tokens_of,
)
from sglang_hybrid.protocol.cores import CoresError, Placement, format_cpus, place

_NO_WORKER = "unused: no worker"
_NO_GPU = "unused: no GPU"


# -- what auto becomes -------------------------------------------------------------------------------------------------


def resolved(config: HybridConfig, host: Host) -> dict[str, str]:
    """Return, for each setting whose value leaves a choice, what is chosen on this host, in words, for one rank.

    Call ``check`` first: values that are impossible on this host cannot be resolved.
    """
    values, texts = config.by_key(), {}
    for key, choice in _CHOICES.items():
        if values[key] in ("auto", "default"):
            texts[key] = choice(config, host) if _uses(config, key) else f"unused by policy {config.policy}"
    if config.host_memory == "auto" or config.host_memory.endswith("%"):
        texts["host_memory"] = f"{config.host_memory_bytes(host.available) / GIB:.2f} GiB"
    return texts


def _uses(config: HybridConfig, key: str) -> bool:
    """Return True if the chosen policy uses a setting: one of its own, or of step programs, prediction or workers."""
    section, dot, _ = key.partition(".")
    if dot:
        return section == config.policy
    policy = policy_named(config.policy)
    if key == "whole_requests":
        return policy.cuda_program is not None
    return policy.needs.prediction if key in ("profile", "prediction") else policy.needs.worker


def _worker(config: HybridConfig, host: Host) -> str:
    if host.gpus:
        return "start"
    if why := unsupported_by_cpu_engine(config, config.sketch_channels):
        return f"start (no GPU, but {why} is computed in plain torch)"
    return "none (no GPU: the server's own threads compute)"


def _has_worker(config: HybridConfig, host: Host) -> bool:
    return config.worker not in ("auto", "none") or (
        config.worker == "auto" and _worker(config, host).startswith("start")
    )


def _with_profile(without: object) -> Callable[[HybridConfig, Host], str]:
    return lambda config, _host: str(without) if config.profile_file is None else "what the profile says, by layer"


def _digest_dtype(config: HybridConfig, host: Host) -> str:
    if not host.gpus:
        return "model"
    if config.sketch_channels == 0 or config.sketch_channels % 8:
        return "model"
    return "int8 (model, if the model's head_dim is no multiple of 32)"


def _slot_dtype(config: HybridConfig, host: Host) -> str:
    if not host.gpus:
        return _NO_GPU
    return "int8 (model, if the model cannot be calibrated)" if keeps_codes_in_slots(config) else "model"


def _profile(config: HybridConfig, host: Host) -> str:
    if calibrates_at_start(config, on_gpu=bool(host.gpus)):
        return "what the server fits at its first start with a model"
    return "none"


def _target_cpu_ratio(_config: HybridConfig, host: Host) -> str:
    return "chosen while serving, by what the worker computes in time" if host.gpus else str(DEFAULT_TARGET)


def _prediction(config: HybridConfig, host: Host) -> str:
    fits = calibrates_at_start(config, on_gpu=bool(host.gpus))
    prediction = prediction_of(config, is_calibrated=fits or config.profile_file is not None)
    return "none (no profile)" if prediction == "none" else prediction


def _whole_requests(_config: HybridConfig, host: Host) -> str:
    return "while the running requests fit the resident blocks' memory" if host.gpus else _NO_GPU


def _cpu_share(_config: HybridConfig, host: Host) -> str:
    return "chosen while serving, by what is missed" if host.gpus else _NO_GPU


def _recall_interval(config: HybridConfig, host: Host) -> str:
    copies = bool(host.gpus) and gather_share_of(config) != 0
    return _with_profile(COPYING_INTERVAL if copies else DEFAULT_INTERVAL)(config, host)


def _threads(config: HybridConfig, host: Host) -> str:
    return str(_placement(config, host).threads) if _has_worker(config, host) else _NO_WORKER


def _cores(config: HybridConfig, host: Host) -> str:
    if not _has_worker(config, host):
        return _NO_WORKER
    cores = _placement(config, host).cores
    return format_cpus(cores) if cores else "none (threads are not bound here)"


# Functions that say what "auto" or "default" becomes, for every setting that can have this value except host_memory,
# which ``resolved`` handles itself, since every policy uses it.
_CHOICES: dict[str, Callable[[HybridConfig, Host], str]] = {
    "scout.resident_tokens": lambda config, _host: str(resident_tokens_of(config)),
    "digest_dtype": _digest_dtype,
    "scout.slot_dtype": _slot_dtype,
    "profile": _profile,
    "prediction": _prediction,
    "scout.resident_bonus": _with_profile(DEFAULT_BONUS),
    "scout.min_miss_attention": _with_profile(DEFAULT_MISS_SHARE),
    "whole_requests": _whole_requests,
    "scout.cpu_share": _cpu_share,
    "scout.recall_interval": _recall_interval,
    "scout.target_cpu_ratio": _target_cpu_ratio,
    "scoutattention.resident_tokens": lambda config, _host: str(config.budget_tokens),
    "scoutattention.recall_interval": _with_profile(DEFAULT_INTERVAL),
    "worker": _worker,
    "worker_threads": _threads,
    "worker_cores": _cores,
}


# -- values that are impossible on the host ----------------------------------------------------------------------------


def check(config: HybridConfig, host: Host, sources: Mapping[str, str] | None = None, ranks: int = 1) -> None:
    """Raise ConfigError, with the legal ranges, if values are impossible on this host.

    ``sources``: where each setting comes from, for messages. ``ranks``: number of server processes on this host, each
    with a worker of its own.
    """
    problems = list(_problems(config, host, sources or {}, ranks))
    if problems:
        raise ConfigError(*problems)


def _problems(config: HybridConfig, host: Host, sources: Mapping[str, str], ranks: int) -> list[str]:
    values = config.by_key()

    def given(*keys: str) -> str:
        return ", ".join(f"{key}={values[key]!r}" + (f" ({sources[key]})" if key in sources else "") for key in keys)

    problems = []
    if (asked := config.host_memory_bytes(host.available)) > host.memory:
        problems.append(
            f"{given('host_memory')}: asks for {asked / GIB:.2f} GiB, but this machine has only "
            f"{host.memory / GIB:.2f} GiB of memory: must be less, or a percentage of what is available"
        )
    if "/" in config.worker:  # a worker started by hand may have other cores, and refuses impossible values itself
        return problems
    threads, most = config.worker_threads, host.cpus // ranks
    if threads != "auto" and threads > most:
        rank = f" for each of {ranks} ranks" if ranks > 1 else ""
        problems.append(
            f"{given('worker_threads')}: this process may use {_count(host.cpus, 'core')} "
            f"({format_cpus(host.topology.cpus)}): must be auto, or {_up_to(max(1, most))}{rank}"
        )
        return problems
    try:
        _placement(config, host)
    except CoresError as error:
        problems.append(f"{given('worker_cores')}: {error}")
    return problems


def _placement(config: HybridConfig, host: Host) -> Placement:
    """Return the placement of the worker's threads on this host. Raise CoresError if it is impossible."""
    threads = 0 if config.worker_threads == "auto" else config.worker_threads
    return place(host.topology, config.worker_cores, threads, group_threads=0)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _up_to(most: int) -> str:
    return "1" if most == 1 else f"1 to {most}"
