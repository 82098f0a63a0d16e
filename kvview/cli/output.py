"""What every command does alike: errors in one line, reports in files."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvview.cli.exit_codes import ExitCode
from kvview.errors import ConfigError, ConnectorError, HookError, KVViewError, line_of

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
    text = missing_extra(error) or line_of(error)
    if isinstance(error, HookError):
        code = ExitCode.CONNECTOR_RAISED
    elif isinstance(error, ConnectorError):
        code = ExitCode.WRONG
    elif isinstance(error, KVViewError) or missing_extra(error):
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


def require_writable(option: str, path: str | None) -> None:
    """Refuse a path before the run: a report that cannot be written must not cost the run.

    Args:
        option: Named in the error.
        path: Where to write; "-" for stdout, None for nowhere.
    """
    if path is None or path == "-":
        return
    folder = Path(path).absolute().parent
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
        click.echo(text, nl=False)
    elif path is not None:
        try:
            # A lone surrogate, which a message may quote, must not cost the report.
            Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(f"{option} {path!r}: {error.strerror}") from error
