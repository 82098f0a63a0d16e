"""The commands as entry points, their common options, and the exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from docs.make_commands import leaves
from kvview.cli import commands
from kvview.cli.commands import SUMMARIES, cli
from kvview.cli.exit_codes import ExitCode
from kvview.errors import ConfigError

ROOT = Path(__file__).parents[2]
MAIN = "from kvview.cli import main; main()"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *args], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", line, sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Add entry points; their commands are in the module ``third``."""
    third = types.ModuleType("third")
    monkeypatch.setitem(sys.modules, "third", third)
    known = list(entry_points(group=commands.GROUP))
    monkeypatch.setattr(commands, "entry_points", lambda group: known)

    def point(name: str, value: str) -> None:
        known.append(EntryPoint(name, value, commands.GROUP))

    return types.SimpleNamespace(point=point, third=third)


@pytest.mark.parametrize("program", [("-m", "kvview"), ("-c", MAIN)])
def test_both_ways_to_start(program: tuple[str, ...]) -> None:
    done = python(*program, "--version")
    assert (done.returncode, done.stderr) == (ExitCode.CLEAN, "")
    assert done.stdout.startswith("kvview, version ")
    done = python(*program, "check", "no_such_file.py:C")
    assert done.returncode == ExitCode.COULD_NOT_RUN
    assert "no_such_file.py" in done.stderr
    assert done.stderr.count("\n") == 1


COMMANDS = [path.split()[1:] for path, _ in leaves()]
GROUPS = [[], *sorted({(command[0],) for command in COMMANDS if len(command) > 1})]


def test_every_help_fits_a_terminal_and_has_the_common_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command in [*COMMANDS, *GROUPS]:
        result = run(*command, "--help")
        assert result.exit_code == ExitCode.CLEAN
        assert max(map(len, result.stdout.splitlines())) <= 80
        for code in ExitCode:
            assert f"{code:>3}  {code.meaning}" in result.stdout
        assert result.stdout.count("  -v, --verbose ") == 1


def test_the_help_has_a_summary_of_every_command() -> None:
    assert {command[0] for command in COMMANDS} == set(SUMMARIES)
    shown = run("--help").stdout
    for summary in SUMMARIES.values():
        assert f"  {summary}\n" in shown


def test_verbose_prints_tracebacks() -> None:
    *lines, last = run("events", "no_such", "--verbose").stderr.splitlines()
    assert any("Traceback" in line for line in lines)
    assert last.startswith("kvview: 'no_such'")


def test_the_shell_completes_commands() -> None:
    assert (
        "_KVVIEW_COMPLETE=bash_complete"
        in python("-c", MAIN, _KVVIEW_COMPLETE="bash_source").stdout
    )
    words = {"COMP_WORDS": "kvview tier fs", "COMP_CWORD": "2"}
    done = python("-c", MAIN, _KVVIEW_COMPLETE="bash_complete", **words)
    assert done.stdout == "plain,fsck\n"


# --- entry points ---


def test_a_broken_command_does_not_affect_the_others(
    add: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = {"absent": "no_such_package.command:run", "nothing": "third:nothing"}
    broken["number"] = "third:number"
    for name, source in {"exits": "raise SystemExit(0)", "syntax": "1 +"}.items():
        (tmp_path / f"{name}_command.py").write_text(source)
        broken[name] = f"{name}_command:run"
    add.third.number = 3
    add.third.good = click.Command("good", callback=lambda: click.echo("done"), help="It works.")
    add.point("good", "third:good")
    for name, value in broken.items():
        add.point(name, value)
    result = run("--help")
    assert result.exit_code == ExitCode.CLEAN
    for name in broken:
        assert f"  {name}" in result.stdout
        for more in ([], ["--unknown", "x"]):
            failed = run(name, *more)
            assert failed.exit_code == ExitCode.COULD_NOT_RUN
            assert failed.stderr.startswith(f"kvview: {name}: ")
            assert failed.stderr.count("\n") == 1
        assert "Not available" in run(name, "--help").stdout
    assert "No module named 'no_such_package'" in run("absent").stderr
    assert "Traceback" in run("absent", "--verbose").stderr
    assert "third:number is not a click command" in run("number").stderr
    assert run("good").stdout == "done\n"


def test_no_other_package_replaces_a_command_of_kvview(add: types.SimpleNamespace) -> None:
    add.third.check = click.Command("check", callback=lambda: click.echo("other"))
    add.point("check", "third:check")
    assert "against the laws of its contract" in run("check", "--help").stdout


# --- exit codes ---


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ConfigError("one\ntwo"), ExitCode.COULD_NOT_RUN, "kvview: one two\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            ExitCode.COULD_NOT_RUN,
            "kvview: this needs torch: pip install 'kvview[reference]'\n",
        ),
        (click.BadParameter("no"), ExitCode.COULD_NOT_RUN, "kvview: Invalid value: no"),
        (click.ClickException("no"), ExitCode.COULD_NOT_RUN, "kvview: no\n"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "kvview: interrupted\n"),
        (EOFError("cut off"), ExitCode.BUG, "a bug of kvview or of the command"),
        (ModuleNotFoundError("x", name="x"), ExitCode.BUG, "a bug of kvview or of the command"),
    ],
)
def test_the_exit_code_of_an_exception(
    add: types.SimpleNamespace, error: BaseException, code: ExitCode, shown: str
) -> None:
    def fail() -> None:
        raise error

    add.third.fails = click.Command("fails", callback=fail)
    add.point("fails", "third:fails")
    result = run("fails")
    assert result.exit_code == code
    assert shown in result.stderr
    assert ("Traceback" in result.stderr) == (code is ExitCode.BUG)


def test_a_returned_number_is_the_exit_code(add: types.SimpleNamespace) -> None:
    for name, value in {"three": 3, "none": None, "text": "x", "code": ExitCode.WRONG}.items():
        setattr(add.third, name, click.Command(name, callback=lambda value=value: value))
        add.point(name, f"third:{name}")
    assert [run(name).exit_code for name in ("three", "none", "text", "code")] == [3, 0, 0, 1]


def test_a_target_may_import_modules_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text("class Base: ...")
    (tmp_path / "mine.py").write_text("from base import Base")
    done = shell(f"cd {tmp_path} && $0 -P -c '{MAIN}' check mine.py:Mine")
    assert "mine.py has no 'Mine'; it has: nothing" in done.stderr


def test_without_a_command_the_help_is_shown() -> None:
    result = run()
    assert result.exit_code in (ExitCode.CLEAN, ExitCode.COULD_NOT_RUN)  # by the click release
    assert "Commands:" in result.output


def test_closed_streams() -> None:
    for closed in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
        assert shell(f'"$0" -m kvview --help {closed}').returncode == ExitCode.CLEAN


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk() -> None:
    for arguments in ("--help", "doctor --json -"):
        done = shell(f'"$0" -m kvview {arguments} > /dev/full')
        assert done.returncode != ExitCode.CLEAN
        assert "No space left on device" in done.stderr
    result = run("doctor", "--json", "/dev/full")
    assert result.exit_code == ExitCode.COULD_NOT_RUN
    assert result.stderr == "kvview: --json '/dev/full': No space left on device\n"


def test_the_engine_vllm_without_vllm_is_one_line() -> None:
    target = "kvview_reference.store_connector:StoreConnector"
    done = python("-c", MAIN, "check", target, "--engine", "vllm", "--seeds", "1")
    if "No module named 'vllm'" not in done.stderr:
        pytest.skip("vLLM is installed")
    assert done.returncode == ExitCode.COULD_NOT_RUN
    assert done.stderr.startswith("kvview: ")
    assert done.stderr.count("\n") == 1
    assert "Install vLLM" in done.stderr
    assert not done.stdout
