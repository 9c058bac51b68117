"""What is compared: stock, hybrid, and hybrid with one part after the other left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hybrid.config import HybridConfig, load_config

RECALL_SETTING = "scout.recall_interval"
GATHER_SETTING = "scout.cpu_share"  # 1: all misses to the CPU; auto: part of them are gathered over PCIe
FP8 = "fp8_e4m3"
PAPERS = ("scoutattention", "hgca", "hcattention", "infinigen")  # policies to compare with


@dataclass(frozen=True)
class Configuration:
    name: str
    backend: str
    settings: tuple[str, ...] = ()  # of hybrid, key=value
    kv_dtype: str | None = None  # of the KV cache, as SGLang's flag has it; None: the model's

    @property
    def is_hybrid(self) -> bool:
        return self.backend == "hybrid"

    def parsed(self) -> HybridConfig:
        return load_config(None, self.settings)


def stock(backend: str) -> Configuration:
    return Configuration("stock", backend)


def stock_fp8(backend: str) -> Configuration:
    """Stock with a KV cache of one byte per value, which holds twice the rows."""
    return Configuration("stock fp8", backend, kv_dtype=FP8)


def hybrid(given: Sequence[str]) -> Configuration:
    """What a user gets who sets nothing but what is ``given``."""
    return Configuration("hybrid", "hybrid", tuple(given))


def hybrid_fp8(given: Sequence[str]) -> Configuration:
    """The same with a KV cache of one byte per value: for ``stock_fp8``."""
    return Configuration("hybrid fp8", "hybrid", tuple(given), kv_dtype=FP8)


def raw(given: Sequence[str]) -> Configuration:
    """As ``hybrid``, with the prediction that costs least: the yardstick of calibrated ones."""
    return Configuration("raw", "hybrid", (*given, "prediction=raw"))


def paper(policy: str, given: Sequence[str]) -> Configuration:
    """Another paper's policy, with as many tokens of a row in GPU memory as the budget of ``hybrid`` has."""
    settings = (*given, f"policy={policy}")
    if policy == "hgca":
        settings += (f"hgca.window_tokens={load_config(None, given).budget_tokens}",)
    return Configuration(policy, "hybrid", settings)


def ablation(given: Sequence[str]) -> list[Configuration]:
    """From nothing on, in the order of the design; the whole is ``hybrid``."""
    never, cpu = f"{RECALL_SETTING}=0", f"{GATHER_SETTING}=1"
    kept = tuple(one for one in given if one.split("=", 1)[0] not in ("prediction", RECALL_SETTING, GATHER_SETTING))
    predicts = tuple(one for one in given if one.startswith("prediction="))
    return [
        Configuration("no prediction", "hybrid", ("prediction=none", never, cpu, *kept)),
        Configuration("+ prediction", "hybrid", (*predicts, never, cpu, *kept)),
        Configuration("+ recall", "hybrid", (*predicts, cpu, *kept)),
    ]


LAST_PART = "+ gather"  # what ``hybrid`` adds to the last run of the ablation


def named(names: str, stock_backend: str, settings: Sequence[str]) -> list[Configuration]:
    """Of names with commas between them. Raises ValueError with the names that there are."""
    known = {"stock": stock(stock_backend), "stock-fp8": stock_fp8(stock_backend), "hybrid": hybrid(settings)}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise ValueError(f"{', '.join(unknown)}: take of {', '.join(known)}")
    return [known[name] for name in names.split(",")]
