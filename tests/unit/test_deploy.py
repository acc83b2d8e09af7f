"""Dashboards, alerts and documentation of metrics use only names and labels that the table has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.model.metric_table import FLEET, METRICS, Kind, Metric, metric_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
#: Labels that Ray itself adds to every metric.
OF_RAY = {"NodeAddress", "SessionName", "Version", "Component", "WorkerId"}

_METRIC = re.compile(r"\b(\w+)(?:\{(.*?)\})?")
_SELECTED = re.compile(r"(\w+)\s*[=!]~?")
_GROUPED = re.compile(r"\b(?:by|on|ignoring|without)\s*\((.*?)\)")
#: Text of a query that is no metric: quoted text, functions and words of PromQL, durations.
_QUOTED = re.compile(r'"[^"]*"')


def metrics_in(query: str) -> Iterator[tuple[Metric, set[str]]]:
    """Yield the metrics of a query, each with the labels by which it selects; KeyError for unknown names."""
    for name, selectors in _METRIC.findall(_QUOTED.sub('""', query)):
        if "statefleet" in name:
            assert name.startswith("ray_"), name
            yield _metric(name.removeprefix("ray_")), set(_SELECTED.findall(selectors))


def _metric(name: str) -> Metric:
    base, _, series = name.rpartition("_")
    if series in ("bucket", "sum", "count"):
        metric = metric_of(base)
        assert metric.kind is Kind.HISTOGRAM
        return metric
    metric = metric_of(name)
    assert metric.kind is not Kind.HISTOGRAM, f"{name}: a histogram has series of other names"
    return metric


def check(query: str) -> None:
    """Check that a query uses known metrics with their labels, and takes counters only as rates or increases."""
    metrics = list(metrics_in(query))
    assert metrics, f"no metric in {query}"
    grouped = {label.strip() for labels in _GROUPED.findall(query) for label in labels.split(",")}
    for metric, selected in metrics:
        labels = {FLEET, *metric.labels}
        assert selected <= labels, (query, metric.name)
        assert grouped <= labels | OF_RAY | {"le"} | {label for used, _ in metrics for label in used.labels}, query
        if metric.kind is not Kind.GAUGE and "offset" not in query:
            assert re.search(rf"(rate|increase)\(ray_{metric.name}", query), query


# -- Grafana ------------------------------------------------------------------------------------------------------

DASHBOARD = json.loads((DEPLOY / "grafana" / "statefleet.json").read_text())
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]


@pytest.mark.parametrize("query", TARGETS)
def test_a_panel_queries_known_metrics(query: str) -> None:
    check(query)


def test_the_dashboard_can_be_imported_as_it_is() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in panels:
        if panel["type"] == "row":
            continue
        # The data source is a variable: any Prometheus of the user.
        assert {queried["datasource"]["uid"] for queried in (panel, *panel["targets"])} == {"${datasource}"}
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
    for name in ("fleet", "state"):
        (metric, _), *more_metrics = metrics_in(variables[name]["query"]["query"])
        assert not more_metrics
        assert name in (FLEET, *metric.labels)
    used = {name for query in TARGETS for name in re.findall(r"\$(\w+)", str(query.values[0]))}
    assert used == {"fleet", "state", "__rate_interval"}


# -- Prometheus ---------------------------------------------------------------------------------------------------


def test_prometheus_finds_rays_nodes_and_the_alerts() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]}]
    assert all((DEPLOY / file).is_file() for file in config["rule_files"])


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_queries_known_metrics_and_says_what_to_do(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    labels = {label for metric, _ in metrics_in(rule["expr"]) for label in metric.labels}
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels | OF_RAY


@pytest.mark.parametrize(
    "query",
    [
        "rate(ray_statefleet_no_such_total[5m])",
        'ray_statefleet_state_rows{shard="1"}',
        "sum by (shard) (ray_statefleet_state_rows)",
        "ray_statefleet_commits_total",
        "rate(ray_statefleet_batch_seconds[5m])",
        "up",
    ],
)
def test_the_check_sees_what_is_wrong(query: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(query)


# -- docs/metrics.md ----------------------------------------------------------------------------------------------


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    unit = re.search("_(seconds|bytes)(_total)?$", metric.name)
    return f"| `{metric.name}` | {metric.kind} | {unit[1] if unit else '-'} | {labels or '-'} | {metric.meaning} |"


def test_every_metric_is_documented_as_it_is() -> None:
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    documented = [line for line in lines if line.startswith("| `statefleet_")]
    assert documented == [row(metric) for metric in METRICS]
