"""The recorder of a server: bounded memory, no ids, no exceptions, and the files that it writes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvview import ConfigError
from kvview.cli.commands import cli
from kvview.testing.connector import Add, HoldBlocks, Step
from kvview_vllm.recorder import Recorder
from kvview_vllm.recorder.facts import positions
from kvview_vllm.recorder.incident import read_incident
from kvview_vllm.recorder.played import make_replay
from tests.recorder.calls import Calls, make_request, play_reuse

RIGHT = "kvview_reference.store_connector:StoreConnector"
RAISES = "tests.testing.test_connector_checks:Raises"


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(1 << 20, tmp_path / "incidents")


def written(recorder: Recorder, **details: Any) -> Path:
    path = recorder.write("on request", details)
    assert path is not None
    return path


def size_of(value: Collection[object]) -> int:
    """Return the memory of a container of plain values."""
    inner = [*value, *value.values()] if isinstance(value, dict) else [*value]
    return sys.getsizeof(value) + sum(map(sys.getsizeof, inner))


def test_memory_is_bounded_under_100_000_hooks(tmp_path: Path) -> None:
    limit = 1 << 16
    recorder = Recorder(limit, tmp_path)
    calls = Calls(recorder)
    number = 0
    while recorder.num_hooks < 100_000:
        request = make_request(f"r{number}", [number], num_output=100)
        calls.serve(request)
        number += 1
    assert recorder.num_errors == 0
    assert recorder.num_bytes <= limit
    held = size_of(recorder._records) + size_of(recorder._requests)
    assert held <= limit
    assert held > limit / 2, "most of the memory is used"
    window = read_incident(written(recorder)).window
    assert not window.is_whole
    assert window.num_hooks == recorder.num_hooks > window.num_records


def test_an_incident_has_no_id_no_token_and_no_hash(recorder: Recorder) -> None:
    calls = Calls(recorder)
    play_reuse(calls, "chatcmpl-5f3a")
    message = "request 'chatcmpl-5f3a-3' reads wrong bytes, like b9d1f0e7a2c4d6e8 at store.py:12"
    more = {"request_id": "chatcmpl-5f3a-1", "law": "XFER-1", "tokens": [7_000_001], "at": b"7000"}
    text = written(recorder, message=message, **more).read_text()
    for secret in ("chatcmpl", "5f3a", "70000", "80000", "9999999", "b9d1f0", "a name", "MyPrompt"):
        assert secret not in text, secret
    details = json.loads(text)["details"]
    assert details["message"] == "request 'request 3' reads wrong bytes, like ... at store.py:12"
    assert details["request_id"] == 1
    assert details["tokens"] == "list"


def test_an_incident_has_the_calls_in_numbers(recorder: Recorder) -> None:
    play_reuse(Calls(recorder))
    incident = read_incident(written(recorder))
    assert incident.window.is_whole
    first, other, again = incident.requests
    assert [first.request, other.request, again.request] == [1, 2, 3]
    assert first.hashes == again.hashes
    assert not set(first.hashes) & set(other.hashes)
    events = [record.event for record in incident.records if record.event]
    assert events.count("transfer_completed") == 4
    assert events.count("blocks_matched") == 1
    (loaded,) = (record for record in incident.records if record.received)
    assert loaded.received == [3]
    assert incident.engine.component == "scheduler"
    assert incident.engine.num_blocks == 60


@pytest.mark.parametrize("number", [0, 1, 31, 32, 33, 100, 1000, 6_250, 100_000])
def test_positions_of_hashes_are_few_and_comparable(number: int) -> None:
    found = positions(number)
    assert len(found) <= 32 + 16 * max(1, number).bit_length()
    assert found[-1:] == ((number - 1,) if number else ())
    longer = positions(number + 17)
    assert set(found[:-1]) <= set(longer), "requests of other lengths have the same positions"


def test_a_recorder_never_raises_and_logs_once(
    recorder: Recorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = ("get_num_new_matched_tokens", "build_connector_meta", "request_finished", "__init__")
    for hook in hooks:
        recorder.note(hook, (), {}, None)
        recorder.note(hook, (object(), None, 3), {"request": 5}, object())
    assert recorder.num_errors == 2 * len(hooks)
    (tmp_path / "file").write_text("")
    blocked = Recorder(1 << 16, tmp_path / "file")
    assert blocked.write("on request") is None
    assert len(caplog.records) == 2, "once for each recorder"
    assert read_incident(written(recorder)).window.num_errors == 2 * len(hooks)


def test_the_folder_keeps_the_first_incident_and_the_newest_ones(tmp_path: Path) -> None:
    recorder = Recorder(1 << 16, tmp_path, max_files=3)
    paths = [recorder.write(f"number {n}") for n in range(9)]
    kept = {json.loads(path.read_text())["reason"] for path in tmp_path.iterdir()}
    assert kept == {"number 0", "number 7", "number 8"}
    assert [path for path in paths if path and path.exists()] == [paths[0], *paths[-2:]]


@pytest.mark.parametrize(("limit", "most"), [(1000, 16), (1 << 16, 1)])
def test_too_small_limits_are_refused(limit: int, most: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        Recorder(limit, tmp_path, most)


@pytest.fixture
def free_signal() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("free_signal")
def test_a_signal_writes_an_incident_unless_the_server_uses_the_signal(
    recorder: Recorder, tmp_path: Path
) -> None:
    assert recorder.write_on_signal()
    os.kill(os.getpid(), signal.SIGUSR2)
    (path,) = (tmp_path / "incidents").iterdir()
    assert read_incident(path).reason == "signal"
    assert not recorder.write_on_signal(), "a handler of the server is kept"


# --- the replay ---


def test_a_replay_has_the_causes_of_the_incident(recorder: Recorder) -> None:
    play_reuse(Calls(recorder))
    replay = make_replay(read_incident(written(recorder, law="XFER-1")))
    assert replay.law == "XFER-1"
    assert list(replay.notes) == []
    scenario = replay.scenarios[0]
    adds = [event for event in scenario.events if isinstance(event, Add)]
    assert [add.family for add in adds] == [1, 2, 1]
    assert [add.num_prompt_tokens for add in adds] == [48, 48, 49]
    place = scenario.events.index(adds[2])
    assert scenario.events[place - 2 : place] == (HoldBlocks(60), HoldBlocks(0)), "blocks evicted"
    assert sum(event.count for event in scenario.events if isinstance(event, Step)) == 19
    assert scenario.max_running == 4


def test_long_prompts_are_scaled_and_families_share_blocks(recorder: Recorder) -> None:
    calls = Calls(recorder, num_blocks=8000)
    shared = [*range(1600)]
    for number in range(3):
        tokens = [*shared, *range(10_000 * (number + 1), 10_000 * (number + 1) + 14_400)]
        calls.serve(make_request(f"r{number}", tokens))
    replay = make_replay(read_incident(written(recorder)))
    assert any("1:26" in note for note in replay.notes)
    adds = [event for event in replay.scenarios[0].events if isinstance(event, Add)]
    assert {add.num_shared_blocks for add in adds} == {4}
    assert {add.num_prompt_tokens for add in adds} == {39 * 16}
    assert [add.family for add in adds] == [1, 2, 3]


def test_a_window_is_named_first(tmp_path: Path) -> None:
    recorder = Recorder(1 << 16, tmp_path)
    calls = Calls(recorder)
    for number in range(200):
        calls.serve(make_request(f"r{number}", [number] * 20))
    notes = make_replay(read_incident(written(recorder))).notes
    assert notes[0].startswith("the incident is a window: the last ")


# --- the command ---


def test_the_command_plays_an_incident_with_connectors_of_kvview(recorder: Recorder) -> None:
    play_reuse(Calls(recorder))
    path = written(recorder, law="CONN-3")
    right = CliRunner().invoke(cli, ["check", RIGHT, "--from", str(path)])
    assert right.exit_code == 0, right.output
    assert "the fault does not repeat: 6 scenarios of the incident break no law" in right.output
    wrong = CliRunner().invoke(cli, ["check", RAISES, "--from", str(path)])
    assert wrong.exit_code == 1, wrong.output
    first, verdict, *_ = wrong.output.splitlines()
    assert first == "incident: on request (CONN-3)"
    assert verdict == "the fault repeats: CONN-3 is broken again"
    assert "scenario = Scenario(" in wrong.output


def _damaged(path: Path) -> Iterator[str]:
    text = path.read_text()
    yield ""
    yield text[: len(text) // 2]
    yield "[]"
    yield text.replace('"schema_version": 1', '"schema_version": 2')
    yield text.replace('"is_whole": true', '"is_whole": 7')
    yield text.replace('"num_prompt_tokens": 48', '"num_prompt_tokens": -1')
    yield text.replace('"hook"', '"hooks"')
    yield "\0" * 100


def test_a_damaged_file_gives_one_line(recorder: Recorder, tmp_path: Path) -> None:
    play_reuse(Calls(recorder))
    arguments = ["check", RIGHT, "--from", str(tmp_path / "damaged.json")]
    missing = CliRunner().invoke(cli, arguments)
    assert missing.exit_code == 2, missing.output
    for text in _damaged(written(recorder)):
        (tmp_path / "damaged.json").write_text(text)
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 2, result.output
        assert "is not an incident" in result.output
        assert len(result.output.strip().splitlines()) == 1, result.output


@pytest.mark.parametrize("more", ["--inference", "--pd", "--seeds=3", "--json=out.json"])
def test_options_that_do_not_apply_are_refused(more: str, recorder: Recorder) -> None:
    path = written(recorder)
    result = CliRunner().invoke(cli, ["check", RIGHT, "--from", str(path), more])
    assert result.exit_code == 2, result.output
    assert "--from cannot be combined with" in result.output
