"""The English of docs, docstrings, comments and messages: counts of patterns that may only fall.

The guide's words with almost no false alarms are counted in prose: Markdown pages, docstrings,
comments, and the string literals of errors, logs and help texts. ``ALLOWED`` has the number of
hits that remain; lower it with every text that is rewritten.
"""

from __future__ import annotations

import ast
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
ALLOWED = dict.fromkeys(PATTERNS, 0)
WHAT_PER_1000 = 2
"""Allowed uses of "what" in 1,000 sentences."""

_CODE = re.compile(r"``[^`]*``|`[^`]*`|\{[^}]*\}")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_PART = re.compile(r"<!-- (\w+): written by .*?<!-- end of \1 -->", re.DOTALL)
_REPORTS = {"echo", "secho", "print", "fail", "warning", "error", "info", "exception", "debug"}


def _markdown(path: Path) -> Iterator[str]:
    text = path.read_text("utf-8")
    if "Written by" in "\n".join(text.splitlines()[:8]):
        return
    text = _PART.sub("", text)
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    yield "\n".join(line for line in text.splitlines() if not line.startswith(("|", "<", "#")))


def _docstrings_and_messages(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.value.value  # of a module, class, function or attribute
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _literals(node.exc)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in _REPORTS:
                yield from _literals(node)
            yield from (
                text for key in node.keywords if key.arg == "help" for text in _literals(key)
            )


def _literals(node: ast.AST) -> Iterator[str]:
    parts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    yield " ".join(part for part in parts if isinstance(part, str))


def _comments(source: str) -> Iterator[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield "\n".join(t.string.lstrip("#: ") for t in tokens if t.type == tokenize.COMMENT)


@cache
def prose() -> tuple[tuple[str, str], ...]:
    """All prose, by the path of its file, without code."""
    found = [(path, text) for path in ["README.md"] for text in _markdown(ROOT / path)]
    for page in sorted((ROOT / "docs").glob("*.md")):
        found += [(page.relative_to(ROOT).as_posix(), text) for text in _markdown(page)]
    for package in PACKAGES:
        for module in sorted((ROOT / package).rglob("*.py")):
            source = module.read_text("utf-8")
            texts = [*_docstrings_and_messages(ast.parse(source)), *_comments(source)]
            found += [(module.relative_to(ROOT).as_posix(), text) for text in texts]
    return tuple((path, " ".join(_CODE.sub("x", text).split())) for path, text in found)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_word_that_the_guide_forbids_is_not_used_more_often(name: str) -> None:
    word = re.compile(rf"\b{PATTERNS[name]}\b", re.IGNORECASE)
    hits = [
        f"{path}: ...{text[max(0, hit.start() - 40) : hit.end() + 40]}..."
        for path, text in prose()
        for hit in word.finditer(text)
    ]
    assert len(hits) <= ALLOWED[name], "\n".join(hits)


def test_what_is_not_used_more_often() -> None:
    texts = [text for _, text in prose()]
    num_sentences = sum(len(_SENTENCE_END.findall(text)) for text in texts)
    num_uses = sum(len(re.findall(r"\bwhat\b", text, re.IGNORECASE)) for text in texts)
    assert 1000 * num_uses / num_sentences <= WHAT_PER_1000, f"{num_uses} in {num_sentences}"
