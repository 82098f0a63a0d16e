"""What every command does alike: errors in one line, reports in files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvview.errors import ConfigError, KVViewError


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user can mend is one line and exit code 2, without a traceback."""
    try:
        yield
    except KVViewError as error:
        click.echo(f"kvview: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "hypothesis"):
            raise
        needed = "testing" if error.name == "hypothesis" else "reference"
        click.echo(f"kvview: this needs {error.name}: pip install 'kvview[{needed}]'", err=True)
        sys.exit(2)


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
    if path is None:
        return
    text = json.dumps(report, indent=2) + "\n"
    if path == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"--json {path!r}: {error.strerror}") from error
