"""Wrong implementations as edits of the text of a right one, listed in text files.

A file lists edits of one implementation. Each gives a wrong one, which is a file of its own when it
runs, like a user's::

    # family
    ## Name: the fault in one line                   or without a name
    @ LAW incident                                   if it is an injected fault
    @ KEY: value                                     more about it
    old text
    ->
    new text
    --                                               between two edits

An old text that does not occur exactly once is an error: write the edit again.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvview.targets import load_target

from .mutant import Mutant

ROOT = Path(__file__).parents[2]
_files = tempfile.TemporaryDirectory(prefix="kvview-wrong-")


@dataclass(frozen=True)
class Base:
    """A right implementation.

    Args:
        name: Its class.
        files: Its text; of later files, imports of the first one are left out.
    """

    name: str
    files: tuple[Path, ...]

    @property
    def source(self) -> str:
        """Its whole text."""
        first, *more = self.files
        imports = rf"^from (?:__future__|\S*\b{first.stem}) import .*\n"
        texts = (re.sub(imports, "", file.read_text(), flags=re.M) for file in more)
        return "\n\n".join([first.read_text(), *texts])


@dataclass(frozen=True)
class Variant:
    """One implementation that differs from a right one.

    Args:
        base: The right one.
        family: Kind of difference.
        name: Name of its class; empty if it keeps that of the right one.
        what: The difference in one line.
        edits: Old and new text of each edit.
        notes: The lines with ``@``.
    """

    base: Base
    family: str
    name: str
    what: str
    edits: tuple[tuple[str, str], ...] = ()
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The right class that it changes."""
        return self.notes.get("in", self.base.name)

    @property
    def law(self) -> str:
        """The law that an injected fault breaks, otherwise empty."""
        return self.notes.get("law", "")

    @property
    def incident(self) -> str | None:
        """The public thread where the fault happened, or None."""
        return self.notes.get("incident") or None

    def source(self) -> str:
        """Return its text.

        Raises:
            ValueError: An edit does not fit the right one.
        """
        text = self.base.source
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.what}: {text.count(old)} times in the right one: {old!r}")
            text = text.replace(old, new)
        return re.sub(rf"\b{self.kind}\b", self.name, text) if self.name else text

    def write(self) -> str:
        """Write it into a file, and return its target."""
        digest = abs(hash((self.base, self.what, self.edits)))
        file = Path(_files.name, f"{self.name or self.kind}_{digest}.py")
        if not file.exists():
            file.write_text(self.source())
        return f"{file}:{self.name or self.kind}"

    def load(self) -> Any:
        """Return its class."""
        return load_target(self.write())


@cache
def read_variants(file: Path, base: Base) -> Sequence[Variant]:
    """Return the variants of a right implementation, in the order of the file."""
    return list(_variants(base, file.read_text()))


def _variants(base: Base, text: str) -> Iterator[Variant]:
    for part in f"\n{text}".split("\n# ")[1:]:
        family, *entries = part.split("\n## ")
        for entry in entries:
            head, _, body = entry.strip("\n").partition("\n")
            name, colon, what = head.partition(": ")
            if not (colon and name.isidentifier()):
                name, what = "", head
            notes: dict[str, str] = {}
            while body.startswith("@ "):
                note, _, body = body[2:].partition("\n")
                key, colon, value = note.partition(": ")
                law, _, incident = note.partition(" ")
                notes |= {key: value} if colon else {"law": law, "incident": incident}
            edits = []
            for edit in body.split("\n--\n"):
                old, _, new = edit.partition("\n->")
                edits.append((old.strip("\n"), new.strip("\n")))
            yield Variant(base, family.strip(), name, what, tuple(edits), notes)


def inject(
    module: dict[str, Any], base: Base, make_harness: Callable[[Any, Variant], Any]
) -> list[Mutant]:
    """Return the injected faults of a module's text file, as attributes of the module.

    A name stands for the harness class, or for the wrong class if the harness has a factory.
    Printed scripts import the names.

    Args:
        module: The globals of the module.
        base: The right implementation.
        make_harness: Makes a harness class or factory of a wrong class.
    """
    mutants = []
    for variant in read_variants(Path(module["__file__"]).with_suffix(".txt"), base):
        wrong = variant.load()
        harness = make_harness(wrong, variant)
        harness.__name__ = harness.__qualname__ = variant.name
        harness.__module__ = module["__name__"]
        module[variant.name] = harness if isinstance(harness, type) else wrong
        mutants.append(Mutant(harness, variant.law, f"{variant.what}.", variant.incident))
    return mutants
