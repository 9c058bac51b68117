"""The dashboard and the alert rules use metrics that are exported, and labels that these metrics have."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker_files import DOCKER, compose

from sglang_hybrid.metrics.rank import RANK_LABELS
from sglang_hybrid.metrics.table import METRICS

MONITORING = DOCKER / "monitoring"
DASHBOARD = json.loads((MONITORING / "sglang-hybrid.json").read_text(encoding="utf-8"))
ALERTS = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OURS = {series: metric for metric in METRICS for series in metric.series}
KEYWORDS = {"and", "or", "unless"}
LABELS_OF_PROMETHEUS = {"job", "instance", "service", "le"}  # prometheus.yaml adds ``service``


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (title of the panel or name of the alert, expression)."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]


def metrics_in(expression: str) -> set[str]:
    without = re.sub(r"\b(by|on|ignoring) *\([^)]*\)|\{[^}]*\}|\[\w+\]|\"[^\"]*\"", " ", expression)
    names = re.findall(r"(?<![\w.])([a-zA-Z_:][\w:]*)(?! *[(\w])", without)
    return set(names) - KEYWORDS


def sglangs_names() -> set[str]:
    spec = importlib.util.find_spec("sglang.srt.observability")
    assert spec is not None and spec.submodule_search_locations
    sources = [path.read_text(encoding="utf-8") for path in Path(spec.submodule_search_locations[0]).glob("*.py")]
    names = set(re.findall(r"\"(sglang:\w+)\"", "".join(sources)))
    return names | {f"{name}_{part}" for name in names for part in ("bucket", "sum", "count")}


EXPRESSIONS = list(expressions())


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS, ids=[place for place, _ in EXPRESSIONS])
def test_every_metric_of_a_panel_or_an_alert_is_exported(place: str, expression: str) -> None:
    names = metrics_in(expression)
    assert names and names - OURS.keys() - sglangs_names() - {"up"} == set()
    for name in names & OURS.keys():
        known = {*RANK_LABELS, *OURS[name].labels, *LABELS_OF_PROMETHEUS}
        assert {label for listed in re.findall(r"by *\(([^)]*)\)", expression) for label in listed.split(", ")} <= known


def test_a_metric_that_nobody_exports_would_be_noticed() -> None:
    expression = 'sum by (le) (rate(sglang_hybrid_surprise_bucket{job="sglang"}[5m])) > 2 and up == 1'
    assert metrics_in(expression) == {"sglang_hybrid_surprise_bucket", "up"}


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    shown = set().union(*(metrics_in(target["expr"]) for panel in PANELS for target in panel["targets"]))
    assert [metric.name for metric in METRICS if not shown & {*metric.series}] == []


def test_legends_and_summaries_use_labels_that_series_have() -> None:
    given = {label for metric in METRICS for label in metric.labels} | {*RANK_LABELS, *LABELS_OF_PROMETHEUS}
    for panel in PANELS:
        for target in panel["targets"]:
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= given, panel["title"]
    for rule in ALERTS:
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= given, rule["alert"]


def test_panels_do_not_lie_on_each_other_and_ask_the_data_source_that_there_is() -> None:
    sources = yaml.safe_load((MONITORING / "datasource.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"] for source in sources}
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells and max(x for x, _ in own) < 24, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "runbook"}
    assert rule["annotations"]["runbook"].endswith(".") and len(rule["annotations"]["runbook"]) > 40


def test_alerts_are_for_what_operators_must_know() -> None:
    names = [rule["alert"] for rule in ALERTS]
    wanted = {"ServerDown", "WorkerDown", "WorkerDegraded", "WorkerRestarts", "WorkerWaitHigh", "HostPoolNearlyFull"}
    assert wanted <= {*names} and len({*names}) == len(names)


def test_prometheus_finds_its_rules_where_compose_puts_them() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    prometheus = compose(DOCKER / "compose.monitoring.yaml")["services"]["prometheus"]
    mounted = dict(volume.split(":")[1::-1] for volume in prometheus["volumes"])
    assert config["rule_files"] == ["alerts.yaml"]
    for file in config["rule_files"]:  # paths are relative to the configuration
        assert mounted[f"/etc/prometheus/{file}"] == f"./monitoring/{file}"
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert set(re.findall(r'job="(\w+)"', " ".join(rule["expr"] for rule in ALERTS))) <= jobs


def test_settings_that_runbooks_name_exist() -> None:
    from sglang_hybrid.config import HybridConfig

    settings = HybridConfig().by_key()
    for rule in ALERTS:
        named = re.findall(r"\b(?:scout\.)?(?:worker_|host_|scout\.|recall_)\w+", rule["annotations"]["runbook"])
        assert {name for name in named if name not in settings} == set(), rule["alert"]
