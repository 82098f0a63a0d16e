"""How much of a contract an implementation keeps: core, full, or no level.

- *core*: every check that asks for no capability passes; of a connector every law holds in the
  simulated runs, and something was stored or loaded.
- *full*: so does every check of a capability, and nothing is left unexercised. What belongs to
  another role (a guard over a pool or a store, the engine under a view) or is one choice of
  several (LRU, ARC) is not asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from kvview.testing.harness import Capability

FEWEST_SEEDS = 200
"""Simulated runs of a connector below which no level is told."""

_CHOICES = frozenset({Capability.LRU, Capability.ARC})
_OF_OTHERS = frozenset(
    {
        Capability.ENGINE_REFUSES,
        *(Capability.LEASES, Capability.LEAKS, Capability.PIN_BUDGET, Capability.GUARDS),
        *(Capability.STATS, Capability.TRACE, Capability.ENGINE_SIDE, Capability.ONE_THREAD),
        Capability.TIER_GUARD,
    }
)


class Level(StrEnum):
    """How much is kept; what keeps full keeps core."""

    CORE = "core"
    FULL = "full"


class Scope(StrEnum):
    """What of the contract a run was to check."""

    ALL = "all"
    CORE = "core"
    """``--level core``."""
    PART = "part"
    """Checks were selected, or searched less far than the profile does."""


def level_of(law: str, requires: Sequence[Capability]) -> Level | None:
    """The level that asks for a check; None for neither.

    Args:
        law: Of the check.
        requires: Capabilities without which it is skipped.
    """
    if law == "coverage":
        return Level.FULL
    if not requires:
        return Level.CORE
    return None if (_CHOICES | _OF_OTHERS).intersection(requires) else Level.FULL


def judge_level(
    scope: str,
    checks: Iterable[tuple[str | None, str, str]],
    runs: tuple[int, Mapping[str, int]] | None,
    is_interrupted: bool,
) -> tuple[Level | None, str]:
    """The level that a run has reached, and why not the next one.

    Args:
        scope: A :class:`Scope`.
        checks: Of each the level that asks for it, its outcome, and its name.
        runs: Of a connector, how many seeds were run and what they did.
        is_interrupted: Whether the run was ended.
    """
    if is_interrupted:
        return None, "the run was interrupted"
    if scope == Scope.PART:
        return None, "not all was checked: leave out --select, --inference and small --steps"
    if runs is not None and runs[0] < FEWEST_SEEDS:
        return None, f"{runs[0]} of {FEWEST_SEEDS} seeds were run"
    missed = [(level, f"{name} {outcome}") for level, outcome, name in checks if level]
    missed = [(level, told) for level, told in missed if not told.endswith(" passed")]
    if told := [told for level, told in missed if level == Level.CORE]:
        return None, _first_of(told)
    if runs is not None and not (runs[1].get("stores") or runs[1].get("loads")):
        return None, "nothing was stored and nothing loaded"
    if scope == Scope.CORE:
        return Level.CORE, "no more was asked for"
    if missed:
        return Level.CORE, _first_of([told for _, told in missed])
    return Level.FULL, ""


def _first_of(told: Sequence[str]) -> str:
    return told[0] + (f", and {len(told) - 1} more" if len(told) > 1 else "")
