"""Fuzzing of every command with every file and option that it reads (SECURITY.md).

    PYTHONPATH=. python tests/cli/test_fuzzed_inputs.py 20000 [--seed 7] [--kind trace]

Each input is a valid file of its kind with a few things made wrong: its bytes, its values, its
name, or the kind of file at its path. A command that reads it

1. ends with an exit code that an input may cause, and prints one line if that is 2,
2. prints no traceback, and no character that a terminal obeys,
3. writes valid JSON if it writes any,
4. needs bounded memory and CPU time, and waits for nothing.

The process stops at the first input that violates a rule, and prints how to repeat it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import importlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.events.formats import WIRE_FORMATS
from kvview.events.recording import Message, Recording
from kvview.events.wire import Batch, codec, encode
from kvview.tier import Namespace
from kvview_reference.tier import FileStore
from tests.replay.trace_rows import TRACES, flat
from tests.tier.test_store_folder import KINDS

ROOT = Path(__file__).parents[2]
MEMORY = 3 << 30  # bytes of an input, besides the imported packages
CPU_SECONDS, SECONDS = 60, 300  # a hundred times the usual, so only loops and pipes reach them
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
HOSTILE = "\x1b[31m\x07\r\n\x9b2J\u202e[/red]\ud800\x00'\"<script>"
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 16, 512, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64),
    *(10**400, -(10**400), 1.5, -0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "1", "GPU", HOSTILE, "x" * 5000, [], {}, [[]], [None], [1, "2"], {"": 0}),
]
POOL_CHECK = "check kvview_reference.harness:ReferencePool --select test_pool_1_growth_of_holds"
RAW = [b"1e999", b"1" * 5000, b"[" * 50_000, b'{"a":' * 5000, b"\xff\xfe", b"\x00", b"\\ud800"]


@pytest.mark.slow
def test_drawn_inputs() -> None:
    # Fixed, so that no change is refused for an older fault; ".ci/run --all" draws more inputs.
    drawn = os.environ.get("KVVIEW_FUZZ_SEED")
    number, seed = ("300", drawn) if drawn else ("150", "500000")
    command = [sys.executable, __file__, number, "--seed", seed]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Input:
    """A command line, and the files that it names.

    Args:
        args: The command line.
        codes: Exit codes that the input may cause.
        report: File of the JSON report; None if the command writes none.
    """

    args: Sequence[str]
    codes: Sequence[int] = (0, 1, 2, 4)
    report: Path | None = None


def reporting(folder: Path, args: str, *files: object, codes: Sequence[int] = (0, 2)) -> Input:
    """The input of a command that writes a report, which the command for events does not."""
    if args == "events":
        return Input([args, "--", *map(str, files)], codes)
    report = folder / "report.json"
    return Input([*args.split(), f"--json={report}", "--", *map(str, files)], codes, report)


# --- mutations ---


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Change, delete, repeat or insert a few bytes."""
    wrong = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(wrong) + 1)
        to = min(len(wrong), at + dice.choice((0, 1, 1, 2, 8, 40)))
        wrong[at:to] = dice.choice(
            (b"", dice.randbytes(to - at), wrong[at:to] * 2, b"\xff\xdd", dice.choice(RAW))
        )
    return bytes(wrong)


def changed(value: Any, dice: random.Random) -> Any:
    """Replace, delete, double or rename one part of a value."""
    if dice.random() < 0.25 or not isinstance(value, list | dict) or not value:
        return copy.deepcopy(dice.choice(VALUES))
    key = dice.choice([*value] if isinstance(value, dict) else [*range(len(value))])
    choice = dice.random()
    if choice < 0.15:
        del value[key]
    elif choice >= 0.25:
        value[key] = changed(value[key], dice)
    elif isinstance(value, list):
        value.insert(key, value[key])
    else:
        value[dice.choice(("", "x", HOSTILE))] = value.pop(key)
    return value


def wrong_json(value: Any, dice: random.Random) -> bytes:
    """JSON with wrong values, or wrong bytes."""
    value = json.loads(json.dumps(value))
    for _ in range(dice.choice((0, 1, 1, 1, 2, 5))):
        value = changed(value, dice)
    text = json.dumps(value).encode()
    if dice.random() < 0.2:
        text = re.sub(rb"\b\d+\b", lambda _: dice.choice(RAW[:2]), text, count=1)
    return damaged(text, dice) if dice.random() < 0.25 else text


def to_lines(rows: Sequence[Any]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


def wrong_rows(rows: Sequence[Any], dice: random.Random) -> bytes:
    """JSON lines, most of them right, compressed or not."""
    lines = [wrong_json(row, dice) if dice.random() < 0.3 else to_lines([row]) for row in rows]
    if dice.random() < 0.3:
        dice.shuffle(lines)
    content = dice.choice((b"\n", b"\n", b"\n", b"\r\n", b"", b"\n\n")).join(lines)
    if dice.random() < 0.3:
        content = gzip.compress(content, 1)
        content = damaged(content, dice) if dice.random() < 0.5 else content
    return content


def put(path: Path, content: bytes, dice: random.Random) -> Path:
    """Write a file, or in some cases something else, or under another name."""
    if dice.random() < 0.05:
        path = path.with_name(dice.choice(("[red]x[b]", "a\x1b[31m\n\u202e", "\udce9", "-", " ")))
    if dice.random() < 0.92:
        path.write_bytes(content)
    else:
        with contextlib.suppress(OSError):
            dice.choice(SPECIAL_FILES)(path, path.parent)
    return path


# --- the kinds of inputs ---

SPECIAL_FILES = [make for kind, make in KINDS.items() if kind != "large file"]


def trace(folder: Path, dice: random.Random) -> Input:
    rows = dice.choice([rows for rows, _ in TRACES.values()])
    path = folder / dice.choice(("trace.jsonl", "trace.jsonl.gz", "trace"))
    if dice.random() < 0.1:
        path = folder / "traces"
        path.mkdir()
        for number in range(3):
            put(path / f"{number}.jsonl", wrong_rows(rows, dice), dice)
    else:
        path = put(path, wrong_rows(rows, dice), dice)
    command = dice.choice(
        (
            "replay --gpu-blocks 40",
            "replay --closed-loop 3 --gpu-blocks 40",
            "size --sizes 10,50MiB --block-bytes 1000",
            "size --skip 2",
        )
    )
    return reporting(folder, command + " --skip-bad-rows" * (dice.random() < 0.6), path)


FIELDS = {
    "block_hashes": [2**64 - 1, 2**62],
    "parent_block_hash": None,
    "token_ids": [*range(32)],
    "block_size": 16,
    "medium": "GPU",
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
} | {"lora_name": "a", "extra_keys": [["s"], None], "locality": "LOCAL"}
MEDIA = ({"medium": "CPU"}, {"medium": "GPU"})
BATCHES = [
    encode(
        Batch(
            1.0, [codec(form).make(tag, **FIELDS | {"medium": m}) for m in ("CPU", "GPU")], 0, form
        )
    )
    for form in WIRE_FORMATS
    for tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared")
]


def recording(folder: Path, dice: random.Random) -> Input:
    source = folder / "whole.jsonl"
    with Recording(str(source)) as written:
        for number, payload in enumerate(dice.sample(BATCHES, 6)):
            if dice.random() < 0.4:
                with contextlib.suppress(ValueError, OverflowError, RecursionError):
                    value = changed(msgspec.msgpack.decode(payload), dice)
                    payload = msgspec.msgpack.encode(value)
            elif dice.random() < 0.3:
                payload = damaged(payload, dice)
            topic = dice.choice(("kv", "", "\x1b[31m\n"))
            written.write(Message(number + (dice.random() < 0.1), payload, topic, 1.5))
    rows = [json.loads(line) for line in source.read_bytes().splitlines()]
    path = put(folder / "recording.jsonl", wrong_rows(rows, dice), dice)
    commands = ["events", "size", "replay --gpu-blocks 90"]
    return reporting(folder, dice.choice(commands), path, codes=(0, 1, 2, 4))


TIERS: list[dict[str, Any]] = [
    {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"secondary_tiers": [1]}},
    {"type": "plugin", "adapter_params": {"store": "kvview.tier.trial:MemoryStore"}},
    {"tier": {"store": "kvview.tier.trial:MemoryStore", "weights": "x"}},
]


def tier_text(folder: Path, dice: random.Random) -> Input:
    content = wrong_json(dice.choice(TIERS), dice)
    text = content.decode(errors="surrogateescape").replace("\x00", "")
    if dice.random() < 0.5 or len(content) > 50_000:
        text = str(put(folder / "tier.json", content, dice))
    report = folder / "report.json"
    return Input(["doctor", f"--json={report}", f"--tier={text}"], (0, 1, 2), report)


def tier_folder(folder: Path, dice: random.Random) -> Input:
    root = folder / "root"
    with contextlib.closing(FileStore(Namespace("m", "w"), root=str(root))) as store:
        for key in (bytes([n]) * 32 for n in range(4)):
            store.store(key, memoryview(key * 9), is_replaced=False)
    for path in sorted(root.rglob("*")):
        if path.is_file() and dice.random() < 0.4:
            content = path.read_bytes()
            is_json = path.suffix == ".json"
            wrong = wrong_json(json.loads(content), dice) if is_json else damaged(content, dice)
            path.unlink()
            put(path, wrong, dice)
    return reporting(folder, "tier fsck", root, codes=(0, 1, 2))


def connector_options(folder: Path, dice: random.Random) -> Input:
    """Options of a connector and of a store, which are read as JSON."""
    (folder / "t.jsonl").write_bytes(to_lines([flat(1024, 0, 1)] * 4))
    wrong = wrong_json(dice.choice([*VALUES[:3], 40, "lru"]), dice).decode(errors="replace")
    wrong = wrong.replace("\x00", "")[:2000]
    if dice.random() < 0.3:
        name = dice.choice(("root", "max_bytes", "threads", "checksum", "x", HOSTILE[:3]))
        store = "replay --gpu-blocks=40 --option=store=kvview_reference.tier:FileStore"
        given = [f"--option=root={folder}/root", f"--option={name}={wrong}", "--", "t.jsonl"]
        return Input([*store.split(), *given], (0, 1, 2, 3))
    names = ("cpu_blocks", "policy", "enable_events", "threads", "x", "cpu_bytes")
    args = "replay --gpu-blocks=40 --connector=kvview_reference.store_connector:StoreConnector"
    option = f"--option={dice.choice(names)}={wrong}"
    codes = (0, 1, 2, 3)  # 3: the tier is larger than memory
    return Input([*args.split(), option, "--", "t.jsonl"], codes)


def messages(numbers: Sequence[int], payload: bytes = b"\x93\x01\x90\x00") -> bytes:
    return b"\n".join(msgspec.json.encode(Message(number, payload)) for number in numbers)


ROW = to_lines([flat(1024, 0, 1)])
LARGE: list[tuple[str, Callable[[], bytes]]] = [
    ("replay --skip-bad-rows", lambda: ROW + b"\n{}" * 300_000),
    ("size --skip-bad-rows", lambda: ROW + b"\n{}" * 300_000),
    (
        "size",
        lambda: ROW + b'\n{"hash_ids":[' + b"1," * 15_000_000 + b"1]}",
    ),
    (
        "size",
        lambda: gzip.compress(ROW + b'\n{"hash_ids":[' + b"1," * 60_000_000, 1),
    ),
    ("size", lambda: gzip.compress(b" " * (400 << 20), 1)),
    ("events", lambda: gzip.compress(b"1" * (400 << 20), 1)),
    ("events", lambda: messages([*range(0, 60_000, 2), *range(1, 60_000, 2)])),
    (
        "events",
        lambda: messages([0], b"\x93\x01\xdd" + (10**7).to_bytes(4, "big") + b"\x90" * 10**7),
    ),
    (
        "replay --gpu-blocks=100",
        lambda: to_lines(
            [flat(33, 1, 2, 3, chat_id=n, parent_chat_id=n - 1) for n in range(20_000)]
        ),
    ),
]


def large(folder: Path, dice: random.Random) -> Input:
    """Many of one thing: a superlinear cost exceeds the limits."""
    command, content = dice.choice(LARGE)
    (folder / "large.jsonl").write_bytes(content())
    return reporting(folder, command, folder / "large.jsonl", codes=(0, 1, 2, 4))


MAKERS: dict[str, Callable[[Path, random.Random], Input]] = {
    make.__name__: make
    for make in (
        *(trace, recording, tier_text, tier_folder),
        *(connector_options, large),
    )
}

# --- the rules ---


class TooLongError(BaseException):
    """Raised by a signal; neither a hook nor a command catches it."""


def too_long(number: int, _: object) -> None:
    raise TooLongError(f"more than {CPU_SECONDS} s of CPU time, or {SECONDS} s")


def problem_with(given: Input) -> tuple[int, str]:
    """Run an input; returns its exit code and the rule that it violates, empty if none."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        code, stdout, stderr = run_input(given)
    except TooLongError as error:
        return -1, f"{error}: {traceback.format_exc(limit=-4)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    output = stdout + stderr
    if code not in given.codes:
        return code, f"exit code {code}, expected one of {given.codes}"
    if "Traceback" in output:
        return code, "a traceback"
    if found := OBEYED.search(output):
        return code, f"a character that a terminal obeys: {found[0]!r}"
    if "enough memory" in output:
        return code, "more memory than the limit"
    lines = [line for line in stderr.splitlines() if line] or [""]
    if code == 2 and (
        not lines[-1].startswith("kvview: ")
        or any("Error" in line and not line.startswith("kvview: skipped: ") for line in lines[:-1])
    ):
        return code, "exit code 2 without one line with the reason"
    if given.report is not None and given.report.is_file():
        try:
            json.loads(given.report.read_bytes(), parse_constant=refuse_constant)
        except ValueError as error:
            return code, f"a report that is not JSON: {error}"
    return code, ""


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def run_input(given: Input) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, given.args, color=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        traceback.print_exception(result.exception)
        return 5, result.stdout, f"{result.stderr}{result.exception!r}"
    return result.exit_code, result.stdout, result.stderr


def main() -> int:
    """Run a number of inputs; returns 1 at the first that violates a rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first input")
    parser.add_argument("--kind", choices=[*MAKERS], action="append")
    given = parser.parse_args()
    kinds = given.kind or [*MAKERS]
    if "tier_text" in kinds:
        with contextlib.suppress(ImportError):
            importlib.import_module("lmcache.v1")  # its first import prints in colours
    signal.signal(signal.SIGPROF, too_long)
    signal.signal(signal.SIGALRM, too_long)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    codes = Counter[str]()
    for seed in range(given.seed, given.seed + given.number):
        kind = kinds[seed % len(kinds)]
        random.seed(seed)
        with (
            tempfile.TemporaryDirectory(
                prefix="kvview-fuzz-", ignore_cleanup_errors=True
            ) as folder,
            contextlib.chdir(folder),
        ):
            made = MAKERS[kind](Path(folder), random.Random(seed))
            code, problem = problem_with(made)
        codes[f"{kind}: {code}"] += 1
        if problem:
            print(f"{kind}, seed {seed}: {problem}\n  {ascii(made.args)[:3000]}")
            print(f"  repeat it with: 1 --seed {seed} --kind {kind}")
            return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{given.number} inputs, {peak} MiB at most: {dict(sorted(codes.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
