"""The metrics page and the Grafana dashboard name exactly the exported metrics.

Prometheus evaluates their expressions in ``tests/docs/test_prometheus.py``. The dashboard has
the structure of Grafana's own reference of the dashboard JSON
(``docs/sources/developers/kinds/core/dashboard/schema-reference.md`` in grafana/grafana).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from kvview.bridge import TIER_COUNTERS
from kvview_vllm.metrics import tier_metrics
from kvview_vllm.metrics.connector_metrics import COUNTERS, GAUGES, PREFIX
from tests.house.source_tree import ROOT

EXPORTED = {PREFIX + name for name in GAUGES} | {f"{PREFIX}{name}_total" for name in COUNTERS}
OF_TIERS = {tier_metrics.PREFIX + name for name in tier_metrics.GAUGES} | {
    f"{tier_metrics.PREFIX}{name}_total" for name in TIER_COUNTERS
}
# Their module imports vLLM, so tests/vllm/test_canary.py compares them with the page.
OF_CANARY = set(
    re.findall(r"vllm:kvview_canary_\w+", (ROOT / "docs/canary.md").read_text("utf-8")),
)
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/kvview.json").read_text("utf-8"))
_NAME = re.compile(r"vllm:\w+")


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_page_names_every_exported_metric() -> None:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    assert set(_NAME.findall(text)) - OF_CANARY == EXPORTED | OF_TIERS


def test_the_dashboard_shows_exported_metrics() -> None:
    assert set(_NAME.findall("\n".join(expressions()))) == EXPORTED | OF_CANARY
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?([a-z]\w+)", text)) == variables
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            assert set(_NAME.findall(variable["definition"])) <= EXPORTED


def test_the_dashboard_has_the_structure_that_grafana_requires() -> None:
    schema = json.loads(Path(__file__).with_name("dashboard.schema.json").read_text("utf-8"))
    Draft202012Validator(schema).validate(DASHBOARD)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
    squares = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(squares)) == len(squares), "panels overlap"
    assert max(x for x, _ in squares) < 24
