"""The runner, which runs the checks of a contract on the harnesses of a factory."""

from __future__ import annotations

import difflib
import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Unpack

from kvview.errors import ConfigError, line_of
from kvview.input_files import read_file
from kvview.testing.checks import EXCEPTIONS, Check, checks_for
from kvview.testing.connector_checks import (
    COVERAGE,
    LAWS,
    NUM_SEEDS,
    NotApplicable,
    NotExercised,
    NotJudged,
    checks_in,
    with_expected_gaps,
)
from kvview.testing.effort import Effort, Settings, use_effort
from kvview.testing.offloading.policy import is_cache_policy, suite_of_policy
from kvview.testing.results.law_broken import LawBroken
from kvview.testing.results.report import CheckResult, Outcome, Report
from kvview.testing.suites.capability import Contract, Factory
from kvview.testing.suites.inspect_target import inspect_target
from kvview.testing.tier.suite import TierConformance, suite_of
from kvview.tier import is_tier_store
from kvview.version import versions_of

_EXPECTED = re.compile(rf"(?P<name>{COVERAGE}:\s*[^:]+(:\d+)?|[^:\s]+)\s*:\s*(?P<reason>\S.*)")
"""Pattern of an expected failure: a check, an item of the coverage, or a place in the code."""

TOKEN_LAWS = ("CONN-3", "CONN-4", "CONN-11", "XFER-1")
"""The laws that real tokens show, each with its own check."""
_TOKENS_ARE_COMPARED = "Blocks were loaded, and a fault injected into loads changed tokens."


@dataclass(frozen=True)
class PlannedCheck:
    """A check, with the facts that are known before it runs.

    Args:
        check: The check.
        skip_reason: Reason why the check cannot run; empty if it can run.
        xfail_reason: Reason why the check is expected to fail; empty if it is expected to pass.
    """

    check: Check
    skip_reason: str
    xfail_reason: str


def plan_checks(
    factory: Factory,
    effort: Effort,
    *,
    expected_failures: Mapping[str, str] | None = None,
    select: Sequence[str] = (),
) -> tuple[Contract, list[PlannedCheck]]:
    """Return the checks that a run would contain, in order.

    Raises:
        ConfigError: The target is not usable, or a name matches no check.
    """
    contract, capabilities = inspect_target(factory)
    names = [] if contract == "connector" else effort.for_connectors()
    if contract == "tier":
        names = [name for name in names if name != "options"]
    if names:
        raise ConfigError(
            f"{names[0]} only applies to connectors, but this target is a suite of the contract "
            f"{contract}; drop the option"
        )
    expected = dict(expected_failures or {})
    checks = checks_for(contract)
    if effort.inference:
        checks = checks_in("real_inference", TOKEN_LAWS, _TOKENS_ARE_COMPARED)
    prefix = f"{COVERAGE}: "
    gaps = [name.removeprefix(prefix) for name in expected if name.startswith(prefix)]
    if contract == "connector" and gaps:
        checks = with_expected_gaps(checks, gaps)
    _require_known("expected_failures", expected, checks, lambda name, c: name == c.name)
    _require_known("select", select, checks, _matches)
    for name, reason in expected.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"expected_failures: {name} needs a reason")
    planned = []
    for check in checks:
        if select and not any(_matches(pattern, check) for pattern in select):
            continue
        missing = [name for name in check.requires if name not in capabilities]
        skip = f"the implementation lacks {', '.join(missing)}" if missing else ""
        if missing and isinstance(factory, type) and issubclass(factory, TierConformance):
            skip = factory.reason_without(missing)
        planned.append(PlannedCheck(check, skip, expected.get(check.name, "")))
    return contract, planned


def as_target(found: Factory, effort: Effort) -> Factory:
    """Return a target itself, or the suite of a class of stores or cache policies."""
    if isinstance(found, type) and is_tier_store(found):
        return suite_of(found, effort.options)
    return suite_of_policy(found) if is_cache_policy(found) else found


def run_checks(
    factory: Factory,
    *,
    expected_failures: Mapping[str, str] | None = None,
    select: Sequence[str] = (),
    target: str | None = None,
    on_result: Callable[[CheckResult], None] | None = None,
    on_seed: Callable[[int, int, int], None] | None = None,
    on_step: Callable[[str], None] | None = None,
    **settings: Unpack[Settings],
) -> Report:
    """Run every check of the contract of a target.

    1. No check runs unless the target and all names are usable.
    2. A check whose capabilities the implementation lacks is skipped, with the reason.
    3. Ctrl-C ends the run; the results so far are returned.
    4. The checks of a connector share one set of simulated runs. The first failure ends the runs,
       unless it is expected. Laws that need all seeds then have no result.

    Args:
        factory: A connector class, a suite of an implementation, or a class of stores or cache
            policies, whose suite the kit makes.
        expected_failures: Checks that may fail, as ``{name of a check: reason}``; such a check is
            reported if it passes. An item that a connector does not exercise has the name
            ``coverage: NAME``; ``*`` is allowed.
        select: Names of checks or laws, ``*`` allowed; empty for all.
        target: Name of the target in the report.
        on_result: Called with each result.
        on_seed: Called with three numbers: seeds so far, all seeds, and failures so far.
        on_step: Called with the progress of real inference.
        **settings: Fields of :class:`~kvview.testing.effort.Effort`.

    Raises:
        ConfigError: A target, a name or a setting cannot be used.
    """
    effort = Effort(**settings)
    factory = as_target(factory, effort)
    contract, planned = plan_checks(
        factory, effort, expected_failures=expected_failures, select=select
    )
    effort.shared.update(
        on_progress=on_seed, on_step=on_step, goes_on=goes_on_after(planned, effort.keep_going)
    )
    results: list[CheckResult] = []
    is_interrupted = False
    for item in planned:
        try:
            result = run_planned(factory, item, effort)
            results.append(result)
            if on_result is not None:
                on_result(result)
        except NotJudged:
            continue
        except KeyboardInterrupt:
            is_interrupted = True
            # Runs that ended early might have broken other laws later.
            if factory in effort.shared:
                continue
            break
    name = target or getattr(factory, "__qualname__", None) or repr(factory)
    return Report(
        name,
        contract,
        effort.seed,
        effort.seeds or int(getattr(factory, "num_runs", NUM_SEEDS)),
        results,
        len(planned),
        is_interrupted,
        runs=effort.shared.get(factory),
        versions=versions_of(factory),
    )


def goes_on_after(planned: Iterable[PlannedCheck], keep_going: bool) -> Callable[[str], bool]:
    """Return a function that decides whether the runs continue after a broken law."""
    judged = {one.check.law for one in planned if not (one.skip_reason or one.xfail_reason)}
    named = {*LAWS, EXCEPTIONS}
    return lambda law: keep_going or (law if law in named else "*") not in judged


def run_planned(factory: Factory, planned: PlannedCheck, effort: Effort) -> CheckResult:
    """Run one check, unless it is skipped."""
    check, expected = planned.check, planned.xfail_reason
    if planned.skip_reason:
        return CheckResult(check, Outcome.SKIPPED, reason=planned.skip_reason)
    failure = None
    start = time.perf_counter()
    try:
        with use_effort(effort):
            check.function(factory)
    except NotApplicable as reason:
        return CheckResult(check, Outcome.SKIPPED, reason=str(reason))
    except LawBroken as broken:
        failure = broken
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{check.name} needs {error.name}: pip install 'kvview[testing,reference]'"
        ) from error
    except Exception as error:
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
        outcome = Outcome.UNEXPECTED_PASS if expected else Outcome.PASSED
    elif expected:
        outcome = Outcome.EXPECTED_FAILURE
    else:
        outcome = Outcome.NOT_CHECKED if isinstance(failure, NotExercised) else Outcome.FAILED
    return CheckResult(check, outcome, seconds, expected, failure)


def read_expected_failures(path: str | Path) -> dict[str, str]:
    """Read lines of the form ``check_name: reason``; skip blank lines and ``#`` comments.

    Raises:
        ConfigError: The file cannot be read, or a line does not have this form.
    """
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or line_of(error)
        raise ConfigError(f"expected failures {str(path)!r} cannot be read: {why}") from error
    expected: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _EXPECTED.fullmatch(line)
        if found is None or found["name"] in expected:
            raise ConfigError(
                f"{path}:{number}: expected 'check_name: reason', each name once, got {line!r}"
            )
        expected[re.sub(r":\s*", ": ", found["name"], count=1)] = found["reason"]
    return expected


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
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ConfigError(f"{what}: {name!r} matches no check of this contract{hint}")
