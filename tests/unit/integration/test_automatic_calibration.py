"""What a server does with a model that cannot be calibrated, by what it needs the calibration for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.config import HybridConfig, load_config
from sglang_hybrid.integration import automatic_calibration
from sglang_hybrid.integration.automatic_calibration import calibration_for
from sglang_hybrid.integration.decoder_layers import UnknownLayers
from sglang_hybrid.integration.refusals import Refusal

CODES, NO_CODES = "scout.slot_dtype=int8", "scout.slot_dtype=model"


def calibrated(error: Exception, *settings: str, device: str = "cuda", ranks: int = 1) -> Any:
    """Return what ``calibration_for`` returns if reading the model raises ``error``."""

    def failing(_model_runner: Any) -> None:
        raise error

    args = SimpleNamespace(enable_lora=False, lora_paths=None, tp_size=ranks)
    runner = SimpleNamespace(server_args=args, device=device)
    config: HybridConfig = load_config(None, ["profile=auto", *settings])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic_calibration, "key_of", failing)
        return calibration_for(config, runner)


@pytest.mark.parametrize(("settings", "device"), [((NO_CODES,), "cuda"), ((), "cpu"), ((CODES,), "cpu")])
@pytest.mark.parametrize("error", [UnknownLayers("layer 3 is packed"), torch.OutOfMemoryError()], ids=type)
def test_without_a_calibration_a_server_predicts_nothing(
    error: Exception, settings: tuple[str, ...], device: str
) -> None:
    assert calibrated(error, *settings, device=device) is None


@pytest.mark.parametrize(("setting", "instead"), [("prediction=calibrated", "prediction=none"), (CODES, "=model")])
def test_settings_that_need_a_calibration_are_refused_with_the_layer(setting: str, instead: str) -> None:
    with pytest.raises(Refusal, match=rf"^{setting}: layer 3 is packed; serve it with .*{instead}$"):
        calibrated(UnknownLayers("layer 3 is packed"), setting)


@pytest.mark.parametrize(
    ("settings", "ranks", "instead"),
    [
        (["prediction=calibrated", NO_CODES], 1, "profile=none"),
        ([NO_CODES], 2, "profile=none"),
        ([CODES], 1, NO_CODES),
    ],
)
def test_too_little_memory_is_refused_where_a_server_cannot_go_on(
    settings: list[str], ranks: int, instead: str
) -> None:
    with pytest.raises(Refusal, match=f"too little device memory for calibration: .*{instead}$"):
        calibrated(torch.OutOfMemoryError(), *settings, ranks=ranks)
