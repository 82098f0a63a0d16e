"""What every command does alike: errors in one line, reports in files."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

import click
from typing_extensions import override

from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.errors import ConfigError, ConnectorError, HookError, KVViewError, line_of

VERBOSE = "kvview.verbose"
"""In ``meta`` of a command's context: whether --verbose is given."""

_STDOUT: ContextVar[TextIO | None] = ContextVar("what '-' stands for; None: sys.stdout")
_MOST = 2**63 - 1
_EXTRAS = {
    "click": "cli",
    "rich": "cli",
    "torch": "reference",
    "numpy": "reference",
    "hypothesis": "testing",
    "pytest": "testing",
    "msgspec": "events",
    "zmq": "events",
    "xxhash": "tier",
    "obstore": "objects",
}


def tell_error(error: Exception, is_verbose: bool) -> ExitCode:
    """Say on stderr why a command ends: in one line, unless it is a bug of ours.

    Args:
        error: What the command raised.
        is_verbose: Whether the traceback is wanted.
    """
    text = missing_extra(error) or refused_by_the_system(error) or line_of(error)
    if isinstance(error, HookError):
        code = ExitCode.CONNECTOR_RAISED
    elif isinstance(error, ConnectorError):
        code = ExitCode.WRONG
    elif isinstance(error, KVViewError) or missing_extra(error) or refused_by_the_system(error):
        code = ExitCode.COULD_NOT_RUN
    else:
        code = ExitCode.BUG
        text = "a bug of kvview or of the command, and no verdict: please report the above"
    if is_verbose or code is ExitCode.BUG:
        for line in "".join(traceback.format_exception(error)).splitlines():
            echo(line, err=True)
    echo(f"kvview: {text}", err=True)
    return code


@contextmanager
def naming(target: str) -> Iterator[None]:
    """Say which connector an error is about."""
    try:
        yield
    except ConnectorError as error:
        error.args = (f"connector {target}: {error}",)
        raise


def missing_extra(error: BaseException) -> str | None:
    """What to install when a package of an extra is not there; None for any other error."""
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"this needs {error.name}: pip install 'kvview[{_EXTRAS[error.name]}]'"
    return None


def refused_by_the_system(error: BaseException) -> str | None:
    """What the operating system did not let us do, and with which file; None for any other error.

    A full disk, a name that is too long: nothing that a mended kvview would do better.
    """
    if not isinstance(error, OSError) or not error.strerror:
        return None
    return line_of(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)


@contextmanager
def silence() -> Iterator[None]:
    """``--quiet``: what is printed goes nowhere, but for what an option sends to "-"."""
    before = _STDOUT.set(sys.stdout)
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            yield
    finally:
        _STDOUT.reset(before)


class Seconds(click.FloatRange):
    """A time that a command may wait: not negative, and one that comes to an end."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(0, 1e8)

    def convert(self, value: Any, *context: Any) -> Any:
        """Refuse what is no number, ``nan`` among it: it is in every range."""
        seconds = super().convert(value, *context)
        return seconds if seconds == seconds else self.fail(f"{value!r} is no time.", *context)


class Whole(click.types.IntParamType):
    """A whole number that a machine can count to.

    Args:
        least: The smallest one.
    """

    def __init__(self, least: int = -_MOST) -> None:
        self._least = least

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = super().convert(value, param, ctx)
        if not self._least <= number <= _MOST:
            self.fail(f"expected a number from {self._least} to {_MOST}, got {number}", param, ctx)
        return number


class OutputFile(click.ParamType[str]):
    """A file that a command writes at its end: refused before the run if it cannot be written.

    Args:
        may_be_stdout: Whether "-" stands for stdout.
    """

    name = "file"

    def __init__(self, *, may_be_stdout: bool = True) -> None:
        self._may_be_stdout = may_be_stdout

    @override
    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        option = "FILE" if param is None else param.opts[0]
        if isinstance(param, click.Argument):
            option = param.human_readable_name
        if value != "-":
            _require_writable(option, value)
        elif not self._may_be_stdout:
            raise ConfigError(f"{option} needs a file")
        return value


class JSONOption(click.Option):
    """``--json FILE``: a command's report, and what it is made of.

    Args:
        schemas: Dataclasses or pydantic models of the reports that it may write, as targets,
            by the name of their schema; ``docs/make_commands.py`` writes those from here.
    """

    def __init__(self, names: list[str], *, schemas: dict[str, str]) -> None:
        text = "Write the report there ('-' for stdout)."
        super().__init__(names, type=OutputFile(), metavar="FILE", help=text)
        self.schemas = schemas


def _require_writable(option: str, path: str) -> None:
    """Open a path as the report will be opened, and leave it as it was."""
    problem = ""
    try:
        if not path or Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
            problem = "not a file in an existing folder"
        elif not Path(path).exists():  # a permission says less than a try, in /proc for example
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
            os.unlink(os.path.realpath(path))
        elif Path(path).is_file():
            os.close(os.open(path, os.O_WRONLY))
        elif not os.access(path, os.W_OK):  # a pipe: its reader would see it closed
            problem = "not writable"
    except (OSError, ValueError) as error:  # a name that is too long, links in a circle
        problem = getattr(error, "strerror", None) or str(error)
    if problem:
        raise ConfigError(f"{option} {path!r}: {problem}")


def write_json(path: str | None, report: dict[str, Any]) -> None:
    """Write a report; to stdout for "-", nowhere for None."""
    write_text("--json", path, json.dumps(report, indent=2) + "\n" if path else "")


def write_text(option: str, path: str | None, text: str) -> None:
    """Write what an option asked for; to stdout for "-", nowhere for None."""
    if path == "-":
        click.echo(text, nl=False, file=_STDOUT.get(None))
    elif path is not None:
        try:
            # A lone surrogate, which a message may quote, must not cost the report.
            Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(f"{option} {path!r}: {error.strerror}") from error
