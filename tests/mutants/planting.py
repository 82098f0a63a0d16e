"""How a wrong harness class says which law it breaks, and who must see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvview.testing import Mutant

HarnessT = TypeVar("HarnessT", bound=Callable[..., Any])


def planter(mutants: list[Mutant]) -> Callable[..., Callable[[HarnessT], HarnessT]]:
    """Make a class decorator that adds to ``mutants``; the docstring says what is wrong."""

    def planted(
        law: str, killed_by: str, incident: str | None = None
    ) -> Callable[[HarnessT], HarnessT]:
        def add(harness: HarnessT) -> HarnessT:
            what = (harness.__doc__ or "").strip().partition("\n")[0]
            mutants.append(Mutant(harness, law, killed_by, what, incident))
            return harness

        return add

    return planted
