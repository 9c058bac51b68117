"""The estimated decode rate is compared with every committed result of a decode step."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from size_cases import LLAMA, MOE

from sglang_hybrid.commands.size import decode_rate
from sglang_hybrid.commands.size.committed import (
    CODE_SERVERS,
    HYBRID_STEPS,
    LEFT_OUT,
    QWEN_STEPS,
    RESULTS,
    SERVERS,
    STOCK_STEPS,
    Measured,
    error_ranges,
)
from sglang_hybrid.commands.size.decode_rate import Rates, hybrid_step, stock_step
from sglang_hybrid.commands.size.model_shape import shape_of
from sglang_hybrid.config import load_config

DIRECTORY = Path(__file__).resolve().parents[3] / "bench" / "results"
MOST_ERROR = 0.15
MODEL, CONFIG, RATES = shape_of(LLAMA, "Llama"), load_config(None, ["scout.slot_dtype=model"]), Rates()

Point = tuple[str, bool, int, int, str, float]  # file, hybrid, tokens, rows, variant, milliseconds


def committed_points() -> dict[Point, dict[str, Any]]:
    """Return all decode steps of the committed results."""
    found: dict[Point, dict[str, Any]] = {}
    for file in (STOCK_STEPS, HYBRID_STEPS, QWEN_STEPS):
        for point in json.loads((DIRECTORY / file).read_text())["points"]:
            is_hybrid = file != STOCK_STEPS
            found[file, is_hybrid, point["tokens"], point["rows"], point["variant"], point["step_ms"]] = point
    for file in (SERVERS, CODE_SERVERS):
        for point in json.loads((DIRECTORY / file).read_text())["points"]:
            name = point["configuration"]
            variant = "" if name in ("stock", "hybrid") else name
            found[file, name != "stock", point["length"], point["rows"], variant, point["step_ms"]] = point
    return found


def key_of(one: Measured) -> Point:
    return one.file, one.hybrid, one.tokens, one.rows, one.variant, one.step_ms


def test_every_committed_step_is_compared_or_left_out_for_a_reason() -> None:
    assert {key_of(one) for one in (*RESULTS, *LEFT_OUT)} == set(committed_points())
    assert not set(RESULTS) & set(LEFT_OUT)


def test_what_is_left_out_was_measured_with_other_settings() -> None:
    points = committed_points()
    for one in LEFT_OUT:
        result = points[key_of(one)]
        if one.hybrid:  # an ablation: neither default settings nor shown in the README
            assert {"recall_interval=0", "cpu_share=1"} & set(result["settings"])
        elif one.file == CODE_SERVERS:  # the slowest tenth took 1.7 times as long as the fastest
            assert result["tokens_per_s_p90"] > 1.7 * result["tokens_per_s_p10"]
        else:
            assert result["different_prompts"] < result["rows"]
            assert one.error > MOST_ERROR  # a result within the error has to be compared


@pytest.mark.parametrize(
    "result",
    RESULTS,
    ids=lambda one: f"{one.file}-{'hybrid' if one.hybrid else 'stock'}-{one.tokens}-{one.rows}{one.variant}",
)
def test_the_estimate_is_within_15_percent_of_each_committed_result(result: Measured) -> None:
    assert abs(result.error) < MOST_ERROR


@pytest.mark.parametrize("hybrid", [False, True], ids=["stock", "hybrid"])
@pytest.mark.parametrize("file", ["decode steps", SERVERS])
def test_results_at_8k_32k_and_64k_are_among_them(file: str, hybrid: bool) -> None:
    steps = HYBRID_STEPS if hybrid else STOCK_STEPS
    compared = {
        one.tokens for one in RESULTS if one.file == (file if file == SERVERS else steps) and one.hybrid == hybrid
    }
    assert {8192, 32768, 65536} <= compared


def test_results_that_scored_fewer_blocks_are_those_before_scoring_at_every_step() -> None:
    for one in RESULTS:
        selects = one.hybrid and one.rows > 1  # a single request is kept whole in GPU memory: nothing is scored
        assert one.scores_all == (not selects or "score_interval=1" in one.variant or one.file == CODE_SERVERS)


def test_shares_of_misses_and_recalls_are_the_means_of_the_steps_that_select() -> None:
    points = committed_points()
    selecting = [points[key_of(one)] for one in RESULTS if one.hybrid and one.rows > 1 and not one.server]
    missed = statistics.mean(one["cpu_compute_ratio"] for one in selecting)
    recalled = statistics.mean(one["recalled_per_list"] for one in selecting) / (2048 // 32)
    assert pytest.approx(missed, abs=0.0005) == decode_rate.MISSED_SHARE
    assert pytest.approx(recalled, abs=0.0005) == decode_rate.RECALLED_SHARE


def test_the_default_rate_of_host_memory_is_what_15_threads_read() -> None:
    worker = json.loads((DIRECTORY / "bench-worker-16-xeon.json").read_text())
    (read,) = (one["gb_s"] for one in worker["read_bandwidth"]["by_threads"] if one["threads"] == 15)
    assert RATES.memory_gb_s == pytest.approx(read, abs=0.5)
    (attended,) = (
        one["median_gb_s"] for one in worker["attention"]
        if (one["dtype"], one["variant"], one["threads"], one["blocks_per_task"]) == ("bfloat16", "amx", 15, 8)
    )  # fmt: skip
    assert pytest.approx(attended / read, abs=0.005) == decode_rate.WORKER_EFFICIENCY


def test_errors_are_summed_up_by_file() -> None:
    ranges = error_ranges(hybrid=True)
    assert set(ranges) == {HYBRID_STEPS, QWEN_STEPS, SERVERS, CODE_SERVERS}
    assert all(-MOST_ERROR < low <= high < MOST_ERROR for low, high in ranges.values())


# -- the estimate ------------------------------------------------------------------------------------------------------


def test_no_step_is_shorter_than_the_latency_of_its_layers() -> None:
    fast = Rates(gpu_tb_s=1000, memory_gb_s=1e5, pcie_gb_s=1e5)
    for step in (stock_step(MODEL, 1, 1024, fast), hybrid_step(MODEL, CONFIG, 64, 65536, fast)):
        assert step.ms > step.latency_ms >= MODEL.layers * 0.05


def test_stock_reads_the_whole_context_and_hybrid_its_slots_and_digests() -> None:
    stock, hybrid = stock_step(MODEL, 8, 65536, RATES), hybrid_step(MODEL, CONFIG, 8, 65536, RATES)
    assert stock.kv_bytes == 8 * 65536 * MODEL.kv_shape(1).bytes_per_token
    assert hybrid.kv_bytes == stock.kv_bytes * 2048 // 65536
    assert 0 < hybrid.digest_bytes < stock.kv_bytes // 10 and stock.digest_bytes == 0
    assert hybrid.weights_bytes == stock.weights_bytes == MODEL.weights.dense


def test_requests_that_fit_in_the_slots_are_whole_and_as_fast_as_stock() -> None:
    whole = hybrid_step(MODEL, CONFIG, 1, 32768, RATES, most_rows=64)
    assert whole == stock_step(MODEL, 1, 32768, RATES)
    settings = load_config(None, ["whole_requests=never", "scout.slot_dtype=model"])
    never = hybrid_step(MODEL, settings, 1, 32768, RATES, most_rows=64)
    assert never.kv_bytes < whole.kv_bytes


def test_slots_of_8_bits_have_memory_for_half_of_the_tokens_of_whole_requests() -> None:
    codes = load_config(None, ["scout.slot_dtype=int8"])
    for rows, whole in ((2, True), (4, False)):
        step = hybrid_step(MODEL, codes, rows, 32768, RATES, most_rows=64)
        assert (step == stock_step(MODEL, rows, 32768, RATES)) is whole
    assert hybrid_step(MODEL, CONFIG, 4, 32768, RATES, most_rows=64) == stock_step(MODEL, 4, 32768, RATES)


@pytest.mark.parametrize(
    ("rates", "bound"),
    [
        (Rates(), "GPU"),
        (Rates(memory_gb_s=10), "worker (host memory bandwidth)"),
        (Rates(pcie_gb_s=1), "PCIe"),
    ],
)
def test_the_slowest_part_bounds_a_step(rates: Rates, bound: str) -> None:
    step = hybrid_step(MODEL, CONFIG, 64, 65536, rates)
    assert step.bound_by == bound
    assert step.ms == max(step.gpu_ms, step.worker_ms, step.pcie_ms) + decode_rate.SERVER_MS


def test_policy_full_reads_everything_over_pcie_when_requests_are_not_whole() -> None:
    step = hybrid_step(MODEL, load_config(None, ["policy=full"]), 64, 65536, RATES)
    assert step.bound_by == "PCIe" and step.pcie_ms > 1000


def test_several_gpus_divide_weights_and_kv_heads_and_share_the_memory_of_the_host() -> None:
    one, two = (hybrid_step(MODEL, CONFIG, 64, 65536, RATES, gpus=gpus) for gpus in (1, 2))
    assert (two.weights_bytes, two.kv_bytes) == (one.weights_bytes // 2, one.kv_bytes // 2)
    assert two.worker_ms == pytest.approx(one.worker_ms)


def test_a_mixture_of_experts_reads_more_weights_with_more_requests() -> None:
    model = shape_of(MOE, "moe")
    assert stock_step(model, 1, 8192, RATES).weights_bytes < stock_step(model, 64, 8192, RATES).weights_bytes / 3


def test_no_requests_have_no_rate() -> None:
    assert stock_step(MODEL, 0, 8192, RATES).tokens_per_s == 0
