"""Calibration without a model: its text, its file, and the settings that ask for it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_hybrid.config import ConfigError, HybridConfig
from sglang_hybrid.policies.registry import calibrates_at_start
from sglang_hybrid.policies.scout.calibration_file import Calibration, CalibrationKey, load_calibration
from sglang_hybrid.policies.scout.calibration_text import calibration_text, without_tokenizer
from sglang_hybrid.policies.scout.corrections_file import Shape
from sglang_hybrid.policies.scout.fit_predictor import LayerCalibration
from sglang_hybrid.policies.scout.predictor import Correction
from sglang_hybrid.policies.scout.profile_facts import ProfileError

SHAPE = Shape(layers=3, hidden=12, query_heads=4, kv_heads=2, head_dim=4)
KEY = CalibrationKey("LlamaForCausalLM", "ab" * 32, "bfloat16", 2, 1, SHAPE)


def some_calibration() -> Calibration:
    thin = Correction(torch.randn(16, 3), torch.randn(3, 12), torch.randn(16))
    full = Correction(torch.randn(16, 12), None, torch.randn(16))
    order = torch.stack([torch.randperm(4) for _ in range(2)])
    layers = {1: LayerCalibration(thin, 3, 0.5, 0.9), 2: LayerCalibration(full, 12, 0.6, 0.8)}
    skew = torch.linalg.qr(torch.randn(2, 4, 4)).Q
    steps = {layer: torch.rand(2, 2, 4) + 0.01 for layer in range(3)}
    return Calibration(layers, dict.fromkeys(range(3), order), dict.fromkeys(range(3), skew), steps)


def letters(text: str) -> Sequence[int]:
    return list(map(ord, text))


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_wider_model_gets_more_text_and_a_short_context_shorter_windows() -> None:
    narrow, wide, short = (calibration_text(letters, *sizes) for sizes in ((576, 8192), (2048, 8192), (576, 512)))
    assert {len(window) for window in (*narrow.fit, *narrow.unseen, *wide.fit)} == {2048}
    assert {len(window) for window in short.fit} == {512}
    assert narrow.tokens < wide.tokens
    assert sum(map(len, wide.fit)) >= 16 * 2048


def test_the_text_is_the_same_at_every_start_and_no_window_comes_twice() -> None:
    text = calibration_text(letters, 2048, 8192)
    assert text == calibration_text(letters, 2048, 8192)
    windows = [*text.fit, *text.unseen]
    assert len(set(windows)) == len(windows)


def test_a_model_without_a_tokenizer_gets_its_own_tokens() -> None:
    text = without_tokenizer(100, 64, 256)
    tokens = [token for window in text.fit for token in window]
    assert set(tokens) <= set(range(100))
    most = max(tokens.count(token) for token in range(100))
    assert most > 3 * len(tokens) / 100  # some tokens are frequent, as in a text


# -- file --------------------------------------------------------------------------------------------------------------


def test_a_calibration_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    made, path = some_calibration(), tmp_path / "new" / KEY.file_name
    made.save(path)
    found = load_calibration(path, KEY)
    assert found is not None
    assert [path.name] == os.listdir(path.parent)
    for layer, one in made.layers.items():
        assert torch.equal(found.layers[layer].correction.left, one.correction.left)
        assert (found.layers[layer].rank, found.layers[layer].cosine) == (one.rank, one.cosine)
    assert all(torch.equal(found.channels[layer], order) for layer, order in made.channels.items())
    assert all(torch.equal(found.skews[layer], skew) for layer, skew in made.skews.items())
    assert list(found.steps) == [0, 1, 2]
    assert all(torch.equal(found.steps[layer], steps) for layer, steps in made.steps.items())
    assert "0.850" in made.summary()


def test_what_a_calibration_is_fitted_for_is_its_name() -> None:
    names = {
        CalibrationKey(architecture, weights, dtype, ranks, rank, SHAPE).file_name
        for architecture in ("LlamaForCausalLM", "../Qwen")
        for weights in ("a" * 64, "b" * 64)
        for dtype in ("bfloat16", "float16")
        for ranks, rank in ((1, 0), (2, 0), (2, 1))
    }
    assert len(names) == 24
    assert not any("/" in name for name in names)


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert load_calibration(tmp_path / "none", KEY) is None


@pytest.mark.parametrize("damage", ["cut", "empty", "others", "layers"])
def test_a_damaged_file_is_told_from_a_good_one(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    made = some_calibration()
    made.save(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "others":
        save_file({"a": torch.zeros(1)}, path)
    else:
        Calibration(made.layers, {0: torch.zeros(2, 4)}).save(path)
    with pytest.raises(ProfileError):
        load_calibration(path, KEY)


@pytest.mark.parametrize(
    "skew", [torch.randn(2, 4, 4), torch.eye(4).expand(3, -1, -1), torch.full((2, 4, 4), torch.nan)]
)
def test_a_skew_that_changes_products_or_does_not_fit_is_refused(tmp_path: Path, skew: torch.Tensor) -> None:
    made = some_calibration()
    made.skews[1] = skew
    made.save(tmp_path / "calibration")
    with pytest.raises(ProfileError, match="the skew of layer 1 must be an orthogonal matrix"):
        load_calibration(tmp_path / "calibration", KEY)


@pytest.mark.parametrize(
    ("shape", "one"),
    [
        *(((2, 2, 4), one) for one in (0.0, -1.0, torch.nan, torch.inf, 1e-42)),
        *((shape, 1.0) for shape in ((2, 3, 4), (2, 2, 5), (1, 2, 4), (2, 4))),
    ],
)
def test_steps_that_do_not_fit_or_by_which_nothing_can_be_divided_are_refused(
    tmp_path: Path, shape: tuple[int, ...], one: float
) -> None:
    made = some_calibration()
    made.steps[1] = torch.ones(shape)
    made.steps[1].view(-1)[-1] = one
    made.save(tmp_path / "calibration")
    with pytest.raises(ProfileError, match="the steps of layer 1 must be positive and finite"):
        load_calibration(tmp_path / "calibration", KEY)


def test_a_folder_that_cannot_be_written_is_an_error_of_the_operating_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        some_calibration().save(tmp_path / "file" / "calibration")
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_gpu_server_calibrates_unless_it_is_told_otherwise_and_a_cpu_server_when_it_is_told() -> None:
    default, auto = HybridConfig(), HybridConfig(profile="auto")
    assert calibrates_at_start(default, on_gpu=True)
    assert not calibrates_at_start(default, on_gpu=False)
    assert calibrates_at_start(auto, on_gpu=False)
    assert calibrates_at_start(HybridConfig(prediction="calibrated"), on_gpu=False)


@pytest.mark.parametrize(
    "config",
    [
        HybridConfig(profile="none"),
        HybridConfig(profile="some/file.safetensors"),
        HybridConfig(prediction="raw"),
        HybridConfig(profile="auto", prediction="none"),
        HybridConfig(policy="full"),
        HybridConfig(policy="scoutattention"),
    ],
)
def test_nothing_is_fitted_that_nobody_uses(config: HybridConfig) -> None:
    assert not calibrates_at_start(config, on_gpu=True)


def test_calibrated_predictions_without_any_calibration_are_refused() -> None:
    with pytest.raises(ConfigError, match="profile=auto"):
        HybridConfig(profile="none", prediction="calibrated")
