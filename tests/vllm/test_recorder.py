"""Recorded runs of the simulated vLLM, and their repetition from incident files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.targets import name_target
from kvview.testing.connector import generate_scenario, simulate
from kvview_vllm.recorder.incident import read_incident
from kvview_vllm.simulation import VLLMEngines
from tests.mutants.edits import Variant
from tests.vllm.raw_connectors import HostConnector, faults, load_fault
from tests.vllm.recorded import record

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.newest]

OPTIONS = {"path": "{tmp}"}
OTHER_LAW = dict.fromkeys(
    ("ForgetsALoad", "SharesLoadsInAClass", "NeedsAttention"), ("CONN-4", "CONN-3")
)
"""Faults whose transfers never end, and which another request shows first."""
FAMILIES = (
    "faults",
    "faults of groups",
    "faults of steps and processes",
    "faults of the pool",
    "faults of ranks",
    "faults of model runner V2",
    "faults of events",
)


def incident_of(fault: Variant, folder: Path, engines: VLLMEngines) -> tuple[type, str, Path]:
    """Record the first of twelve seeds that fails."""
    kind = fault.load()
    for seed in range(12):
        if found := record(kind, generate_scenario(seed), folder, engines, OPTIONS):
            return kind, *found
    pytest.skip("the first seeds do not show the fault")


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
    kind, law, path = incident_of(fault, tmp_path, engines)
    assert laws_of_replay(kind, path, law, engines)[-1:] == [law]
    scenario = engines.read_replay(str(path)).scenarios[0]
    failure = simulate(HostConnector, scenario, OPTIONS, engines=engines).failure
    assert failure is None, "a right connector passes"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [one for family in FAMILIES for one in faults(family)], ids=lambda one: one.name
)
def test_each_fault_repeats(fault: Variant, tmp_path: Path, engines: VLLMEngines) -> None:
    kind, law, path = incident_of(fault, tmp_path, engines)
    laws = laws_of_replay(kind, path, law, engines)
    assert law in laws or (law, *laws[:1]) == OTHER_LAW.get(fault.name)


def test_the_command_reports_whether_the_fault_repeats_and_prints_a_script(
    tmp_path: Path, engines: VLLMEngines
) -> None:
    kind = load_fault("LoadsOneLayer")
    scenario = replace(generate_scenario(0), worker_half="job_by_job", compute_lags=False)
    found = record(kind, scenario, tmp_path, engines, {})
    assert found is not None
    arguments = ["check", name_target(kind), "--from", str(found[1])]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1, result.output
    assert "the fault repeats: XFER-1 is broken again" in result.output
    script = result.output.partition("\n# seed")[2]
    with pytest.raises(AssertionError, match="XFER-1"):
        exec(f"#{script}", {})
    arguments[1] = f"{Path(__file__).with_name('raw_connectors.py')}:HostConnector"
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "the fault does not repeat" in result.output


def test_an_incident_of_a_worker_is_refused(tmp_path: Path, engines: VLLMEngines) -> None:
    from kvview import ConfigError
    from kvview_vllm.recorder import Recorder
    from kvview_vllm.recorder.played import make_replay
    from tests.vllm.recorded import with_recorders

    recorders = {role: Recorder(1 << 20, tmp_path) for role in ("SCHEDULER", "WORKER")}
    scenario = replace(generate_scenario(0), worker_half="job_by_job", compute_lags=False)
    simulate(with_recorders(HostConnector, recorders), scenario, engines=engines)
    path = recorders["WORKER"].write("on request")
    assert path is not None
    incident = read_incident(path)
    assert {"start_load_kv", "get_finished", "wait_for_save"} <= {r.hook for r in incident.records}
    with pytest.raises(ConfigError, match="of the worker side"):
        make_replay(incident)
