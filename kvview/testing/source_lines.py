"""Lines of an author's code, formatted with their source text for messages."""

from __future__ import annotations

import linecache

from kvview.connector.hook_errors import where


def at_line(error: BaseException) -> str:
    """Return the innermost line of the author's code that an exception passed through.

    Returns:
        ``" at file.py:12: source"``; empty if the exception passed through no such line.
    """
    place = where(error)
    return f" at {with_source(place)}" if place else ""


def with_source(place: str) -> str:
    """Format a place such as ``file.py:12`` with the source of the line."""
    path, _, number = place.rpartition(":")
    source = linecache.getline(path, int(number)).strip()
    return f"{place}: {source}" if source else place
