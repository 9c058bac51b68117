"""bench/served_ruler.py without servers: what is served, and how scores become bars."""

from __future__ import annotations

from typing import Any

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
