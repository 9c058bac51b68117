"""Scores of answers, and differences between two runs."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hybrid.commands.eval.comparison import compare
from sglang_hybrid.commands.eval.prompts import RetrievalPrompt
from sglang_hybrid.commands.eval.result import Run, TaskResult
from sglang_hybrid.commands.eval.scoring import (
    Answered,
    Difference,
    f1,
    found,
    kl_summary,
    metric_of,
    needle_grid,
    paired_difference,
    perplexity,
    task_results,
)


def answered(task: str, text: str, *answers: str, length: int = 100, depth: float | None = None) -> Answered:
    return Answered(RetrievalPrompt(task, (1, 2), answers, length, depth, 8), text)


# -- one answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        (" 48213.", ["48213"], True),
        ("<48213>\nline", ["48213"], True),
        (" 482135", ["48213"], False),
        (" 148213", ["48213"], False),
        ("4821", ["48213"], False),
        ("NEW\n york", ["New York"], True),
        ("one and two", ["two", "one"], True),
        ("one", ["one", "two"], False),
        ("a.b", ["a.b"], True),
        ("axb", ["a.b"], False),
        ("他住在北京市", ["北京"], True),
        ("", ["x"], False),
    ],
)
def test_an_answer_is_found_as_a_whole_in_any_case(text: str, answers: list[str], expected: bool) -> None:
    assert found(text, answers) is expected


def test_nothing_to_find_is_an_error_not_a_success() -> None:
    with pytest.raises(ValueError, match="no answers"):
        found("anything", [])


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("it's Paris", "its paris", 1.0),
        ("Paris in France", "Paris", 0.5),
        ("paris paris", "paris", 2 / 3),
        ("Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("北京市", "北京", 0.8),
    ],
)
def test_f1_counts_words_without_articles_and_punctuation(text: str, answer: str, expected: float) -> None:
    assert f1(text, answer) == pytest.approx(expected)


def test_longbench_takes_the_best_of_the_answers_with_the_metric_of_its_dataset() -> None:
    score = answered("longbench:hotpotqa", " Paris\nQuestion: and Rome?", "Rome", "Paris").score
    assert score == 1.0, "the first line counts, against the best answer"
    assert answered("longbench:gov_report", "one\ntwo", "one two").score == 1.0
    assert answered("longbench:trec", "Type: Human being", "Location", "human being").score == 1.0
    assert metric_of("longbench:trec") == "contains"
    assert metric_of("longbench:mine") == "F1"
    assert metric_of("needle") == "found"


# -- many answers ------------------------------------------------------------------------------------------------------


def test_results_are_by_task_and_by_length() -> None:
    lines, bench = task_results(
        [
            answered("lines", "1", "1", length=512),
            answered("longbench:qasper", "a b c", "b c d", length=77),
            answered("lines", "2", "1", length=1024),
            answered("lines", "1", "1", length=1024),
        ]
    )
    assert lines == TaskResult("lines", "found", (1.0, 0.0, 1.0), {512: 1.0, 1024: 0.5})
    assert lines.score == pytest.approx(2 / 3)
    assert (bench.metric, bench.by_length) == ("F1", {})


def test_the_grid_has_depths_down_and_lengths_across_and_holes_where_nothing_was_asked() -> None:
    grid = needle_grid(
        [
            answered("needle", "1", "1", length=1024, depth=0.0),
            answered("needle", "1", "1", length=512, depth=1.0),
            answered("needle", "2", "1", length=512, depth=1.0),
            answered("needle", "2", "1", length=512, depth=0.0),
            answered("multi-needle", "1", "1", length=4096, depth=0.5),
        ]
    )
    assert grid is not None
    assert (grid.lengths, grid.depths) == ((512, 1024), (0.0, 1.0))
    assert grid.accuracy == ((0.0, 1.0), (0.5, None))
    assert needle_grid([answered("lines", "1", "1")]) is None


# -- logprobs and divergences ------------------------------------------------------------------------------------------


def test_perplexity_is_the_number_of_equally_likely_tokens() -> None:
    assert perplexity([math.log(1 / 8)] * 5) == pytest.approx(8)
    assert perplexity([math.log(1 / 2), math.log(1 / 8)]) == pytest.approx(4)
    assert perplexity([-math.inf, -1.0]) == math.inf
    with pytest.raises(ValueError, match="nothing"):
        perplexity([])


def test_kl_is_summed_up_by_mean_and_tail() -> None:
    summary = kl_summary([n / 100 for n in range(101)])
    assert (summary.mean, summary.p95) == pytest.approx((0.5, 0.95))


# -- differences -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(pairs=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_the_interval_is_around_the_mean_and_within_the_differences(pairs: list[tuple[float, float]]) -> None:
    baseline, other = zip(*pairs, strict=True)
    difference = paired_difference(baseline, other, resamples=500)
    assert difference.mean == pytest.approx(fmean(b - a for a, b in pairs), abs=1e-12)
    each = [b - a for a, b in pairs]
    assert min(each) - 1e-9 <= difference.low <= difference.high <= max(each) + 1e-9
    assert difference == paired_difference(baseline, other, resamples=500), "the same on every call"


def test_what_prompts_differ_in_cancels_out() -> None:
    baseline = [n / 10 for n in range(10)]
    difference = paired_difference(baseline, [value + 0.01 for value in baseline])
    assert difference.clear and difference.high - difference.low < 1e-9
    assert not paired_difference(baseline, baseline[::-1]).clear


def test_the_interval_is_as_wide_as_statistics_say() -> None:
    difference = paired_difference([0.0] * 400, [0.0, 1.0] * 200)
    assert (difference.low, difference.high) == pytest.approx((0.451, 0.549), abs=0.01)


def test_runs_are_compared_in_what_both_have() -> None:
    a = Run("full", tasks=(TaskResult("needle", "found", (1.0, 1.0)),), loss_by_prompt=(1.0, 2.0))
    b = Run(
        "scout",
        tasks=(TaskResult("lines", "found", (1.0,)), TaskResult("needle", "found", (0.0, 0.0))),
        loss_by_prompt=(1.0 + math.log(1.1), 2.0 + math.log(1.1)),
    )
    comparison = compare(a, b)
    assert comparison.tasks == {"needle": Difference(-1.0, -1.0, -1.0)}
    assert comparison.perplexity is not None and comparison.perplexity.mean == pytest.approx(0.1)
    assert compare(a, Run("none")).perplexity is None
    assert compare(a, Run("impossible", loss_by_prompt=(1.0, math.inf))).perplexity is None


def test_different_prompts_are_not_compared() -> None:
    a, b = (Run(name, tasks=(TaskResult("needle", "found", (1.0,) * n),)) for name, n in (("full", 2), ("scout", 3)))
    with pytest.raises(ValueError, match="scout and full, task needle: 2 and 3 prompts"):
        compare(a, b)
