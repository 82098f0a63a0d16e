"""Executes the reason of a survivor, with the right code and with the wrong code.

A reason has Python code with one or two functions:

1. ``same()`` returns values that do not depend on the mutant: the argument of ``equivalent``, the
   result that ``performance`` does not change, or the behaviour that still works despite
   ``freedom``.
2. ``differs()`` returns values that depend on it: two costs, or the blocks that are stored. Costs
   are counted (:func:`count_calls`) and not timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .areas import OWN
from .processes import Say, forget, run_forked
from .survivors import Survivor
from .trial import make_wrong

SECONDS = 60.0


@dataclass(frozen=True)
class Shown:
    """The values of a reason.

    Args:
        same: Of ``same()``.
        differs: Of ``differs()``; None without it.
    """

    same: Any
    differs: Any = None


def count_calls(function: Callable[[], object]) -> int:
    """Return the number of Python and C functions that a function calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def execute(survivor: Survivor) -> tuple[Shown, Shown]:
    """Return the values with the right code and with the wrong code.

    Raises:
        RuntimeError: The code of the reason did not end.
    """

    return _values(survivor, is_wrong=False), _values(survivor, is_wrong=True)


def _values(survivor: Survivor, *, is_wrong: bool) -> Shown:
    def run(say: Say) -> None:
        if is_wrong:
            make_wrong(survivor.id)
        forget(OWN)
        names: dict[str, Any] = {"count_calls": count_calls}
        exec(survivor.shown, names)
        differs = names.get("differs")
        say(Shown(names["same"](), differs() if differs else None))

    ended = run_forked(run, seconds=SECONDS)
    if ended.why or not ended.said:
        raise RuntimeError(f"{survivor.id}: {ended.why or 'no value'} (wrong: {is_wrong})")
    shown: Shown = ended.said[0]
    return shown


def is_shown(survivor: Survivor, right: Shown, wrong: Shown) -> bool:
    """Return whether the values show a reason of this kind."""
    if right.same != wrong.same:
        return False
    if survivor.kind in ("performance", "freedom"):
        return right.differs is not None and bool(right.differs != wrong.differs)
    return True
