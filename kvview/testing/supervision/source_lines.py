"""Lines of an author's code, formatted with their source text for messages."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Sequence

from kvview.connector.hook_errors import places_in


def at_line(error: BaseException) -> str:
    """Return the innermost line of the author's code that an exception passed through.

    Returns:
        ``" at file.py:12: source"``, with the outermost such line if the innermost one is in a
        function that it calls; empty if the exception passed through no such line.
    """
    return at_places(places_in(traceback.walk_tb(error.__traceback__)))


def places_of_caller(kind: type) -> Sequence[str]:
    """Return the running lines in the modules of a class of the author, the outermost first."""
    modules = [base.__module__ for base in kind.__mro__]
    return places_in(reversed(list(traceback.walk_stack(sys._getframe(1)))), *modules)


def at_places(places: Sequence[str]) -> str:
    """Format the innermost and the outermost of some places, as :func:`at_line`."""
    if not places:
        return ""
    inner, outer = places[-1], places[0]
    text = f" at {with_source(inner)}"
    if len(places) > 1:
        file = inner.rpartition(":")[0]
        text += f", called at {with_source(outer).replace(f'{file}:', 'line ', 1)}"
    return text


def with_source(place: str) -> str:
    """Format a place such as ``file.py:12`` with the source of the line."""
    path, _, number = place.rpartition(":")
    source = linecache.getline(path, int(number)).strip()
    return f"{place}: {source}" if source else place
