"""Settings of the runs of an evaluation: what they share is passed on, and must not differ."""

import pytest

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.in_process import _codes, _settings_of_prefill
from sglang_hybrid.config import HybridConfig, load_config


def test_what_prefill_works_by_is_taken_from_the_runs() -> None:
    runs = [
        load_config(None, ["digest_dtype=int8", "sketch_channels=16", budget])
        for budget in ("budget_tokens=1024", "budget_tokens=2048")
    ]
    assert _settings_of_prefill(runs) == [
        "digest_dtype=int8",
        "sketch_channels=16",
    ]


@pytest.mark.parametrize("setting", ["sketch_channels=16", "digest_dtype=int8"])
def test_runs_that_would_need_another_prefill_are_refused(setting: str) -> None:
    with pytest.raises(InputError, match=f"runs differ in {setting.partition('=')[0]} "):
        _settings_of_prefill([load_config(None, []), load_config(None, [setting])])


def infinigen(*settings: str) -> HybridConfig:
    return load_config(None, ["policy=infinigen", *settings])


def test_a_policy_that_keeps_codes_of_keys_is_there_from_prefill_on() -> None:
    assert _codes([load_config(None, []), load_config(None, ["policy=full"])]) == []
    shared = _codes([load_config(None, []), infinigen("infinigen.alpha=5"), infinigen("infinigen.unit=blocks")])
    assert shared == ["policy=infinigen", "infinigen.alpha=5.0", "infinigen.partial_ratio=0.3", "infinigen.unit=tokens"]


def test_runs_that_keep_other_codes_of_keys_are_refused() -> None:
    with pytest.raises(InputError, match="runs differ in what prefill keeps of every key"):
        _codes([infinigen(), infinigen("infinigen.partial_ratio=0.5")])
