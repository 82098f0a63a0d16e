"""The mutants that the kit does not find, each with a reason."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .operators import Site
from .trial import Verdict

FILE = Path(__file__).with_name("survivors.toml")
KINDS = {
    "equivalent": "no caller can see a difference",
    "performance": "the same results, slower or in more memory",
    "freedom": "a connector stores, promises or holds less or later; no law obliges it to more",
    "outside": "of no contract: constructors, the engine's own calls, numbers for people",
    "message": "only a text for people differs",
    "hole": "a real fault that the kit does not find",
}


@dataclass(frozen=True)
class Survivor:
    """An entry of the file.

    Args:
        id: Of the mutant.
        change: The change, for which the reason was written.
        kind: One of :data:`KINDS`.
        reason: Why the kit need not find it, or the check that the kit lacks.
        shown: Python code that executes the reason (:mod:`~tests.mutation.reasons`); empty for a
            reason that is only text.
    """

    id: str
    change: str
    kind: str
    reason: str
    shown: str = ""

    @property
    def module(self) -> str:
        """The module that is wrong."""
        return self.id.partition(":")[0]


@dataclass(frozen=True)
class Account:
    """The differences between a run and the file.

    Args:
        explained: Survivors with their entries.
        unexplained: Survivors without an entry, or with an entry about other code.
        dead: Entries whose mutant was killed in this run.
        gone: Entries whose mutant is no longer in the sources.
    """

    explained: list[tuple[Verdict, Survivor]]
    unexplained: list[Verdict]
    dead: list[Survivor]
    gone: list[Survivor]


def read_survivors(path: Path = FILE) -> dict[str, Survivor]:
    """Return the entries of the file, by id.

    Raises:
        ValueError: An entry is twice in it, has no reason or an unknown kind.
    """
    entries: dict[str, Survivor] = {}
    for row in tomllib.loads(path.read_text()).get("survivor", []):
        entry = Survivor(**row)
        if entry.id in entries or entry.kind not in KINDS or not entry.reason.strip():
            raise ValueError(f"{path.name}: {entry.id}: once, with a reason, of {', '.join(KINDS)}")
        entries[entry.id] = entry
    return entries


def compare(
    verdicts: Iterable[Verdict], sites: Collection[Site], entries: Mapping[str, Survivor]
) -> Account:
    """Compare the survivors of a run with the entries of the file.

    Args:
        verdicts: Of a run.
        sites: All mutants of the current sources.
        entries: From :func:`read_survivors`.
    """
    account = Account([], [], [], [])
    for verdict in verdicts:
        entry = entries.get(verdict.site.id)
        if verdict.is_killed:
            if entry is not None:
                account.dead.append(entry)
        elif entry is not None and entry.change == verdict.site.change:
            account.explained.append((verdict, entry))
        else:
            account.unexplained.append(verdict)
    changes = {site.id: site.change for site in sites}
    account.gone.extend(
        entry for entry in entries.values() if changes.get(entry.id) != entry.change
    )
    return account
