"""The functions with which every command prints text to the terminal.

A text may come from a file, a socket or an exception, and a terminal executes control characters in
the text. :func:`echo` and :class:`~kvview.cli.console.Console` write these characters as escapes;
ruff refuses other ways to print (``pyproject.toml``). Reports are data, so
:func:`~kvview.cli.output.write_json` writes them unchanged.
"""

from __future__ import annotations

import click

from kvview.errors import printable

_LONGEST_LINE = 4000  # characters: more than a path has, and less than a screen shows


def echo(line: str, *, err: bool = False) -> None:
    """Print one line; a line break in the text is printed as an escape."""
    if len(line) > _LONGEST_LINE:
        line = f"{line[:_LONGEST_LINE]}..."
    click.echo(printable(line), err=err)
