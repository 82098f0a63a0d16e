"""The command line: the door to every floor; it opens them lazily.

Exit codes: 0 all well, 1 the run found something wrong, 2 it could not run.
"""

from __future__ import annotations

import sys

_NEEDS = "the command line needs more than the contract: pip install 'kvview[cli,reference]'"


def main() -> None:
    """Run the command line."""
    try:
        from kvview.commands import cli
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print(f"kvview: {_NEEDS}", file=sys.stderr)
        sys.exit(2)
    cli()
