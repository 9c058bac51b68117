"""Server configurations that benchmarks compare: stock, hybrid, other papers' policies, and an ablation of hybrid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hybrid.config import HybridConfig, load_config

RECALL_SETTING = "scout.recall_interval"
GATHER_SETTING = "scout.cpu_share"  # 1: all misses to the CPU; auto: part of them are gathered over PCIe
FP8 = "fp8_e4m3"
PAPERS = ("scoutattention", "hgca", "hcattention", "infinigen")  # policies of other papers, to compare hybrid with


@dataclass(frozen=True)
class Configuration:
    name: str
    backend: str
    settings: tuple[str, ...] = ()  # settings of hybrid, key=value
    kv_dtype: str | None = None  # dtype of the KV cache, a value of SGLang's flag; None: the model's dtype

    @property
    def is_hybrid(self) -> bool:
        return self.backend == "hybrid"

    def parsed(self) -> HybridConfig:
        return load_config(None, self.settings)


def stock(backend: str) -> Configuration:
    return Configuration("stock", backend)


def stock_fp8(backend: str) -> Configuration:
    """Return stock with a KV cache of one byte per value, which holds twice as many rows as 16 bits."""
    return Configuration("stock fp8", backend, kv_dtype=FP8)


def hybrid(given: Sequence[str]) -> Configuration:
    """Return hybrid with the default settings, except for the settings in ``given``."""
    return Configuration("hybrid", "hybrid", tuple(given))


def hybrid_fp8(given: Sequence[str]) -> Configuration:
    """Return ``hybrid`` with a KV cache of one byte per value, to compare with ``stock_fp8``."""
    return Configuration("hybrid fp8", "hybrid", tuple(given), kv_dtype=FP8)


def raw(given: Sequence[str]) -> Configuration:
    """Return ``hybrid`` with the cheapest prediction, to compare calibrated predictions with."""
    return Configuration("raw", "hybrid", (*given, "prediction=raw"))


def paper(policy: str, given: Sequence[str]) -> Configuration:
    """Return another paper's policy, which keeps as many tokens of a row in GPU memory as the budget of ``hybrid``."""
    settings = (*given, f"policy={policy}")
    if policy == "hgca":
        settings += (f"hgca.window_tokens={load_config(None, given).budget_tokens}",)
    return Configuration(policy, "hybrid", settings)


def ablation(given: Sequence[str]) -> list[Configuration]:
    """Return configurations that add parts of hybrid one by one: none, prediction, recall. ``hybrid`` has all parts."""
    never, cpu = f"{RECALL_SETTING}=0", f"{GATHER_SETTING}=1"
    kept = tuple(one for one in given if one.split("=", 1)[0] not in ("prediction", RECALL_SETTING, GATHER_SETTING))
    predicts = tuple(one for one in given if one.startswith("prediction="))
    return [
        Configuration("no prediction", "hybrid", ("prediction=none", never, cpu, *kept)),
        Configuration("+ prediction", "hybrid", (*predicts, never, cpu, *kept)),
        Configuration("+ recall", "hybrid", (*predicts, cpu, *kept)),
    ]


LAST_PART = "+ gather"  # part that ``hybrid`` adds to the last configuration of the ablation


def named(names: str, stock_backend: str, settings: Sequence[str]) -> list[Configuration]:
    """Return the configurations of comma-separated names. Raises ValueError, with all known names, for unknown ones."""
    known = {"stock": stock(stock_backend), "stock-fp8": stock_fp8(stock_backend), "hybrid": hybrid(settings)}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: take of {', '.join(known)}")
    return [known[name] for name in names.split(",")]
