"""One self-contained HTML page about a run of checks: the output of the terminal, with links."""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from pathlib import Path

from rich.console import Console

from kvview.testing.report import Report
from kvview.testing.terminal import show_report
from kvview.urls import DOCS_URL
from kvview.web_page import made_by, write_page

_WIDTH = 120
_LINK = re.compile(re.escape(DOCS_URL) + r"[\w/.#-]*")


def write_report(path: str | Path, report: Report) -> None:
    """Write a page about a run of checks of any contract.

    Args:
        path: The file to write.
        report: The result of :func:`~kvview.testing.run_checks`.

    Raises:
        ConfigError: The file cannot be written.
    """
    console = Console(file=StringIO(), record=True, width=_WIDTH, emoji=False)
    show_report(console, report)
    text = _LINK.sub(r'<a href="\g<0>">\g<0></a>', escape(console.export_text()))
    parts = [f"<pre>{text}</pre>", *made_by(report.versions)]
    write_page("report", path, f"kvview check: {report.target}", parts)
