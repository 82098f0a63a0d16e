"""The command line: the door to every floor; nothing but commands imports it.

A command belongs to the package that does the work, which names it among the entry
points ``kvview.commands``; it is imported when it is called.

Exit codes: see :class:`~kvview.cli.exit_codes.ExitCode`.
"""

from __future__ import annotations

import io
import sys
from typing import TextIO

_NEEDS = "the command line needs more than the contract: pip install 'kvview[cli,reference]'"


def main() -> None:
    """Run the command line."""
    sys.stdout, sys.stderr = _outlasting(sys.stdout), _outlasting(sys.stderr)
    try:
        from kvview.cli.commands import cli
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(f"kvview: {_NEEDS}", file=sys.stderr)
        sys.exit(2)
    cli(prog_name="kvview")


class _UntilClosed(io.FileIO):
    """A stream whose reader may leave: ``kvview replay | head`` ends as it would without."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            return len(memoryview(data))  # type: ignore[arg-type]


def _outlasting(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # closed, or somebody's own
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_UntilClosed(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
