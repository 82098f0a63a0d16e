"""No text of a file, a stream or an exception reaches the terminal as more than text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvview.cli.commands import cli
from kvview.cli.console import Console
from kvview.errors import line_of, printable
from kvview.events.recording import Message, Recording
from kvview.tier import Namespace
from kvview_reference.tier.store_folder import path_of

HOSTILE = "\x1b]0;title\x07\x1b[31mred\x1b[2J\r\x9b31m\u202eabc\u2028[/red][link=x]"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> Result:
    result = CliRunner().invoke(cli, args, color=True)  # click removes colours otherwise
    assert not OBEYED.search(result.output), ascii(result.output)
    return result


def stored(**more: Any) -> dict[str, Any]:
    plain = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [7], "block_size": 1}
    return {"type": "BlockStored", **plain, "lora_id": None, "medium": "GPU", **more}


BATCHES: list[Any] = [
    [1.0, [stored(medium=HOSTILE)], 0],
    [1.0, [stored(lora_name=HOSTILE, kv_cache_spec_kind=HOSTILE, group_idx=0)], 0],
    [1.0, [stored(locality=HOSTILE, ownership=HOSTILE)], 0],
    [1.0, [{"type": HOSTILE, "block_hashes": [1]}], 0],
    [1.0, [{"type": "BlockRemoved", "block_hashes": [7], "medium": HOSTILE}], 0],
    [1.0, [[HOSTILE, [1]]], 0],
    [HOSTILE, [], 0],
    {HOSTILE: 1},
]


@pytest.mark.parametrize(
    "command",
    [
        ["tail"],
        ["validate"],
        ["validate", "--consumer", "all"],
    ],
)
def test_events(command: list[str]) -> None:
    with Recording(f"{HOSTILE.replace('/', '')}.jsonl") as recording:
        for number, batch in enumerate(BATCHES):
            recording.write(Message(number, msgspec.msgpack.encode(batch), HOSTILE))
    (path,) = Path().glob("*.jsonl")
    run("events", "validate", "--format", "vllm-0.33", str(path))
    assert run("events", *command, str(path)).exit_code == 1
    result = CliRunner().invoke(cli, ["events", *command, str(path), "--json", "-"], color=True)
    assert result.stdout.isascii()
    assert HOSTILE in json.loads(result.stdout)["held"]


ROWS = [
    {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]},
    {"timestamp": HOSTILE, "input_length": 512, "output_length": 1, "hash_ids": [1]},
    {HOSTILE: 1},
    [HOSTILE],
    HOSTILE,
]


@pytest.mark.parametrize("command", [["replay"], ["replay", "--closed-loop=2"], ["size"]])
@pytest.mark.parametrize("name", ["trace.jsonl", HOSTILE.replace("/", "") + ".jsonl"])
def test_traces(command: list[str], name: str) -> None:
    Path(name).write_text("\n".join(map(json.dumps, ROWS)) + "\n" + HOSTILE)
    assert run(*command, name).exit_code == 0


def test_a_name_with_markup_is_a_name() -> None:
    Path("[red]:x:[b].jsonl").write_text(json.dumps(ROWS[0]))
    for command in ("replay", "size"):
        assert "[red]:x:[b].jsonl" in run(command, "[red]:x:[b].jsonl").stdout


def test_a_folder_of_pages() -> None:
    namespace = Namespace(HOSTILE, HOSTILE)
    folder = Path("root", namespace.digest.hex())
    page = folder / path_of(b"key")
    page.parent.mkdir(parents=True)
    page.write_text("no page")
    (folder / "namespace.json").write_text(namespace.to_json())
    assert "it has no header" in run("tier", "fsck", "root").stderr
    (folder / "namespace.json").write_text(HOSTILE)
    assert run("tier", "fsck", "root").exit_code == 1


@pytest.mark.parametrize(
    "args",
    [
        ["check", "kvview_reference.harness:pool", "--expected-failures", "file"],
        ["check", f"{HOSTILE}:x"],
        ["check", f"kvview_reference.harness:{HOSTILE}"],
        ["doctor", "--tier", "file"],
        ["doctor", "--tier", "tier.json"],
        ["replay", "--model", "file"],
        ["replay", "--connector", "raises.py:Mine"],
        ["size", "--policies", HOSTILE],
        [f"{HOSTILE}\n"],
        ["replay", f"--{HOSTILE}\n"],
        ["replay", f"--seed={HOSTILE}\n"],
        ["new", f"{HOSTILE}\n.py"],
        ["--verbose", "replay", "--connector", "raises.py:Mine"],
    ],
)
def test_errors(args: list[str]) -> None:
    Path("file").write_text(HOSTILE)
    tier = {"tier": {"store": HOSTILE}, HOSTILE: HOSTILE}
    Path("tier.json").write_text(json.dumps(tier))
    Path("raises.py").write_text(f"raise ValueError({HOSTILE!r})")
    assert run(*args).exit_code in (1, 2)


def test_what_is_shown() -> None:
    assert printable("a b\u3000漢 é") == "a b\u3000漢 é"
    assert printable("\x1b[m\n\udc80\u202e") == r"\x1b[m\n\udc80\u202e"
    assert line_of("a\n\tb \x1b\n") == r"a b \x1b"
    console = Console(width=200)
    with console.capture() as shown:
        console.print(HOSTILE)
    assert not OBEYED.search(shown.get())
