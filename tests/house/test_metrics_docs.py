"""The metrics page and the Grafana dashboard name exactly the exported metrics.

Prometheus evaluates their expressions in ``tests/docs/test_prometheus.py``. The dashboard has
the structure of Grafana's own reference of the dashboard JSON
(``docs/sources/developers/kinds/core/dashboard/schema-reference.md`` in grafana/grafana).
"""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

from kvview.bridge import TIER_COUNTERS
from kvview_vllm import tier_metrics
from kvview_vllm.metrics import COUNTERS, GAUGES, PREFIX
from tests.house.source_tree import ROOT

EXPORTED = {PREFIX + name for name in GAUGES} | {f"{PREFIX}{name}_total" for name in COUNTERS}
OF_TIERS = {tier_metrics.PREFIX + name for name in tier_metrics.GAUGES} | {
    f"{tier_metrics.PREFIX}{name}_total" for name in TIER_COUNTERS
}
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/kvview.json").read_text("utf-8"))
_NAME = re.compile(r"vllm:\w+")


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_the_page_names_every_exported_metric() -> None:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    assert set(_NAME.findall(text)) == EXPORTED | OF_TIERS


def test_the_dashboard_shows_exported_metrics() -> None:
    assert set(_NAME.findall("\n".join(expressions()))) == EXPORTED
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?([a-z]\w+)", text)) == variables
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            assert set(_NAME.findall(variable["definition"])) <= EXPORTED


def test_the_dashboard_has_the_structure_that_grafana_asks_for() -> None:
    kinds = {
        "uid": str,
        "title": str,
        "tags": list,
        "schemaVersion": int,
        "version": int,
        "editable": bool,
        "graphTooltip": int,
        "time": dict,
        "templating": dict,
        "annotations": dict,
        "panels": list,
    }
    assert {key for key, kind in kinds.items() if not isinstance(DASHBOARD.get(key), kind)} == set()
    assert DASHBOARD["id"] is None, "Grafana gives it one"
    assert 8 <= len(DASHBOARD["uid"]) <= 40
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        assert {"type", "title", "gridPos", "datasource", "fieldConfig", "targets"} <= set(panel)
        place = panel["gridPos"]
        assert set(place) == {"h", "w", "x", "y"}
        assert 0 <= place["x"] <= 24 - place["w"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) >= 1
        assert panel["fieldConfig"]["defaults"]["unit"]
    for one, other in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
