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

from kvview.cli.exit_codes import ExitCode
from kvview.errors import ConfigError, ConnectorError, HookError, KVViewError, line_of

_STDOUT: ContextVar[TextIO | None] = ContextVar("what '-' stands for; None: sys.stdout")
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
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    click.echo(f"kvview: {text}", err=True)
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


class JSONOption(click.Option):
    """``--json FILE``: a command's report, and what it is made of.

    Args:
        schemas: Dataclasses or pydantic models of the reports that it may write, as targets,
            by the name of their schema; ``docs/make_commands.py`` writes those from here.
    """

    def __init__(self, names: list[str], *, schemas: dict[str, str]) -> None:
        super().__init__(names, metavar="FILE", help="Write the report there ('-' for stdout).")
        self.schemas = schemas


def require_writable(option: str, path: str | None) -> None:
    """Refuse a path before the run: a report that cannot be written must not cost the run.

    Args:
        option: Named in the error.
        path: Where to write; "-" for stdout, None for nowhere.
    """
    if path is None or path == "-":
        return
    folder = Path(path).absolute().parent
    try:
        Path(path).stat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a name that is too long, links in a circle
        raise ConfigError(f"{option} {path!r}: {error.strerror}") from None
    if not path or Path(path).is_dir() or not folder.is_dir():
        raise ConfigError(f"{option} {path!r}: not a file in an existing folder")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ConfigError(f"{option} {path!r}: not writable")


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
