"""Every report of a command fits its schema in ``docs/``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from docs.make_commands import PAGE, files, targets
from docs.parts import ROOT
from kvview.cli.commands import cli
from kvview.events.recording import Message, Recording
from kvview.testing.results.schema import UpgradeModel
from kvview.tier import Namespace
from kvview_reference.tier import FileStore
from tests.recorder.calls import make_recorder, play_reuse

CONNECTOR = "kvview_reference.store_connector:StoreConnector"


def run(arguments: str) -> Any:
    """The report of a command, which prints only this to stdout."""
    result = CliRunner().invoke(cli, [*arguments.split(), "--json", "-"])
    assert result.exit_code in (0, 1, 3, 4), result.output
    return json.loads(result.stdout)


def upgrade() -> Any:
    """A report made from its model, because the command needs vLLM."""
    row: dict[str, Any] = {"release": "0.33.0", "verdict": "green", "reason": "", "left_out": []}
    row |= {"seconds": 1.0, "report": run(f"check {CONNECTOR} --seeds 1")}
    report: dict[str, Any] = {"target": "t", "engine": "vllm", "is_clean": True}
    report |= {"seconds": 1.0, "results": [row]}
    return UpgradeModel.model_validate(report).model_dump(mode="json")


def result() -> Any:
    """The result file of a connector."""
    arguments = ["check", CONNECTOR, "--seeds", "1", "--report-json", "-"]
    return json.loads(CliRunner().invoke(cli, arguments).stdout)


def incident() -> Any:
    """An incident, which a recorder writes in a server."""
    recorder = make_recorder()
    play_reuse(recorder)
    return recorder.export("XFER-1")


COMMANDS: dict[str, list[str | Callable[[], Any]]] = {
    "report": [
        "check kvview_reference.harness:ReferencePool --select test_pool_1_growth_of_holds",
        f"check {CONNECTOR} --seeds 1",
        "check tests.testing.test_connector_checks:Raises --seeds 1",
        "check tests.testing.test_connector_checks:Connector_that_does_nothing --seeds 1",
    ],
    "upgrade": [upgrade],
    "result": [result],
    "incident": [incident],
    "doctor": ["doctor"],
    "replay": ["replay --requests 30", "replay trace.jsonl --skip-bad-rows"],
    "size": ["size --requests=30", "size trace.jsonl --skip-bad-rows --block-bytes=9"],
    "fsck": ["tier fsck pages"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    Path("trace.jsonl").write_text(f"{json.dumps(row)}\nnot a row\n")
    with Recording("recording.jsonl") as recording:
        for sequence in (0, 2):  # one message is missing, and none can be read
            recording.write(Message(sequence, b"no batch"))
    FileStore(Namespace("model", "weights"), root="pages").close()
    (namespace,) = Path("pages").glob("*/namespace.json")
    (namespace.parent / "00").mkdir(exist_ok=True)
    (namespace.parent / "00" / "entry").write_bytes(b"no entry")


@pytest.mark.parametrize("name", targets())
def test_every_report_fits_its_schema(name: str) -> None:
    schema = json.loads((ROOT / f"docs/{name}.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    for command in COMMANDS[name]:
        report = run(command) if isinstance(command, str) else command()
        Draft202012Validator(schema).validate(report)
        assert report["schema_version"] == 1
        unknown = report | {"no_such_field": 1}
        assert list(Draft202012Validator(schema).iter_errors(unknown))


def test_the_page_and_the_schemas_are_up_to_date() -> None:
    for path, text in files().items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/make_commands.py"
    assert {path.name for path in PAGE.parent.glob("*.schema.json")} == {
        f"{name}.schema.json" for name in targets()
    }


def test_the_page_has_the_fields_of_a_report() -> None:
    text = (ROOT / "docs/report.md").read_text()
    schema = json.loads((ROOT / "docs/report.schema.json").read_text())
    assert [name for name in schema["properties"] if f"`{name}" not in text] == []
