"""The laws of the contract, read from ``laws.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvview.urls import law_url


@dataclass(frozen=True)
class Law:
    """A law of the contract.

    Args:
        number: ``"POOL-4"`` for example.
        title: Summary of the law in a few words.
        text: The law itself, in Markdown.
        hint: The usual remedy, in Markdown; empty if there is none.
    """

    number: str
    title: str
    text: str
    hint: str = ""

    @property
    def family(self) -> str:
        """The letters of the law's number, ``"POOL"`` for example."""
        return self.number.partition("-")[0]

    @property
    def url(self) -> str:
        """The address of the law's documentation."""
        return law_url(self.number)


@cache
def laws() -> Mapping[str, Law]:
    """Return all laws by number, family by family."""
    from tomllib import loads  # read on first use, because an import of kvview needs no law

    found = loads(files("kvview").joinpath("laws.toml").read_text(encoding="utf-8"))
    return {
        number: Law(number, **entry | {"text": " ".join(entry["text"].split())})
        for number, entry in found.items()
    }


def titled(number: str) -> str:
    """Return a law's number with its title: ``"POOL-4 No foreign frees"``.

    Args:
        number: Number of a law; any other text is returned unchanged.
    """
    law = laws().get(number)
    return f"{number} {law.title}" if law else number


def hint_of(number: str) -> str:
    """Return the usual remedy for a broken law as text; empty if the law has no hint."""
    law = laws().get(number)
    return law.hint.replace("`", "") if law else ""
