"""Recorded runs of the simulated vLLM, and their repetition from incident files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.targets import name_target
from kvview.testing.connector import generate_scenario, simulate
from kvview.testing.connector.scenario.scenario import Scenario
from kvview_vllm.canary import CanaryConnector, CanaryOneGroupConnector
from kvview_vllm.recorder import Recorder
from kvview_vllm.simulation import VLLMEngines
from kvview_vllm.simulation.raw.transfer_config import registered
from tests.mutants.edits import Variant
from tests.vllm.raw_connectors import HostConnector, SupportsHMA, faults, load_fault

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.newest]

OPTIONS = {"path": "{tmp}"}
FAMILIES = (
    "faults",
    "faults of groups",
    "faults of steps and processes",
    "faults of the pool",
    "faults of ranks",
    "faults of model runner V2",
    "faults of events",
)


def record(
    kind: type, scenario: Scenario, folder: Path, engines: VLLMEngines
) -> tuple[str, Path] | None:
    """Run a scenario under the canary; returns the broken law, and the recorded calls."""
    made: list[Recorder] = []
    wrapper = CanaryConnector if issubclass(kind, SupportsHMA) else CanaryOneGroupConnector

    class Watched(wrapper):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.extend([self._recorder] if self._recorder else [])

    canary = {"connector": kind.__name__, "incidents": str(folder)}
    with registered(kind):
        failure = simulate(
            Watched, scenario, {**OPTIONS, "canary": canary}, engines=engines
        ).failure
    if failure is None:
        return None
    path = folder / "recorded.json"
    path.write_text(json.dumps(made[0].export(failure.law)))
    return failure.law, path


def incidents_of(kind: type, folder: Path, engines: VLLMEngines) -> Iterator[tuple[str, Path]]:
    """Record the first three of twelve seeds that fail."""
    scenarios = map(generate_scenario, range(12))
    incidents = (record(kind, scenario, folder, engines) for scenario in scenarios)
    return islice(filter(None, incidents), 3)


def laws_of_replay(kind: type, path: Path, law: str, engines: VLLMEngines) -> list[str]:
    """Return the laws that the scenarios of an incident break, up to the law of the incident."""
    laws: list[str] = []
    for scenario in engines.read_replay(str(path)).scenarios:
        failure = simulate(kind, scenario, OPTIONS, engines=engines).failure
        laws += [failure.law] if failure else []
        if laws[-1:] == [law]:
            break
    return laws


@pytest.mark.parametrize("name", ["LoadsTheNextBlock", "PromisesAllTokens", "Raises"])
def test_the_fault_of_an_incident_repeats(name: str, tmp_path: Path, engines: VLLMEngines) -> None:
    (fault,) = (one for one in faults("faults") if one.name == name)
    kind = fault.load()
    law, path = next(incidents_of(kind, tmp_path, engines))
    assert laws_of_replay(kind, path, law, engines)[-1:] == [law]
    scenario = engines.read_replay(str(path)).scenarios[0]
    failure = simulate(HostConnector, scenario, OPTIONS, engines=engines).failure
    assert failure is None, "a right connector passes"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [one for family in FAMILIES for one in faults(family)], ids=lambda one: one.name
)
def test_each_fault_repeats(fault: Variant, tmp_path: Path, engines: VLLMEngines) -> None:
    kind, seen = fault.load(), False
    for law, path in incidents_of(kind, tmp_path, engines):
        seen = True
        if law in laws_of_replay(kind, path, law, engines):
            return
    if seen:
        pytest.fail("no incident repeats")
    pytest.skip("the first seeds do not show the fault")


def test_the_command_reports_whether_the_fault_repeats_and_prints_a_script(
    tmp_path: Path, engines: VLLMEngines
) -> None:
    kind = load_fault("LoadsOneLayer")
    scenario = replace(generate_scenario(0), worker_half="job_by_job", compute_lags=False)
    found = record(kind, scenario, tmp_path, engines)
    assert found is not None
    report = tmp_path / "report.json"
    arguments = ["check", name_target(kind), "--from", str(found[1]), "--json", str(report)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1, result.output
    assert "the fault repeats: XFER-1 is broken again" in result.output
    failures = [one["failure"] for one in json.loads(report.read_text())["checks"]]
    with pytest.raises(AssertionError, match="XFER-1"):
        exec(next(filter(None, failures))["script"], {})
    arguments[1] = f"{Path(__file__).with_name('raw_connectors.py')}:HostConnector"
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "the fault does not repeat" in result.output
