"""Runs the checks of a contract over a factory, and says what came of each."""

from __future__ import annotations

import difflib
import fnmatch
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvview.errors import ConfigError
from kvview.testing.checks import Check, checks_for
from kvview.testing.harness import Contract, Factory
from kvview.testing.inspect_factory import inspect_factory
from kvview.testing.profiles import Profile, make_profile, use_profile
from kvview.testing.recorder import LawBroken
from kvview.testing.report import CheckResult, Outcome, Report


@dataclass(frozen=True)
class PlannedCheck:
    """A check, and what is known before it runs.

    Args:
        check: The check.
        skip_reason: Why it can not run, or empty.
        xfail_reason: Why it is expected to fail, or empty.
    """

    check: Check
    skip_reason: str
    xfail_reason: str


def plan_checks(
    factory: Factory,
    *,
    expected_failures: Mapping[str, str] | None = None,
    select: Sequence[str] = (),
) -> tuple[Contract, list[PlannedCheck]]:
    """What would run, in order.

    Raises:
        ConfigError: The target is not usable, or a name matches no check.
    """
    contract, capabilities = inspect_factory(factory)
    expected = dict(expected_failures or {})
    checks = checks_for(contract)
    _require_known("expected_failures", expected, checks, lambda name, c: name == c.name)
    _require_known("select", select, checks, _matches)
    for name, reason in expected.items():
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"expected_failures: {name} needs a reason")
    planned = []
    for check in checks:
        if select and not any(_matches(pattern, check) for pattern in select):
            continue
        missing = [name.value for name in check.requires if name not in capabilities]
        skip = f"the harness does not declare {', '.join(missing)}" if missing else ""
        planned.append(PlannedCheck(check, skip, expected.get(check.name, "")))
    return contract, planned


def run_checks(
    factory: Factory,
    *,
    expected_failures: Mapping[str, str] | None = None,
    profile: str = "ci",
    select: Sequence[str] = (),
    seed: int | None = None,
    target: str | None = None,
    on_result: Callable[[CheckResult], None] | None = None,
) -> Report:
    """Run every check of the contract that a factory's harness is for.

    1. Nothing runs unless the harness and all names are usable.
    2. A check whose capabilities are not declared is skipped, with the reason.
    3. Ctrl-C ends the run; what was found so far is returned.

    Args:
        factory: Makes a harness in its first state.
        expected_failures: ``{name of a check: reason}``; one that passes is bad news.
        profile: ``ci`` (the same every time) or ``soak`` (random, much longer).
        select: Names of checks or laws, ``*`` allowed; empty for all.
        seed: Of everything random; None lets the profile decide.
        target: How to name the factory in the report.
        on_result: Told each result as it comes.

    Raises:
        ConfigError: A target, a name or a profile that cannot be used.
    """
    chosen = make_profile(profile, seed)
    contract, planned = plan_checks(factory, expected_failures=expected_failures, select=select)
    results: list[CheckResult] = []
    is_interrupted = False
    try:
        for item in planned:
            result = run_planned(factory, item, chosen)
            results.append(result)
            if on_result is not None:
                on_result(result)
    except KeyboardInterrupt:
        is_interrupted = True
    name = target or getattr(factory, "__qualname__", None) or repr(factory)
    return Report(name, contract, chosen.name, chosen.seed, results, len(planned), is_interrupted)


def run_planned(factory: Factory, planned: PlannedCheck, profile: Profile) -> CheckResult:
    """Run one check, unless it is skipped."""
    check, expected = planned.check, planned.xfail_reason
    if planned.skip_reason:
        return CheckResult(check, Outcome.SKIPPED, reason=planned.skip_reason)
    failure = None
    start = time.perf_counter()
    try:
        with use_profile(profile):
            check.function(factory)
    except LawBroken as broken:
        failure = broken
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{check.name} needs {error.name}: pip install 'kvview[testing,reference]'"
        ) from error
    except Exception as error:
        # The target broke outside of a call that was made for it: in its factory.
        failure = LawBroken(
            check.law,
            f"{check.name} did not come to its end",
            got=f"{type(error).__name__}: {error}",
            expected="no error",
            script="",
        )
        failure.__cause__ = error
    seconds = time.perf_counter() - start
    if failure is None:
        outcome = Outcome.UNEXPECTED_PASS if expected else Outcome.PASSED
    else:
        outcome = Outcome.EXPECTED_FAILURE if expected else Outcome.FAILED
    return CheckResult(check, outcome, seconds, expected, failure)


def read_expected_failures(path: str | Path) -> dict[str, str]:
    """Read ``check_name: reason`` lines; blank lines and ``#`` comments are skipped.

    Raises:
        ConfigError: The file cannot be read, or a line is not of that form.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected failures {str(path)!r} cannot be read: {error}") from error
    expected: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, reason = line.partition(":")
        if not colon or not reason.strip() or name.strip() in expected:
            raise ConfigError(
                f"{path}:{number}: expected 'check_name: reason', each name once, got {line!r}"
            )
        expected[name.strip()] = reason.strip()
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
