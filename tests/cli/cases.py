"""Cases in a text file: ``input => expected`` lines below ``== section`` lines."""

from __future__ import annotations

from pathlib import Path


def read_cases(name: str) -> list[tuple[str, str, str]]:
    """Return the section, the input and the expected text of each case of a file."""
    cases = []
    section = ""
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            section = line.removeprefix("== ")
        elif line and not line.startswith("#"):
            given, _, expected = line.rpartition(" => ")
            cases.append((section, given, expected))
    return cases
