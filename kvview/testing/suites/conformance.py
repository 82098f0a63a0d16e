"""The suites that implementers derive from, and the Hypothesis machines that run their calls.

A suite is a pytest class. Its ``test_calls`` runs a state machine of Hypothesis: the rules are the
calls of the contract, which run on the object under test and on the model of the contract, and all
observables of both are compared after each call. Its other tests check properties that a model
cannot state, such as cost and growth.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, TypeVar
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.control import current_build_context
from hypothesis.errors import Flaky, FlakyFailure
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvview.connector.hook_errors import where
from kvview.laws import laws as all_laws
from kvview.targets import target_of
from kvview.testing.checks import CHECKS, Check
from kvview.testing.effort import Effort, current_effort
from kvview.testing.results.law_broken import LawBroken, broken
from kvview.testing.suites.capability import Capability, Contract, capabilities_of
from kvview.testing.suites.cost import growth_of
from kvview.testing.supervision import watchdog

# CPU seconds that one call may take; a call that uses no CPU may take four times as long.
_CALL_SECONDS = 10.0
_SHRINK_SECONDS = 30.0  # seconds from the first failure, after which no smaller run is tried
_TOLERATED_GROWTH = 32_768  # bytes
_COMPARE = "state.compare()"
# Hypothesis derives five of six runs from an earlier run, and makes the first ones short, unless a
# backend draws the values. Independent runs find faults in half of the time.
_BACKEND = "kvview"
AVAILABLE_PROVIDERS[_BACKEND] = type("Independent", (HypothesisProvider,), {})
_RESULT = reprlib.Repr()  # the class takes no arguments before Python 3.12
_RESULT.maxlist = _RESULT.maxtuple = _RESULT.maxdict = _RESULT.maxset = 24
_RESULT.maxstring = _RESULT.maxother = 200

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
MachineT = TypeVar("MachineT", bound="ContractMachine")
ItemT = TypeVar("ItemT")

Promises = Iterable[tuple[str, str, bool]]
"""Laws, each with a promise of the law, and whether the promise was kept."""

Needs = Mapping[str, tuple[Capability, ...]]
"""Laws, each with the capabilities without which the law cannot be broken."""


def of_state(
    strategy: Callable[[Any], st.SearchStrategy[ItemT]],
) -> st.SearchStrategy[ItemT]:
    """Return a strategy that depends on the state of the machine, which it receives."""
    return st.runner().flatmap(strategy)


def operation(
    law: str,
    *needs: Capability,
    when: Callable[[Any], object] | None = None,
    **arguments: st.SearchStrategy[Any],
) -> Callable[[FunctionT], FunctionT]:
    """Make a rule of a machine from a method.

    Args:
        law: The law that is broken by an unexpected exception, or by a difference for which no
            other law is named.
        *needs: Capabilities without which the rule does not run.
        when: Whether the rule can run in the machine's state.
        **arguments: The strategies of the arguments.
    """

    def is_possible(machine: ContractMachine) -> bool:
        return machine.can(*needs) and (when is None or bool(when(machine)))

    def mark(function: FunctionT) -> FunctionT:
        def call(machine: ContractMachine, *args: Any, **kwargs: Any) -> Any:
            machine.begin_operation(law)
            machine.calls.append((function.__name__, kwargs))
            return function(machine, *args, **kwargs)

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        call.__qualname__, call.__module__ = function.__qualname__, function.__module__
        return precondition(is_possible)(rule(**arguments)(call))  # type: ignore

    return mark


def observable(law: str, *needs: Capability) -> Callable[[FunctionT], FunctionT]:
    """Mark a method of a machine as a comparison that follows every rule.

    Args:
        law: The law that is broken by a difference for which no other law is named.
        *needs: Capabilities without which the values are not compared.
    """

    def mark(function: FunctionT) -> FunctionT:
        function.observes = law, needs  # type: ignore[attr-defined]
        return function

    return mark


class _DoesNotReturn(BaseException):
    """A call did not return; Hypothesis does not catch it, because it must not be repeated."""

    def __init__(self, failure: LawBroken) -> None:
        super().__init__(str(failure))
        self.failure = failure


class ContractMachine(RuleBasedStateMachine):
    """Base of the machines, which make calls on an object under test and on a model.

    An ``@initialize`` rule of each machine draws the sizes and makes object and model.
    """

    suite_class: ClassVar[type[Conformance]]
    laws: ClassVar[tuple[str, ...]]
    """The laws that the machine checks."""
    needs: ClassVar[Needs] = {}
    """Capabilities without which a law cannot be broken; a law that is not listed needs none."""
    num_calls: ClassVar[int] = 40
    """Number of calls of a run, unless settings or ``kvview check`` have another number."""
    shrinks_until: ClassVar[float | None] = None
    """The time at which shrinking ends; None before the first failure."""
    found: ClassVar[list[LawBroken]]
    """The failures of all runs of a test so far."""

    def __init__(self) -> None:
        super().__init__()
        if self.shrinks_until and time.monotonic() > self.shrinks_until:
            context = current_build_context()
            if not context.is_final:
                context.data.mark_overrun()  # which, unlike reject(), is no result of these calls
        self.suite = self.suite_class()
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        """Names and arguments of the rules that ran, for failures that depend on time."""
        self.only_law: str | None = None
        """The law that a test outside of the machine checks; None for all."""
        self._law = self.laws[0]
        self._culprit: str | None = None
        self._is_comparing = False
        kind = type(self)  # whose properties have no value yet
        names = [n for n in sorted(dir(kind)) if hasattr(getattr(kind, n, None), "observes")]
        marked = [getattr(self, name) for name in names]
        self._observables = [
            (function, function.observes[0])
            for function in marked
            if self.can(*function.observes[1])
        ]

    def can(self, *capabilities: Capability) -> bool:
        """Return whether the implementation has all of these capabilities."""
        return all(self.suite.has(capability) for capability in capabilities)

    # --- laws ---

    def begin_operation(self, law: str) -> None:
        """Start a rule, whose unexpected exceptions break a law."""
        self._law, self._culprit = law, None

    def blame(self, law: str) -> None:
        """Set the law that a difference after the current rule breaks."""
        self._law = self._culprit = law

    def equal(self, got: object, expected: object, what: str, law: str | None = None) -> None:
        """Break a law unless two values are equal."""
        if got != expected:
            self.fail(what, _RESULT.repr(got), _RESULT.repr(expected), law)

    def true(
        self, holds: object, what: str, got: object, expected: str, law: str | None = None
    ) -> None:
        """Break a law unless a condition is true."""
        if not holds:
            self.fail(what, _RESULT.repr(got), expected, law)

    def judge(self, promises: Promises, got: object) -> None:
        """Break the law of the first promise that the model reports as not kept."""
        for law, promise, is_kept in promises:
            self.true(is_kept, promise, got, promise, law)

    def keeps_size(
        self, what: str, work: Callable[[], object], warm_up: Callable[[], object]
    ) -> None:
        """Break a law if some work, after a warm-up, leaves memory allocated."""
        grown = growth_of(work, warm_up)
        self.true(grown <= _TOLERATED_GROWTH, what, grown, f"at most {_TOLERATED_GROWTH} bytes")

    def fail(self, what: str, got: str, expected: str, law: str | None = None) -> NoReturn:
        """Break a law: that of the call that explains the difference, or else the named one."""
        raise self._failure(what, got, expected, law)

    def _failure(self, what: str, got: str, expected: str, law: str | None = None) -> LawBroken:
        law = self.only_law or (self._is_comparing and self._culprit) or law or self._law
        assert self.only_law or law in self.laws, f"{law} is not a law of {type(self).__name__}"
        kind = type(self)
        kind.shrinks_until = kind.shrinks_until or time.monotonic() + _SHRINK_SECONDS
        failure = broken(law)(law, what, got=got, expected=expected)
        failure.calls = self.calls
        self.found.append(failure)
        return failure

    # --- calls ---

    def call(
        self,
        receiver: object,
        method: str,
        *args: Any,
        permitted: tuple[type[Exception], ...] = (),
        **kwargs: Any,
    ) -> Any:
        """Call a method; an exception that is not permitted breaks the law of the rule."""
        try:
            with watchdog.calling():
                return getattr(receiver, method)(*args, **kwargs)
        except watchdog.HookTimeout as error:
            raise self._does_not_return(method, args, error) from error
        except permitted:
            raise
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            what = f"{_code(method, args)} must not raise"
            raise self._failure(what, got, "no error") from error

    def refused(
        self,
        error: type[Exception],
        receiver: object,
        method: str,
        *args: Any,
        law: str | None = None,
        **kwargs: Any,
    ) -> Exception:
        """Call a method that must raise an error; returns the error."""
        try:
            with watchdog.calling():
                result = getattr(receiver, method)(*args, **kwargs)
            got = f"no error, {_RESULT.repr(result)}"
        except watchdog.HookTimeout as timeout:
            raise self._does_not_return(method, args, timeout) from timeout
        except error as expected:
            return expected
        except Exception as other:
            got = f"{type(other).__name__}: {other}"
        what = f"{_code(method, args)} must raise {error.__name__}"
        raise self._failure(what, got, error.__name__, law)

    def _does_not_return(
        self, method: str, args: tuple[Any, ...], error: watchdog.HookTimeout
    ) -> _DoesNotReturn:
        line = where(error)
        got = str(error) + (f": it is at {line}" if line else "")
        return _DoesNotReturn(
            self._failure(f"{_code(method, args)} must return", got, "it returns")
        )

    # --- comparison ---

    @invariant()
    def compare(self) -> None:
        """Compare all observables of object and model."""
        self._is_comparing = True
        before = self._law
        for compare, law in self._observables:
            self._law = law
            compare()
        self._is_comparing, self._law = False, before


class Conformance:
    """Base of the suites of all contracts.

    An implementer derives one small class from the suite of a contract, and defines ``make``. All
    capabilities of the contract are checked, except those that ``lacks`` names.
    """

    contract: ClassVar[Contract]
    machine: ClassVar[type[ContractMachine]]
    """The machine of the contract."""
    Machine: ClassVar[type[ContractMachine]]
    """The machine of this suite; a script of a failure starts with it."""
    lacks: ClassVar[Collection[str]] = ()
    """The capabilities that the implementation lacks."""
    hangs: ClassVar[bool] = False
    """Whether a call of a test did not return, which would take the time limit in each test."""
    settings: ClassVar[settings | None] = None
    """The settings of Hypothesis; None for those of the profile, with ``num_calls`` calls."""
    num_runs: ClassVar[int] = 100
    """The number of runs of the machine in ``kvview check``, by default."""
    made_by: ClassVar[str] = ""
    """The lines of a script that make the suite; empty for a suite that a script can import."""
    protocols: ClassVar[Mapping[str, type]] = {}
    """The protocols that the objects of :meth:`parts` fulfil, by the name of the object."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "contract" in vars(cls):
            _register(cls)
        name = f"{cls.__name__}.Machine"
        names = {"suite_class": cls, "found": [], "__module__": cls.__module__}
        make: Any = type(cls.machine)  # the metaclass of Hypothesis
        cls.Machine = make(name, (cls.machine,), names)

    def has(self, capability: str) -> bool:
        """Return whether the implementation has a capability."""
        return capability in self.capabilities()

    @contextmanager
    def parts(self) -> Iterator[Mapping[str, object]]:
        """Make a small object under test, for a check of its methods before any law is checked.

        Yields:
            The objects that must have the methods of :attr:`protocols` and of the capabilities, by
            the names that :attr:`protocols` and the capabilities use; the suite itself is one.
        """
        yield {"suite": self}

    @classmethod
    def capabilities(cls) -> list[Capability]:
        """Return the capabilities that are checked."""
        return [one for one in capabilities_of(cls.contract) if one not in cls.lacks]

    @classmethod
    def source(cls) -> str:
        """Return the lines of a script that import or make the suite."""
        return cls.made_by or import_lines(cls)

    def test_calls(self) -> None:
        """Run the machine: random calls, each compared with the model.

        Raises:
            LawBroken: A law is broken; an ``ExceptionGroup``, if several are.
        """
        run_machine(
            type(self), self.settings or settings(stateful_step_count=self.machine.num_calls)
        )


def run_machine(suite: type[Conformance], options: settings, seed: int | None = None) -> None:
    """Run the machine of a suite.

    Args:
        suite: The suite.
        options: Settings of Hypothesis; deadlines and health checks are switched off.
        seed: The seed; None for the seed of the suite or of Hypothesis.

    Raises:
        LawBroken: A law is broken; an ``ExceptionGroup``, if several are.
    """
    machine: Any = suite.Machine
    machine.shrinks_until, machine.found = None, []
    for name in ("_hypothesis_internal_use_seed", "_hypothesis_internal_use_reproduce_failure"):
        setattr(machine, name, getattr(suite, name, None))
    if seed is not None:
        machine._hypothesis_internal_use_seed = seed
    backend = _BACKEND if options.backend == "hypothesis" else options.backend
    options = settings(
        options, deadline=None, suppress_health_check=list(HealthCheck), backend=backend
    )
    with _watched(suite):
        try:
            run_state_machine_as_test(machine, settings=options)
            if machine.found:  # it was caught before Hypothesis saw it, and later runs were skipped
                raise machine.found[0]
        except Flaky as error:
            raise _flaky(machine.found[0]) if machine.found else error from None
        finally:
            machine.shrinks_until = None


@contextmanager
def _watched(suite: type[Conformance]) -> Iterator[None]:
    """Watch all calls; after one that does not return, other tests of the suite are skipped.

    Raises:
        LawBroken: A call did not return.
        SkipTest: A call of an earlier test did not return.
    """
    if suite.hangs:
        raise SkipTest("a call of an earlier test did not return")
    with watchdog.limit(_CALL_SECONDS), watchdog.watching():
        try:
            yield
        except _DoesNotReturn as error:
            suite.hangs = True
            raise error.failure from None


def find_failures(suite: type[Conformance], effort: Effort) -> dict[str, LawBroken]:
    """Run the machine of a suite with the settings of ``kvview check``.

    Returns:
        The shrunk failure of each broken law, with the script of Hypothesis.
    """
    options = settings(
        settings.get_profile("default"),
        max_examples=runs_of(suite, effort),
        stateful_step_count=effort.steps or suite.machine.num_calls,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=not effort.is_brief,
        phases=[Phase.generate] if effort.is_brief else [Phase.generate, Phase.shrink],
    )
    try:
        run_machine(suite, options, effort.seed)
    except (LawBroken, ExceptionGroup) as error:
        found = list(_failures_in(error))
        if not found:
            raise
        failures: dict[str, LawBroken] = {}
        for failure in found:
            failure.script = _script(suite, failure)
            failures.setdefault(failure.law, failure)
        return failures
    return {}


def runs_of(suite: type[Conformance], effort: Effort) -> int:
    """Return the number of runs of a suite's machine."""
    return effort.seeds or suite.num_runs


def _flaky(failure: LawBroken) -> LawBroken:
    failure.got += "; the same calls did not fail again, so the failure depends on time"
    return failure


def _failures_in(error: BaseException) -> Iterator[LawBroken]:
    if isinstance(error, LawBroken):
        yield error
    elif isinstance(error, FlakyFailure):
        for failure in error.exceptions:
            if isinstance(failure, LawBroken):
                yield _flaky(failure)
    elif isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _failures_in(one)


def _script(suite: type[Conformance], failure: LawBroken) -> str:
    """Return the calls that Hypothesis found, with the import of their suite.

    Comparisons change nothing, so only the last one is needed.
    """
    notes = "\n".join(getattr(failure, "__notes__", ())).splitlines()
    starts = [at for at, line in enumerate(notes) if line.startswith("state = ")]
    if starts:
        *calls, end = notes[starts[0] :]
        calls = [line for line in calls[:-1] if line != _COMPARE] + calls[-1:]
    else:  # Hypothesis has not printed calls that did not fail again
        ran = [(name, arguments.items()) for name, arguments in failure.calls]
        texts = [(name, ", ".join(f"{key}={value!r}" for key, value in some)) for name, some in ran]
        calls = [f"state = {suite.__name__}.Machine()"]
        calls += [f"state.{name}({arguments})" for name, arguments in texts]
        end = "state.teardown()"
    told = f"{failure.law}: {failure.what}: got {failure.got}, expected {failure.expected}"
    lines = [suite.source(), "", *calls]
    return "\n".join([*lines, *(f"# {line}" for line in told.splitlines()), end, ""])


def example(law: str, *needs: Capability) -> Callable[[FunctionT], FunctionT]:
    """Mark a test of a suite, of a property that the model cannot state.

    The test receives the suite and a new machine, and makes the machine's calls itself.

    Args:
        law: The law that the test checks.
        *needs: Capabilities without which the test is skipped.
    """

    def mark(function: FunctionT) -> FunctionT:
        def test(suite: Conformance) -> None:
            if lacking := [need for need in needs if not suite.has(need)]:
                raise SkipTest(f"the implementation lacks {', '.join(lacking)}")
            machine = suite.Machine()
            machine.only_law = law
            with _watched(type(suite)):
                try:
                    function(suite, machine)
                finally:
                    machine.teardown()

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        test.__qualname__, test.__module__ = function.__qualname__, function.__module__
        test.checks = law, needs  # type: ignore[attr-defined]
        return test  # type: ignore[return-value]

    return mark


def _register(suite: type[Conformance]) -> None:
    """Register the laws and the tests of the suite of a contract as checks."""
    for law in suite.machine.laws:
        family, _, number = law.lower().partition("-")
        name = f"check_{family}_{number}"
        if any(check.name == name for check in CHECKS):  # a law that two contracts share
            name = f"check_{suite.contract}_{family}_{number}"
        CHECKS.append(_check_of_law(name, law, suite))
    for name, test in vars(suite).items():
        if hasattr(test, "checks"):
            law, needs = test.checks
            summary = (test.__doc__ or "").partition("\n")[0]
            CHECKS.append(Check(name, summary, law, suite.contract, needs, _calling(name)))


def _check_of_law(name: str, law: str, suite_class: type[Conformance]) -> Check:
    def run(suite: Any) -> None:
        if failure := failures_of(suite).get(law):
            raise failure

    needs = suite_class.machine.needs.get(law, ())
    return Check(name, f"{all_laws()[law].title}.", law, suite_class.contract, needs, run)


def failures_of(suite: type[Conformance]) -> Mapping[str, LawBroken]:
    """Return the failures of a suite's machine, which runs once for all checks."""
    effort = current_effort()
    if suite.Machine not in effort.shared:
        effort.shared[suite.Machine] = find_failures(suite, effort)
    found: Mapping[str, LawBroken] = effort.shared[suite.Machine]
    return found


def _calling(name: str) -> Callable[[Any], None]:
    def run(suite: Any) -> None:
        try:
            getattr(suite(), name)()
        except LawBroken as failure:
            call = f"{suite.__qualname__}().{name}()  # raises LawBroken"
            failure.script = f"{suite.source()}\n\n{call}\n"
            raise

    return run


def import_lines(subject: type) -> str:
    """Return the lines of a script that import a class, also one of a file."""
    if target := target_of(subject):
        load = "from kvview.testing import load_target"
        return f"{load}\n\n{subject.__qualname__} = load_target({target!r})"
    return f"from {subject.__module__} import {subject.__qualname__}"


def _code(method: str, args: tuple[Any, ...]) -> str:
    return f"{method}({', '.join(map(_RESULT.repr, args))})"
