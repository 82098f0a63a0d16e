"""Wrong inputs of every command, by kind of option: one line, exit code 2, no output."""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from docs.make_commands import leaves
from kvview.cli.commands import EntryPointGroup, cli
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import OutputFile
from kvview.events.recording import Message, Recording
from tests.cases import read_cases

HERE = Path(__file__).parent
POINTS = EntryPointGroup()._points()
COMMANDS = {path.removeprefix("kvview "): command for path, command in leaves()}
TABLE = json.loads((HERE / "wrong_values.json").read_text("utf-8"))
"""Arguments with which each command succeeds, where its engine is installed; arguments without
which an option is not read; wrong values of each option, and lists of them."""
ARGUMENTS = {command: args.split() for command, args in TABLE["succeeds"].items()}
CONNECTOR = ["kvview_reference.store_connector:StoreConnector", "--seeds", "1"]
FREE = {"file"}
"""Paths to write have tests of their own."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EntryPointGroup, "_points", lambda group: POINTS)  # once for 1,400 calls
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "large.json").touch()
    os.truncate(tmp_path / "large.json", (1 << 24) + 1)
    os.mkfifo(tmp_path / "pipe")
    with Recording("recording.jsonl") as recording:
        recording.write(Message(0, b""))


def run(command: str, *args: str) -> Result:
    return CliRunner().invoke(cli, [*command.split(), *args])


def assert_refused(result: Result, *given: object) -> None:
    assert result.exit_code == ExitCode.COULD_NOT_RUN, (given, result.output)
    assert result.stderr.startswith("kvview: "), given
    assert result.stderr.count("\n") == 1, (given, result.stderr)
    assert not result.stdout, given


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_options_and_outputs_that_are_not_writable(command: str) -> None:
    given = ARGUMENTS[command]
    assert_refused(run(command, *given, "--no-such-option"))
    assert_refused(run(command, *given, *"abcd"))
    for param, path in itertools.product(COMMANDS[command].params, values(["@outputs"])):
        if isinstance(param.type, OutputFile):
            option = param.opts[0]
            args = [given[0], path, *given[2:]] if option == "file" else [*given, option, path]
            assert_refused(run(command, *args), option, path)


def test_a_refused_run_leaves_its_files_unchanged() -> None:
    Path("old.json").write_text("old")
    Path("link.json").symlink_to("nowhere.json")
    for path in ("old.json", "new.json", "link.json"):
        assert_refused(run("check", "no.module:x", "--json", path))
        assert_refused(run("events", "tcp://x", "--record", path, "--seconds=0"))
    assert_refused(run("events", "old.json", "--record", "old.json"))
    assert Path("old.json").read_text() == "old"
    assert not Path("new.json").exists()
    assert not Path("nowhere.json").exists()


def values(names: Sequence[str]) -> Iterator[str]:
    """Yield values, with those of a list for ``@list``."""
    for name in names:
        if name.startswith("@"):
            yield from values(TABLE["lists"][name[1:]])
        else:
            yield name.replace("{long}", "x" * 300).replace("{digits}", "9" * 5000)


def wrong_values(param: click.Parameter) -> list[str]:
    """Values that an option or argument cannot have, some of them drawn."""
    name, kind = param.opts[0], param.type
    if name in FREE or isinstance(kind, OutputFile) or getattr(param, "is_flag", False):
        return []
    dice, letters = random.Random(name), "zqä漢 \t%$?*[{(\\'\"\u202e\x1b"
    drawn = ["z" + "".join(dice.choices(letters, k=dice.randint(1, 12))) for _ in range(4)]
    if isinstance(kind, click.types.IntParamType):
        return [*values(["@integers"]), *([] if name == "--seed" else ["-1"]), *drawn]
    if isinstance(kind, click.types.FloatParamType):
        return [*values(["@numbers"]), *drawn]
    return [*values(TABLE["values"][name]), *drawn]


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, p.opts[0]) for command, c in COMMANDS.items() for p in c.params if wrong_values(p)],
)
def test_wrong_values_of_every_option(command: str, name: str) -> None:
    (param,) = (param for param in COMMANDS[command].params if param.opts[0] == name)
    is_argument = isinstance(param, click.Argument)
    for value in wrong_values(param):
        for given in [ARGUMENTS[command], *([CONNECTOR] if command == "check" else [])]:
            if is_argument:
                options = given if given[:1] == ["--requests"] else given[1:]
                result = run(command, *options, "--", value)
            else:
                result = run(command, *given, f"{name}={value}")
            assert_refused(result, command, name, value, given)


@pytest.mark.parametrize(("section", "given", "part"), read_cases(HERE / "refused.txt"))
def test_a_refused_command_names_the_reason(section: str, given: str, part: str) -> None:
    commands, _, common = section.partition(" ")
    before = sorted(Path().rglob("*"))
    for command in commands.split(","):
        result = run(command, *shlex.split(f"{common} {given}"))
        assert_refused(result, command, given)
        assert part in result.stderr
        assert len(result.stderr) < 400
        assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (f"size --requests=20 --sizes=9999,{10**20}", ExitCode.CLEAN),
        (
            "events tcp://127.0.0.1:5999 --record x.jsonl --seconds=0",
            ExitCode.NOT_CHECKED,
        ),
        ("events empty", ExitCode.NOT_CHECKED),
    ],
)
def test_unusual_inputs_that_are_valid(arguments: str, code: ExitCode) -> None:
    result = CliRunner().invoke(cli, arguments.split())
    assert result.exit_code == code, result.output


def test_no_permission(tmp_path: Path) -> None:
    secret, sealed = tmp_path / "secret.jsonl", tmp_path / "sealed"
    secret.write_text("{}")
    secret.chmod(0)
    sealed.mkdir(mode=0o555)
    if os.access(secret, os.R_OK):
        pytest.skip("root has every permission")
    assert_refused(run("replay", str(secret)))
    assert_refused(run("new", str(sealed / "mine.py")))
    assert_refused(run("doctor", "--json", str(sealed / "report.json")))
