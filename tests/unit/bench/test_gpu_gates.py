"""The verdict of bench/gpu_gates.py: what is rounding, what is a near tie, and whether the worker served all misses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from bench import gpu_gates
from bench.gates import child
from bench.gates.comparing import Comparison, Reading, compare, judge, rows_with_misses, served_by_worker
from bench.gates.random_models import ARCHITECTURES, SHAPE, write_random_model


def reading(logprob: float = -1.0, gap: float = 2.0, best: int = 5, position: int = 1) -> list[Reading]:
    """Return one row of three positions; ``position`` has the given values, the others have defaults."""
    bests, logprobs, gaps = [5, 5, 5], [-1.0] * 3, [2.0] * 3
    bests[position], logprobs[position], gaps[position] = best, logprob, gap
    return [Reading("together", [bests], [logprobs], [gaps])]


def test_equal_readings_differ_by_nothing() -> None:
    same = compare(reading(), reading())
    assert (same.positions, same.equal_best, same.worst_logprob, same.flips) == (3, 3, 0.0, [])
    assert judge(same, same, "float16", highest_logit=0.0)["passed"]


def test_differences_are_measured_at_the_same_positions() -> None:
    found = compare(reading(), reading(logprob=-1.3, gap=1.9, position=0))
    assert found.worst_logprob == found.worst_prefill_logprob == pytest.approx(0.3)
    assert found.mean_logprob == pytest.approx(0.1)
    assert found.worst_gap_change == pytest.approx(0.1)
    assert compare(reading(), reading(logprob=-1.3)).worst_prefill_logprob == 0.0


@pytest.mark.parametrize(("difference", "passes"), [(0.14, True), (0.16, False)])
def test_half_as_much_again_as_the_control_is_allowed(difference: float, passes: bool) -> None:
    control = compare(reading(), reading(logprob=-1.1))
    ours = compare(reading(), reading(logprob=-1.0 - difference))
    assert judge(ours, control, "float16", highest_logit=0.0)["passed"] is passes


def test_one_rounding_of_the_highest_logit_is_always_allowed() -> None:
    ours = compare(reading(), reading(logprob=-1.015))
    assert judge(ours, Comparison(), "float16", highest_logit=20.0)["passed"]
    assert not judge(ours, Comparison(), "float16", highest_logit=10.0)["passed"]


@pytest.mark.parametrize(("gap", "passes"), [(0.1, True), (0.2, False)])
def test_another_arg_max_must_be_a_near_tie_in_stock(gap: float, passes: bool) -> None:
    control = compare(reading(), reading(gap=2.1))  # between stock backends, gaps change by 0.1
    stock = reading(gap=gap)
    ours = compare(stock, reading(gap=-0.01, best=7))
    verdict = judge(ours, control, "float16", highest_logit=0.0)
    assert (verdict["passed"], verdict["flips_that_are_no_near_ties"]) == (passes, int(not passes))


def test_what_is_not_a_number_is_red() -> None:
    ours = compare(reading(), reading(logprob=math.nan))
    assert ours.not_finite == 1
    assert not judge(ours, Comparison(worst_logprob=9.0, worst_gap_change=9.0), "float16", 1.0)["passed"]


def test_without_a_control_there_is_a_tolerance() -> None:
    assert judge(compare(reading(), reading(logprob=-1.0005)), None, "float32", 1.0)["passed"]
    assert not judge(compare(reading(), reading(logprob=-1.002)), None, "float32", 1.0)["passed"]


def test_the_worker_must_have_served_something_and_nobody_else_anything() -> None:
    assert served_by_worker({"served": 10, "empty": 3}, expected=10)["passed"]
    assert served_by_worker({"worker": 10}, expected=None)["passed"]  # as a server without a GPU counts
    assert not served_by_worker({"served": 10, "late": 1}, expected=11)["passed"]
    assert not served_by_worker({"empty": 3}, expected=0)["passed"]


def test_rows_have_misses_once_a_block_lies_between_sink_and_tail() -> None:
    assert rows_with_misses([63], steps=1, layers=5) == 0  # 64 tokens with the new one: sink and a full tail
    assert rows_with_misses([63], steps=3, layers=5) == 10
    assert rows_with_misses([64, 100], steps=1, layers=5) == 10


class OneStep:
    """Stand-in for prefilled prompts. Each step's logits depend on the tokens fed and overwrite the last logits."""

    def __init__(self, rows: int) -> None:
        self.fed: list[list[int]] = []
        self.logits = torch.zeros(rows, 8)
        self.logits[:, 3] = 2.0

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.fed.append(tokens.tolist())
        self.logits.zero_()
        self.logits[torch.arange(len(tokens)), (tokens + 1) % 8] = 1.0
        return self.logits


class OneSession:
    def prefill(self, prompts: list[list[int]]) -> OneStep:
        self.last = OneStep(len(prompts))
        return self.last


def test_stock_decodes_greedily_and_others_are_fed_its_tokens() -> None:
    session = OneSession()
    stock = child.read_case(session, [[1], [2]], 3, None)
    assert stock["best"] == [[3, 4, 5]] * 2
    assert session.last.fed == [[3, 3], [4, 4]]
    forced = stock | {"best": [[3, 6, 1], [3, 4, 5]]}
    other = child.read_case(session, [[1], [2]], 3, forced)
    assert session.last.fed == [[3, 3], [6, 4]]
    assert other["best"] == [[3, 4, 7], [3, 4, 5]]
    assert other["logit"] == [[2.0, 0.0, 0.0], [2.0, 1.0, 1.0]]  # logits of the tokens that were fed
    assert stock["logprob"][0][1] == pytest.approx(1 - math.log(math.e + 7))


def test_over_fp8_stock_and_control_read_prompts_as_they_are_stored(tmp_path: Path) -> None:
    args = gpu_gates.parsed(["--random", "qwen3", "--kv-cache-dtype", "fp8_e4m3"])
    run = gpu_gates.Run(args, tmp_path, tmp_path)
    for role in ("stock", "control", "hybrid"):
        spec = run._spec(role)
        assert spec.is_fp8 and spec.flags[-2:] == ["--kv-cache-dtype", "fp8_e4m3"]
    backend = SimpleNamespace(enable_deterministic=False)
    child.attend_to_prompts_as_stored(SimpleNamespace(runner=SimpleNamespace(attn_backend=backend)))
    assert backend.enable_deterministic
    with pytest.raises(AttributeError, match="cannot be told"):
        child.attend_to_prompts_as_stored(SimpleNamespace(runner=SimpleNamespace(attn_backend=object())))
    plain = gpu_gates.Run(gpu_gates.parsed(["--random", "qwen3"]), tmp_path, tmp_path)._spec("stock")
    assert not plain.is_fp8 and "--kv-cache-dtype" not in plain.flags
    with pytest.raises(SystemExit):
        gpu_gates.parsed(["--random", "qwen3", "--kv-cache-dtype", "fp8_e4m3", "--device", "cpu"])


def test_a_budget_that_is_too_small_must_be_seen() -> None:
    case = {"best": [[5]], "logprob": [[-1.0]], "gap": [[2.0]], "logit": [[3.0]]}
    found = {name: {"cases": {"together": case}} for name in ("stock", "control", "too-small")}
    args = gpu_gates.parsed(["--random", "qwen3", "--variants", "too-small"])
    assert not gpu_gates.judged(found, {}, args)["passed"]
    found["too-small"] = {"cases": {"together": case | {"logprob": [[-1.5]]}}}
    assert gpu_gates.judged(found, {}, args)["passed"]


def test_a_control_that_was_asked_for_and_is_missing_is_red() -> None:
    case = {"best": [[5]], "logprob": [[-1.0]], "gap": [[2.0]], "logit": [[3.0]]}
    found: dict[str, Any] = {"stock": {"cases": {"together": case}}, "gate1-budget": {"cases": {"together": case}}}
    args = gpu_gates.parsed(["--random", "qwen3", "--variants", "gate1-budget"])
    assert not gpu_gates.judged(found, {}, args)["passed"]
    found["control"] = {"cases": {"together": case}}
    assert gpu_gates.judged(found, {}, args)["passed"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_random_model_has_the_weights_of_its_architecture(architecture: str, tmp_path: Path) -> None:
    shape = replace(SHAPE, layers=1, vocabulary=64)
    model = write_random_model(tmp_path, architecture, shape=shape)
    described = json.loads((model / "config.json").read_text())
    assert described["architectures"] == ARCHITECTURES[architecture]["architectures"]
    with safe_open(model / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert ("model.layers.0.self_attn.q_norm.weight" in names) == architecture.startswith("qwen3")
    assert ("model.layers.0.self_attn.q_proj.bias" in names) == (architecture == "qwen2")
    assert ("model.layers.0.mlp.experts.7.up_proj.weight" in names) == (architecture == "qwen3-moe")
