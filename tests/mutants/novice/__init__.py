"""Wrong connectors as a novice writes them: small right ones, each wrong in one place.

They were written from README.md and the contract's docstrings, one family of mistakes after
the other, before the kit was run on them. A mistake is an edit of the text of a right
connector in this folder, so each is a file of its own when it is run.
``benchmarks/first_seeds.py`` counts how many the kit kills.

Eight harmless mistakes were removed when they survived, because none of them gives wrong bytes
or events, leaks, hangs or loses an answer in any engine:

- "reuses a page that is being read" (at_finish), "evicts what is being loaded" (walker), "in
  use is never counted up" (each_step): these workers copy in the order of the plans, loads
  first, so the store over a page comes after the load that was planned before it (XFER-3).
- "takes loads out of the plan when their request is aborted" (at_finish), "drops the jobs of
  requests that were preempted" (walker): nothing is aborted or preempted between
  ``on_blocks_allocated`` and the ``plan_step`` that takes its loads, so nothing is dropped.
- "pending means loads" (walker): stores that are in flight when an idle engine stops are
  reported in its next step; their blocks are held until then.
- "one page too many", "one page too few, the last one" (each_step): a store that touches the
  page that does not exist fails, and reports it; the request computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
BASES = ("at_finish", "walker", "each_step")
"""The right ones: files that each hold a class ``Novice``."""


@dataclass(frozen=True)
class Mistake:
    """One wrong connector.

    Args:
        base: The right one that it changes.
        family: Kind of mistake.
        what: The mistake in one line.
        edits: Old and new text of each edit.
    """

    base: str
    family: str
    what: str
    edits: tuple[tuple[str, str], ...]

    def source(self) -> str:
        """The wrong connector.

        Raises:
            ValueError: An edit does not fit the right one.
        """
        text = (FOLDER / f"{self.base}.py").read_text()
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.what}: {text.count(old)} times in {self.base}.py: {old!r}")
            text = text.replace(old, new)
        return text


def load_mistakes() -> list[Mistake]:
    """All of them, in the order of the files.

    A file ``BASE.txt`` has families (``# name``), mistakes (``## what``), and below each its
    edits: the old text, a line ``->``, the new text; ``--`` between two edits.
    """
    found = []
    for base in BASES:
        family = ""
        for part in f"\n{(FOLDER / f'{base}.txt').read_text()}".split("\n# ")[1:]:
            family, *entries = part.split("\n## ")
            for entry in entries:
                what, _, body = entry.strip("\n").partition("\n")
                edits = []
                for edit in body.split("\n--\n"):
                    old, _, new = edit.partition("\n->")
                    edits.append((old.strip("\n"), new.strip("\n")))
                found.append(Mistake(base, family.strip(), what, tuple(edits)))
    return found
