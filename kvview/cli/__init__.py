"""The command line of all packages, imported only by modules named ``command``.

A command belongs to the package that does its work, which declares the command as an entry point
of ``kvview.commands``. A command is imported when it is called.

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
    try:
        cli(prog_name="kvview")
    except SystemExit as end:
        if refusal := _refusal_of(sys.stdout):
            print(f"kvview: stdout: {refusal.strerror}", file=sys.stderr)
            end.code = end.code or 2
        raise


class _Outlasting(io.FileIO):
    """A stream that survives its reader, so that ``kvview replay | head`` runs to its end.

    An error other than a closed reader, such as a full disk, is reported at the end of the run.
    """

    refusal: OSError | None = None

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            pass
        except OSError as error:
            self.refusal = error
        return len(memoryview(data))  # type: ignore[arg-type]


def _outlasting(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # closed or replaced
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Outlasting(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",  # a file name need not be text
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _refusal_of(stream: TextIO) -> OSError | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if not isinstance(raw, _Outlasting):
        return None
    stream.flush()
    return raw.refusal
