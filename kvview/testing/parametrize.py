"""The checks as parametrised pytest tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvview.testing.checks import Check
from kvview.testing.harness import Factory
from kvview.testing.profiles import Profile, make_profile, use_profile
from kvview.testing.recorder import LawBroken
from kvview.testing.runner import plan_checks

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class BoundCheck:
    """A check with its factory: call it.

    Args:
        check: The check.
        factory: Makes the harness.
        profile: How long to search.
    """

    check: Check
    factory: Factory
    profile: Profile

    def __call__(self) -> None:
        """Run the check; raises what it finds."""
        with use_profile(self.profile):
            self.check.function(self.factory)


def make_params(
    factory: Factory,
    expected_failures: Mapping[str, str] | None = None,
    *,
    profile: str = "ci",
    select: Sequence[str] = (),
    seed: int | None = None,
) -> list[Any]:
    """One ``pytest.param`` a check, marked as skipped or as an expected failure.

    Raises:
        ConfigError: As :func:`~kvview.testing.run_checks`.
    """
    import pytest

    chosen = make_profile(profile, seed)
    _, planned = plan_checks(factory, expected_failures=expected_failures, select=select)
    params = []
    for item in planned:
        marks: list[pytest.MarkDecorator] = []
        if item.skip_reason:
            marks.append(pytest.mark.skip(reason=item.skip_reason))
        elif item.xfail_reason:
            marks.append(pytest.mark.xfail(reason=item.xfail_reason, raises=LawBroken, strict=True))
        bound = BoundCheck(item.check, factory, chosen)
        params.append(pytest.param(bound, id=item.check.name, marks=marks))
    return params


def parametrize_with_checks(
    factory: Factory,
    expected_failures: Mapping[str, str] | None = None,
    *,
    profile: str = "ci",
    select: Sequence[str] = (),
    seed: int | None = None,
) -> pytest.MarkDecorator:
    """Make one test of every check; the decorated function is given ``check``.

    Example:
        >>> @parametrize_with_checks(make_pool, {"check_x": "upstream #1"})
        ... def test_pool(check):
        ...     check()

    Args:
        factory: Makes a harness in its first state.
        expected_failures: ``{name of a check: reason}``; strict.
        profile: ``ci`` or ``soak``.
        select: Names of checks or laws, ``*`` allowed; empty for all.
        seed: Of everything random; None lets the profile decide.

    Raises:
        ConfigError: As :func:`~kvview.testing.run_checks`.
    """
    import pytest

    params = make_params(factory, expected_failures, profile=profile, select=select, seed=seed)
    return pytest.mark.parametrize("check", params)
