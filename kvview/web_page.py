"""Self-contained HTML pages: they need no other file, and read well dark, light and printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from kvview.errors import ConfigError

_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --rule: #e3e6ea; --code: #f4f5f7;
  --note: #5a6169; --bad: #b22222; --good: #2e7d32; --expected: #9a5b00; --axis: #333;
  --engine: #4e79a7; --held: #f28e2b; --free: #d7dde3; --hatch: #7a4300 }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6e8; --page: #17191c; --rule: #3a3f45;
  --code: #22262b; --note: #a3abb3; --bad: #ff8a80; --good: #81c784; --expected: #ffb74d;
  --axis: #c3c8cd; --engine: #7ea6d0; --held: #c8741c; --free: #454c54; --hatch: #ffdcb3 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em;
  color: var(--text); background: var(--page) }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em }
h1, h2, td { overflow-wrap: anywhere }
table { border-collapse: collapse }
th, td { text-align: left; vertical-align: top; padding: .3em 1.2em .3em 0;
  border-bottom: 1px solid var(--rule) }
th { font-weight: 600 } td:first-child, .number, .outcome { white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: var(--code); padding: 1em; overflow-x: auto; font-size: 13px; line-height: 1.4 }
code { font-size: 13px } .note { color: var(--note) } .good { color: var(--good) }
.bad { color: var(--bad); font-weight: 600 } .expected { color: var(--expected) }
svg { width: 100%; height: auto; margin: .5em 0 } summary { cursor: pointer; color: var(--note) }
svg text { font: 13px system-ui, sans-serif; fill: var(--axis) }
svg .told { fill: var(--bad) } .axis { fill: none; stroke: var(--axis) }
.engine { fill: var(--engine) } .held { fill: var(--held) } .free { fill: var(--free) }
.hatch { fill: none; stroke: var(--hatch); stroke-width: 1.2 }
.halo { fill: none; stroke: var(--page); stroke-width: 5 }
.jobs { fill: none; stroke: var(--bad); stroke-width: 2.5 }
.broken { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 4 3 }
.grid { stroke: var(--rule) } .curve { fill: none; stroke-width: 2.2 }
.alone { stroke: var(--note); stroke-dasharray: 7 4 }
.most { stroke: var(--axis); stroke-dasharray: 1.5 4; stroke-linecap: round }
.enough { stroke: var(--note) } .wide { overflow-x: auto }
.c0 { stroke: var(--engine) } .c1 { stroke: var(--held) } .c2 { stroke: var(--good) }
.c3 { stroke: var(--bad) } .mark { fill: var(--page); stroke-width: 1.8 }
@media print { body { max-width: none; margin: 0 } h2, svg, tr { break-inside: avoid } }
"""


def write_page(what: str, path: str | Path, title: str, parts: Iterable[str]) -> None:
    """Write a page.

    Args:
        what: It is, for the error.
        path: Of the page.
        title: As text.
        parts: Of its body, as HTML.

    Raises:
        ConfigError: The file cannot be written.
    """
    # The empty icon keeps a browser from asking a server for one.
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style>'
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    try:
        # A lone surrogate, which a message may quote, must not cost the report.
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r}: {error.strerror}") from error


def make_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()
) -> str:
    """A table as HTML.

    Args:
        names: Of its columns, as text.
        rows: Cells, as HTML.
        numbers: Names of the columns that hold numbers.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if name in numbers else "" for name in names]
        filled = zip(kinds, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in filled) + "</tr>"

    lines = [row("th", [escape(name) for name in names]), *(row("td", cells) for cells in rows)]
    return "<table>" + "\n".join(lines) + "</table>"
