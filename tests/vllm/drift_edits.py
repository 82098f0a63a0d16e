"""Edits of vLLM's sources, as ``drifts.toml`` lists them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

Files = dict[str, str]
"""Texts of changed files, by path in the sources."""

_ROOTS = ("vllm/v1", "vllm/distributed", "vllm/config", "vllm/platforms")


class DriftError(Exception):
    """A drift does not fit the sources, so it must be written again for the newest release."""


@dataclass(frozen=True)
class Sources:
    """The files of the newest release."""

    folder: Path

    def read(self, path: str) -> str:
        """Return the text of one file."""
        return (self.folder / path).read_text()

    @cache  # noqa: B019 - one object, for the length of the script
    def all(self) -> dict[str, str]:
        """Return the texts of all files that a rename may touch."""
        return {
            str(path.relative_to(self.folder)): path.read_text()
            for root in _ROOTS
            for path in sorted((self.folder / root).rglob("*.py"))
        }


Edit = Callable[[Sources, Files], None]
"""Changes the texts of some files."""


@dataclass(frozen=True)
class Drift:
    """One change to vLLM.

    Args:
        name: Of the drift.
        edits: Of the sources.
        like: A change of vLLM that it resembles.
        works: Whether the adapter works in spite of the change; otherwise it must refuse it.
    """

    name: str
    edits: tuple[Edit, ...]
    like: str = ""
    works: bool = False

    def apply(self, files: Sources) -> Files:
        """Return the texts of the files that change.

        Raises:
            DriftError: An edit does not fit.
        """
        changed: Files = {}
        for edit in self.edits:
            edit(files, changed)
        return changed


def rename(word: str, new: str) -> Edit:
    """Replace a name wherever vLLM uses it."""

    def edit(files: Sources, changed: Files) -> None:
        pattern = re.compile(rf"\b{word}\b")
        for path, text in files.all().items():
            if pattern.search(found := changed.get(path, text)):
                changed[path] = pattern.sub(new, found)
        if not changed:
            raise DriftError(f"no name matches {word}")

    return edit


def add_field(path: str, kind: str, line: str) -> Edit:
    """Add a line as the first field of a class."""

    def edit(files: Sources, changed: Files) -> None:
        text = changed.get(path) or files.read(path)
        pattern = re.compile(rf'^class {kind}\b[^:]*:\n(?:    """(?:.|\n)*?"""\n)?', re.M)
        if not (found := pattern.search(text)):
            raise DriftError(f"{path} has no class {kind}")
        changed[path] = f"{text[: found.end()]}    {line}\n{text[found.end() :]}"

    return edit


def _swap(files: Sources, changed: Files, *, path: str, old: str, new: str) -> None:
    text = changed.get(path) or files.read(path)
    if text.count(old) != 1:
        raise DriftError(f"{path} has {text.count(old)} times {old!r}, expected once")
    changed[path] = text.replace(old, new)


def _edit_of(row: Mapping[str, str]) -> Edit:
    match row:
        case {"rename": word, "to": new}:
            return rename(word, new)
        case {"file": path, "old": old, "new": new}:
            return partial(_swap, path=path, old=old, new=new)
        case {"file": path, "class": kind, "field": line}:
            return add_field(path, kind, line)
        case {"file": path, "class": kind, "method": line}:
            return add_field(path, kind, f"@abstractmethod\n    def {line}: ...\n")
    raise DriftError(f"{dict(row)} is not an edit")


def read_drifts(name: str = "drifts.toml") -> dict[str, Drift]:
    """Return the drifts of a file in this folder, by name."""
    return {drift.name: drift for drift in _drifts(Path(__file__).with_name(name))}


def _drifts(file: Path) -> Iterator[Drift]:
    rows: list[dict[str, Any]] = tomllib.loads(file.read_text())["drift"]
    for row in rows:
        yield Drift(**row | {"edits": tuple(map(_edit_of, row["edits"]))})
