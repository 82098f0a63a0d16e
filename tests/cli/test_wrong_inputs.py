"""Wrong inputs, by the kind of what is asked for: one clear line, exit code 2, nothing printed."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from docs.make_commands import leaves
from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import OutputFile, Seconds
from kvview.events.recording import Message, Recording

COMMANDS = {path.removeprefix("kvview "): command for path, command in leaves()}
ARGUMENTS = {
    "check": ["kvview_reference.harness:pool", "--select", "POOL-1"],
    "completion": ["bash"],
    "doctor": [],
    "events record": ["tcp://127.0.0.1:5999", "fine.jsonl", "--seconds", "0"],
    "events replay": ["recording.jsonl", "tcp://127.0.0.1:*", "--wait", "0"],
    "events tail": ["recording.jsonl"],
    "events validate": ["recording.jsonl"],
    "new": ["fine.py"],
    "replay": ["--requests", "20"],
    "size": ["--requests", "20"],
    "tier bench": [
        *("kvview_reference.tier:FileStore", "--option", "root={tmp}"),
        *("--page-bytes", "4096", "--pages", "1", "--rounds", "1"),
    ],
    "tier fsck": ["folder"],
}
LONG = "x" * 300
OUTPUTS = ["", "missing/report", "folder", "file/below", LONG, "loop", "/proc/report"]
INPUTS = ["", "missing", "folder", "empty", "binary", "loop", "file/below", LONG, "deep.json"]
INPUTS += ["/proc/self/mem"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with Recording("recording.jsonl") as recording:
        recording.write(Message(0, b""))


def run(command: str, *args: str) -> Result:
    return CliRunner().invoke(cli, [*command.split(), *args])


def assert_refused(result: Result) -> None:
    assert result.exit_code == ExitCode.COULD_NOT_RUN, result.output
    assert result.stderr.startswith("kvview: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert not result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_what_no_command_knows(command: str) -> None:
    given = ARGUMENTS[command]
    assert_refused(run(command, *given, "--no-such-option"))
    assert_refused(run(command, *given, *"abcd"))


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (name, o.opts[0])
        for name, command in COMMANDS.items()
        for o in command.params
        if isinstance(o.type, OutputFile)
    ],
)
@pytest.mark.parametrize("path", OUTPUTS)
def test_where_nothing_can_be_written(command: str, option: str, path: str) -> None:
    if path == "/proc/report" and not Path("/proc/self").exists():
        pytest.skip("no /proc")
    given = ARGUMENTS[command]
    if option == "file":
        assert_refused(run(command, given[0], path, *given[2:]))
    else:
        assert_refused(run(command, *given, option, path))


def test_a_refused_run_leaves_its_files_as_they_were() -> None:
    Path("old.json").write_text("old")
    Path("link.json").symlink_to("nowhere.json")
    for path in ("old.json", "new.json", "link.json"):
        assert_refused(run("doctor", "--tier=[]", "--json", path))
        assert_refused(run("events", "record", "tcp://x", path, "--seconds=0"))
    assert_refused(run("events", "record", "old.json", "old.json"))
    assert Path("old.json").read_text() == "old"
    assert not Path("new.json").exists()
    assert not Path("nowhere.json").exists()


# --- every option of every command, with values that it cannot have ---

WHOLE = ["", " ", "x", "-", "1.5", "1e3", "0x10", "nan", "inf", "1 2", "\udce9", "9" * 5000]
RATE = ["", " ", "x", "-", "nan", "-inf", "-1", "1,5", "0x10", "1 2", "\udce9"]
NAMES = ["", " ", "no such", "\udce9", "../x:y", "x" * 300]
TARGETS = [*NAMES, ":", "x:", ":x", "kvview:__all__", "kvview:Nothing", "folder:X"]
PAIRS = ["", " ", "x", "=", "=1", "no_such_option=1"]
ENDPOINTS = ["", "x", "tcp://", "tcp://x:99999", "inproc://a", "ftp://x:1", "\udce9"]
FILES = ["", "missing", "folder", "empty", "binary", "loop", LONG, "deep.json"]
TEXTS = {
    "target": TARGETS,
    "store": TARGETS,
    "shell": NAMES,
    "--connector": TARGETS,
    "--option": PAIRS,
    "--profile": NAMES,
    "--select": [*NAMES, "check_nothing_*"],
    "--engine": NAMES,
    "--vllm": [*NAMES, "0.9", "-1", "all,all"],
    "--against": NAMES,
    "--kv-transfer-config": ["", "x", "[", "[]", "null", "{}"],
    "--tier": ["", "x", "[", "[]", "null", "{}", "folder"],
    "--expected-failures": ["", "missing", "folder", "binary", "loop", LONG, "file"],
    "--policy": NAMES,
    "--policies": [*NAMES, ",", "lru,no such"],
    "--model": FILES,
    "--groups": [
        "",
        "x",
        "full,,",
        "window",
        "window:0",
        "window:-1",
        "window:x",
        "mamba@0",
        "full:1",
    ],
    "--sizes": ["", "x", "-1", "nan%", "inf%", "5,", "5,x", "1 parsec", "64GiB"],
    "--gpu-blocks": ["", "x", "-1", "nan%", "1.5", "1 parsec", "64GiB"],
    "--dtype": NAMES,
    "--name": ["", " ", "a b", "1a", "\udce9", "a-b", "Connector"],
    "--consumer": NAMES,
    "--format": NAMES,
    "--replay-from": ENDPOINTS,
    "--replay-to": ENDPOINTS,
    "--publish": ENDPOINTS,
    "--publish-replay": ENDPOINTS,
}
BY_PATHS = {"trace", "file", "source", "endpoint", "root", "--json", "--html", "--csv", "--topic"}
"""Tried with files and folders in other tests; and any text is a topic."""
BESIDES = {
    "--against": ["--vllm", "0.33.0"],
    "--publish-replay": ["--publish", "tcp://127.0.0.1:*"],
    "--publish-wait": ["--publish", "tcp://127.0.0.1:*"],
    "--linger": ["--replay-to", "tcp://127.0.0.1:*"],
    "--dtype": ["--layers=2", "--kv-heads=1", "--head-size=8"],
}
CONNECTOR = ["kvview_reference.connector:OffloadConnector", "--seeds", "1"]


def drawn(kind: str) -> list[str]:
    """Texts drawn at random that are no number, and no name of anything."""
    dice = random.Random(kind)
    letters = "zqä漢 \t%$?*[{(\\'\"\u202e\x1b"
    return ["z" + "".join(dice.choices(letters, k=dice.randint(1, 12))) for _ in range(4)]


def wrong_values(option: click.Parameter) -> list[str]:
    name = option.opts[0]
    if isinstance(option, click.Option) and option.is_flag:
        return []
    if name in BY_PATHS:
        return []
    if isinstance(option.type, click.types.IntParamType):
        return WHOLE + ([] if name == "--seed" else ["-1"]) + drawn(name)
    if isinstance(option.type, click.types.FloatParamType) or type(option.type) is Seconds:
        return RATE + drawn(name)
    # What begins with no letter of ours is no name either.
    return TEXTS[name] + drawn(name)


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, o.opts[0]) for command, c in COMMANDS.items() for o in c.params if wrong_values(o)],
)
def test_values_that_no_option_has(command: str, name: str) -> None:
    (option,) = (o for o in COMMANDS[command].params if o.opts[0] == name)
    givens = [ARGUMENTS[command], *([CONNECTOR] if command == "check" else [])]
    for given, value in itertools.product(givens, wrong_values(option)):
        if isinstance(option, click.Argument):
            result = run(command, *given[1:], "--", value)
        else:
            result = run(command, *given, *BESIDES.get(name, ()), f"{name}={value}")
        assert result.exit_code == ExitCode.COULD_NOT_RUN, (given, value, result.output)
        assert_refused(result)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("replay", []),
        ("size", []),
        ("size", ["--model"]),
        ("events validate", []),
        ("events tail", []),
        ("events replay", ["--wait", "0", "tcp://127.0.0.1:*"]),
        ("tier fsck", []),
        ("check", ["kvview_reference.harness:pool", "--expected-failures"]),
        ("doctor", ["--tier"]),
    ],
)
@pytest.mark.parametrize("path", INPUTS)
def test_what_cannot_be_read(command: str, options: list[str], path: str) -> None:
    if path == "/proc/self/mem" and not Path(path).exists():
        pytest.skip("no /proc")
    if command == "events replay":
        result = run(command, path, *reversed(options[-1:]), *options[:-1])
    else:
        result = run(command, *options, path)
    if path == "empty" and (command.startswith("events") or "--expected-failures" in options):
        assert result.exit_code in (ExitCode.CLEAN, ExitCode.NOT_CHECKED)  # there is nothing in it
    else:
        assert_refused(result)


@pytest.mark.parametrize(
    "arguments",
    [
        "events replay --wait=nan recording.jsonl tcp://127.0.0.1:*",
        "events replay --wait=-1 recording.jsonl tcp://127.0.0.1:*",
        "events replay --linger=inf recording.jsonl tcp://127.0.0.1:*",
        "events replay recording.jsonl tcp://127.0.0.1:99999",
        "events replay --replay-to=\udce9 --wait=0 recording.jsonl tcp://127.0.0.1:*",
        "events validate --seconds=nan tcp://127.0.0.1:5999",
        "events record --seconds=-1 tcp://127.0.0.1:5999 fine.jsonl",
        "replay --publish=\udce9",
        "replay --publish-wait=nan --publish=tcp://127.0.0.1:*",
    ],
)
def test_values_that_are_none(arguments: str) -> None:
    assert_refused(CliRunner().invoke(cli, arguments.split()))


def test_a_host_beyond_all_memory_is_one_that_holds_everything() -> None:
    result = run("size", "--requests=20", f"--sizes=9999,{10**20}", "--policies=lru,arc")
    assert result.exit_code == ExitCode.CLEAN, result.output


def test_a_topic_that_is_no_text_is_one_that_nobody_publishes() -> None:
    result = run(
        "events", "record", "tcp://127.0.0.1:5999", "x.jsonl", "--seconds=0", "--topic=\udce9"
    )
    assert result.exit_code == ExitCode.NOT_CHECKED, result.output


# --- streams, in a process of their own ---


def shell(line: str, **options: int) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", line, sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "completion zsh", "doctor --json -"])
def test_a_full_disk_behind_stdout(arguments: str) -> None:
    done = shell(f'"$0" -m kvview {arguments} > /dev/full')
    assert done.returncode in (ExitCode.COULD_NOT_RUN, ExitCode.WRONG)
    assert done.stderr.splitlines()[-1] == "kvview: stdout: No space left on device"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_a_report() -> None:
    result = run("doctor", "--json", "/dev/full", "-q")
    assert result.exit_code == ExitCode.COULD_NOT_RUN
    assert result.stderr == "kvview: --json '/dev/full': No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams(closed: str) -> None:
    assert shell(f'"$0" -m kvview completion bash {closed}').returncode == ExitCode.CLEAN


def test_no_permission(tmp_path: Path) -> None:
    secret, sealed = tmp_path / "secret.jsonl", tmp_path / "sealed"
    secret.write_text("{}")
    secret.chmod(0)
    sealed.mkdir(mode=0o555)
    if os.access(secret, os.R_OK):
        pytest.skip("root may do everything")
    assert_refused(run("replay", str(secret)))
    assert_refused(run("new", str(sealed / "mine.py")))
    assert_refused(run("doctor", "--json", str(sealed / "report.json")))
