"""The host pool refuses settings that it cannot serve."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_hybrid.integration.host_kv_pool import HostKVPool
from sglang_hybrid.integration.refusals import Refusal


@pytest.mark.parametrize(
    ("settings", "head_dim", "reason"),
    [
        (["digest_dtype=int8"], 48, "digest_dtype=int8 needs a head_dim that is a multiple of 32, not 48"),
    ],
)
def test_a_head_dim_that_sketches_or_digests_cannot_have_is_refused(
    settings: list[str], head_dim: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_CONFIG", "")
    monkeypatch.setenv("SGLANG_HYBRID_SET", json.dumps(settings))
    with pytest.raises(Refusal, match=reason):
        HostKVPool(
            320, page_size=32, dtype=torch.float32, head_num=2, head_dim=head_dim, layer_num=1, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
