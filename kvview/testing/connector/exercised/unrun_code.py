"""The statements of a connector that no seed reached, and options that might reach them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from kvview.testing.connector.exercised.author_code import AuthorCode, Unrun
from kvview.testing.connector.exercised.branches import ARE_CHEAP, Branches, lines_of, why_not
from kvview.testing.connector.exercised.coverage import FEWEST_SEEDS
from kvview.testing.placeholders import is_sized
from kvview.testing.results.law_broken import Gap

_ENOUGH_SEEDS = 200  # further seeds rarely reach other code
_MEASURED_FIRST, _MEASURED_EVERY = 20, 5
_LOOKUPS = {"has", "find"}  # methods of a store that only run if the store outlives a run
_SIZES = ("byte", "block", "page", "slot", "entr", "capacity", "size", "max", "limit")


class UnrunCode:
    """Collects the branches that ran, seed after seed.

    Args:
        code: Code of the author; None for a connector that kvview cannot read.
        options: Options of the connector that the user has set.
    """

    def __init__(self, code: AuthorCode | None, options: Mapping[str, Any]) -> None:
        self._code = code if code is not None and code.paths else None
        self._options = options
        self._ran: dict[str, set[tuple[int, int]]] = {}
        self._is_complete = self._code is None
        self._why_not = why_not()

    def measures(self, place: int) -> bool:
        """Whether to measure a seed: no seed once all code ran, and only some if measuring is slow.

        Args:
            place: Index of the seed among all seeds.
        """
        is_due = place < _MEASURED_FIRST or place % _MEASURED_EVERY == 0
        return not self._is_complete and (is_due or ARE_CHEAP)

    def add(self, branches: Branches) -> None:
        """Add the branches that ran in the process of a seed."""
        if self._code is None:
            return
        has_new_lines = has_new_branches = False
        for path, new in branches.items():
            has_new_branches |= path not in self._ran or not self._ran[path].issuperset(new)
            known = self._ran.setdefault(path, set())
            has_new_lines |= not lines_of(new) <= lines_of(known)
            known.update(new)
        if has_new_branches:
            vars(self).pop("unrun", None)
            vars(self).pop("num_statements", None)
        if has_new_lines:
            self._is_complete = not any(one.is_judged for one in self.unrun)

    @cached_property
    def num_statements(self) -> int:
        """Number of statements in the functions of the code; 0 without a measurement."""
        return self._code.num_statements(self._ran) if self._code and self._ran else 0

    @cached_property
    def unrun(self) -> Sequence[Unrun]:
        """Statements that no seed reached; empty without a measurement."""
        return self._code.unrun(self._ran) if self._code and self._ran else ()

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

    def notes(self, gaps: Sequence[Gap], num_seeds: int) -> Iterator[str]:
        """Report that the code could not be measured, or list options that might reach more code.

        Args:
            gaps: The gaps that are reported.
            num_seeds: Number of seeds that were run.
        """
        if self._code is not None and self._why_not is not None:
            yield f"the code that never ran cannot be listed: {self._why_not}"
        elif {gap.name for gap in gaps}.intersection(one.place for one in self.unrun):
            yield f"to reach the code that never ran: {self._options_to_try(num_seeds)}"
        elif any(gap.name == "code" for gap in gaps):
            yield f"run at least {FEWEST_SEEDS} --seeds to list the lines that never ran"

    def _options_to_try(self, num_seeds: int) -> str:
        sizes = [
            name for name, value in self._known_options.items() if self._is_a_size(name, value)
        ]
        tries = []
        for name in sizes:  # the option of a tier's upper level usually comes first
            unit = "{bytes}" if "byte" in name else "{blocks}"
            tries.append(f"--option {name}='{unit if name == sizes[-1] else f'{unit}/4'}'")
        mentioned = {name for one in self.unrun if one.is_judged for name in _words(one.condition)}
        tries += [
            f"--option {name}={str(not value).lower()}"
            for name, value in self._known_options.items()
            if isinstance(value, bool) and name in mentioned and name not in self._options
        ]
        unrun = {one.function.rpartition(".")[2] for one in self.unrun if one.is_judged}
        has_store = self._code is not None and hasattr(self._code.connector_class, "store")
        if has_store and unrun & _LOOKUPS and "weights" not in self._options:
            tries.append("--option weights={tmp}")
        first = f"give {' '.join(tries)}" if tries else "play more --seeds"
        if num_seeds >= _ENOUGH_SEEDS and not tries:
            first = "remove conditions that are never true"
        return f"{first}; or name lines that cannot run, with a reason, in --expected-failures"

    def _is_a_size(self, name: str, default: object) -> bool:
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        is_given = is_sized({name: self._options.get(name)})
        has_a_name = any(word in name.lower() for word in _SIZES)
        return has_a_name and (is_number or default is None) and not is_given

    @cached_property
    def _known_options(self) -> Mapping[str, object]:
        """Return the options that the code reads, with their defaults."""
        return self._code.options() if self._code is not None else {}


def _gap(unrun: Unrun) -> Gap:
    text = f"{unrun.place} in {unrun.function} never ran: {unrun.source}"
    if unrun.condition:
        text += f" (after {unrun.condition})"
    return Gap(unrun.place, text)


def _words(condition: str) -> set[str]:
    return set(re.findall(r"\w+", condition.partition("#")[0]))
