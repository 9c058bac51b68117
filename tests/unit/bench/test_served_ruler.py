"""bench/served_ruler.py without servers: which servers run, and which scores meet the bar of a budget."""

from __future__ import annotations

from typing import Any

import pytest

from bench import served_ruler


def run(name: str, **scores: float) -> dict[str, Any]:
    tasks = [{"task": f"ruler:{task}", "by_length": {"32768": score}} for task, score in scores.items()]
    return {"name": name, "tasks": tasks}


def judged(**scores: float) -> dict[str, Any]:
    runs = [run("stock", vt=0.8, fwe=0.6), run("budget-2048", **scores), run("budget-1024", **scores)]
    found: dict[str, Any] = served_ruler.judge(runs)
    return {name: found[name]["32768"] for name in found}


def test_a_mean_within_a_point_and_no_task_lost_meets_the_bar() -> None:
    found = judged(vt=0.79, fwe=0.6)
    assert found["stock"]["mean"] == 70 and "met" not in found["stock"]
    assert found["budget-2048"] == {"mean": 69.5, "below_stock": 0.5, "tasks": {"vt": -1.0, "fwe": 0.0}, "met": True}


def test_a_mean_that_is_lower_misses_the_bar_of_its_budget() -> None:
    found = judged(vt=0.77, fwe=0.6)
    assert (found["budget-2048"]["met"], found["budget-1024"]["met"]) == (False, True)


def test_a_task_that_is_lost_misses_the_bar_though_the_mean_is_stocks() -> None:
    found = judged(vt=0.9, fwe=0.54)
    assert (found["budget-2048"]["met"], found["budget-1024"]["met"]) == (False, True)
    assert "fwe -6.0" in served_ruler.show({name: {"32768": told} for name, told in found.items()})


def test_servers_serve_defaults_but_for_whole_requests_and_the_cores_they_share() -> None:
    stock, noise, wide, narrow = served_ruler.configurations_of([], "cuda", 6)
    assert (stock.backend, noise.backend) == ("flashinfer", "triton")
    assert wide.settings == ("whole_requests=never", "worker_threads=6")
    assert narrow.parsed().budget_tokens == 1024 and wide.parsed().budget_tokens == 2048


def test_names_of_servers_and_of_bars_agree() -> None:
    names = {one.name for one in served_ruler.configurations_of([], "cuda", 0)}
    assert names == {served_ruler.STOCK, served_ruler.NOISE, *served_ruler.BARS}


def test_policies_are_served_with_the_same_settings_and_divide_the_cores() -> None:
    args = served_ruler.parsed(["--model", "m", "--prompts", "p", "--policies", "--hybrid", "budget_tokens=1024"])
    served = {one.name: one for one in served_ruler.chosen_of(args, cores=20)}
    assert list(served) == ["stock", "scout", "scoutattention", "hgca", "hcattention", "infinigen"]
    policies = {name: one.parsed() for name, one in served.items() if one.is_hybrid}
    assert {name: config.policy for name, config in policies.items()} == {name: name for name in policies}
    assert all(
        (config.budget_tokens, config.worker_threads, config.whole_requests) == (1024, 3, "never")
        for config in policies.values()
    )
    assert "hgca.window_tokens=1024" in served["hgca"].settings


def test_servers_that_there_are_not_are_refused() -> None:
    args = served_ruler.parsed(["--model", "m", "--prompts", "p", "--only", "hgca"])
    with pytest.raises(SystemExit, match="hgca: there are stock, stock-triton, budget-2048, budget-1024"):
        served_ruler.chosen_of(args, cores=16)
    args.only = "budget-1024"
    assert [one.name for one in served_ruler.chosen_of(args, cores=16)] == ["stock", "budget-1024"]
