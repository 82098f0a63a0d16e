"""Untrusted text reaches the terminal as text, whatever control characters it has."""

from __future__ import annotations

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

HOSTILE = "\x1b]0;title\x07\x1b[31mred\x1b[2J\r\x9b31m\u202eabc\u2028[/red][link=x]"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
NAME = HOSTILE.replace("/", "")


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


def test_events() -> None:
    path = f"{NAME}.jsonl"
    with Recording(path) as recording:
        for number, batch in enumerate(BATCHES):
            recording.write(Message(number, msgspec.msgpack.encode(batch), HOSTILE))
    assert run("events", path).exit_code == 1


@pytest.mark.parametrize(
    "args",
    [
        ["check", "kvview_reference.harness:ReferencePool", "--expected", "file"],
        ["check", f"{HOSTILE}:x"],
        ["check", f"kvview_reference.harness:{HOSTILE}"],
        ["replay", "--model", "file"],
        ["--verbose", "replay", "--connector", "raises.py:Mine"],
        ["size", "--policies", HOSTILE],
        [f"{HOSTILE}\n"],
        ["replay", f"--{HOSTILE}\n"],
        ["replay", f"--seed={HOSTILE}\n"],
        ["new", f"{HOSTILE}\n.py"],
    ],
)
def test_errors(args: list[str]) -> None:
    Path("file").write_text(HOSTILE)
    Path("raises.py").write_text(f"raise ValueError({HOSTILE!r})")
    assert run(*args).exit_code in (1, 2)


def test_escapes() -> None:
    assert printable("a b\u3000漢 é") == "a b\u3000漢 é"
    assert printable("\x1b[m\n\udc80\u202e") == r"\x1b[m\n\udc80\u202e"
    assert line_of("a\n\tb \x1b\n") == r"a b \x1b"
    console = Console(width=200)
    with console.capture() as shown:
        console.print(HOSTILE)
    assert not OBEYED.search(shown.get())
