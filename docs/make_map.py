#!/usr/bin/env python3
"""Writes the list of files in docs/architecture.md: each room with its modules.

python docs/make_map.py
python docs/make_map.py --check   # exit 1 when the list is not up to date
"""

from __future__ import annotations

import sys

from docs.parts import ROOT, with_parts, write

PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("kvview", "reference/kvview_reference", "adapters/kvview_vllm")


def rooms() -> str:
    """Return the list, as Markdown."""
    lines = []
    for package in PACKAGES:
        folders = [ROOT / package, *sorted(p for p in (ROOT / package).rglob("*") if p.is_dir())]
        for folder in folders:
            names = sorted(one.stem for one in folder.glob("*.py") if one.stem != "__init__")
            if names:
                lines.append(f"- `{folder.relative_to(ROOT)}/`: {', '.join(names)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(write({PAGE: with_parts(PAGE, rooms=rooms())}))
