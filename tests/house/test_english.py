"""The English of docs, docstrings, comments and messages: words that the guide forbids.

The guide's words with almost no false alarms are counted in Markdown pages, comments and strings.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.source_tree import ROOT

PACKAGES = ("kvview", "reference", "adapters")
PATTERNS = {
    "told": r"told",
    "hear": r"(?:un)?hear[sd]?|hearing",
    "anew": r"anew",
    "spoil": r"spoil\w*",
    "mend": r"mend(?:s|ed|ing)?",
    "in silence": r"in silence",
    "let go": r"let(?:s|ting)? go",
    "for ever": r"for ever",
    "beside": r"beside",
    "nobody": r"nobody|somebody",
    "lap": r"laps?",
    "go on": r"go(?:es)? on",
    "from before": r"from before|ones before",
    "now and then": r"now and then",
    "judged": r"judge[ds]?",
    "begin": r"begin(?:s|ning)?",
    "of its own": r"a [a-z ]{1,20} of (?:its|their) own",
    "callable twice": r"callable twice",
    "is none": r"(?<!there )(?:is|are|was|were) (?-i:none)",
}
WHAT_PER_1000 = 2
"""Allowed uses of "what" in 1,000 sentences."""

_CODE = re.compile(r"``[^`]*``|`[^`]*`|\{[^}]*\}|\]\([^)]*\)")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_NOT_PROSE = re.compile(
    r"<!-- (\w+): written by .*?<!-- end of \1 -->|^(```|~~~).*?^\2|^[|<#].*?$",
    re.MULTILINE | re.DOTALL,
)
_TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def _texts(path: Path) -> Iterator[str]:
    """Yield the paragraphs of a page, or the comments and the strings with spaces of a module."""
    source = path.read_text("utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in _TEXTS and " " in token.string:
                yield token.string
    elif "Written by" not in "\n".join(source.splitlines()[:8]):
        yield _NOT_PROSE.sub("", source)


@cache
def prose() -> tuple[tuple[str, str], ...]:
    """All prose, by the path of its file, without code."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    files += [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(
        (path.relative_to(ROOT).as_posix(), " ".join(_CODE.sub("x", text).split()))
        for path in files
        for text in _texts(path)
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_a_word_that_the_guide_forbids_is_not_used(name: str) -> None:
    word = re.compile(rf"\b{PATTERNS[name]}\b", re.IGNORECASE)
    hits = [
        f"{path}: ...{text[max(0, hit.start() - 40) : hit.end() + 40]}..."
        for path, text in prose()
        for hit in word.finditer(text)
    ]
    assert not hits, "\n".join(hits)


def test_what_is_not_used_more_often() -> None:
    texts = [text for _, text in prose()]
    num_sentences = sum(len(_SENTENCE_END.findall(text)) for text in texts)
    num_uses = sum(len(re.findall(r"\bwhat\b(?!:)", text, re.IGNORECASE)) for text in texts)
    assert 1000 * num_uses / num_sentences <= WHAT_PER_1000, f"{num_uses} in {num_sentences}"
