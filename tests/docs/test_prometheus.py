"""The alerts of docs/metrics.md and the Grafana board, evaluated by Prometheus's own ``promtool``.

Needs the program ``promtool`` (Debian's package ``prometheus``). ``tests/vllm/test_metrics.py`` and
``test_tiers.py`` show that vLLM's front end exports these series.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.house.source_tree import ROOT
from tests.house.test_metrics_docs import DASHBOARD, EXPORTED, OF_CANARY, OF_TIERS

if not shutil.which("promtool"):
    pytest.skip("needs the program promtool", allow_module_level=True)

SLOW = {"Is there a leak?", "Are loads stuck?", "Are stores stuck?"}  # they need minutes
BEFORE, AFTER, LAST = "4m30s", "9m30s", "14m30s"
"""Before the first event, after it, and much later."""


def questions() -> dict[str, str]:
    """The expressions of the page by their questions; ``(2)`` follows that of a second one."""
    found = {}
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    for question, cell in re.findall(r"^\| ([^|]*\?) \| (.*) \|$", text, re.MULTILINE):
        for number, expression in enumerate(re.findall("`([^`]*)`", cell), 1):
            found[question + f" ({number})" * (number > 1)] = expression
    return found


def panels() -> dict[str, str]:
    """The expressions of the dashboard, with every variable at All."""
    return {
        f"{panel['title']} {target['refId']}": re.sub(r"\$\w+", ".*", target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }


def alerts() -> dict[str, str]:
    """The questions whose expression has a comparison."""
    return {each: text for each, text in questions().items() if re.search(" (>|==) ", text)}


def promtool(folder: Path, tests: str) -> None:
    """Run unit tests of the alerts; JSON is YAML."""
    rules = [{"alert": name, "expr": text} for name, text in alerts().items()]
    groups = {"groups": [{"name": "kvview", "rules": rules}]}
    (folder / "alerts.yml").write_text(json.dumps(groups), "utf-8")
    (folder / "test.yml").write_text(tests, "utf-8")
    command = ["promtool", "test", "rules", str(folder / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def series() -> dict[str, str]:
    """Return the values of every exported series: no event for 5 minutes, then one of each kind.

    vLLM exports the series of tiers only after the first event.
    """
    labels = '{model_name="m",engine="0",connector="c"}'
    found = {name + labels: "0x19 1x40" for name in EXPORTED | OF_CANARY}
    found |= {name + '{model_name="m",store="s"}': "_x19 1x40" for name in OF_TIERS}
    found['vllm:kvview_tier_in_use{model_name="m",store="s"}'] = "_x19 0x40"
    return found


def test_every_panel_question_and_alert_has_a_result(tmp_path: Path) -> None:
    given = [{"series": name, "values": values} for name, values in series().items()]
    some = [{"labels": "{}", "value": 1}]
    expected: list[dict[str, Any]] = [
        {"expr": 'ALERTS{alertstate="firing"}', "eval_time": BEFORE, "exp_samples": []}
    ]

    def expect(expression: str, time: str) -> None:
        expected.append({"expr": f"group({expression})", "eval_time": time, "exp_samples": some})

    for panel, text in panels().items():
        if "leak" not in panel:  # nothing is held: nothing leaks
            expect(text, BEFORE)
        expect(text, AFTER)
    for question, text in questions().items():
        if question not in SLOW:
            expect(f"last_over_time(({text})[14m:15s])", LAST)
    for alert in alerts().keys() - SLOW:
        labels = f'alertname="{alert}", alertstate="firing"'
        expect(f"last_over_time(ALERTS{{{labels}}}[14m])", LAST)
    test = {"interval": "15s", "input_series": given, "promql_expr_test": expected}
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": [test]}
    promtool(tmp_path, json.dumps(tests))


def test_the_variables_of_the_board_are_labels_of_series() -> None:
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            [(name, label)] = re.findall(r"label_values\(([\w:]+).*, (\w+)\)", one["definition"])
            assert any(each.startswith(name) and f"{label}=" in each for each in series())


def test_alerts_over_time(tmp_path: Path) -> None:
    """An old hold, the first load stuck, and damage whose first sample is one."""
    promtool(tmp_path, Path(__file__).with_name("alerts_over_time.yml").read_text("utf-8"))
