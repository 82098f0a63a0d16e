"""The runner, which runs the checks of a contract on the harnesses of a factory."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from kvview.connector import Connector
from kvview.errors import ConfigError, did_you_mean
from kvview.testing.checks import EXCEPTIONS, Check, FindGaps, checks_for, coverage_check
from kvview.testing.connector_checks import (
    LAWS,
    NUM_SEEDS,
    NotApplicable,
    NotJudged,
    checks_in,
)
from kvview.testing.effort import Effort, use_effort
from kvview.testing.offloading.policy import is_cache_policy, suite_of_policy
from kvview.testing.results.expected import ExpectedFailure
from kvview.testing.results.law_broken import COVERAGE, Gap, LawBroken, NotExercised
from kvview.testing.results.report import CheckResult, Outcome, Report
from kvview.testing.suites.capability import Contract, Factory
from kvview.testing.suites.conformance import Conformance
from kvview.testing.suites.inspect_target import inspect_target
from kvview.testing.supervision import watchdog
from kvview.testing.tier.suite import TierConformance, suite_of
from kvview.testing.tier.transform_suite import is_transform, suite_of_transform
from kvview.tier import is_tier_store
from kvview.version import versions_of

if TYPE_CHECKING:
    from kvview.testing.connector.exercised.lines import LineTracer

TOKEN_LAWS = ("CONN-3", "CONN-4", "CONN-11", "XFER-1")
"""The laws that real tokens show, each with its own check."""
_TOKENS_ARE_COMPARED = "Blocks were loaded, and a fault injected into loads changed tokens."


@dataclass(frozen=True)
class PlannedCheck:
    """A check, with the facts that are known before it runs.

    Args:
        check: The check.
        factory: The target of the check, or a part of the target.
        part: Name of the part; empty for the target itself.
        skip_reason: Reason why the check cannot run; empty if it can run.
        expected: The expected failure; None if the check is expected to pass.
    """

    check: Check
    factory: Factory
    part: str
    skip_reason: str
    expected: ExpectedFailure | None = None

    def effort(self, effort: Effort) -> Effort:
        """Return the settings of the check: steps and many seeds concern only the target itself."""
        if not self.part:
            return effort
        most = int(getattr(self.factory, "num_runs", NUM_SEEDS))
        return replace(effort, steps=None, seeds=min(effort.seeds or most, most))


def plan_checks(
    factory: Factory,
    effort: Effort,
    *,
    expected: Sequence[ExpectedFailure] = (),
    select: Sequence[str] = (),
) -> tuple[Contract, list[PlannedCheck]]:
    """Return the checks that a run would contain, in order: those of the parts come first.

    Raises:
        ConfigError: The target is not usable, or a name matches no check.
    """
    contract = inspect_target(factory)[0]
    names = [] if contract == "connector" else effort.for_connectors()
    if contract == "tier":
        names = [name for name in names if name != "options"]
    if names:
        raise ConfigError(
            f"{names[0]} only applies to connectors, but this target is a suite of the contract "
            f"{contract}; drop the option"
        )
    planned = []
    for target, part in [*_parts_of(factory, effort), (factory, "")]:
        kind, capabilities = inspect_target(target)
        checks = checks_for(kind)
        if effort.inference:
            checks = checks_in("real_inference", TOKEN_LAWS, _TOKENS_ARE_COMPARED)
        for check in checks:
            missing = [name for name in check.requires if name not in capabilities]
            skip = f"the implementation lacks {', '.join(missing)}" if missing else ""
            if missing and isinstance(target, type) and issubclass(target, TierConformance):
                skip = target.reason_without(missing)
            if check.law == COVERAGE and effort.shard != (1, 1):
                skip = "only all shards together show what is missing: kvview check --merge"
            planned.append(PlannedCheck(check, target, part, skip))
    planned = _with_expected(planned, expected)
    _require_known("select", select, [item.check for item in planned], _matches)
    if select:
        planned = [item for item in planned if any(_matches(one, item.check) for one in select)]
    return contract, planned


def _parts_of(factory: Factory, effort: Effort) -> list[tuple[Factory, str]]:
    """Return the suites of the parts of a connector, each with the name of the part.

    The parts do not depend on the engine, so only runs in the reference engine check them. They
    are checked when shards are merged.
    """
    is_on_reference = effort.engine in (None, "reference") and not effort.inference
    if (
        not is_on_reference
        or effort.shard != (1, 1)
        or not (isinstance(factory, type) and issubclass(factory, Connector))
    ):
        return []
    found: list[tuple[Factory, str]] = []
    for part, options in factory.checked_parts(effort.options):
        name = getattr(part, "__qualname__", repr(part)).removeprefix("Test")  # of a suite
        suite = as_target(part, replace(effort, options=options))
        if not (isinstance(suite, type) and issubclass(suite, Conformance)):
            raise ConfigError(
                f"{factory.__qualname__}.checked_parts names {name}, which is not a store, a "
                "transform, a cache policy or a suite; name only such parts"
            )
        found.append((suite, name))
    return found


def _with_expected(
    planned: Sequence[PlannedCheck], expected: Sequence[ExpectedFailure]
) -> list[PlannedCheck]:
    """Return the checks with their expected failures; each expected gap also has a check.

    Raises:
        ConfigError: A law matches no check, or several.
    """
    prefix = f"{COVERAGE}: "
    by_name: dict[str, ExpectedFailure] = {}
    checks = [item.check for item in planned]
    for one in expected:
        if not one.law.startswith(prefix):
            _require_known("expected", [one.law], checks, lambda law, c: law in (c.name, c.law))
            names = sorted({c.name for c in checks if one.law in (c.name, c.law)})
            if len(names) > 1:
                raise ConfigError(
                    f"expected: {one.law} has several checks: {', '.join(names)}; name one of them"
                )
            by_name[names[0]] = one
    planned = [replace(item, expected=by_name.get(item.check.name)) for item in planned]
    gaps = {one.law.removeprefix(prefix): one for one in expected if one.law.startswith(prefix)}
    planned = _with_expected_gaps(planned, gaps)
    if gaps and not any(item.check.gaps for item in planned):
        _require_known("expected", [f"{prefix}{n}" for n in gaps], checks, lambda *_: False)
    return planned


def _with_expected_gaps(
    planned: Sequence[PlannedCheck], expected: Mapping[str, ExpectedFailure]
) -> list[PlannedCheck]:
    """Return the checks, in which each pattern of names of expected gaps also has a check."""
    sources = [item for item in planned if item.check.gaps is not None]
    if not expected or not sources:
        return [*planned]

    def other_gaps(gaps: FindGaps, factory: Factory) -> list[Gap]:
        found = gaps(factory)
        return [gap for gap in found if not any(_fits(gap, one) for one in expected)]

    def gaps_of(pattern: str, factory: Factory) -> list[Gap]:
        found = (gap for one in sources if one.check.gaps for gap in one.check.gaps(one.factory))
        return [gap for gap in found if _fits(gap, pattern)]

    result = []
    for item in planned:
        check = item.check
        if check.gaps is not None:
            gaps = partial(other_gaps, check.gaps)
            check = coverage_check(check.name, check.summary, check.contract, gaps)
        result.append(replace(item, check=check))
    for pattern, one in expected.items():
        summary = f"{pattern} is exercised."
        made = coverage_check(
            one.law, summary, planned[-1].check.contract, partial(gaps_of, pattern)
        )
        result.append(PlannedCheck(made, planned[-1].factory, "", "", one))
    return result


def _fits(gap: Gap, pattern: str) -> bool:
    return fnmatch.fnmatchcase(gap.name, pattern)


def as_target(found: Factory, effort: Effort) -> Factory:
    """Return a target itself, or the suite of a class of stores, transforms or cache policies."""
    if isinstance(found, type) and is_tier_store(found):
        return suite_of(found, effort.options)
    if is_transform(found):
        return suite_of_transform(found)
    return suite_of_policy(found) if is_cache_policy(found) else found


def run_checks(
    factory: Factory,
    *,
    expected: Sequence[ExpectedFailure] = (),
    select: Sequence[str] = (),
    target: str | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Report:
    """Run every check of the contract of a target.

    1. No check runs unless the target and all names are usable.
    2. A check whose capabilities the implementation lacks is skipped, with the reason.
    3. Ctrl-C ends the run; the results so far are returned.
    4. The parts that a connector lists (:meth:`~kvview.Connector.checked_parts`) are checked first.
    5. The checks of a connector share one set of simulated runs. The first failure ends the runs,
       unless it is expected. Laws that need all seeds then have no result.

    Args:
        factory: A connector class, a suite of an implementation, or a class of stores or cache
            policies, whose suite the kit makes.
        expected: Checks that may fail; such a check is reported if it passes.
        select: Names of checks or laws, ``*`` allowed; empty for all.
        target: Name of the target in the report.
        on_progress: Called with the name of each check that has ended, and with the progress of
            the runs of a connector.
        **settings: Fields of :class:`~kvview.testing.effort.Effort`.

    Raises:
        ConfigError: A target, a name or a setting cannot be used.
    """
    effort = Effort(**settings)
    factory = as_target(factory, effort)
    contract, planned = plan_checks(factory, effort, expected=expected, select=select)
    effort.shared.update(
        on_progress=on_progress, goes_on=_goes_on_after(planned, effort.keep_going)
    )
    results: list[CheckResult] = []
    is_interrupted = False
    tracer = _tracer_of_parts(factory, planned)
    for item in planned:
        try:
            with tracer.measuring() if item.part and tracer else nullcontext():
                results.append(run_planned(item, effort))
            if item.part and tracer:
                effort.shared["lines"] = tracer.take()
            on_progress(item.check.name)
        except NotJudged:
            continue
        except KeyboardInterrupt:
            is_interrupted = True
            # Runs that ended early might have broken other laws later.
            if factory in effort.shared:
                continue
            break
    name = target or getattr(factory, "__qualname__", None) or repr(factory)
    runs = effort.shared.get(factory)
    return Report(
        name,
        contract,
        effort.seed,
        effort.seeds or int(getattr(factory, "num_runs", NUM_SEEDS)),
        results,
        len(planned),
        is_interrupted,
        runs=runs,
        engine=getattr(factory, "engine_name", "") if runs is None else runs.engine,
        versions=versions_of(factory),
    )


def _tracer_of_parts(factory: Any, planned: Iterable[PlannedCheck]) -> LineTracer | None:
    """Make a tracer of the author's files, because the checks of parts also run their lines."""
    if not any(item.part for item in planned):
        return None
    from kvview.testing.connector.exercised.author_code import AuthorCode
    from kvview.testing.connector.exercised.lines import LineTracer

    return LineTracer(AuthorCode(factory).paths)


def _goes_on_after(planned: Iterable[PlannedCheck], keep_going: bool) -> Callable[[str], bool]:
    """Return a function that decides whether the runs continue after a broken law."""
    judged = {one.check.law for one in planned if not (one.skip_reason or one.expected)}
    named = {*LAWS, EXCEPTIONS}
    return lambda law: keep_going or (law if law in named else "*") not in judged


def run_planned(planned: PlannedCheck, effort: Effort) -> CheckResult:
    """Run one check, unless it is skipped."""
    check, expected, part = planned.check, planned.expected, planned.part
    if planned.skip_reason:
        return CheckResult(check, Outcome.SKIPPED, 0.0, planned.skip_reason, part=part)
    failure = None
    start = time.perf_counter()
    try:
        message = expected.message if expected else ""
        with use_effort(replace(planned.effort(effort), expected_message=message)):
            check.function(planned.factory)
    except (NotApplicable, SkipTest) as skipped:
        return CheckResult(check, Outcome.SKIPPED, reason=str(skipped), part=part)
    except LawBroken as broken:
        failure = broken
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{check.name} needs {error.name}: pip install 'kvview[testing,reference]'"
        ) from error
    except Exception as error:
        if watchdog.is_ending():  # a signal during a search ends it with any exception
            raise KeyboardInterrupt from error
        if check.contract == "connector" or getattr(error, "law", None) == "ENGINE":
            raise  # exceptions of hooks are already reported, and those of vLLM break no law
        # The target raised outside of a recorded call, in its factory.
        failure = LawBroken(
            check.law,
            f"{check.name} did not finish",
            got=f"{type(error).__name__}: {error}",
            expected="no error",
            script="",
        )
        failure.__cause__ = error
    seconds = time.perf_counter() - start
    if failure is None:
        is_whole = effort.shard == (1, 1)
        outcome = Outcome.UNEXPECTED_PASS if expected and is_whole else Outcome.PASSED
    elif expected and message in failure.what:
        outcome = Outcome.EXPECTED_FAILURE
    else:
        outcome = Outcome.NOT_CHECKED if isinstance(failure, NotExercised) else Outcome.FAILED
    reason, link = (expected.reason, expected.link) if expected else ("", "")
    return CheckResult(check, outcome, seconds, reason, failure, part, link)


def _matches(pattern: str, check: Check) -> bool:
    return pattern == check.law or fnmatch.fnmatchcase(check.name, pattern)


def _require_known(
    what: str,
    names: Iterable[str],
    checks: Sequence[Check],
    matches: Callable[[str, Check], bool],
) -> None:
    for name in names:
        if not any(matches(name, check) for check in checks):
            known = [check.name for check in checks] + sorted({check.law for check in checks})
            raise ConfigError(
                f"{what}: {name!r} matches no check of this contract{did_you_mean(name, known)}"
            )
