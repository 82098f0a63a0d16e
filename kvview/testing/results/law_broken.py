"""The failure of a check: the law, the wrong and the expected value, and a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from kvview.laws import hint_of, titled
from kvview.urls import law_url


class LawBroken(AssertionError):
    """An implementation broke a law.

    Args:
        law: Number of the law, ``"POOL-2"`` for example.
        what: Description of the broken expectation.
        got: The observed value.
        expected: The value that the law requires.
        script: Python code that reproduces the failure, and fails as long as the law is broken.
        seeds: For a connector, the seeds that break the law; the script shows the first seed.
        log: For a connector, the last hooks, transfers and holds of the script's run.
        hint: The remedy; None for the hint of the law.
    """

    def __init__(
        self,
        law: str,
        what: str,
        *,
        got: str,
        expected: str,
        script: str = "",
        seeds: Sequence[int] = (),
        log: Sequence[str] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(law, what)
        self.seeds = seeds
        self.log = log
        self.law = law
        self.what = what
        self.got = got
        self.expected = expected
        self.script = script
        self.calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
        """Names and arguments of the calls of a machine, if a machine made them."""
        self.hint = hint_of(law) if hint is None else hint

    @property
    def law_url(self) -> str:
        """Return the page of the law; empty if the documentation has no such page."""
        return law_url(self.law)

    def __str__(self) -> str:
        return (
            f"{self.law}: {self.what}\n  got:      {self.got}\n  expected: {self.expected}\n"
            f"  law:      {titled(self.law)}, {self.law_url}\n\n{self.script}"
        )


@cache
def broken(law: str) -> type[LawBroken]:
    """Return the class of the failures of one law.

    Hypothesis takes failures of different classes for different bugs, and shrinks each of them.
    """
    return type(f"{law.replace('-', '_')}_Broken", (LawBroken,), {"__module__": __name__})
