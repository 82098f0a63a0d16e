"""The alerts of docs/metrics.md and the Grafana board, evaluated by a real Prometheus.

vLLM's own front end exports the series: a scheduler's stats go over vLLM's wire format
into the registry, which the server scrapes over HTTP. Needs vLLM's Python sources (``sources.py``)
and the programs ``prometheus`` and ``promtool`` (Debian's package ``prometheus``).
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
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
if not all(map(shutil.which, ("prometheus", "promtool"))):
    pytest.skip("needs the programs prometheus and promtool", allow_module_level=True)

from kvview import KVViewError
from kvview.testing.tier.faulty_store import FaultyStore
from kvview.tier import GuardedTier, Namespace
from kvview_reference.tier import FileStore
from tests.docs.prometheus_server import (
    DASHBOARD,
    Prometheus,
    alerts,
    export,
    panels,
    questions,
    serve,
    write_rules,
)
from tests.house.source_tree import ROOT

sys.path.insert(0, str(ROOT / "tests/vllm"))
from front_end import FrontEnd  # type: ignore[import-not-found]

import engine as lane  # type: ignore[import-not-found]
from kvview_vllm.metrics import COUNTERS, GAUGES, PREFIX
from kvview_vllm.tier_metrics import TierReporter

CONNECTOR = f"{ROOT / 'tests/vllm/faulty_connectors.py'}:FailingAtLastConnector"
TOKENS = range(10, 10 + 6 * lane.BLOCK_SIZE + 4)
LEAK, STUCK, DAMAGE = "Is there a leak?", "Are loads stuck?", "Are bytes being damaged?"
SLOW = {LEAK, STUCK, "Are stores stuck?"}  # they need minutes: promtool plays them below
HERE = Namespace("m", weights="1")


@dataclass
class Seen:
    """The results of every expression at one moment, and the alerts that fire."""

    results: dict[str, list[Any]]
    firing: set[str]
    variables: dict[str, list[str]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Seen, Seen, Seen]]:
    """Before the first event of any kind, after them, and after the connector was left out."""
    folder = tmp_path_factory.mktemp("prometheus")
    write_rules(folder / "alerts.yml", alerts())
    engine = lane.Engine(folder / "model", lane.connector_config(CONNECTOR, cpu_blocks=64))
    front = FrontEnd(engine, CONNECTOR)
    tiers = _TierFrontEnd()
    try:
        with export() as port, serve(folder, port, [folder / "alerts.yml"]) as server:
            server.scrape()
            before = _look(server)
            _have_events(engine)
            tiers.have_events(folder)
            assert front.value("loads") == front.value("failed_loads") == 1
            server.scrape()
            after = _look(server)
            _fail(engine)
            server.scrape()
            yield before, after, _look(server)
    finally:
        importlib.import_module("vllm.v1.metrics.prometheus").unregister_vllm_metrics()


def _look(server: Prometheus) -> Seen:
    variables = {
        each["name"]: server.label_values(each["definition"])
        for each in DASHBOARD["templating"]["list"]
        if each["type"] == "query"
    }
    names = [PREFIX + name for name in GAUGES] + [f"{PREFIX}{name}_total" for name in COUNTERS]
    expressions = questions() | panels() | {name: name for name in names}
    results = {name: server.query(text) for name, text in expressions.items()}
    return Seen(results, server.firing(), variables)


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


def test_every_series_has_a_sample_before_its_first_event(seen: tuple[Seen, ...]) -> None:
    before, *_ = seen
    for name in (*GAUGES, *(f"{each}_total" for each in COUNTERS)):
        values = [each["value"][1] for each in before.results[PREFIX + name]]
        assert values == ["0"], name
    assert before.variables == {"model": ["m"], "connector": [CONNECTOR]}
    assert before.firing == set()


@pytest.mark.parametrize("panel", panels())
def test_a_panel_has_something_to_show(panel: str, seen: tuple[Seen, ...]) -> None:
    before, after, _ = seen
    assert before.results[panel] or "leak" in panel, "nothing is held: nothing leaks"
    assert after.results[panel]


@pytest.mark.parametrize("question", questions())
def test_a_question_is_answered(question: str, seen: tuple[Seen, ...]) -> None:
    assert any(each.results[question] for each in seen) or question in SLOW


@pytest.mark.parametrize("alert", [name for name in alerts() if name not in SLOW])
def test_an_alert_fires_at_the_first_event(alert: str, seen: tuple[Seen, ...]) -> None:
    assert alert in seen[1].firing | seen[2].firing


def test_alerts_over_time(tmp_path: Path) -> None:
    """An old hold, the first load stuck, and damage whose first sample is one."""
    write_rules(tmp_path / "alerts.yml", alerts())
    series = {
        f"{PREFIX}oldest_hold_timestamp_seconds": "0 60x200",
        f"{PREFIX}loads_in_flight": "0x9 1x200",
        f"{PREFIX}loads_total": "0x200",
        f"{PREFIX}stores_in_flight": "1x200",
        f"{PREFIX}stores_total": "0+1x200",
        'vllm:kvview_tier_damaged_total{store="late"}': "_x9 1x200",
        'vllm:kvview_tier_damaged_total{store="zero"}': "0x9 1x200",
    }
    both: list[dict[str, str]] = [{"store": "late"}, {"store": "zero"}]
    none: list[dict[str, str]] = []
    moments: list[tuple[int, str, list[dict[str, str]]]]
    moments = [(5, LEAK, none), (7, LEAK, [{}]), (9, STUCK, none), (20, STUCK, [{}])]
    moments += [(8, DAMAGE, none), (20, DAMAGE, both), (120, DAMAGE, none)]
    moments += [(20, "Are stores stuck?", none)]
    expected = [
        {
            "eval_time": f"{minutes}m",
            "alertname": alert,
            "exp_alerts": [{"exp_labels": labels} for labels in firing],
        }
        for minutes, alert, firing in moments
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    tests = [{"interval": "1m", "input_series": given, "alert_rule_test": expected}]
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}), "utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
