"""The command line: the door to every floor; nothing but commands imports it.

A command belongs to the package that does the work, which names it among the entry
points ``kvview.commands``; it is imported when it is called.

Exit codes: see :class:`~kvview.cli.output.ExitCode`.
"""

from __future__ import annotations

import sys

_NEEDS = "the command line needs more than the contract: pip install 'kvview[cli,reference]'"


def main() -> None:
    """Run the command line."""
    try:
        from kvview.cli.commands import cli
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(f"kvview: {_NEEDS}", file=sys.stderr)
        sys.exit(2)
    cli(prog_name="kvview")
