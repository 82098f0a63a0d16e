"""Fuzzing of the commands with the files and options that they read (SECURITY.md).

Each input is a valid file or option with a few things made wrong: its bytes or its values. A
command that reads it ends with an exit code that an input may cause, prints one line if the code is
2, prints no traceback and no character that a terminal obeys, and writes valid JSON if it writes
any. A large input needs bounded memory and time.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings, strategies as st

from kvview.cli.commands import cli
from kvview.events.formats import WIRE_FORMATS
from kvview.events.recording import Message, Recording
from kvview.events.wire import Batch, codec, encode
from kvview.tier import Namespace
from kvview_reference.tier import FileStore
from tests.replay.trace_rows import TRACES, flat

pytestmark = pytest.mark.slow

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
HOSTILE = "\x1b[31m\x07\r\n\x9b2J\u202e[/red]\ud800'\"<script>"
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 16, 512, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64),
    *(10**400, -(10**400), 1.5, -0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "1", "GPU", HOSTILE, "x" * 5000, [], {}, [[]], [None], [1, "2"], {"": 0}),
]
RAW = [b"1e999", b"1" * 5000, b"[" * 50_000, b'{"a":' * 5000, b"\xff\xfe", b"\x00", b"\\ud800", b""]
FIELDS = {
    "block_hashes": [2**64 - 1, 2**62],
    "parent_block_hash": None,
    "token_ids": [*range(32)],
    "block_size": 16,
    "medium": "GPU",
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
} | {"lora_name": "a", "extra_keys": [["s"], None], "locality": "LOCAL"}
BATCHES = [
    encode(Batch(1.0, [codec(form).make(tag, **FIELDS)], 0, form))
    for form in WIRE_FORMATS
    for tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared")
]
REPLAY = ["replay", "--gpu-blocks=40"]


def fuzzed(test: Callable[[st.DataObject], None]) -> Callable[[], None]:
    """Run a test with drawn data, which are new ones if KVVIEW_FUZZ_SEED is set."""
    is_long = "KVVIEW_FUZZ_SEED" in os.environ
    options = settings(
        max_examples=200 if is_long else 25,
        derandomize=not is_long,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    return options(given(st.data())(test))


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Replace some bytes."""
    at = data.draw(st.integers(0, len(content)))
    end = at + data.draw(st.sampled_from((0, 1, 8, 40)))
    return content[:at] + data.draw(st.sampled_from(RAW) | st.binary(max_size=9)) + content[end:]


def changed(data: st.DataObject, value: Any) -> Any:
    """Replace, delete or add one part of a value."""
    if not (isinstance(value, list | dict) and value) or data.draw(st.integers(0, 3)) == 0:
        return copy.deepcopy(data.draw(st.just(HOSTILE) | st.sampled_from(VALUES)))
    key = data.draw(st.sampled_from([*value] if isinstance(value, dict) else range(len(value))))
    match data.draw(st.integers(0, 5)):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[HOSTILE] = value.pop(key)
        case _:
            value[key] = changed(data, value[key])
    return value


def wrong_json(data: st.DataObject, value: Any) -> bytes:
    """Return JSON with a wrong value, or wrong bytes."""
    text = json.dumps(changed(data, json.loads(json.dumps(value)))).encode()
    return damaged(data, text) if data.draw(st.booleans()) else text


def wrong_rows(data: st.DataObject, rows: Sequence[Any]) -> bytes:
    """Return JSON lines, one of them wrong, compressed or not."""
    lines = [json.dumps(row).encode() for row in rows]
    lines.insert(data.draw(st.integers(0, len(lines))), wrong_json(data, rows[0]))
    content = b"\n".join(lines)
    if data.draw(st.booleans()):
        content = gzip.compress(content, 1)
        content = damaged(data, content) if data.draw(st.booleans()) else content
    return content


def require_clean_end(args: Sequence[str], codes: Collection[int] = (0, 1, 2, 4)) -> None:
    """Run a command in this process, and check its exit code and its output."""
    result = CliRunner().invoke(cli, args, color=True)
    assert isinstance(result.exception, SystemExit | None), ascii(args)
    assert result.exit_code in codes, result.output
    assert "Traceback" not in result.output
    assert not OBEYED.search(result.output), ascii(result.output)
    if result.exit_code == 2:
        assert (result.stderr.splitlines() or [""])[-1].startswith("kvview: ")
    if "--json=-" in args and result.stdout:
        json.loads(result.stdout, parse_constant=pytest.fail)


@contextlib.contextmanager
def new_folder() -> Any:
    with tempfile.TemporaryDirectory(prefix="kvview-fuzz-") as folder, contextlib.chdir(folder):
        yield


@fuzzed
def test_traces(data: st.DataObject) -> None:
    rows, _ = data.draw(st.sampled_from([*TRACES.values()]))
    command = data.draw(st.sampled_from((REPLAY, ["size", "--skip=2"], ["size", "--sizes=10"])))
    more = data.draw(st.sampled_from(([], ["--skip-bad-rows"])))
    with new_folder():
        Path("trace.jsonl").write_bytes(wrong_rows(data, rows))
        require_clean_end([*command, *more, "--json=-", "trace.jsonl"])


@fuzzed
def test_recordings(data: st.DataObject) -> None:
    payload = data.draw(st.sampled_from(BATCHES))
    if data.draw(st.booleans()):
        with contextlib.suppress(ValueError, OverflowError, RecursionError):
            payload = msgspec.msgpack.encode(changed(data, msgspec.msgpack.decode(payload)))
    else:
        payload = damaged(data, payload)
    with new_folder():
        with Recording("messages.jsonl") as written:
            for number, one in enumerate((BATCHES[0], payload)):
                written.write(Message(number, one, HOSTILE.replace("\ud800", ""), 1.5))
        if data.draw(st.booleans()):
            rows = [*map(json.loads, Path("messages.jsonl").read_bytes().splitlines())]
            Path("messages.jsonl").write_bytes(wrong_rows(data, rows))
        commands = ([*REPLAY, "--json=-"], ["size", "--json=-"], ["events"])
        require_clean_end([*data.draw(st.sampled_from(commands)), "messages.jsonl"])


@fuzzed
def test_folders_of_stores(data: st.DataObject) -> None:
    with new_folder():
        with contextlib.closing(FileStore(Namespace("m", "w"), root="root")) as store:
            for key in (bytes([n]) * 32 for n in range(4)):
                store.store(key, memoryview(key * 9), is_replaced=False)
        files = sorted(path for path in Path("root").rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(files))
        path.write_bytes(damaged(data, path.read_bytes()))
        require_clean_end(["tier", "fsck", "--json=-", "root"])


@fuzzed
def test_options_of_connectors(data: st.DataObject) -> None:
    wrong = wrong_json(data, data.draw(st.sampled_from([*VALUES[:3], 40, "lru"])))
    text = wrong.decode(errors="replace").replace("\x00", "")[:2000]
    names = ("cpu_blocks", "policy", "enable_events", "store", "threads", "x", "cpu_bytes")
    with new_folder():
        Path("t.jsonl").write_text("\n".join([json.dumps(flat(1024, 0, 1))] * 4))
        option = f"--option={data.draw(st.sampled_from(names))}={text}"
        codes = (0, 1, 2, 3)  # 3: the tier is larger than memory
        require_clean_end([*REPLAY, option, "--json=-", "t.jsonl"], codes)


def messages(numbers: Collection[int], payload: bytes = b"\x93\x01\x90\x00") -> bytes:
    return b"\n".join(msgspec.json.encode(Message(number, payload)) for number in numbers)


ROW = json.dumps(flat(1024, 0, 1)).encode()
LARGE: list[tuple[str, Callable[[], bytes]]] = [
    ("replay --skip-bad-rows", lambda: ROW + b"\n{}" * 300_000),
    ("size", lambda: gzip.compress(ROW + b'\n{"hash_ids":[' + b"1," * 60_000_000, 1)),
    ("size", lambda: gzip.compress(b" " * (400 << 20), 1)),
    ("events", lambda: gzip.compress(b"1" * (400 << 20), 1)),
    ("events", lambda: messages([*range(0, 60_000, 2), *range(1, 60_000, 2)])),
    (
        "events",
        lambda: messages([0], b"\x93\x01\xdd" + (10**7).to_bytes(4, "big") + b"\x90" * 10**7),
    ),
]


@pytest.mark.parametrize(("command", "content"), LARGE)
def test_a_large_input_needs_bounded_memory_and_time(
    command: str, content: Callable[[], bytes], tmp_path: Path
) -> None:
    (tmp_path / "large.jsonl").write_bytes(content())

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (90, 90))

    line = [sys.executable, "-m", "kvview", *command.split(), str(tmp_path / "large.jsonl")]
    done = subprocess.run(line, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode in (0, 1, 2, 4), done.stderr
    assert "enough memory" not in done.stdout + done.stderr
