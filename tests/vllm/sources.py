"""Prints the folders of the sources of vLLM releases (`kvview_vllm.releases.sources`).

PYTHONPATH=$(python tests/vllm/sources.py 0.33.0) python ...
"""

import argparse
import sys
from collections.abc import Sequence

from kvview_vllm.releases.compat.versions import LATEST_OF_MINORS, RELEASES
from kvview_vllm.releases.sources import SourcesError, resolve_all, sources

__all__ = ["LATEST_OF_MINORS", "RELEASES", "SourcesError", "main", "sources"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the folder of each release, one per line.

    Args:
        argv: The command line's arguments; those of the process if None.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        description="Fetch vLLM's Python sources and print where they are."
    )
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="such as 0.33.0 or 0.33")
    parser.add_argument(
        "--all-minors", action="store_true", help="the latest patch of each minor release"
    )
    arguments = parser.parse_args(argv)
    names = [*arguments.releases, *(["all"] if arguments.all_minors else ())]
    if not names:
        parser.error("no release is given; name one, or use --all-minors")
    try:
        for release in resolve_all(names):
            print(sources(release), flush=True)
    except SourcesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
