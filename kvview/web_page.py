"""Self-contained HTML pages, readable in dark and light mode and in print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def made_by(versions: Mapping[str, str]) -> list[str]:
    """Make the end of a page, with the versions of the software that produced its figures."""
    rows = [
        f"<tr><th>{escape(name)}</th><td>{escape(version)}</td></tr>"
        for name, version in versions.items()
    ]
    return ["<h2>Made with</h2>", "<table>" + "\n".join(rows) + "</table>"]
