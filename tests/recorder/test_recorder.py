"""The recorder of a server: bounded memory, no ids in its files, and their replay."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview.testing.connector import Add, HoldBlocks, Step
from kvview_vllm.recorder import Recorder, on_signal
from kvview_vllm.recorder.incident import IncidentModel, read_incident
from kvview_vllm.recorder.played import make_replay
from kvview_vllm.recorder.ring import positions
from tests.recorder.calls import BLOCK_SIZE, Calls, make_recorder, make_request, play_reuse

RIGHT = "kvview_reference.store_connector:StoreConnector"
RAISES = "tests.testing.test_connector_checks:Raises"


def exported(recorder: Recorder, law: str = "") -> IncidentModel:
    return IncidentModel.model_validate(recorder.export(law))


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """A file with two prompts, and one of them again."""
    recorder = make_recorder()
    play_reuse(recorder)
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(recorder.export("CONN-3")))
    return path


def size_of(value: Collection[object]) -> int:
    """Return the memory of a container of plain values."""
    inner = [*value, *value.values()] if isinstance(value, dict) else [*value]
    return sys.getsizeof(value) + sum(map(sys.getsizeof, inner))


def test_memory_is_bounded_under_100_000_hooks() -> None:
    limit = 1 << 17
    recorder = make_recorder(limit)
    calls = Calls(recorder)
    number = 0
    while calls.num_records < 100_000:
        calls.serve(make_request(f"r{number}", [number], num_output=100))
        number += 1
    assert recorder.num_bytes <= limit
    held = size_of([packed for packed, _ in recorder._pages])
    assert limit / 2 < held <= limit, "most of the memory is used"
    found = exported(recorder)
    assert found.num_dropped + len(found.records) == calls.num_records
    notes = make_replay(found).notes
    assert notes[0] == f"the incident is a window: {found.num_dropped} earlier calls are not played"


def test_an_incident_has_no_id_no_token_and_no_hash(incident: Path) -> None:
    text = incident.read_text()
    for secret in ("chatcmpl", "5f3a", "70000", "80000", "9999999"):
        assert secret not in text, secret


def test_an_incident_has_the_calls_in_numbers(incident: Path) -> None:
    found = read_incident(incident)
    assert found.num_dropped == 0
    first, other, again = found.requests
    assert [first.request, other.request, again.request] == [1, 2, 3]
    assert first.hashes == again.hashes
    assert not set(first.hashes) & set(other.hashes)
    (loaded,) = (record for record in found.records if record.received)
    assert loaded.received == [3]
    assert found.engine.num_blocks == 60


def test_a_request_that_comes_like_a_new_one_again_is_resumed() -> None:
    recorder = make_recorder()
    calls, request = Calls(recorder), make_request("a", [0] * BLOCK_SIZE)
    for _ in range(2):
        calls.step(request)
    calls.step(finished=["a"])
    calls.step(request)  # another request with the same id
    found = [(record.new, record.resumed) for record in exported(recorder).records]
    assert found == [([1], []), ([], [1]), ([], []), ([1], [])]


@pytest.mark.parametrize("number", [0, 1, 31, 32, 33, 100, 1000, 6_250, 100_000])
def test_positions_of_hashes_are_few_and_comparable(number: int) -> None:
    found = positions(number)
    assert len(found) <= 32 + 16 * max(1, number).bit_length()
    assert found[-1:] == ((number - 1,) if number else ())
    longer = positions(number + 17)
    assert set(found[:-1]) <= set(longer), "requests of other lengths have the same positions"


@pytest.fixture
def free_signal() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("free_signal")
def test_a_signal_writes_unless_the_server_uses_the_signal() -> None:
    calls: list[int] = []
    on_signal(lambda: calls.append(1))
    on_signal(lambda: calls.append(2))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert calls == [1], "a handler of the server is kept"


# --- the replay ---


def test_a_replay_has_the_causes_of_the_incident(incident: Path) -> None:
    replay = make_replay(read_incident(incident))
    assert replay.law == "CONN-3"
    assert list(replay.notes) == []
    scenario = replay.scenarios[0]
    adds = [event for event in scenario.events if isinstance(event, Add)]
    assert [add.family for add in adds] == [1, 2, 1]
    assert [add.num_prompt_tokens for add in adds] == [48, 48, 49]
    place = scenario.events.index(adds[2])
    assert scenario.events[place - 2 : place] == (HoldBlocks(60), HoldBlocks(0)), "blocks evicted"
    assert sum(event.count for event in scenario.events if isinstance(event, Step)) == 19
    assert scenario.max_running == 4


def test_long_prompts_are_scaled_and_families_share_blocks() -> None:
    recorder = make_recorder(num_blocks=8000)
    calls = Calls(recorder)
    shared = [*range(1600)]
    for number in range(3):
        tokens = [*shared, *range(10_000 * (number + 1), 10_000 * (number + 1) + 14_400)]
        calls.serve(make_request(f"r{number}", tokens))
    replay = make_replay(exported(recorder))
    assert any("1:26" in note for note in replay.notes)
    adds = [event for event in replay.scenarios[0].events if isinstance(event, Add)]
    assert {add.num_shared_blocks for add in adds} == {4}
    assert {add.num_prompt_tokens for add in adds} == {39 * 16}
    assert [add.family for add in adds] == [1, 2, 3]


# --- the command ---


def test_the_command_plays_an_incident_with_connectors_of_kvview(incident: Path) -> None:
    right = CliRunner().invoke(cli, ["check", RIGHT, "--from", str(incident)])
    assert right.exit_code == 0, right.output
    assert "the fault does not repeat: 6 scenarios of the incident break no law" in right.output
    wrong = CliRunner().invoke(cli, ["check", RAISES, "--from", str(incident)])
    assert wrong.exit_code == ExitCode.CONNECTOR_RAISED, wrong.output
    first, *_, verdict = wrong.output.splitlines()
    assert first == "incident: CONN-3"
    assert verdict == "the fault repeats: CONN-3 is broken again"
    assert "scenario = Scenario(" in wrong.output


def _damaged(text: str) -> Iterator[str]:
    yield ""
    yield text[: len(text) // 2]
    yield "[]"
    yield text.replace('"schema_version": 1', '"schema_version": 2')
    yield text.replace('"num_prompt_tokens": 48', '"num_prompt_tokens": -1')
    yield text.replace('"hook"', '"hooks"')
    yield "\0" * 100


def test_a_damaged_file_gives_one_line(incident: Path) -> None:
    arguments = ["check", RIGHT, "--from", str(incident)]
    for text in _damaged(incident.read_text()):
        incident.write_text(text)
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 2, result.output
        assert "is not an incident" in result.output
        assert len(result.output.strip().splitlines()) == 1, result.output
    incident.unlink()
    assert CliRunner().invoke(cli, arguments).exit_code == 2


@pytest.mark.parametrize("more", ["--inference", "--pd", "--seeds=3", "--select=CONN-3"])
def test_options_that_do_not_apply_are_refused(more: str, incident: Path) -> None:
    result = CliRunner().invoke(cli, ["check", RIGHT, "--from", str(incident), more])
    assert result.exit_code == 2, result.output
    assert "--from cannot be combined with" in result.output
