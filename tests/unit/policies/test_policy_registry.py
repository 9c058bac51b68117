"""Policies by name: built-in ones, those that are registered while a process runs, and those of other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import softmax_attention
from decoding import Requests, Shape, T
from installed_package import installed

from sglang_hybrid.config import ConfigError, HybridConfig, load_config
from sglang_hybrid.engines.choice import unsupported_by_cpu_engine
from sglang_hybrid.engines.cuda.program import StepProgram
from sglang_hybrid.engines.cuda.settings import unsupported_settings
from sglang_hybrid.engines.torch import TorchAttention
from sglang_hybrid.memory.capacity import KVShape
from sglang_hybrid.memory.device_capacity import device_bytes
from sglang_hybrid.policies import registry
from sglang_hybrid.policies.full import FullPolicy
from sglang_hybrid.policies.registry import (
    ENTRY_POINTS,
    Needs,
    PolicyContext,
    UnknownPolicy,
    policy_named,
    policy_names,
    register_policy,
)

EXAMPLE = Path(__file__).parents[3] / "examples/streaming_llm"


@pytest.fixture(autouse=True)
def registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own registry, so that the policies that the test registers are gone after it."""
    policy_names()  # registers the built-in policies
    monkeypatch.setattr(registry, "_policies", dict(registry._policies))


def test_a_policy_that_is_registered_at_run_time_is_used() -> None:
    made: list[PolicyContext] = []

    @register_policy("mine", description="everything, once more")
    def create(context: PolicyContext) -> FullPolicy:
        made.append(context)
        return FullPolicy()

    config = HybridConfig(policy="mine")
    assert isinstance(TorchAttention(config, rows=3, layers=2).policy, FullPolicy)
    assert [(context.rows, context.layers) for context in made] == [(3, 2)]
    # the torch engine serves it, on any host
    assert unsupported_settings(config) == "policy=mine"
    assert unsupported_by_cpu_engine(config, head_dim=64) == "policy=mine"


def test_built_in_policies_have_step_programs_for_cuda_graphs() -> None:
    for name in ("full", "hgca", "infinigen", "scout"):
        program = policy_named(name).cuda_program
        assert program is not None and issubclass(program(), StepProgram)
    assert policy_named("full").needs == Needs()  # neither a worker nor prediction


def test_limits_of_selection_do_not_bind_a_policy_that_selects_nothing() -> None:
    def unsupported(*settings: str) -> str | None:
        return unsupported_settings(load_config(None, settings))

    assert unsupported("policy=full", "budget_tokens=16384") is None
    assert unsupported("budget_tokens=16384") == "more than 8192 tokens in the budget"
    assert unsupported("policy=full", "sketch_channels=16") == "sketch_channels=16"


def test_policy_full_takes_device_memory_for_whole_requests_only() -> None:
    shape = KVShape(layers=3, kv_heads=2, key_dim=64, value_dim=64, itemsize=2)

    def resident(**settings: Any) -> int:
        return device_bytes(HybridConfig(**settings), shape, rows=5, context=4096).resident

    assert resident(policy="full", budget_tokens=1024) == 5 * 1024 * shape.bytes_per_token
    assert resident(policy="full", whole_requests="never") == 0
    sixteen_bits = {"scout": {"slot_dtype": "model"}}
    assert resident(sections=sixteen_bits, budget_tokens=1024) > 5 * 1024 * shape.bytes_per_token  # and scores


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="must be one of full, hcattention, hgca, infinigen, scout, scoutattention"):
        HybridConfig(policy="nobodys")
    with pytest.raises(
        UnknownPolicy,
        match="nobodys: there are full, hcattention, hgca, infinigen, scout, scoutattention",
    ):
        policy_named("nobodys")


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match=r"a policy full already, made by sglang_hybrid\.policies\.built_in"):
        register_policy("full", description="")(lambda _context: FullPolicy())


def test_a_package_adds_a_policy_by_its_entry_point(tmp_path: Path) -> None:
    program = (
        "from sglang_hybrid.config import HybridConfig; from sglang_hybrid.policies.registry import policy_named;"
        "import sys; HybridConfig(); assert 'streaming_llm' not in sys.modules;"
        "config = HybridConfig(policy='streaming_llm'); policy = policy_named('streaming_llm');"
        "print(policy.description, config.section(policy.settings).window_tokens)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | installed(tmp_path, "streaming_llm", ENTRY_POINTS, "streaming_llm", EXAMPLE),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "the first and the last tokens of a request are attended to 1024\n", done.stderr


def test_the_example_attends_to_sink_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    from streaming_llm import StreamingLLM

    shape = Shape(heads=2, group=3, dim=16, value_dim=16, dtype=torch.float32)
    lengths = [1, 2 * T, 3 * T + 5, 9 * T + 1]
    requests = Requests(lengths, shape, seed=3)
    requests.write_all()
    batch, query = requests.decode_batch(), requests.last_queries()
    out = StreamingLLM(sink=1, window=2).decode(query, requests.cache, batch, shape.scale)
    for row, length in enumerate(lengths):
        blocks = -(-length // T)
        kept = [token for token in range(length) if token < T or token // T >= blocks - 2]
        keys, values = requests.row_keys[row][:, kept], requests.row_values[row][:, kept]
        expected = softmax_attention(query[row], keys, values, shape.scale)[0]
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-5)
