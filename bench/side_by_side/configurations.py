"""What is compared: stock, hybrid, and hybrid with one part after the other left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hybrid.config import HybridConfig, load_config

RECALL_SETTING = "scout.recall_interval"
GATHER_SETTING = "scout.cpu_share"  # 1: all misses to the CPU; auto: part of them are gathered over PCIe


@dataclass(frozen=True)
class Configuration:
    name: str
    backend: str
    settings: tuple[str, ...] = ()  # of hybrid, key=value

    @property
    def is_hybrid(self) -> bool:
        return self.backend == "hybrid"

    def parsed(self) -> HybridConfig:
        return load_config(None, self.settings)


def stock(backend: str) -> Configuration:
    return Configuration("stock", backend)


def hybrid(given: Sequence[str]) -> Configuration:
    """Everything on; what is ``given`` comes last and wins."""
    return Configuration("hybrid", "hybrid", (*_prediction(given), *_gather("auto"), *given))


def has_gather() -> bool:
    return GATHER_SETTING in HybridConfig().by_key()


def ablation(given: Sequence[str]) -> list[Configuration]:
    """From nothing on, in the order of the design; the whole is ``hybrid``."""
    predicts, never, cpu = _prediction(given), f"{RECALL_SETTING}=0", _gather("1")
    kept = tuple(one for one in given if one.split("=", 1)[0] not in ("prediction", RECALL_SETTING, GATHER_SETTING))
    runs = [
        Configuration("no prediction", "hybrid", ("prediction=none", never, *cpu, *kept)),
        Configuration("+ prediction", "hybrid", (*predicts, never, *cpu, *kept)),
    ]
    if has_gather():  # otherwise recall is the last part, and this run is `hybrid`
        runs.append(Configuration("+ recall", "hybrid", (*predicts, *cpu, *kept)))
    return runs


def last_part() -> str:
    """What `hybrid` adds to the last run of the ablation."""
    return "+ gather" if has_gather() else "+ recall"


def _prediction(given: Sequence[str]) -> tuple[str, ...]:
    calibrated = any(one.startswith("profile=") and one != "profile=none" for one in given)
    return (f"prediction={'calibrated' if calibrated else 'raw'}",)


def _gather(value: str) -> tuple[str, ...]:
    return (f"{GATHER_SETTING}={value}",) if has_gather() else ()
