"""GPU memory of rows and pages: the plan equals what the engines allocate, and pages get the rest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Literal

import msgspec
import pytest
import torch

from sglang_hybrid.blocks import BLOCK_TOKENS
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.engines.cuda.handover import Handover
from sglang_hybrid.engines.cuda.infinigen import InfinigenSettings, StagedTokens
from sglang_hybrid.engines.cuda.layers import DeviceShape
from sglang_hybrid.engines.cuda.settings import slots_of, unsupported_settings
from sglang_hybrid.engines.cuda.slots import ResidentSlots
from sglang_hybrid.memory.capacity import GIB, CapacityError, KVShape
from sglang_hybrid.memory.device_capacity import (
    WORKSPACE_BYTES,
    DevicePlan,
    device_bytes,
    page_bytes,
    plan_device,
    rows_of,
    scout_row_bytes,
    staging_bytes,
)
from sglang_hybrid.ops.cuda.kept_tokens import KeptTokens
from sglang_hybrid.ops.cuda.speculation import SpeculationWorkspace
from sglang_hybrid.policies.hgca.options import HgcaOptions
from sglang_hybrid.policies.infinigen.options import InfinigenOptions
from sglang_hybrid.policies.scout.options import ScoutOptions

SHAPE = KVShape(layers=3, kv_heads=2, key_dim=64, value_dim=64, itemsize=2)
SETTINGS = HybridConfig(budget_tokens=256).with_section(ScoutOptions(slot_dtype="model"))


def plan(available: int, rows: int, config: HybridConfig = SETTINGS, *, cuda_graphs: bool = True) -> DevicePlan:
    return plan_device(available, config, SHAPE, rows, context=4096, device="cuda", cuda_graphs=cuda_graphs)


@pytest.mark.parametrize("slot_dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("whole_requests", ["auto", "never"])
def test_the_slots_of_a_row_take_what_the_engine_allocates_for_it(
    whole_requests: Literal["auto", "never"], slot_dtype: torch.dtype
) -> None:
    config, shape = msgspec.structs.replace(SETTINGS, whole_requests=whole_requests), replace(SHAPE, group=4)
    if slot_dtype == torch.uint8:
        config = config.with_section(msgspec.structs.replace(config.scout, slot_dtype="int8"))
    slots = ResidentSlots(3, 1, 2, slots_of(config), 64, slot_dtype, "cpu")
    taken = sum(part.nbytes for part in (*slots.keys, *slots.values, slots.all_positions))
    for layer in range(3):
        codes = slots.codes(layer, torch.ones(4, 2, 64))
        assert (codes is None) == (slot_dtype != torch.uint8)
        taken += 0 if codes is None else codes.factors.nbytes
    if whole_requests == "auto":
        of_device = DeviceShape(rows=1, max_batch=1, max_blocks=128, heads=2, group=4, dim=64, pool_pages=1)
        handover = Handover(3, of_device, torch.bfloat16, "cpu", borrow=lambda: None)
        taken += sum(handover.query(layer)[0].nbytes for layer in range(3))
    assert scout_row_bytes(config, shape, max_blocks=128).slots == taken


def test_fp8_halves_slots_and_staging_and_leaves_digests_as_they_are() -> None:
    quantised = replace(SHAPE, itemsize=1)
    whole, half = (device_bytes(SETTINGS, shape, rows=3, context=4096) for shape in (SHAPE, quantised))
    positions = 3 * SHAPE.layers * SHAPE.kv_heads * slots_of(SETTINGS) * 4
    last_queries = 3 * SHAPE.layers * SHAPE.kv_heads * SHAPE.group * SHAPE.key_dim * 2  # of the model's dtype
    same = positions + last_queries
    assert half.slots - same == (whole.slots - same) // 2 and half.scores == whole.scores
    assert half.staging - WORKSPACE_BYTES == (whole.staging - WORKSPACE_BYTES) // 2
    for digest_dtype in ("auto", "model"):
        config = msgspec.structs.replace(SETTINGS, digest_dtype=digest_dtype)
        assert page_bytes(config, quantised, "cuda") == page_bytes(config, SHAPE, "cuda")
    of_cpu = page_bytes(SETTINGS, quantised, "cpu")  # where digests have the pool's dtype
    assert of_cpu.digests * 2 == page_bytes(SETTINGS, SHAPE, "cpu").digests


def test_a_row_has_one_score_for_every_block_of_the_longest_context() -> None:
    scores = torch.empty(3, 2, 128, dtype=torch.float32)
    assert scout_row_bytes(SETTINGS, SHAPE, max_blocks=128).scores == scores.nbytes


def test_a_window_takes_its_slots_an_average_for_every_token_and_a_mask_for_every_block() -> None:
    config = HybridConfig(policy="hgca").with_section(HgcaOptions(window_tokens=512))
    slots = ResidentSlots(3, 1, 2, 16, 64, torch.bfloat16, "cpu")
    taken = sum(part.nbytes for part in (*slots.keys, *slots.values, slots.all_positions))
    averages, masks = torch.empty(3, 2, 512, dtype=torch.float32), torch.empty(3, 2, 128, dtype=torch.int32)
    found = device_bytes(config, SHAPE, rows=1, context=4096)
    assert (found.slots, found.scores) == (taken + averages.nbytes, masks.nbytes)


@pytest.mark.parametrize("unit", ["tokens", "blocks"])
def test_tokens_that_are_fetched_ahead_take_two_stagings_ranks_and_lists(unit: Literal["tokens", "blocks"]) -> None:
    config = HybridConfig(policy="infinigen", budget_tokens=256, whole_requests="never")
    config = config.with_section(InfinigenOptions(unit=unit))
    settings = InfinigenSettings.of(config)
    shape = DeviceShape(rows=1, max_batch=1, max_blocks=128, heads=2, group=1, dim=64, pool_pages=1)
    staged = StagedTokens(shape, settings, torch.bfloat16, "cpu")
    workspace = SpeculationWorkspace(1, 2, 128, by_block=settings.by_block, device="cpu")
    lists = staged.lists(1)
    of_lists = sum(part.nbytes for part in (lists.pages, lists.masks, lists.offsets))
    found = device_bytes(config, SHAPE, rows=1, context=4096)
    assert found.slots == 2 * sum(part.nbytes for part in staged.blocks(1))
    assert found.scores == workspace.ranks.nbytes + workspace.chosen.nbytes + 2 * of_lists
    held = device_bytes(msgspec.structs.replace(config, whole_requests="auto"), SHAPE, rows=1, context=4096)
    assert held.slots == found.slots + 256 * SHAPE.bytes_per_token


def test_a_row_of_hcattention_takes_a_weight_for_every_token_and_query_head_and_two_numbers_for_every_block() -> None:
    config, shape = HybridConfig(policy="hcattention"), replace(SHAPE, group=4)
    kept = KeptTokens.zeros(1, heads=2, group=4, max_blocks=128, device="cpu")
    found = device_bytes(config, shape, rows=3, context=4096)
    assert (found.slots, found.scores) == (0, 3 * (kept.weights.nbytes + kept.pages.nbytes + kept.positions.nbytes))


def test_a_policy_without_digests_does_not_care_about_sketches() -> None:
    assert unsupported_settings(HybridConfig(policy="hcattention", sketch_channels=16)) is None
    assert unsupported_settings(HybridConfig(sketch_channels=16)) == "sketch_channels=16"


def test_windows_that_the_kernels_do_not_have_are_served_in_torch() -> None:
    def reason(window_tokens: int = 4096, window_ratio: float = 0.0) -> str | None:
        options = HgcaOptions(window_tokens=window_tokens, window_ratio=window_ratio)
        return unsupported_settings(HybridConfig(policy="hgca").with_section(options))

    assert reason() is None
    assert reason(window_ratio=0.5) == "hgca.window_ratio=0.5"
    assert reason(window_tokens=32768) is None
    assert reason(window_tokens=32800) == "a window of more than 32768 tokens"


def test_one_row_takes_the_writes_of_padding_and_others_those_of_arriving_requests() -> None:
    assert (rows_of(64), rows_of(64, arriving=8)) == (65, 73)


def test_pages_get_what_rows_and_staging_leave_and_not_a_page_more() -> None:
    planned = plan(GIB, rows=5)
    row = scout_row_bytes(SETTINGS, SHAPE, max_blocks=4096 // BLOCK_TOKENS)
    assert planned.taken.resident == 5 * (row.slots + row.scores)
    assert planned.taken.staging == staging_bytes(128, SHAPE)
    left = GIB - planned.taken.resident - planned.taken.staging
    assert planned.pages * planned.page.total <= left < (planned.pages + 1) * planned.page.total


def test_the_torch_engine_takes_memory_for_pages_only() -> None:
    assert plan(GIB, rows=5, cuda_graphs=False).taken.resident == 0
    assert plan(GIB, rows=5, config=HybridConfig(sketch_channels=16)).taken.resident == 0  # the CUDA kernels lack it


def test_memory_for_less_than_one_budget_is_refused_with_every_number() -> None:
    with pytest.raises(CapacityError, match=r"blocks of 9999 rows .*budget of 256 tokens; lower --max-running"):
        plan(GIB, rows=9999)


def test_capacity_is_known_without_torch() -> None:
    program = "import sys, sglang_hybrid.memory.device_capacity; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)
