"""Every report that a command writes is what its schema in ``docs/`` says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from docs.make_commands import PAGE, ROOT, files, targets
from kvview.cli.commands import cli
from kvview.events.recording import Message, Recording
from kvview.testing.schema import SelfTestModel, UpgradeModel
from kvview.tier import Namespace
from kvview_reference.tier import FileStore

Run = Callable[..., Any]


def run(*args: str) -> Any:
    """What a command writes to standard output, which is JSON alone."""
    result = CliRunner().invoke(cli, [*args, "--json", "-", "--quiet"])
    assert result.exit_code in (0, 1, 4), result.output
    return json.loads(result.stdout)


def replayed(folder: Path) -> Any:
    trace = folder / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    trace.write_text(f"{json.dumps(row)}\nno row\n")
    return run("replay", str(trace))


def recorded(folder: Path) -> str:
    path = str(folder / "recording.jsonl")
    with Recording(path) as recording:
        for sequence in (0, 2):  # one is missing, and neither can be read
            recording.write(Message(sequence, b"no batch"))
    return path


def checked_store(folder: Path) -> Any:
    FileStore(Namespace("model", "weights"), root=str(folder)).close()
    (entries,) = (path.parent for path in folder.glob("*/namespace.json"))
    (entries / "00").mkdir(exist_ok=True)
    (entries / "00" / "entry").write_bytes(b"no entry")
    return run("tier", "fsck", str(folder))


def self_test(_: Path) -> Any:
    row: dict[str, Any] = {"mutant": "m", "what": "w", "law": "POOL-1", "killed_by": "POOL-1"}
    row |= {"incident": None, "is_killed": True, "is_killed_by_its_law": True}
    told = {"mutants": [row], "num_survivors": 0, "automatic": {}}
    return SelfTestModel.model_validate(told).model_dump(mode="json")


def upgraded(_: Path) -> Any:
    report = run("check", "kvview_reference.harness:pool", "--select", "POOL-1")
    row: dict[str, Any] = {"release": "0.33.0", "verdict": "green", "reason": "", "left_out": []}
    row |= {"seconds": 1.0, "report": report}
    told: dict[str, Any] = {"target": "t", "engine": "vllm", "is_clean": True, "against": None}
    told |= {"seconds": 1.0, "results": [row], "changes": {}}
    return UpgradeModel.model_validate(told).model_dump(mode="json")


REPORTS: dict[str, list[Run]] = {
    "report": [
        lambda _: run("check", "kvview_reference.harness:pool", "--select", "POOL-1"),
        lambda _: run("check", "kvview_reference.connector:LazyOffloadConnector", "--seeds", "2"),
    ],
    # What takes long, or vLLM, is written through its model: tests of the commands run it.
    "self-test": [self_test],
    "upgrade": [upgraded],
    "doctor": [
        lambda _: run("doctor"),
        lambda _: run("doctor", "--tier", '{"adapter_params": {}}'),
    ],
    "events": [
        lambda folder: run("events", "validate", recorded(folder), "--consumer", "all"),
        lambda folder: run("events", "tail", recorded(folder)),
    ],
    "replay": [lambda _: run("replay", "--requests", "30"), replayed],
    "size": [
        lambda _: run("size", "--requests=30"),
        lambda _: run("size", "--requests=30", "--layers=2", "--kv-heads=2", "--head-size=8"),
    ],
    "bench": [
        lambda folder: run(
            *("tier", "bench", "kvview_reference.tier:FileStore", "--option", f"root={folder}"),
            *("--page-bytes", "4096", "--pages", "2", "--rounds", "1"),
        )
    ],
    "fsck": [checked_store],
}


@pytest.mark.parametrize("name", targets())
def test_what_is_written_fits_its_schema(name: str, tmp_path: Path) -> None:
    schema = json.loads((ROOT / f"docs/{name}.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    for write in REPORTS[name]:
        report = write(tmp_path)
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
