"""The failure of a check: the law, the wrong and the expected value, and a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from reprlib import Repr
from typing import Any

from kvview.laws import hint_of, titled
from kvview.urls import law_url

COVERAGE = "coverage"
"""Name used instead of a law if the runs did not exercise an event or some code.

An expected failure names a gap with this word first (``coverage: loads``).
"""
_GAPS_IN_WORDS = 2
_SHORT = Repr()
_SHORT.maxother = 24  # characters


def short_repr(key: bytes) -> str:
    """Format a key for a message of one line, without the middle of a long key."""
    return _SHORT.repr(key)


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


@dataclass(frozen=True)
class Gap:
    """An event that no run exercised, code that no run reached, or a law that cannot be checked.

    Args:
        name: Stable name for expected failures, such as ``"loads"``,
            ``"loads/several/mixed/mamba/gpu-hit/failed"`` or ``"my_connector.py:12"``.
        what: Description of the gap in the report.
    """

    name: str
    what: str

    def __str__(self) -> str:
        return self.what if self.what.startswith(self.name) else f"{self.name}: {self.what}"


@dataclass(frozen=True)
class Unrun:
    """Consecutive statements of the connector's code that no run reached.

    Args:
        place: ``file:line`` of the first statement; the file is relative to the author's folder.
        function: Qualified name of the function that contains the statements.
        num_statements: Number of statements.
        source: Source of the first line.
        is_judged: Whether a check that does not reach these statements is incomplete. False for
            code that handles errors, a GPU or a log, for code without an effect or without a
            caller, and for a method that a class of the author overrides.
    """

    place: str
    function: str
    num_statements: int
    source: str
    is_judged: bool


class NotExercised(LawBroken):
    """No law was broken, but parts of the check are missing.

    Args:
        gaps: The missing parts.
    """

    def __init__(self, gaps: Sequence[Gap]) -> None:
        num_more = len(gaps) - _GAPS_IN_WORDS
        texts = [gap.what for gap in gaps[:_GAPS_IN_WORDS]]
        texts += [f"and {num_more} more"] if num_more > 0 else []
        super().__init__(
            COVERAGE,
            "; ".join(texts),
            got=", ".join(gap.name for gap in gaps),
            expected="nothing is missing",
        )
        self.gaps = gaps


@cache
def broken(law: str) -> type[LawBroken]:
    """Return the class of the failures of one law.

    Hypothesis takes failures of different classes for different bugs, and shrinks each of them.
    """
    return type(f"{law.replace('-', '_')}_Broken", (LawBroken,), {"__module__": __name__})
