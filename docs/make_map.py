#!/usr/bin/env python3
"""Writes the list of files in docs/architecture.md: each room with its modules.

python docs/make_map.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("kvview", "reference/kvview_reference", "adapters/kvview_vllm")
_START, _END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"


def rooms() -> str:
    """Return the list, as Markdown."""
    lines = []
    for package in PACKAGES:
        folders = [ROOT / package, *sorted(p for p in (ROOT / package).rglob("*") if p.is_dir())]
        for folder in folders:
            names = sorted(one.stem for one in folder.glob("*.py") if one.stem != "__init__")
            if names:
                lines.append(f"- `{folder.relative_to(ROOT)}/`: {', '.join(names)}\n")
    return "".join(lines)


def main() -> int:
    """Write the list, or only compare it; returns the exit code."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition(_START)
    _, end, after = rest.partition(_END)
    text = f"{before}{start}\n{rooms()}\n{end}{after}"
    if "--check" in sys.argv:
        is_equal = text == PAGE.read_text(encoding="utf-8")
        print("" if is_equal else "docs/architecture.md: run python docs/make_map.py")
        return not is_equal
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
