"""A badge that says which level was reached: a picture, or JSON for shields.io."""

from __future__ import annotations

import json
from html import escape

from kvview.testing.levels import Level
from kvview.testing.report import Report

_LABEL = "kvview"
_COLOURS = {Level.FULL: ("brightgreen", "#2e7d32"), Level.CORE: ("green", "#4c7a1f")}
_NO_LEVEL = ("lightgrey", "#6a737d")
_FAILED = ("red", "#b3261e")
_LETTER = 6.6  # pixels


def badge_for(path: str, report: Report) -> str:
    """The text of a badge.

    Args:
        path: Where it goes: an endpoint of shields.io if it ends in ``.json``, else an SVG.
        report: What it is about.
    """
    reached, _ = report.level
    told = reached.value if reached else "failing" if report.failures else "no level"
    name, colour = _COLOURS[reached] if reached else _FAILED if report.failures else _NO_LEVEL
    version = report.versions.get("kvview", "")
    message = f"{told} {version}" if reached else told
    if path.endswith(".json"):
        endpoint = {"schemaVersion": 1, "label": _LABEL, "message": message, "color": name}
        return json.dumps(endpoint, indent=2) + "\n"
    return _svg(message, colour)


def _svg(message: str, colour: str) -> str:
    left, right = (round(_LETTER * len(text) + 12) for text in (_LABEL, message))
    width, title = left + right, escape(f"{_LABEL}: {message}")
    texts = "".join(
        f'<text x="{middle}" y="14" textLength="{round(_LETTER * len(text))}">{escape(text)}</text>'
        for middle, text in ((left / 2, _LABEL), (left + right / 2, message))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" '
        f'aria-label="{title}"><title>{title}</title>'
        f'<clipPath id="r"><rect width="{width}" height="20" rx="3"/></clipPath>'
        f'<g clip-path="url(#r)"><rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/></g>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" '
        f'font-size="11">{texts}</g></svg>\n'
    )
