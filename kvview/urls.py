"""Where the project and its documentation are, and where a law stands."""

from __future__ import annotations

import re

PROJECT_URL = "https://github.com/kvview/kvview"
DOCS_URL = "https://kvview.github.io/kvview/"

_LAW = re.compile(r"([A-Z]+)-([0-9]+|\*)")
_NO_LAWS = {"ENGINE": "engine", "coverage": "not-checked", "exceptions": "exceptions"}


def law_url(law: str) -> str:
    """The page about a law, at its anchor.

    Args:
        law: ``"POOL-4"``; ``"POOL-*"`` for all of a family; or what reports have in its place,
            ``"ENGINE"`` and ``"coverage"``, which the page about symptoms explains.

    Returns:
        An absolute URL; empty for anything else.
    """
    if found := _LAW.fullmatch(law):
        family, number = found.groups()
        anchor = family if number == "*" else law
        return f"{DOCS_URL}laws/#{anchor.lower()}"
    return f"{DOCS_URL}troubleshooting/#{_NO_LAWS[law]}" if law in _NO_LAWS else ""
