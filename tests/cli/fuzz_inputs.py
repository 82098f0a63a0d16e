"""Fuzzing of every command with every file and option that it reads (SECURITY.md).

    PYTHONPATH=. python tests/cli/fuzz_inputs.py 20000 [--seed 7] [--kind trace]

Each input is a valid file of its kind with a few things made wrong: in its bytes, in its
values, in its name, or in what lies at its path. A command that reads it

1. ends with an exit code of those that an input may lead to, and with 2 in one line,
2. prints no traceback, and no character that a terminal obeys,
3. writes valid JSON if it writes any,
4. needs no more than a bounded memory and CPU time, and waits for nothing.

The process stops at the first input that breaks one of these, and prints how to see it again.
``tests/cli/test_fuzzed_inputs.py`` runs a few hundred of them.
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
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.events.formats import WIRE_FORMATS
from kvview.events.recording import Message, Recording
from kvview.events.wire import Batch, codec, encode
from kvview.tier import Namespace
from kvview_reference.tier import FileStore

ROOT = Path(__file__).parents[2]
MEMORY = 3 << 30
"""Bytes that an input may take, on top of the imported packages."""

CPU_SECONDS, SECONDS = 60, 300
"""That an input may take: a hundred times what one takes, so only loops and pipes reach them."""

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
HOSTILE = "\x1b[31m\x07\r\n\x9b2J\u202e[/red]\ud800\x00'\"<script>"
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 16, 512, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64),
    *(10**400, -(10**400), 1.5, -0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "1", "GPU", HOSTILE, "x" * 5000, [], {}, [[]], [None], [1, "2"], {"": 0}),
]
RAW = [b"1e999", b"1" * 5000, b"[" * 50_000, b'{"a":' * 5000, b"\xff\xfe", b"\x00", b"\\ud800"]


@dataclass
class Input:
    """Something that a command reads.

    Args:
        args: The command line.
        codes: Exit codes that it may end with.
        report: Where its JSON goes; None where it writes none.
    """

    args: list[str]
    codes: Sequence[int] = (0, 1, 2, 4)
    report: Path | None = None


# --- things made wrong ---


def damaged(content: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, left out, repeated or put in."""
    wrong = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(wrong) + 1)
        to = min(len(wrong), at + dice.choice((0, 1, 1, 2, 8, 40)))
        put_in = (b"", dice.randbytes(to - at), wrong[at:to] * 2, b"\xff\xdd", dice.choice(RAW))
        wrong[at:to] = dice.choice(put_in)
    return bytes(wrong)


def changed(value: Any, dice: random.Random) -> Any:
    """The value with one part replaced, left out, doubled or under another name."""
    if dice.random() < 0.25 or not isinstance(value, list | dict) or not value:
        return copy.deepcopy(dice.choice(VALUES))
    key = dice.choice([*value] if isinstance(value, dict) else [*range(len(value))])
    deed = dice.random()
    if deed < 0.15:
        del value[key]
    elif deed < 0.25:
        if isinstance(value, list):
            value.insert(key, value[key])
        else:
            value[dice.choice(("", "x", HOSTILE))] = value.pop(key)
    else:
        value[key] = changed(value[key], dice)
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


def wrong_rows(rows: Sequence[Any], dice: random.Random) -> bytes:
    """JSON lines, most of them right, compressed or not."""
    lines = [wrong_json(row, dice) if dice.random() < 0.3 else to_line(row) for row in rows]
    if dice.random() < 0.3:
        dice.shuffle(lines)
    content = dice.choice((b"\n", b"\n", b"\n", b"\r\n", b"", b"\n\n")).join(lines)
    if dice.random() < 0.3:
        content = gzip.compress(content, 1)
        content = damaged(content, dice) if dice.random() < 0.5 else content
    return content


def to_line(row: Any) -> bytes:
    return json.dumps(row).encode()


def put(path: Path, content: bytes, dice: random.Random) -> Path:
    """Write it; now and then something else lies at the path, or it has another name."""
    if dice.random() < 0.05:
        path = path.with_name(dice.choice(("[red]x[b]", "a\x1b[31m\n\u202e", "\udce9", "-", " ")))
    if dice.random() < 0.92:
        path.write_bytes(content)
    else:
        put_special(path, dice)
    return path


def put_special(path: Path, dice: random.Random) -> None:
    kind = dice.choice(("folder", "pipe", "socket", "device", "proc", "loop", "sparse", "none"))
    with contextlib.suppress(OSError):
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            here = os.getcwd()
            os.chdir(path.parent)  # its name may have 107 bytes
            with socket.socket(socket.AF_UNIX) as bound, contextlib.suppress(OSError):
                bound.bind(path.name)
            os.chdir(here)
        elif kind == "device":
            path.symlink_to(dice.choice(("/dev/zero", "/dev/full", "/dev/random", "/dev/tty")))
        elif kind == "proc":
            names = ("mem", "pagemap", "maps", "fd", "environ")
            path.symlink_to(f"/proc/self/{dice.choice(names)}")
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 31)


# --- the kinds ---

MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": 55,
    "timestamp": 61.1,
    "input_length": 33,
    "output_length": 13,
    "type": "text",
    "turn": 2,
    "hash_ids": [1089, 1090, 6326],
}


def session(number: int) -> dict[str, Any]:
    request = {"t": 0.5, "type": "n", "in": 133, "out": 9, "hash_ids": [1, number]}
    agent = {"t": 1.0, "type": "subagent", "agent_id": "a", "requests": [request]}
    head = {"id": f"trace_{number}", "block_size": 64, "hash_id_scope": "local"}
    return {**head, "requests": [request, agent, request]}


def trace(folder: Path, dice: random.Random) -> Input:
    rows: list[dict[str, Any]] = dice.choice(
        (
            [{**MOONCAKE, "timestamp": 100 * n, "hash_ids": [0, n]} for n in range(8)],
            [{**BAILIAN, "chat_id": n, "parent_chat_id": n - 1} for n in range(8)],
            [session(n) for n in range(3)],
        )
    )
    path = folder / dice.choice(("trace.jsonl", "trace.jsonl.gz", "trace"))
    if dice.random() < 0.1:
        path = folder / "traces"
        path.mkdir()
        for number in range(3):
            put(path / f"{number}.jsonl", wrong_rows(rows, dice), dice)
    else:
        path = put(path, wrong_rows(rows, dice), dice)
    report = folder / "report.json"
    args = dice.choice(
        (
            ["replay", "--gpu-blocks", "40"],
            ["replay", "--closed-loop", "3", "--gpu-blocks", "40", "--html", f"{folder}/r.html"],
            ["size", "--sizes", "10,50%"],
            ["size", "--html", f"{folder}/r.html", "--csv", f"{folder}/r.csv"],
            ["size", "--max-references", "5"],
        )
    )
    strict = ["--strict"] * (dice.random() < 0.2)
    return Input([*args, *strict, f"--json={report}", "--", str(path)], (0, 2), report)


FIELDS: dict[str, Any] = {
    "block_hashes": [1, b"h" * 32],
    "parent_block_hash": 2,
    "token_ids": [*range(32)],
    "block_size": 16,
    "medium": "CPU",
    "lora_name": "a",
    "extra_keys": [["s"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "locality": "LOCAL",
}


def batches() -> Iterator[bytes]:
    for wire_format in WIRE_FORMATS:
        make = codec(wire_format).make
        for tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
            gpu = {**FIELDS, "medium": "GPU"}
            yield encode(Batch(1.0, [make(tag, **FIELDS), make(tag, **gpu)], 0, wire_format))


def recording(folder: Path, dice: random.Random) -> Input:
    source = folder / "whole.jsonl"
    with Recording(str(source)) as written:
        for number, payload in enumerate(dice.sample([*batches()], 6)):
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
    report = folder / "report.json"
    args = dice.choice(
        (
            ["events", "tail"],
            ["events", "validate", "--consumer", "all"],
            ["events", "validate", "--format", "vllm-0.33"],
            ["size"],
            ["events", "replay", "--wait=0"],
        )
    )
    if args[1:2] == ["replay"]:
        return Input([*args, "--", str(path), "tcp://127.0.0.1:*"], (0, 2, 4))
    return Input([*args, f"--json={report}", "--", str(path)], (0, 1, 2, 4), report)


MODELS: list[dict[str, Any]] = [
    {"layers": 4, "kv_heads": 2, "head_size": 64, "dtype": "fp8", "tp": 2, "name": "m"},
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 512,
        "torch_dtype": "bfloat16",
    },
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "hidden_size": 512,
    },
    {
        "model_type": "gemma3",
        "text_config": {
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size": 64,
            "sliding_window": 1024,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    },
    {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 512,
        "full_attention_interval": 4,
        "linear_num_value_heads": 8,
        "linear_conv_kernel_dim": 4,
    },
]


def model(folder: Path, dice: random.Random) -> Input:
    path = put(folder / "config.json", wrong_json(dice.choice(MODELS), dice), dice)
    rows = put(folder / "t.jsonl", b"\n".join([to_line(MOONCAKE)] * 3), random.Random(1))
    report = folder / "report.json"
    args = ["size", "--sizes", "1GiB"] if dice.random() < 0.7 else ["replay", "--gpu-blocks", "40"]
    args += [f"--json={report}", "--model", str(path), "--", str(rows)]
    return Input(args, (0, 2), report)


def expectations(folder: Path, dice: random.Random) -> Input:
    name = "check_pool_4_unknown_ids_are_refused"
    lines = [f"{name}: a reason {HOSTILE[:3]}", "# why", "", f"{name}:x", "coverage: x: y", "a: b"]
    text = "\n".join([lines[0], *dice.sample(lines[1:], dice.choice((0, 1, 2))), ""]).encode()
    content = damaged(text, dice) if dice.random() < 0.5 else text
    path = put(folder / "expected", content, dice)
    given = ["check", "kvview_reference.harness:pool", "--select", "POOL-4"]
    return Input([*given, "--expected-failures", str(path)])


TIERS: list[dict[str, Any]] = [
    {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"secondary_tiers": [1]}},
    {"type": "plugin", "adapter_params": {"store": "kvview.tier.trial:MemoryStore"}},
    {"tier": {"store": "kvview.tier.trial:MemoryStore", "weights": "x"}},
]


def tier_text(folder: Path, dice: random.Random) -> Input:
    content = wrong_json(dice.choice(TIERS), dice)
    report = folder / "report.json"
    text = content.decode(errors="surrogateescape").replace("\x00", "")
    if dice.random() < 0.5 or len(content) > 50_000:
        text = str(put(folder / "tier.json", content, dice))
    return Input(["doctor", f"--json={report}", f"--tier={text}"], (0, 1, 2), report)


def tier_folder(folder: Path, dice: random.Random) -> Input:
    root = folder / "root"
    with contextlib.closing(FileStore(Namespace("m", "w"), root=str(root))) as store:
        keys = [bytes([n]) * 32 for n in range(4)]
        for key in keys:
            store.store(key, memoryview(key * 9), is_replaced=False)
    for path in sorted(root.rglob("*")):
        if path.is_file() and dice.random() < 0.4:
            content = path.read_bytes()
            is_json = path.suffix == ".json"
            wrong = wrong_json(json.loads(content), dice) if is_json else damaged(content, dice)
            path.unlink()
            put(path, wrong, dice)
    report = folder / "report.json"
    return Input(["tier", "fsck", f"--json={report}", str(root)], (0, 1, 2), report)


NUMBERS = [
    *("", " ", "x", "-1", "0", "1", "2", "1.5", "1e3", "0x10", "nan", "inf", "-inf", "1e308"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "1" + "0" * 30, "9" * 5000),
    *("1_000", "\u0663", "\ud800", "\x1b[31m", "1\n2"),
]
OPTIONS = {
    "replay": [
        *("--gpu-blocks", "--cpu-blocks", "--block-bytes", "--closed-loop", "--requests"),
        *("--seed", "--speed", "--prefill-rate", "--decode-step", "--load-bandwidth"),
        *("--store-bandwidth", "--token-bytes", "--step-tokens", "--max-running", "--groups"),
        *("--policy", "--option", "--connector", "--publish", "--publish-wait"),
    ],
    "size": [
        *("--sizes", "--gpu-blocks", "--policies", "--prefill-rate", "--load-bandwidth"),
        *("--requests", "--seed", "--max-references"),
    ],
    "check": [
        *("--profile", "--select", "--level", "--seed", "--steps", "--seeds", "--engine"),
        *("--option", "--vllm", "--against", "--hook-seconds", "--badge", "--mutants"),
    ],
    "events": ["--messages", "--seconds", "--topic", "--replay-from", "--consumer", "--format"],
}
TEXTS = [
    *("full@0", "window:" + "9" * 30, "window:2147483648", "full@9223372036854775808", "mamba@3"),
    *("1PiB", "99999999TiB", "1e9%", "50%,", ",", "lru,lru", "arc", "kvview:", "json:loads"),
    *("a=1", "cpu_blocks=1e400", "cpu_blocks=" + "9" * 400, "cpu_blocks=[]", "policy={}"),
    *("cpu_blocks=NaN", "enable_events=2", "tcp://[", "ipc://", "reference", "0.33.0", "POOL-1"),
]


def options(folder: Path, dice: random.Random) -> Input:
    command = dice.choice([*OPTIONS])
    rows = folder / "t.jsonl"
    rows.write_bytes(b"\n".join(to_line({**MOONCAKE, "hash_ids": [0, n]}) for n in range(4)))
    given = []
    for name in dice.sample(OPTIONS[command], dice.choice((1, 1, 2, 3))):
        given.append(f"{name}={dice.choice(TEXTS if dice.random() < 0.4 else NUMBERS)}")
    head = {
        "replay": ["replay", *(["--gpu-blocks=40"] * (dice.random() < 0.7))],
        "check": ["check", "kvview_reference.harness:pool", "--select", "POOL-4"],
        "events": ["events", "validate"],
    }
    if command == "events":
        rows = folder / "recording.jsonl"
        with Recording(str(rows)) as written:
            written.write(Message(0, next(batches())))
    tail = [] if command == "check" else ["--", str(rows)]
    report = folder / "report.json"
    args = [*head.get(command, [command]), *given, f"--json={report}", *tail]
    return Input(args, (0, 1, 2, 4), report)


def connector_options(folder: Path, dice: random.Random) -> Input:
    """Options of a connector and of a store, which are read as JSON."""
    rows = folder / "t.jsonl"
    rows.write_bytes(b"\n".join(to_line(MOONCAKE) for _ in range(4)))
    wrong = wrong_json(dice.choice([*VALUES[:3], 40, "lru"]), dice).decode(errors="replace")
    wrong = wrong.replace("\x00", "")[:2000]
    if dice.random() < 0.3:
        name = dice.choice(("root", "max_bytes", "threads", "checksum", "x", HOSTILE[:3]))
        store = ["tier", "bench", "kvview_reference.tier:FileStore", "--pages=1", "--rounds=1"]
        store += ["--page-bytes=64", f"--option=root={folder}/root", f"--option={name}={wrong}"]
        return Input(store, (0, 1, 2))  # 1: a budget too small for a page
    kind = dice.choice(("Offload", "LazyOffload", "Multi"))
    name = dice.choice(
        ("cpu_blocks", "policy", "enable_events", "connectors", "threads", "x", "cpu_bytes")
    )
    args = ["replay", f"--connector=kvview_reference.connector:{kind}Connector"]
    return Input([*args, "--gpu-blocks=40", f"--option={name}={wrong}", "--", str(rows)], (0, 1, 2))


def large(folder: Path, dice: random.Random) -> Input:
    """A lot of one thing: what costs more than its length grows into the limits."""
    path, report = folder / "large.jsonl", folder / "report.json"
    kind = dice.choice([*LARGE])
    content, args = LARGE[kind]
    path.write_bytes(content())
    return Input([*args, f"--json={report}", "--", str(path)], (0, 1, 2, 4), report)


def _messages(numbers: Sequence[int], payload: bytes = b"\x93\x01\x90\x00") -> bytes:
    rows = (msgspec.json.encode(Message(number, payload)) for number in numbers)
    return b"\n".join(rows)


LARGE: dict[str, tuple[Callable[[], bytes], list[str]]] = {
    "bad rows": (lambda: to_line(MOONCAKE) + b"\n{}" * 60_000, ["replay"]),
    "bad rows of size": (lambda: to_line(MOONCAKE) + b"\n{}" * 60_000, ["size"]),
    "one row of many ids": (
        lambda: to_line(MOONCAKE) + b'\n{"hash_ids":[' + b"1," * 15_000_000 + b"1]}",
        ["size"],
    ),
    "a bomb": (lambda: gzip.compress(b" " * (400 << 20), 1), ["size"]),
    "a bomb of a recording": (lambda: gzip.compress(b"1" * (400 << 20), 1), ["events", "tail"]),
    "late messages": (
        lambda: _messages([*range(0, 60_000, 2), *range(1, 60_000, 2)]),
        ["events", "validate"],
    ),
    "empty events": (
        lambda: _messages([0], b"\x93\x01\xdd" + (10**7).to_bytes(4, "big") + b"\x90" * 10**7),
        ["events", "validate"],
    ),
    "conversations": (
        lambda: b"\n".join(
            to_line({**BAILIAN, "chat_id": n, "parent_chat_id": n - 1}) for n in range(20_000)
        ),
        ["replay", "--gpu-blocks=100"],
    ),
}
KINDS: dict[str, Callable[[Path, random.Random], Input]] = {
    "trace": trace,
    "recording": recording,
    "model": model,
    "expectations": expectations,
    "tier text": tier_text,
    "tier folder": tier_folder,
    "options": options,
    "connector options": connector_options,
    "large": large,
}

# --- what must hold ---


class TooLong(BaseException):
    """No exception of a hook or a command."""


def _too_long(number: int, _: object) -> None:
    raise TooLong(f"more than {CPU_SECONDS} s of CPU time, or {SECONDS} s")


def problem_with(given: Input) -> tuple[int, str]:
    """The exit code, and what is wrong with how the command ended; empty if nothing is."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        code, stdout, stderr = _run(given)
    except TooLong as error:
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
    if code == 2:
        *skipped, last = [line for line in stderr.splitlines() if line]
        if not last.startswith("kvview: ") or not all(map(_is_news, skipped)):
            return code, "exit code 2 without one line that says why"
    if given.report is not None and given.report.is_file():
        try:
            json.loads(given.report.read_bytes(), parse_constant=_refuse)
        except ValueError as error:
            return code, f"a report that is not JSON: {error}"
    return code, ""


def _is_news(line: str) -> bool:
    """Whether a line on stderr may stand before the reason: of a row, an entry, an endpoint."""
    return "Error" not in line or line.startswith("kvview: skipped: ")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _run(given: Input) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, given.args, color=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        traceback.print_exception(result.exception)
        return 5, result.stdout, f"{result.stderr}{result.exception!r}"
    return result.exit_code, result.stdout, result.stderr


def main() -> int:
    """Run so many inputs; 1 at the first that breaks a rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first input")
    parser.add_argument("--kind", choices=[*KINDS], action="append")
    parser.add_argument("--go-on", action="store_true", help="print all that is wrong")
    given = parser.parse_args()
    kinds = given.kind or [*KINDS]
    if "tier text" in kinds:
        with contextlib.suppress(ImportError):
            importlib.import_module("lmcache.v1")  # its first import prints in colours of its own
    signal.signal(signal.SIGPROF, _too_long)
    signal.signal(signal.SIGALRM, _too_long)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    before, codes, num_wrong = os.getcwd(), Counter[str](), 0
    for seed in range(given.seed, given.seed + given.number):
        dice = random.Random(seed)
        kind = kinds[seed % len(kinds)]
        folder = Path(tempfile.mkdtemp(prefix="kvview-fuzz-"))
        os.chdir(folder)
        try:
            made = KINDS[kind](folder, dice)
            code, problem = problem_with(made)
        finally:
            os.chdir(before)
        codes[f"{kind}: {code}"] += 1
        if problem:
            num_wrong += 1
            print(f"{kind}, seed {seed}: {problem}\n  {ascii(made.args)[:3000]}", flush=True)
            print(f"  --seed {seed} --kind '{kind}' 1")
            if not given.go_on:
                print(f"  its files are in {folder}")
                return 1
        shutil.rmtree(folder, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    counts = dict(sorted(codes.items()))
    print(f"{given.number} inputs, {num_wrong} wrong, {peak} MiB at most: {counts}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
