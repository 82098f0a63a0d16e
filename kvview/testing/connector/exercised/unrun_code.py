"""The statements of a connector that no seed reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from kvview.testing.connector.exercised.author_code import AuthorCode
from kvview.testing.connector.exercised.coverage import FEWEST_SEEDS
from kvview.testing.connector.exercised.lines import Lines, why_not
from kvview.testing.results.law_broken import Gap, Unrun

_TO_REACH = (
    "to reach the code that never ran: give the option of a limit a size (--option "
    "NAME='{blocks}/4'), set the option that leads there, or remove conditions that are never "
    "true; or name lines that cannot run, with a reason, in --expected"
)


class UnrunCode:
    """Collects the lines that ran, seed after seed.

    Args:
        code: Code of the author; None for a connector that kvview cannot read.
    """

    def __init__(self, code: AuthorCode | None) -> None:
        self._code = code if code is not None and code.paths else None
        self.ran: dict[str, set[int]] = {}
        """The lines that ran, by file."""
        self._why_not = why_not()
        self.is_complete = self._code is None
        """Whether further seeds need not be measured, because all code ran."""

    def add(self, lines: Lines) -> None:
        """Add the lines that ran in the process of a seed."""
        if self._code is None:
            return
        has_new_lines = False
        for path, new in lines.items():
            known = self.ran.setdefault(path, set())
            has_new_lines |= not known.issuperset(new)
            known.update(new)
        if has_new_lines:
            vars(self).pop("unrun", None)
            vars(self).pop("num_statements", None)
            self.is_complete = not any(one.is_judged for one in self.unrun)

    @cached_property
    def num_statements(self) -> int:
        """Number of statements in the functions of the code; 0 without a measurement."""
        return self._code.num_statements(self.ran) if self._code and self.ran else 0

    @cached_property
    def unrun(self) -> Sequence[Unrun]:
        """Statements that no seed reached; empty without a measurement."""
        return self._code.unrun(self.ran) if self._code and self.ran else ()

    def gaps(self, num_seeds: int) -> list[Gap]:
        """Return the statements that a complete check must reach, each as a named gap.

        A few seeds reach few statements. With few seeds, the only possible gap is therefore a small
        number of statements that ran.

        Args:
            num_seeds: Number of seeds that were run.
        """
        if num_seeds >= FEWEST_SEEDS:
            return [_gap(one) for one in self.unrun if one.is_judged]
        num_unrun = sum(one.num_statements for one in self.unrun)
        if 2 * num_unrun <= self.num_statements:
            return []
        text = f"{self.num_statements - num_unrun} of {self.num_statements} statements ran"
        return [Gap("code", f"{text} in {num_seeds} seeds")]

    def notes(self, gaps: Sequence[Gap]) -> Iterator[str]:
        """Report that the code could not be measured, or how more code is reached.

        Args:
            gaps: The gaps that are reported.
        """
        if self._code is not None and self._why_not is not None:
            yield f"the code that never ran cannot be listed: {self._why_not}"
        elif {gap.name for gap in gaps}.intersection(one.place for one in self.unrun):
            yield _TO_REACH
        elif any(gap.name == "code" for gap in gaps):
            yield f"run at least {FEWEST_SEEDS} --seeds to list the lines that never ran"


def _gap(unrun: Unrun) -> Gap:
    return Gap(unrun.place, f"{unrun.place} in {unrun.function} never ran: {unrun.source}")
