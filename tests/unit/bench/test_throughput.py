"""bench/throughput.py without servers: capacity, statistics, traces, metrics, tables, and the synthetic model."""

from __future__ import annotations

import gzip
import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import throughput
from bench.side_by_side import claims, configurations, metrics, plots, report
from bench.side_by_side.capacity import KVModel, Limits, hybrid_capacity, hybrid_server_bytes, stock_capacity
from bench.side_by_side.measuring import MeasurementPlan, long_enough, most_new_tokens
from bench.side_by_side.metrics_course import MetricsCourse, part_of
from bench.side_by_side.prompts import OWN_TOKENS, Prompts
from bench.side_by_side.real_text import RealText
from bench.side_by_side.statistics import Arrivals, NotSteady, Slice, course, steady_slices, summary
from bench.side_by_side.synthetic_check import check
from bench.synthetic_model import TINY, Character, Shape, next_token, parts, read_model, write_model
from sglang_hybrid.commands.report.session import gpu_trace as trace
from sglang_hybrid.config import HybridConfig
from sglang_hybrid.memory.device_capacity import device_bytes

QWEN3_14B_10_LAYERS = KVModel(layers=10, kv_heads=8, head_dim=128, itemsize=2)
LIMITS = Limits(gpu_bytes=11 * 10**9, host_bytes=100 * 10**9, most_rows=64)
DEFAULTS = HybridConfig()
STAGING = device_bytes(DEFAULTS, QWEN3_14B_10_LAYERS.shape, 1, 131072).staging


# -- capacity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "rows"), [(8192, 32), (16384, 16), (32768, 8), (65536, 4)])
def test_stock_holds_what_its_pool_has_tokens_for(length: int, rows: int) -> None:
    assert QWEN3_14B_10_LAYERS.token_bytes == 40960
    assert stock_capacity(QWEN3_14B_10_LAYERS, LIMITS, length + 128).rows == rows


def test_hybrid_holds_what_a_server_takes_for_rows_digests_and_prefill_in_the_same_memory() -> None:
    no_cap = Limits(LIMITS.gpu_bytes, host_bytes=10**15, most_rows=None)
    capacity = hybrid_capacity(QWEN3_14B_10_LAYERS, no_cap, DEFAULTS, 32768, "cuda")
    slots = 10 * 8 * 64 * (16384 // 2 + 2 * 32 * 2 + 4)  # bytes: codes of blocks, factors of tokens, and positions
    scores = 10 * 8 * 4096 * 4
    digests = 10 * 8 * 1024 * (224 + 512)
    row, more = slots + scores + digests, STAGING + slots + scores
    assert capacity.limited_by == "GPU memory"
    assert capacity.rows * row + more <= LIMITS.gpu_bytes < (capacity.rows + 1) * row + more


def test_hybrid_is_limited_by_host_memory_too() -> None:
    capacity = hybrid_capacity(QWEN3_14B_10_LAYERS, LIMITS, DEFAULTS, 65536, "cuda")
    assert (capacity.rows, capacity.limited_by) == (100 * 10**9 // (65536 * 40960), "host memory")


def test_most_rows_are_what_memory_holds_unless_a_number_is_given() -> None:
    def rows(most: int | None) -> int:
        limits = Limits(LIMITS.gpu_bytes, LIMITS.host_bytes, most)
        return hybrid_capacity(QWEN3_14B_10_LAYERS, limits, DEFAULTS, 8192, "cuda").rows

    assert rows(None) > 64 == rows(64)


def test_nothing_is_staged_on_a_cpu() -> None:
    tiny = Limits(gpu_bytes=STAGING, host_bytes=10**12, most_rows=None)
    assert hybrid_capacity(QWEN3_14B_10_LAYERS, tiny, DEFAULTS, 8192, "cpu").rows > 0
    assert hybrid_capacity(QWEN3_14B_10_LAYERS, tiny, DEFAULTS, 8192, "cuda").rows == 0


def test_a_server_for_one_length_is_within_the_limit_and_one_for_two_need_not_be() -> None:
    rows = {
        length: hybrid_capacity(QWEN3_14B_10_LAYERS, LIMITS, DEFAULTS, length, "cuda").rows for length in (8192, 65536)
    }

    def taken(most: int, length: int) -> int:
        return hybrid_server_bytes(QWEN3_14B_10_LAYERS, DEFAULTS, most, rows[length] * length, "cuda")

    assert all(taken(rows[length], length) <= LIMITS.gpu_bytes for length in rows)
    assert taken(max(rows.values()), 65536) > taken(rows[65536], 65536)


def test_a_limit_that_holds_nothing_gives_no_rows() -> None:
    nothing = Limits(gpu_bytes=10**6, host_bytes=10**9, most_rows=64)
    assert hybrid_capacity(QWEN3_14B_10_LAYERS, nothing, DEFAULTS, 32768, "cuda").rows == 0
    assert stock_capacity(QWEN3_14B_10_LAYERS, nothing, 32768).rows == 0


def test_batches_that_do_not_fit_are_left_out_and_the_largest_comes_first() -> None:
    capacity = stock_capacity(QWEN3_14B_10_LAYERS, LIMITS, 32768)
    assert throughput._rows([1, "max", 4, 999], capacity) == [8, 4, 1]


# -- statistics --------------------------------------------------------------------------------------------------------


def arriving(first: float, every: float, tokens: int, interval: int = 1) -> Arrivals:
    counts = list(range(interval, tokens + 1, interval))
    return Arrivals(0.0, [first + every * count for count in counts], counts)


def test_throughput_counts_the_time_in_which_all_rows_decode() -> None:
    # the second row starts a second later, and each row makes 100 tokens per second
    slices = steady_slices([arriving(0, 0.01, 300, 8), arriving(1, 0.01, 300, 8)], warm_tokens=8, slices=4)
    assert [one.rate for one in slices] == pytest.approx([200] * 4)
    assert sum(one.seconds for one in slices) == pytest.approx(2.96 - 1.08)


def test_rows_that_never_ran_together_are_not_a_batch() -> None:
    with pytest.raises(NotSteady, match="done before"):
        steady_slices([arriving(0, 0.01, 20), arriving(5, 0.01, 20)], warm_tokens=2, slices=2)
    with pytest.raises(NotSteady, match="fewer than 30"):
        steady_slices([arriving(0, 0.01, 20)], warm_tokens=30, slices=2)


def test_summary_has_the_median_and_the_spread() -> None:
    found = summary([Slice(1.0, tokens) for tokens in (100, 110, 120, 130, 500)], rows=12)
    assert (found["tokens_per_s"], found["step_ms"]) == (120, 100)
    assert (found["tokens_per_s_p10"], found["tokens_per_s_p90"]) == (104, 352)


def plan(least_window: float) -> MeasurementPlan:
    return MeasurementPlan(512, 24, 3, 4, None, "cuda", least_window)


def test_answers_become_long_enough_for_a_window_of_two_seconds() -> None:
    assert long_enough(512, 2.0, plan(2.0), most=10**6) == 512
    longer = long_enough(512, 1.2, plan(2.0), most=10**6)
    assert (longer - 24) * 1.2 / (512 - 24) >= 2.0
    assert long_enough(512, 1.2, plan(2.0), most=600) == 600  # the pool holds no more
    assert long_enough(512, 1.2, plan(2.0), most=100) == 512
    assert long_enough(512, 0.1, plan(0.0), most=10**6) == 512


def test_an_answer_may_be_as_long_as_the_pool_holds_for_all_rows() -> None:
    assert most_new_tokens({"pool_tokens": 100_000}, 20_000, 4, 4) == 5000 - 128
    assert most_new_tokens({"pool_tokens": 100_000}, 20_000, 4, 1) == 20_000 - 128
    assert most_new_tokens({}, 20_000, 4, 4) < 0


# -- traces ------------------------------------------------------------------------------------------------------------


def kernel(name: str, begin: float, duration: float, stream: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": duration, "args": {"stream": stream}}


def two_steps() -> list[dict[str, Any]]:
    """Return a trace of two steps, each with 100 us of GEMM, 50 of attention, 20 of waiting and 30 idle.

    60 us of scoring run on another stream during the GEMM.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}, {"ph": "X", "cat": "cpu_op", "name": "x"}]
    for begin in (1000.0, 1200.0):
        events += [
            kernel("nvjet_tst_128x64_gemm", begin, 100),
            kernel("void sglang_hybrid::score_blocks<128, 32>(sh_score_blocks)", begin + 20, 60, stream=9),
            kernel("attend_slots(sh_attend_slots, Spread)", begin + 100, 50),
            kernel("wait_for_replies(sh_mailbox_wait)", begin + 150, 20),
        ]
    return events


def test_a_trace_is_summed_by_what_kernels_are_for() -> None:
    found = trace.breakdown(two_steps(), steps=2)
    busy = {name: (one["busy_ms"], one["alone_ms"]) for name, one in found["categories"].items()}
    assert busy["GEMM"] == (0.1, 0.04)
    assert busy["scout lane"] == (0.06, 0.0)
    assert busy["attention"] == (0.05, 0.05)
    assert busy["wait"] == (0.02, 0.02)
    assert found["idle_ms"] == 0.015  # the trace ends with the last kernel: only one of two pauses of 30 us counts
    assert found["step_ms"] == 0.185
    assert found["categories"]["scout lane"]["streams"] == 1


def test_no_gap_of_a_trace_is_left_out_however_long() -> None:
    late = [{**event, "ts": event["ts"] + 5000} for event in two_steps() if event.get("cat") == "kernel"]
    found = trace.breakdown(two_steps() + late, steps=4)
    assert found["step_ms"] == pytest.approx(5.370 / 4, abs=1e-4)
    assert found["idle_ms"] == pytest.approx((5.370 - 4 * 0.17) / 4, abs=1e-4)
    assert found["busy_ms"] == 0.17
    assert found["gaps"] == {
        "count": 0.8,
        "longest_us": 4630.0,
        "long_count": 0.2,
        "long_ms": 1.1575,
        "long_from_us": 60,
    }


def test_idle_time_without_a_profiler_is_a_step_without_its_busy_time() -> None:
    found = trace.breakdown(two_steps(), steps=2)
    told = trace.idle_without_profiler(found, step_ms=0.2)
    assert told == {"step_ms": 0.2, "idle_ms": 0.03, "idle_share": 0.15, "idle_or_waiting_share": 0.25}
    assert trace.idle_without_profiler(found, step_ms=0.1)["idle_ms"] == 0.0


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("merge_sides(sh_merge)", "attention"),
        ("gather_blocks(sh_gather_blocks)", "gather"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "GEMM"),
        ("act_and_mul_kernel", "other"),
    ],
)
def test_kernels_have_a_category_by_their_names(name: str, category: str) -> None:
    assert trace.category_of(name) == category


def test_traces_are_read_compressed_or_not(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": two_steps()})
    (tmp_path / "a.trace.json").write_text(text)
    (tmp_path / "a.trace.json.gz").write_bytes(gzip.compress(text.encode()))
    assert trace.read_trace(tmp_path / "a.trace.json") == trace.read_trace(tmp_path / "a.trace.json.gz") == two_steps()
    with pytest.raises(trace.EmptyTrace):
        trace.breakdown([], steps=1)


# -- metrics, configurations -------------------------------------------------------------------------------------------


def test_counters_count_what_happened_meanwhile_and_gauges_are_as_they_are() -> None:
    text = (
        '# HELP x y\nsglang_hybrid_rows_total{by="worker"} %d\nsglang_hybrid_cpu_compute_ratio{rank="0"} %s\nother 1\n'
    )
    before, after = metrics.parse(text % (5, 0.5)), metrics.parse(text % (25, 0.1))
    found = metrics.during(before, after)
    assert found == {'sglang_hybrid_rows_total{by="worker"}': 20, 'sglang_hybrid_cpu_compute_ratio{rank="0"}': 0.1}
    assert metrics.named(found, "cpu_compute_ratio") == 0.1
    assert metrics.named(found, "unknown") is None


def test_all_configurations_are_legal_and_the_ablation_adds_one_part_at_a_time() -> None:
    given = ["budget_tokens=1024", "scout.recall_interval=4", "prediction=raw"]
    runs = [*configurations.ablation(given), configurations.hybrid(given)]
    parsed = [run.parsed() for run in runs]
    assert {one.budget_tokens for one in parsed} == {1024}
    assert (parsed[0].prediction, parsed[0].scout.recall_interval) == ("none", 0)
    assert (parsed[1].prediction, parsed[1].scout.recall_interval) == ("raw", 0)
    assert (parsed[-1].prediction, parsed[-1].scout.recall_interval) == ("raw", 4)


def test_hybrid_is_what_a_user_gets_who_sets_nothing() -> None:
    assert configurations.hybrid([]).parsed() == HybridConfig()
    assert configurations.raw([]).parsed().prediction == "raw"


def test_stock_with_a_cache_of_one_byte_holds_twice_the_rows(tmp_path: Path, tiny: Path) -> None:
    args = throughput.parsed(["--quick", "--model", str(tiny), "--most-rows", "1000"])
    benchmark = throughput.Benchmark(args, tmp_path)
    plain, fp8 = configurations.stock("flashinfer"), configurations.stock_fp8("flashinfer")
    # four times: stock's cache on a CPU is float32
    assert benchmark._capacity(fp8, 256).rows == pytest.approx(4 * benchmark._capacity(plain, 256).rows, abs=3)
    assert benchmark._flags(fp8, {256: [2]})[-2:] == ["--kv-cache-dtype", "fp8_e4m3"]
    assert "--kv-cache-dtype" not in benchmark._flags(plain, {256: [2]})


def test_hybrid_with_a_cache_of_one_byte_holds_more_rows_in_a_smaller_pool(tmp_path: Path, tiny: Path) -> None:
    args = throughput.parsed(["--quick", "--model", str(tiny), "--most-rows", "1000"])
    benchmark = throughput.Benchmark(args, tmp_path)
    settings = ["scout.slot_dtype=model"]  # slots of 8 bits are half as large already
    plain, fp8 = configurations.hybrid(settings), configurations.hybrid_fp8(settings)
    assert benchmark._capacity(fp8, 256).rows > benchmark._capacity(plain, 256).rows
    flags, plain_flags = (benchmark._flags(one, {256: [8]}) for one in (fp8, plain))
    assert flags[-2:] == ["--kv-cache-dtype", "fp8_e4m3"] and "--kv-cache-dtype" not in plain_flags
    pool, plain_pool = (
        int(next(word for word in words if word.startswith("host_memory=")).removeprefix("host_memory=")[:-3])
        for words in (flags, plain_flags)
    )
    assert pool < plain_pool


def test_metrics_are_told_by_part_of_the_answers() -> None:
    samples = [(float(t), {"a_total": 10.0 * t, "ratio": 0.1 * t, "x_bucket": 1.0}) for t in range(5)]
    assert part_of(samples, 0.0, 2.0) == {"a_total": 10.0, "ratio": 0.1}
    assert part_of(samples, 2.5, 4.0) == {"a_total": 10.0, "ratio": 0.35}
    assert part_of(samples, 8.0, 9.0) == {}


def test_metrics_are_read_beside_the_load() -> None:
    read = threading.Event()

    def metrics_now() -> dict[str, float]:
        read.set()
        return {"ratio": 0.5}

    begin = time.monotonic()
    with MetricsCourse(metrics_now, interval=60) as watched:
        assert read.wait(30)
    assert watched.parts(begin, time.monotonic(), 1) == [{"ratio": 0.5}]


# -- tables and figures ------------------------------------------------------------------------------------------------


def point(configuration: str, length: int, rows: int, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "configuration": configuration,
        "settings": ("prediction=raw",),
        "capacity": {"rows": rows, "limited_by": "GPU memory", "why": ""},
        "length": length,
        "rows": rows,
        **summary([Slice(1.0, rate)], rows),
        "metrics": {'sglang_hybrid_cpu_compute_ratio{rank="0"}': 0.082},
        **more,
    }


def result() -> dict[str, Any]:
    points = [
        point("stock", 32768, 8, 800.0),
        point("stock", 32768, 1, 200.0),
        point("hybrid", 32768, 64, 4000.0, breakdown=trace.breakdown(two_steps(), 2)),
        point("hybrid", 32768, 1, 190.0),
        point("raw", 32768, 64, 4100.0),
        point("no prediction", 32768, 64, 1000.0),
    ]
    return {
        "points": points,
        "ablation": throughput.ablation_of(points, 32768),
        "claims": claims.claims(points),
        "notes": ["[note]"],
    }


def test_claims_compare_the_best_batch_of_each_side() -> None:
    found = {one["what"]: one for one in result()["claims"]}
    assert found["32k, best batch of each: hybrid / stock"]["measured"] == 5.0
    assert found["32k, best batch of each: hybrid / stock"]["reached"] is False
    assert found["32k: defaults / prediction=raw"] == {
        "what": "32k: defaults / prediction=raw", "aim": 0.97, "measured": 0.976, "reached": True,
    }  # fmt: skip
    assert found["64k, best batch of each: hybrid / stock"]["reached"] is None
    assert found["32k, one row: hybrid / stock"]["reached"] is False


def test_tables_show_ratios_parts_and_aims() -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    report.print_result(result(), console)
    text = console.export_text()
    for expected in ("5.00x", "8.2%", "no prediction", "+ ", "0.05 (0.05)", "not measured", "[note]"):
        assert expected in text


def test_figures_are_drawn_beside_the_result(tmp_path: Path) -> None:
    drawn = plots.draw(result(), tmp_path / "run.json")
    assert [one.name for one in drawn] == ["run-throughput.png", "run-speedup.png", "run-breakdown.png"]
    assert all(one.stat().st_size > 5000 for one in drawn)


def test_quick_is_small_and_what_is_given_wins() -> None:
    args = throughput.parsed(["--quick", "--lengths", "1k", "--batches", "max,2"])
    assert (args.device, args.lengths, args.batches) == ("cpu", [1024], ["max", 2])


def test_what_is_not_measured_again_is_taken_over_from_an_earlier_run(tmp_path: Path, tiny: Path) -> None:
    def benchmark(*more: str) -> throughput.Benchmark:
        return throughput.Benchmark(throughput.parsed(["--quick", "--model", str(tiny), *more]), tmp_path)

    old = {**benchmark().result, "origin": {}, "points": [point("stock", 512, 2, 9.0), point("hybrid", 512, 3, 9.0)]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    result = benchmark("--runs", "hybrid", "--with", str(tmp_path / "old.json")).result
    assert [one["configuration"] for one in result["points"]] == ["stock"]
    result = benchmark("--lengths", "256", "--with", str(tmp_path / "old.json")).result
    assert [one["configuration"] for one in result["points"]] == ["stock", "hybrid"]  # both have another length
    with pytest.raises(SystemExit, match="limits"):
        benchmark("--gpu-limit", "1", "--with", str(tmp_path / "old.json"))


# -- the synthetic model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "tiny"
    write_model(target, TINY, Character(), seed=3)
    return target


def test_a_synthetic_model_says_what_it_was_made_with(tiny: Path) -> None:
    assert read_model(tiny) == (TINY, Character())
    assert KVModel.of(tiny, itemsize=2) == KVModel(TINY.layers, TINY.kv_heads, TINY.head_dim, 2, TINY.positions)


def test_every_token_has_the_next_one_that_is_expected() -> None:
    first, *_, last = parts(TINY, Character(), 0, "cpu", torch.float32)
    told = first["model.embed_tokens.weight"][:, TINY.half :]
    chosen = (told @ last["lm_head.weight"][:, TINY.half :].T).argmax(dim=1).tolist()
    assert chosen == [next_token(token, TINY.vocabulary) for token in range(TINY.vocabulary)]
    assert len(set(chosen)) == TINY.vocabulary


def test_transformers_decodes_the_walk_of_a_synthetic_model(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    asked = Prompts(tiny, seed=0).rows(64, 1, 1)
    with torch.inference_mode():
        answer = model.generate(torch.tensor(asked), max_new_tokens=8, do_sample=False, eos_token_id=-1)[
            0, 64:
        ].tolist()
    token = asked[0][-1]
    assert answer == [token := next_token(token, TINY.vocabulary) for _ in range(8)]


def test_rows_that_share_a_prompt_differ_in_their_last_tokens(tiny: Path) -> None:
    rows = Prompts(tiny, seed=0).rows(256, rows=5, different=2)
    assert len({tuple(row) for row in rows}) == 5 and {len(row) for row in rows} == {256}
    assert len({tuple(row[:-OWN_TOKENS]) for row in rows}) == 2
    assert max(map(max, rows)) < TINY.vocabulary


def test_queries_drift_slowly_from_step_to_step_and_layer_to_layer() -> None:
    shape = Shape(layers=3, hidden=256, heads=4, kv_heads=2, head_dim=128, intermediate=512, vocabulary=1024)
    found = check(shape, Character(), seed=0, tokens=4096, steps=4)
    assert 0 < found["block_change_in_steps"][1] < 0.3  # 1.0 with random weights; --check prints the numbers
    assert found["raw_prediction_cosine"] > 0.85
    assert found["steps_on_the_walk"] == "4 of 4"


def test_the_course_of_answers_is_told_part_by_part_over_all_runs() -> None:
    slices = [Slice(1.0, tokens) for tokens in (10, 20, 30, 14, 20, 50)]  # two runs in three parts
    assert course(slices, 3) == [12.0, 20.0, 40.0]


def test_prompts_of_a_real_model_are_pieces_of_text_that_do_not_overlap(tmp_path: Path) -> None:
    words = {f"w{n}": n for n in range(500)}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [],
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    files = [tmp_path / f"text-{n}" for n in range(2)]
    for n, file in enumerate(files):
        file.write_text(" ".join(f"w{250 * n + m}" for m in range(250)))
    text = RealText(tmp_path / "tokenizer.json", seed=1, files=files)
    taken = [text.take(100) for _ in range(5)]
    assert sorted(token for piece in taken for token in piece) == list(range(500))
    with pytest.raises(ValueError, match="the text has 500 tokens"):
        text.take(1)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 500}))
    prompts = Prompts(tmp_path, seed=0)
    rows = prompts.rows(64, rows=3, different=3)
    assert rows == prompts.rows(64, rows=3, different=3)
    assert prompts.kind == "real text"
    assert {len(row) for row in rows} == {64}


def test_policies_are_compared_at_equal_batches() -> None:
    rates = {"hybrid": 210.0, "scoutattention": 150.0, "hgca": 90.0, "infinigen": 100.0}
    points = [
        {"configuration": name, "length": 32768, "rows": rows, "tokens_per_s": rate}
        for name, rate in rates.items()
        for rows in ((32, 62) if name != "infinigen" else (32,))
    ]
    found = claims.against_papers(points)
    assert [(one["what"], one["measured"], one["reached"]) for one in found] == [
        ("32k x 32: scout / infinigen", 2.1, True), ("32k x 32: scoutattention / infinigen", 1.5, None),
    ]  # fmt: skip


def test_a_papers_window_holds_what_the_budget_of_scout_holds() -> None:
    assert configurations.paper("hgca", ["budget_tokens=1024"]).settings[-1] == "hgca.window_tokens=1024"
    assert configurations.paper("infinigen", []).settings == ("policy=infinigen",)
