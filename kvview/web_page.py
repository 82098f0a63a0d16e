"""Self-contained HTML pages, readable in dark and light mode and in print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from kvview.errors import ConfigError

_STYLE = Path(__file__).with_suffix(".css")


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
    style = _STYLE.read_text(encoding="utf-8")
    # The empty icon keeps a browser from asking a server for one.
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>\n{style}</style>'
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
    try:
        # A message may quote a lone surrogate, which must not prevent the report.
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{kind} {str(path)!r}: {error.strerror}") from error


def wide(html: str) -> str:
    """Wrap HTML that may be wider than a narrow screen, so that only this part scrolls."""
    return f'<div class="wide" tabindex="0">{html}</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Make a table of names and values, both given as text."""
    lines = [f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows]
    return "<table>" + "\n".join(lines) + "</table>"


def share_bar(share: float) -> str:
    """Show a share as a striped bar and a number."""
    return f'<span class="share"><i style="width:{min(1, share):.1%}"></i></span> {share:.1%}'


def made_by(versions: Mapping[str, str]) -> list[str]:
    """Make the end of a page, with the versions of the software that produced its figures."""
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
