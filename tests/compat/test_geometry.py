"""The geometry that the worker gets: the mailbox has space for what the policy declares and for nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.config import load_config
from sglang_hybrid.integration import miss_server
from sglang_hybrid.ops.cpu.structs import MASKS, VALUE_SUMS
from sglang_hybrid.policies.registry import Needs
from sglang_hybrid.protocol.mailbox import layout_of


@pytest.mark.parametrize(
    ("needs", "flags"),
    [
        (Needs(worker=True), 0),
        (Needs(worker=True, masks=True), MASKS),
        (Needs(worker=True, value_sums=True), VALUE_SUMS),
        (Needs(worker=True, masks=True, value_sums=True), MASKS | VALUE_SUMS),
    ],
)
def test_a_mailbox_has_room_for_what_the_policy_declares(
    needs: Needs, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miss_server, "policy_named", lambda _name: SimpleNamespace(needs=needs))
    memory = torch.zeros(2, 2, 4, 2, 32, 64)  # [key or value][layer][page]...
    pool: Any = SimpleNamespace(
        dtype=torch.float32, k_buffer=list(memory[0]), v_buffer=list(memory[1]), head_num=2, head_dim=64,
        region=SimpleNamespace(address=memory.data_ptr(), size=memory.nbytes),
    )  # fmt: skip
    model: Any = SimpleNamespace(
        dtype=torch.float32,
        model_config=SimpleNamespace(get_num_attention_heads=lambda _ranks: 6),
        server_args=SimpleNamespace(tp_size=1),
        req_to_token_pool=SimpleNamespace(size=4),
    )
    geometry = miss_server.geometry_of(load_config(None, []), pool, model)
    layout = layout_of(geometry)
    assert geometry.flags == flags
    assert (layout.queries > layout.masks) == bool(flags & MASKS)
    assert (layout.outputs > layout.weights) == bool(flags & VALUE_SUMS)
