"""The checks of a connector as parametrised pytest tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvview.testing.checks import Check
from kvview.testing.connector_checks import NotApplicable, NotJudged
from kvview.testing.effort import Effort, use_effort
from kvview.testing.results.expected import ExpectedFailure
from kvview.testing.results.law_broken import LawBroken
from kvview.testing.runner import as_target, goes_on_after, plan_checks
from kvview.testing.suites.capability import Factory

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class BoundCheck:
    """A check with its target, which a test calls.

    Args:
        check: The check.
        factory: The target.
        effort: The settings of the run.
    """

    check: Check
    factory: Factory
    effort: Effort

    def __call__(self) -> None:
        """Run the check: raise its failure, or skip the test if the runs cannot show its law."""
        try:
            with use_effort(self.effort):
                self.check.function(self.factory)
        except (NotApplicable, NotJudged) as ended:
            import pytest

            pytest.skip(str(ended))


def parametrize_with_checks(
    factory: Factory,
    expected: Sequence[ExpectedFailure] = (),
    *,
    select: Sequence[str] = (),
    **settings: Any,
) -> pytest.MarkDecorator:
    """Make one test for every check; the decorated function receives ``check``.

    Examples:
        >>> @parametrize_with_checks(MyConnector, read_expected("expected.toml"))
        ... def test_connector(check):
        ...     check()

    Args:
        factory: A connector class, or any other target of ``kvview check``. The checks share one
            set of runs.
        expected: Checks that may fail; a test that passes nevertheless is a failure.
        select: Names of checks or laws, ``*`` allowed; empty for all.
        **settings: Fields of :class:`~kvview.testing.effort.Effort`. Unless ``keep_going`` is set,
            the checks of all laws that a connector's runs did not reach are skipped.

    Raises:
        ConfigError: As :func:`~kvview.testing.run_checks`.
    """
    import pytest

    effort = Effort(**settings)
    factory = as_target(factory, effort)
    _, planned = plan_checks(factory, effort, expected=expected, select=select)
    effort.shared["goes_on"] = goes_on_after(planned, effort.keep_going)
    params = []
    for item in planned:
        marks: list[pytest.MarkDecorator] = []
        if item.skip_reason:
            marks.append(pytest.mark.skip(reason=item.skip_reason))
        elif item.expected:
            reason = f"{item.expected.reason} {item.expected.link}".rstrip()
            marks.append(pytest.mark.xfail(reason=reason, raises=LawBroken, strict=True))
        bound = BoundCheck(item.check, item.factory, item.effort(effort))
        name = f"{item.part}-{item.check.name}" if item.part else item.check.name
        params.append(pytest.param(bound, id=name, marks=marks))
    return pytest.mark.parametrize("check", params)
