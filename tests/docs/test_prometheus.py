"""The alerts of docs/metrics.md and the Grafana board, evaluated by Prometheus's own ``promtool``.

vLLM's own front end exports the series: a scheduler's stats go over vLLM's wire format into the
registry of ``prometheus_client``. Needs vLLM's Python sources (``sources.py``) and the program
``promtool`` (Debian's package ``prometheus``).
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip(
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)
if not shutil.which("promtool"):
    pytest.skip("needs the program promtool", allow_module_level=True)

from kvview import KVViewError
from kvview.testing.tier.faulty_store import FaultyStore
from kvview.tier import GuardedTier, Namespace
from kvview_reference.tier import FileStore
from tests.house.source_tree import ROOT

sys.path.insert(0, str(ROOT / "tests/vllm"))
from front_end import FrontEnd  # type: ignore[import-not-found]

import engine as lane  # type: ignore[import-not-found]
from kvview_vllm.tier_metrics import TierReporter

CONNECTOR = f"{ROOT / 'tests/vllm/faulty_connectors.py'}:FailingAtLastConnector"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/kvview.json").read_text("utf-8"))
TOKENS = range(10, 10 + 6 * lane.BLOCK_SIZE + 4)
LEAK, STUCK, DAMAGE = "Is there a leak?", "Are loads stuck?", "Are bytes being damaged?"
SLOW = {LEAK, STUCK, "Are stores stuck?"}  # they need minutes
HERE = Namespace("m", weights="1")
BEFORE, AFTER, LAST = "4m30s", "9m30s", "14m30s"
"""Times at which each moment has been scraped for nearly five minutes."""
Samples = Mapping[str, float]
"""Values by series."""


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


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Samples]]:
    """Before the first event of any kind, after them, and after the connector was left out."""
    folder = tmp_path_factory.mktemp("metrics")
    engine = lane.Engine(folder / "model", lane.connector_config(CONNECTOR, cpu_blocks=64))
    front = FrontEnd(engine, CONNECTOR)
    tiers = _TierFrontEnd()
    try:
        before = _samples()
        _have_events(engine)
        tiers.have_events(folder)
        assert front.value("loads") == front.value("failed_loads") == 1
        after = _samples()
        _fail(engine)
        yield before, after, _samples()
    finally:
        importlib.import_module("vllm.v1.metrics.prometheus").unregister_vllm_metrics()


def _samples() -> Samples:
    client: Any = importlib.import_module("prometheus_client")
    return {
        sample.name + json.dumps(sample.labels): sample.value
        for metric in client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:kvview")
    }


def _series(name_and_labels: str) -> str:
    """A series as PromQL writes it."""
    name, _, labels = name_and_labels.partition("{")
    pairs = json.loads("{" + labels).items()
    return name + "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in pairs) + "}"


def _have_events(engine: Any) -> None:
    """One of each kind: a failed load, a refused call, a hold, jobs that never end."""
    view, worker = engine.scheduler.connector.block_pool_view, engine.worker._worker_side
    for name in ("first", "again"):
        engine.add(name, TOKENS)
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
    with pytest.raises(KVViewError):
        view.free_blocks([40])
    view.touch_blocks([41])
    worker._half.get_finished = list
    engine.add("stuck load", TOKENS)
    engine.add("stuck store", range(500, 500 + 6 * lane.BLOCK_SIZE))
    _step(engine)


def _fail(engine: Any) -> None:
    """Have the hook at the end of a request raise; the connector is not called any more."""
    engine.add("last", range(900, 910))
    _step(engine)


def _step(engine: Any) -> None:
    for _ in range(8):
        engine.scheduler.connector._scheduler_side._next_stats = 0.0  # else once a second
        engine.worker._worker_side._next_stats = 0.0
        engine.step()


class _TierFrontEnd:
    """Two tiers and the front end of vLLM's that their stats go to."""

    def __init__(self) -> None:
        client: Any = importlib.import_module("prometheus_client")
        metrics: Any = importlib.import_module(
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
        )
        extra = {
            "spec_name": "KVViewTieringSpec",
            "spec_module_path": "kvview_vllm.tier",
            "secondary_tiers": [{"type": "kvview"}],
        }
        config = SimpleNamespace(kv_connector_extra_config=extra)
        kinds = {kind: kind for kind in (client.Counter, client.Gauge, client.Histogram)}
        self._prom = metrics.OffloadPromMetrics(
            SimpleNamespace(kv_transfer_config=config), kinds, ["model_name"], {0: ["m"]}
        )

    def have_events(self, folder: Path) -> None:
        """Damaged pages, late jobs and lookups, a tier that is left alone; none was seen before."""
        files = FileStore(HERE, root=str(folder / "tier"))
        guard = GuardedTier(files, HERE)
        _moved(guard, "put", 8)
        for path in folder.glob("tier/*/??/*"):
            path.write_bytes(path.read_bytes()[:-1])
        _moved(guard, "get", 8)
        assert guard.stats.damaged == 8
        self._prom.observe(TierReporter(guard, "files").news().data)
        guard.close()
        faulty = FaultyStore()
        guard = GuardedTier(faulty, HERE, deadline=0.05, lookup_deadline=0.05, trip_after=2)
        faulty.fault = "lookup never knows"
        while guard.lookup([b"0"]) != [False]:
            pass
        faulty.fault = "never reports"
        for _ in range(2):
            _moved(guard, "put", 1)
        self._prom.observe(TierReporter(guard, "faulty").news().data)
        faulty.heal()
        guard.close()


def _moved(guard: GuardedTier, method: str, number: int) -> None:
    ended = threading.Event()
    guard.on_wake_up(ended.set)
    pages = [memoryview(bytearray(1000)) for _ in range(number)]
    getattr(guard, method)(1, [b"%d" % each for each in range(number)], pages)
    assert guard.drain(30.0)
    guard.poll()


def test_the_variables_of_the_board_have_values(moments: Sequence[Samples]) -> None:
    found = {}
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            [(name, label)] = re.findall(r"label_values\(([\w:]+).*, (\w+)\)", one["definition"])
            labels = [json.loads(each.removeprefix(name)) for each in moments[0] if name in each]
            found[one["name"]] = {each[label] for each in labels}
    assert found == {"model": {"m"}, "connector": {CONNECTOR}}


def test_every_panel_question_and_alert_has_a_result(
    moments: Sequence[Samples], tmp_path: Path
) -> None:
    def values(name: str) -> str:
        return " ".join(f"{one[name]}x19" if name in one else "_x19" for one in moments)

    given = [{"series": _series(name), "values": values(name)} for name in moments[-1]]
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


def test_alerts_over_time(tmp_path: Path) -> None:
    """An old hold, the first load stuck, and damage whose first sample is one."""
    promtool(tmp_path, Path(__file__).with_name("alerts_over_time.yml").read_text("utf-8"))
