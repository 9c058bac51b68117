"""Queries are predicted from a layer's whole input and the current weights, or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.integration import weight_updates
from sglang_hybrid.integration.attention_backend import HybridAttnBackend
from sglang_hybrid.integration.calibrate import refuse_inputs
from sglang_hybrid.integration.decoder_layers import UnknownLayers
from sglang_hybrid.integration.refusals import Refusal


def args(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"enable_lora": False, "lora_paths": None, "tp_size": 1} | given)


def test_plain_layers_are_predicted() -> None:
    refuse_inputs(args())
    refuse_inputs(args(enable_flashinfer_allreduce_fusion=True))  # with one rank no sum is pending
    refuse_inputs(args(tp_size=2))


@pytest.mark.parametrize("given", [{"enable_lora": True}, {"lora_paths": ["somewhere"]}])
def test_adapters_are_not_predicted(given: dict[str, Any]) -> None:
    with pytest.raises(UnknownLayers, match="LoRA adapters change queries"):
        refuse_inputs(args(**given))


@pytest.mark.parametrize("flag", ["enable_flashinfer_allreduce_fusion", "enable_aiter_allreduce_fusion"])
def test_a_part_of_an_input_is_not_taken_for_the_whole(flag: str) -> None:
    with pytest.raises(UnknownLayers, match="before it is summed"):
        refuse_inputs(args(tp_size=2, **{flag: True}))


class Backend(HybridAttnBackend):
    """Attention backend that only counts changes of weights."""

    def __init__(self, reason: str | None) -> None:
        self.reason, self.changes = reason, 0

    def why_weights_must_stay(self) -> str | None:
        return self.reason

    def weights_changed(self) -> None:
        self.changes += 1


def update(backend: object, outcome: tuple[bool, str] = (True, "")) -> tuple[bool, str]:
    return weight_updates.update(lambda _updater, _request: outcome, updater_of(backend), "request")


def updater_of(backend: object) -> SimpleNamespace:
    return SimpleNamespace(get_model_runner=lambda: SimpleNamespace(attn_backend=backend))


@pytest.mark.parametrize("outcome", [(True, "done"), (False, "half of it")])
def test_predictors_are_made_anew_when_weights_change(outcome: tuple[bool, str]) -> None:
    backend = Backend(None)
    assert update(backend, outcome) == outcome
    assert backend.changes == 1


def test_weights_that_must_stay_are_left_alone_and_the_caller_is_told() -> None:
    backend = Backend("graphs hold copies")
    assert update(backend) == (False, "graphs hold copies")
    assert backend.changes == 0


@pytest.mark.parametrize("through_sglang", [False, True])
def test_predictors_are_made_anew_after_a_session_in_which_a_peer_wrote_the_weights(through_sglang: bool) -> None:
    backend = Backend(None)
    weight_updates.session_ended(None, updater_of(backend), run_post_load=not through_sglang)
    assert backend.changes == (0 if through_sglang else 1)


def test_other_backends_update_as_they_always_did() -> None:
    weight_updates.session_ended(None, updater_of(object()), run_post_load=True)
    assert update(object()) == (True, "")


@pytest.mark.parametrize(
    ("calibration", "why"),
    [(None, "made for other weights"), ("of an earlier start", "were calibrated on the old weights")],
)
def test_a_profile_that_does_not_fit_the_new_weights_ends_prediction(
    calibration: Any, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_hybrid.config import HybridConfig
    from sglang_hybrid.integration import attention_backend

    used: list[HybridConfig] = []

    def read_profile(config: HybridConfig, _runner: object) -> None:
        raise Refusal(f"profile {config.profile}: made for other weights")

    monkeypatch.setattr(attention_backend, "read_profile", read_profile)

    backend = HybridAttnBackend.__new__(HybridAttnBackend)
    backend._config = HybridConfig(profile="p")
    backend._model_runner = None
    backend._calibration = calibration
    for name, value in {"engine": None, "_scouting": SimpleNamespace(use=None), "use": used.append}.items():
        monkeypatch.setattr(backend, name, value, raising=False)
    backend.weights_changed()
    assert [(config.profile, config.prediction) for config in used] == [("none", "none")]
    assert why in caplog.text
    assert "Queries are not predicted any more" in caplog.text
    assert backend._calibration is None
