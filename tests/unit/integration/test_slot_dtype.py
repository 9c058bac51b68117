"""What ``scout.slot_dtype=auto`` is for a model, before memory is divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch

from sglang_hybrid.config import HybridConfig
from sglang_hybrid.integration import slot_dtype
from sglang_hybrid.integration.decoder_layers import UnknownLayers
from sglang_hybrid.policies.registry import calibrates_at_start, keeps_codes_in_slots


class LikeLlama:
    ids = (0, 1)

    def __init__(self, model: object) -> None:
        self._model = model
        if model == "unknown":
            raise UnknownLayers("its layers are elsewhere")

    def query_weights(self, layer: int) -> None:
        if self._model == "packed in its last layer" and layer == self.ids[-1]:
            raise UnknownLayers(f"layer {layer}'s qkv_proj is packed")


def decoder_of(model: object) -> None:
    if model == "of another build":
        raise UnknownLayers("it keeps its layers elsewhere")


@pytest.fixture(autouse=True)
def layers_of_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_dtype, "DecoderLayers", LikeLlama)
    monkeypatch.setattr(slot_dtype, "decoder_of", decoder_of)


def asked(dtype: Literal["auto", "int8", "model"] = "auto", **settings: Any) -> HybridConfig:
    config = HybridConfig(**settings)
    return config.with_section(msgspec.structs.replace(config.scout, slot_dtype=dtype))


def settled(config: HybridConfig, model: str = "known", device: str = "cuda", **args: Any) -> str:
    flags = {"enable_lora": False, "lora_paths": None, "tp_size": 1, "enable_dp_attention": False} | args
    kv_dtype = flags.pop("kv_dtype", torch.bfloat16)
    found = slot_dtype.settled(config, model, SimpleNamespace(**flags), device, kv_dtype)  # type: ignore[arg-type]
    return str(found.scout.slot_dtype)


def test_auto_is_int8_where_the_server_calibrates() -> None:
    assert settled(asked()) == "int8"


@pytest.mark.parametrize(
    "case",
    [
        {"device": "cpu"},
        {"kv_dtype": torch.float8_e4m3fn},
        {"kv_dtype": torch.float32},
        {"model": "unknown"},
        {"model": "packed in its last layer"},
        {"model": "of another build"},
        {"enable_lora": True},
        {"enable_dp_attention": True},
    ],
    ids=str,
)
def test_auto_is_the_models_dtype_where_nothing_is_calibrated(case: dict[str, Any]) -> None:
    assert settled(asked(), **case) == "model"


def test_codes_are_not_kept_of_numbers_of_8_bits() -> None:
    assert settled(asked("int8"), kv_dtype=torch.float8_e4m3fn) == "model"


@pytest.mark.parametrize("settings", [{"profile": "none"}, {"prediction": "none"}, {"policy": "full"}], ids=str)
def test_auto_asks_for_no_calibration(settings: dict[str, Any]) -> None:
    assert not calibrates_at_start(asked(**settings), on_gpu=True)
    assert settled(asked(**settings)) == "model"


@pytest.mark.parametrize("dtype", ["int8", "model"])
def test_what_is_asked_for_stays(dtype: Literal["int8", "model"]) -> None:
    assert settled(asked(dtype), model="unknown") == dtype


def test_int8_needs_a_calibration_even_if_nothing_is_predicted() -> None:
    assert calibrates_at_start(asked("int8", prediction="none"), on_gpu=True)
    assert not calibrates_at_start(asked("int8", profile="none"), on_gpu=True)
    assert keeps_codes_in_slots(asked("int8", profile="none"))
    assert not keeps_codes_in_slots(asked("int8", policy="scoutattention"))
