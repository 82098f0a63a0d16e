"""The programs of docs/tier.md, run unchanged."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parents[2] / "docs" / "tier.md"
_MARK = "<!-- tests/tier/shown.py runs it -->"


def shown(number: int, **names: Any) -> dict[str, str]:
    """Run a program of the page; returns the two sides of the colon in each of its lines."""
    program = re.findall(_MARK + "\n```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)[number]
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(program, f"{_PAGE}, {number}", "exec"), names)
    lines = output.getvalue().splitlines()
    return {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}


def expected(column: int) -> dict[str, str]:
    """Return the column of one store in the table below the first program."""
    table = _PAGE.read_text().partition("| output (loaded")[2].partition("\n\n")[0]
    rows = [[*map(str.strip, line.split("|"))] for line in table.splitlines()[2:]]
    return {row[1]: row[2 + column].strip("`") for row in rows}
