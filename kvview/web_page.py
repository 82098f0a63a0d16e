"""Self-contained HTML pages: they need no other file, and read well dark, light and printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em } h3 { font-size: 1em }
h1, h2, h3, p, td { overflow-wrap: anywhere } a { color: inherit }
table { border-collapse: collapse }
th, td { text-align: left; vertical-align: top; padding: .3em 1.2em .3em 0;
  border-bottom: 1px solid var(--rule) }
th { font-weight: 600 } td.number, .outcome, .law { white-space: nowrap }
.number { text-align: right; vertical-align: bottom; font-variant-numeric: tabular-nums }
pre { background: var(--code); padding: 1em; overflow-x: auto; font-size: 13px; line-height: 1.4 }
code { font-size: 13px } .note { color: var(--note) } .good { color: var(--good) }
.bad { color: var(--bad); font-weight: 600 } .expected { color: var(--expected) }
svg { width: 100%; min-width: 640px; height: auto; margin: .5em 0 }
summary { cursor: pointer; color: var(--note) }
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
.knee { stroke: var(--note) } .wide { overflow-x: auto }
.c0 { stroke: var(--engine) } .c1 { stroke: var(--held) } .c2 { stroke: var(--good) }
.c3 { stroke: var(--bad) } .mark { fill: var(--page); stroke-width: 1.8 }
.never { display: inline-block; min-width: 3em;
  background: repeating-linear-gradient(135deg, transparent 0 5px, var(--rule) 5px 7px) }
.share { display: inline-block; width: 12em; height: .8em; border: 1px solid var(--axis) }
.share i { display: block; height: 100%; background: repeating-linear-gradient(90deg,
  var(--engine) 0 5px, var(--page) 5px 6px) }
section { border-left: 3px solid var(--bad); padding-left: 1em; margin: 1.5em 0 }
section.expected { border-left: 3px dashed var(--expected); color: inherit }
@media print {
  :root { color-scheme: light; --text: #000; --page: #fff; --rule: #ccc; --code: #f4f5f7;
    --note: #444; --bad: #b22222; --good: #2e7d32; --expected: #9a5b00; --axis: #333;
    --engine: #4e79a7; --held: #f28e2b; --free: #d7dde3; --hatch: #7a4300 }
  body { max-width: none; margin: 0; print-color-adjust: exact }
  h2, h3, svg, tr { break-inside: avoid }
  h2, h3 { break-after: avoid } svg { min-width: 0 } .wide { overflow: visible }
  pre { white-space: pre-wrap; overflow-wrap: anywhere } }
"""


def write_page(kind: str, path: str | Path, title: str, parts: Iterable[str]) -> None:
    """Write a page.

    Args:
        kind: The kind of page, for the error.
        path: The file to write.
        title: The title, as text.
        parts: The parts of the body, as HTML.

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
        # A message may quote a lone surrogate, which must not prevent the report.
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{kind} {str(path)!r}: {error.strerror}") from error


def wide(html: str) -> str:
    """Wrap HTML that may be wider than a narrow screen, so that it scrolls by itself."""
    return f'<div class="wide" tabindex="0">{html}</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Make a table of names and values, both given as text."""
    lines = [f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows]
    return "<table>" + "\n".join(lines) + "</table>"


def share_bar(share: float) -> str:
    """Show a share as a striped bar and a number."""
    return f'<span class="share"><i style="width:{min(1, share):.1%}"></i></span> {share:.1%}'


def made_by(versions: Mapping[str, str]) -> list[str]:
    """Make the end of a page: the versions of the software that made its figures."""
    return ["<h2>Made with</h2>", facts(versions.items())]


def make_table(
    names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()
) -> str:
    """Make a table.

    Args:
        names: Names of the columns, as text.
        rows: Cells, as HTML.
        numbers: Names of the columns of numbers.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if name in numbers else "" for name in names]
        if tag == "th":
            kinds = [f' scope="col"{kind}' for kind in kinds]
        filled = zip(kinds, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in filled) + "</tr>"

    lines = [row("th", [escape(name) for name in names]), *(row("td", cells) for cells in rows)]
    return "<table>" + "\n".join(lines) + "</table>"
