"""The programs of docs/tier.md, run as they stand there."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parents[2] / "docs" / "tier.md"
_MARK = "<!-- tests/tier/shown.py runs it -->"


def shown(number: int, **names: Any) -> dict[str, str]:
    """What a program prints: what stands before the colon of each line, and what behind."""
    program = re.findall(_MARK + "\n```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)[number]
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(program, f"{_PAGE}, {number}", "exec"), names)
    lines = said.getvalue().splitlines()
    return {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}


def expected(column: int) -> dict[str, str]:
    """What the table under the first program says of a store."""
    table = _PAGE.read_text().partition("| output (loaded")[2].partition("\n\n")[0]
    rows = [[*map(str.strip, line.split("|"))] for line in table.splitlines()[2:]]
    return {row[1]: row[2 + column].strip("`") for row in rows}
