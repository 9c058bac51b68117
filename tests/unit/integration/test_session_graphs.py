"""The session of ``sglang-hybrid eval`` on a GPU uses a server's CUDA graphs, recorded anew for new settings."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.config import load_config
from sglang_hybrid.integration.model_session import ModelSession
from sglang_hybrid.integration.refusals import Refusal
from sglang_hybrid.integration.session_flags import add_model_flags, session_flags


def session(by_graphs: bool) -> tuple[ModelSession, list[str]]:
    """Return a session without a model, and a list that records what the session does to SGLang's model runner."""
    done: list[str] = []
    made: Any = ModelSession.__new__(ModelSession)
    made._by_graphs = by_graphs
    made.runner = SimpleNamespace(
        attn_backend=SimpleNamespace(
            use=lambda config, _profile: done.append(f"use {config.budget_tokens}"),
            use_policy=lambda _policy: done.append("use a policy"),
        ),
        init_cuda_graphs=lambda: done.append("record"),
    )
    return made, done


def test_graphs_are_recorded_anew_behind_new_settings() -> None:
    made, done = session(by_graphs=True)
    made.use(load_config(None, ["budget_tokens=1024"]))
    assert done == ["use 1024", "record"]


def test_without_graphs_nothing_is_recorded() -> None:
    made, done = session(by_graphs=False)
    made.use(load_config(None, ["budget_tokens=1024"]))
    made.use_policy(Any, load_config(None, []))  # type: ignore[arg-type]
    assert done == ["use 1024", "use 2048", "use a policy"]


def test_settings_that_graphs_cannot_have_are_refused() -> None:
    made, done = session(by_graphs=True)
    with pytest.raises(Refusal, match=r"sketch_channels=16\): decode in plain torch, --server-flag=--disable-cuda-gr"):
        made.use(load_config(None, ["sketch_channels=16"]))
    with pytest.raises(Refusal, match="runs in plain torch"):
        made.use_policy(Any, load_config(None, []))  # type: ignore[arg-type]
    assert done == []


def flags(*given: str, as_served: bool) -> list[str]:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    return session_flags(parser.parse_args(["--model-path", str(Path("model")), *given]), [], as_served=as_served)


def test_on_a_gpu_an_evaluation_has_graphs_and_a_worker_as_a_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    served = flags(as_served=True)
    assert "--disable-cuda-graph" not in served and "--hybrid=worker=none" not in served
    assert served[served.index("--cuda-graph-bs-decode") + 4] == "8" and "--max-running-requests=8" in served
    for plain in (
        flags(as_served=False), flags("--device", "cpu", as_served=True),
        flags("--server-flag=--disable-cuda-graph", as_served=True),
    ):  # fmt: skip
        assert "--disable-cuda-graph" in plain and "--hybrid=worker=none" in plain
        assert "--cuda-graph-bs-decode" not in plain
