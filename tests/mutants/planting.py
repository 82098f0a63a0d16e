"""The decorator with which a wrong harness class states the law that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .mutant import Mutant

HarnessT = TypeVar("HarnessT", bound=Callable[..., Any])


def planter(mutants: list[Mutant]) -> Callable[..., Callable[[HarnessT], HarnessT]]:
    """Make a class decorator that adds to ``mutants``; the docstring describes the fault."""

    def planted(law: str, incident: str | None = None) -> Callable[[HarnessT], HarnessT]:
        def add(harness: HarnessT) -> HarnessT:
            fault = (harness.__doc__ or "").strip().partition("\n")[0]
            mutants.append(Mutant(harness, law, fault, incident))
            return harness

        return add

    return planted
