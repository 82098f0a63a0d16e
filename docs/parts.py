"""The parts of pages that scripts write, between two comments; people write the rest of a page."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def with_parts(page: Path, **parts: str) -> str:
    """Return the text of a page with other contents of some parts.

    A part starts with the comment ``<!-- NAME: written by SCRIPT -->`` and ends with ``<!-- end of
    NAME -->``.

    Args:
        page: The page.
        **parts: The new contents, by the name of the part.

    Raises:
        ValueError: The page does not have exactly one part with a name.
    """
    text = page.read_text(encoding="utf-8")
    for name, content in parts.items():
        part = re.compile(rf"(<!-- {name}: .* -->\n).*(<!-- end of {name} -->)", re.DOTALL)
        found = [*part.finditer(text)]
        if len(found) != 1:
            raise ValueError(f"{page} has {len(found)} parts {name!r}, expected one")
        start, end = found[0].end(1), found[0].start(2)
        text = f"{text[:start]}\n{content.strip()}\n\n{text[end:]}"
    return text


def write(texts: Mapping[Path, str]) -> int:
    """Write files; with ``--check``, only compare them. Returns the exit code of the script."""
    is_check = "--check" in sys.argv[1:]
    stale = {
        path: text
        for path, text in texts.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}{' is not up to date' if is_check else ''}")
        if not is_check:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and is_check else 0
