"""Runs of an evaluation share one prefill: settings that prefill depends on are passed on and must not differ."""

import pytest

from sglang_hybrid.commands.eval.errors import InputError
from sglang_hybrid.commands.eval.in_process import _settings_of_prefill
from sglang_hybrid.config import load_config


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


def test_a_policy_that_keeps_codes_of_keys_is_that_of_prefill() -> None:
    runs = [load_config(None, ["policy=hcattention", f"hcattention.tau={tau}"]) for tau in (0.5, 1.0)]
    assert _settings_of_prefill(runs)[2:] == ["policy=hcattention", "hcattention.codebook=none"]


def test_runs_that_keep_other_codes_or_need_digests_are_refused() -> None:
    coded = load_config(None, ["policy=hcattention"])
    others = {
        "hcattention.codebook=file": "runs differ in hcattention.codebook ",
        "policy=scout": "scout needs digests",
    }
    for other, reason in others.items():
        with pytest.raises(InputError, match=reason):
            _settings_of_prefill([coded, load_config(None, ["policy=hcattention", other])])


def test_partial_keys_are_shared_by_runs_that_keep_the_same_share() -> None:
    runs = [load_config(None, ["policy=infinigen", more]) for more in ("infinigen.alpha=5", "infinigen.unit=blocks")]
    assert _settings_of_prefill(runs)[2:] == ["policy=infinigen", "infinigen.partial_ratio=0.3"]
    other = load_config(None, ["policy=infinigen", "infinigen.partial_ratio=0.5"])
    with pytest.raises(InputError, match=r"runs differ in infinigen.partial_ratio "):
        _settings_of_prefill([runs[0], other])
