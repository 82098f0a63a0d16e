"""The commands as entry points, and the exit codes, one by one."""

from __future__ import annotations

import json
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
from kvview.version import CONTRACT_VERSION, __version__

ROOT = Path(__file__).parents[2]
LAZY = "kvview_reference.connector:LazyOffloadConnector"


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def python(*args: str, shell: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args] if shell is None else ["bash", "-c", shell, sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Add entry points; their commands live in the module ``third``."""
    third = types.ModuleType("third")
    monkeypatch.setitem(sys.modules, "third", third)
    known = list(entry_points(group=commands.GROUP))
    monkeypatch.setattr(commands, "entry_points", lambda group: known)

    def point(name: str, value: str) -> None:
        known.append(EntryPoint(name, value, commands.GROUP))

    return types.SimpleNamespace(point=point, third=third)


# --- every way in ---


@pytest.mark.parametrize(
    "way",
    [
        ("-m", "kvview"),
        ("-m", "kvview.cli"),
        ("-c", "from kvview.cli import main; main()"),
    ],
)
def test_every_way_in(way: tuple[str, ...]) -> None:
    done = python(*way, "--version")
    assert (done.returncode, done.stderr) == (ExitCode.CLEAN, "")
    assert done.stdout.startswith("kvview, version ")
    done = python(*way, "check", "no_such_file.py:C")
    assert done.returncode == ExitCode.COULD_NOT_RUN
    assert "there is no file 'no_such_file.py'" in done.stderr
    assert done.stderr.count("\n") == 1


COMMANDS = [path.split()[1:] for path, _ in leaves()]
GROUPS = [[], *sorted({(command[0],) for command in COMMANDS if len(command) > 1})]


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPS], ids=" ".join)
def test_help_fits_a_terminal_and_says_what_all_have(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = run(*command, "--help")
    assert result.exit_code == ExitCode.CLEAN
    assert max(map(len, result.stdout.splitlines())) <= 80
    for code in ExitCode:
        assert f"{code:>3}  {code.what}" in result.stdout
    for option in ("-q, --quiet", "-v, --verbose"):
        assert result.stdout.count(f"  {option} ") == 1


def test_the_help_has_a_summary_of_every_command_and_imports_none() -> None:
    commands = {command[0] for command in COMMANDS}
    assert commands == set(SUMMARIES)
    shown = run("--help").stdout
    for summary in SUMMARIES.values():
        assert f"  {summary}\n" in shown


def test_quiet_leaves_errors_and_what_was_asked_for() -> None:
    args = ("replay", "--requests", "20", "--json", "-")
    told = run(*args).stdout
    assert not told.startswith("{")
    for quiet in (run(*args, "--quiet"), run("--quiet", *args), run(*args, "-q")):
        assert (quiet.exit_code, quiet.stderr) == (ExitCode.CLEAN, "")
        assert json.loads(quiet.stdout)["requests"] == 20
    wrong = run("replay", "no_such_trace", "--quiet")
    assert (wrong.exit_code, wrong.stdout) == (ExitCode.COULD_NOT_RUN, "")
    assert wrong.stderr.startswith("kvview: cannot read trace")


def test_verbose_names_versions_and_brings_tracebacks() -> None:
    good = run("events", "validate", "no_such", "--verbose")
    first, *_, last = good.stderr.splitlines()
    assert first.startswith(f"kvview: kvview {__version__} (contract {CONTRACT_VERSION}), ")
    assert "Traceback" in good.stderr
    assert last.startswith("kvview: 'no_such'")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    script = run("completion", shell)
    assert script.exit_code == ExitCode.CLEAN
    assert f"_KVVIEW_COMPLETE={shell}_complete" in script.stdout
    assert run("completion", "ksh").exit_code == ExitCode.COULD_NOT_RUN


def test_what_the_shell_asks_is_answered() -> None:
    asked = "COMP_WORDS='kvview events val' COMP_CWORD=2 _KVVIEW_COMPLETE=bash_complete"
    done = python(shell=f'{asked} "$0" -c "from kvview.cli import main; main()"')
    assert done.stdout == "plain,validate\n"


def test_the_readme_says_the_exit_codes() -> None:
    text = (ROOT / "README.md").read_text()
    for code in ExitCode:
        assert f"| {code:d} | {code.what.removesuffix(' or of a command')}" in text


@pytest.mark.parametrize(
    "command", ["--version", "--help", "new mine.py", "new --help", "completion bash"]
)
def test_it_starts_without_the_heavy_packages(command: str, tmp_path: Path) -> None:
    args = [str(tmp_path / word) if word == "mine.py" else word for word in command.split()]
    code = (
        f"import sys; sys.argv[1:] = {args!r}\nfrom kvview.cli import main\n"
        "try: main()\nexcept SystemExit as end: print(end.code, *sys.modules)"
    )
    *_, last = python("-c", code).stdout.splitlines()
    exit_code, *loaded = last.split()
    assert exit_code == "0"
    assert "kvview.cli.commands" in loaded
    heavy = {"torch", "numpy", "vllm", "hypothesis", "pydantic", "rich", "msgspec", "zmq"}
    heavy |= {"kvview.testing", "kvview_reference", "kvview_vllm"}
    assert not heavy.intersection(loaded)


# --- entry points ---


def test_broken_commands_take_no_other_down(add: types.SimpleNamespace) -> None:
    add.third.number = 3
    add.third.good = click.Command("good", callback=lambda: click.echo("done"), help="It works.")
    add.point("absent", "no_such_package.command:run")
    add.point("nothing", "third:nothing")
    add.point("number", "third:number")
    add.point("good", "third:good")
    result = run("--help")
    assert result.exit_code == ExitCode.CLEAN
    for name in ("absent", "nothing", "number"):
        assert f"  {name}" in result.stdout
        for more in ([], ["--unknown", "x"]):
            broken = run(name, *more)
            assert broken.exit_code == ExitCode.COULD_NOT_RUN
            assert broken.stderr.startswith(f"kvview: {name}: ")
            assert broken.stderr.count("\n") == 1
        assert "Not available" in run(name, "--help").stdout
    assert "No module named 'no_such_package'" in run("absent").stderr
    assert "Traceback" in run("absent", "--verbose").stderr
    assert "third:number is no click command" in run("number").stderr
    assert run("good").stdout == "done\n"


@pytest.mark.parametrize("raised", ["raise SystemExit(0)", "raise OSError('one\\ntwo')", "1 +"])
def test_whatever_an_import_of_a_command_does(
    add: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str
) -> None:
    (tmp_path / "bad_command.py").write_text(raised)
    monkeypatch.syspath_prepend(str(tmp_path))
    add.point("bad", "bad_command:run")
    result = run("bad")
    sys.modules.pop("bad_command", None)
    assert result.exit_code == ExitCode.COULD_NOT_RUN
    assert "bad_command:run does not import" in result.stderr.replace(" of bad_command:run", "")
    assert result.stderr.count("\n") == 1


def test_a_missing_extra_is_named(
    add: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for module in ("kvview.cli.console", "kvview_reference.replay.command"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    result = run("replay")
    assert result.exit_code == ExitCode.COULD_NOT_RUN
    assert "rich" in result.stderr
    assert result.stderr.count("\n") == 1


def test_nobody_takes_the_place_of_kvviews_own(add: types.SimpleNamespace) -> None:
    add.third.check = click.Command("check", callback=lambda: click.echo("other"))
    add.point("check", "third:check")
    assert "against the laws of its contract" in run("check", "--help").stdout


def test_without_an_entry_point_there_is_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: [])
    assert run("--help").exit_code == ExitCode.CLEAN


# --- exit codes ---


def raises(error: BaseException) -> click.Command:
    def fail() -> None:
        raise error

    return click.Command("fails", callback=fail)


@pytest.mark.parametrize(
    ("error", "code", "told"),
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
        (click.Abort(), ExitCode.INTERRUPTED, "kvview: interrupted\n"),
        (EOFError("cut off"), ExitCode.BUG, "a bug of kvview or of the command"),
        (KeyError("x"), ExitCode.BUG, "a bug of kvview or of the command"),
        (ModuleNotFoundError("x", name="x"), ExitCode.BUG, "a bug of kvview or of the command"),
    ],
)
def test_what_a_command_raises(
    add: types.SimpleNamespace, error: BaseException, code: ExitCode, told: str
) -> None:
    add.third.fails = raises(error)
    add.point("fails", "third:fails")
    result = run("fails")
    assert result.exit_code == code
    assert told in result.stderr
    assert ("Traceback" in result.stderr) == (code is ExitCode.BUG)


def test_what_a_command_returns_is_its_exit_code_when_it_is_one(
    add: types.SimpleNamespace,
) -> None:
    for name, value in {"three": 3, "none": None, "text": "x", "code": ExitCode.WRONG}.items():
        setattr(add.third, name, click.Command(name, callback=lambda value=value: value))
        add.point(name, f"third:{name}")
    assert [run(name).exit_code for name in ("three", "none", "text", "code")] == [3, 0, 0, 1]


@pytest.mark.parametrize("args", ["bogus", "--bogus", "check --bogus", "check a b"])
def test_errors_of_click_are_one_line(args: str) -> None:
    result = run(*args.split())
    assert result.exit_code == ExitCode.COULD_NOT_RUN
    assert result.stderr.startswith("kvview: ")
    assert "--help'" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_without_a_command_there_is_help() -> None:
    result = run()
    assert result.exit_code in (ExitCode.CLEAN, ExitCode.COULD_NOT_RUN)  # by the click release
    assert "Commands:" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        "replay --requests 50 | true",
        "replay --requests 50 --json - | head -c 5 >/dev/null",
        "replay --requests 50 2>&1 | head -1 >/dev/null",
        "--help | true",
        "replay --help | true",
        "check kvview_reference.harness:pool --select POOL-1 | head -1 >/dev/null",
    ],
)
def test_nobody_has_to_read_to_the_end(arguments: str) -> None:
    before, pipe, after = arguments.partition("|")
    shell = f'"$0" -m kvview {before}{pipe}{after}; echo ${{PIPESTATUS[0]}} >&2'
    done = python(shell=shell)
    assert done.stderr == "0\n"


def test_the_exit_code_is_what_was_found_when_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "from kvview_reference.connector import LazyOffloadConnector\n"
        "from kvview_reference.connector.lazy_offload import LazyOffloadScheduler\n"
        "class S(LazyOffloadScheduler):\n"
        "    def match_prefix(self, request, n): return 7\n"
        "class C(LazyOffloadConnector):\n"
        "    def make_scheduler(self): return S(self.config, self.options)\n"
    )
    command = f'"$0" -m kvview check --seeds 1 {tmp_path}/wrong.py:C'
    done = python(shell=f"{command} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == ExitCode.WRONG
