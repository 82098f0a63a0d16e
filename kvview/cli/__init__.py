"""The command line of all packages, imported only by modules named ``command``.

A command belongs to the package that does its work, which declares the command as an entry point
of ``kvview.commands``. A command is imported when it is called.

Exit codes: see :class:`~kvview.cli.exit_codes.ExitCode`.
"""

from __future__ import annotations

import io
import os
import sys

_NEEDS = "the command line needs more than the contract: pip install 'kvview[cli,reference]'"


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # otherwise closed or replaced
            stream.reconfigure(errors="backslashreplace")  # a file name need not be text
    sys.path.append(os.getcwd())  # for the imports of a target; last, so that it hides no package
    try:
        from kvview.cli.commands import cli
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(f"kvview: {_NEEDS}", file=sys.stderr)
        sys.exit(2)
    from kvview.cli.ending import end_soon

    try:
        cli(prog_name="kvview")
    except SystemExit as ended:
        end_soon(ended.code if isinstance(ended.code, int) else 1)
        raise
