"""The record of the calls on an object under test, as a script that reproduces a failure."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from typing import Any, ClassVar, NoReturn

from kvview.connector.hook_errors import where
from kvview.targets import target_of
from kvview.testing import watchdog
from kvview.testing.checks import running_check
from kvview.testing.effort import Effort, current_effort
from kvview.testing.law_broken import LawBroken
from kvview.testing.repetition import cut_repetitions

_NUM_IMPORTS = 4  # number of import lines in the header
_RESULT = reprlib.Repr()  # the class takes no arguments before Python 3.12
_RESULT.maxlist = _RESULT.maxtuple = _RESULT.maxdict = _RESULT.maxset = 24
_RESULT.maxstring = _RESULT.maxother = 200


class Recorder:
    """Calls a harness for one check, and records the calls as a script.

    Args:
        factory: Makes the harness; called once, by this constructor.
        law: The checked law. Law that the check tests; if it contains ``*``, each failure names its
            own law.
        subject: Name of the attribute of the harness that is under test.
    """

    max_listed: int | None = None
    """Maximum of items that are taken from an iterator; None for no limit."""

    is_timed: ClassVar[bool] = False
    """Whether results depend on time, so that the calls alone do not reproduce the failure."""

    def __init__(self, factory: Callable[[], Any], law: str, subject: str) -> None:
        self.is_recording = True
        self.law = law
        self._factory = factory
        self.harness: Any = factory()
        self.subject: Any = getattr(self.harness, subject)
        self._names = {id(self.harness): "h", id(self.subject): subject}
        self._kept: list[object] = []  # named objects, so that their ids are not reused
        self._header = [
            "from kvview import *",
            "from contextlib import suppress",
            import_line(factory),
            "",
            "h = factory()",
            f"{subject} = h.{subject}",
        ]
        self._lines: list[str] = []
        self._last: tuple[str, object] | None = None
        self._begun = subject  # the last call
        self._asserts = False  # whether the last line fails by itself

    def end(self) -> None:
        """Release the resources of the harness, also after a failure."""

    def does_not_return(self, error: BaseException) -> NoReturn:
        """Break the law, because the watchdog ended a call."""
        self._asserts = False
        line = where(error)
        got = str(error) + (f": it is at {line}" if line else "")
        self.fail(f"{self._begun} must return", got, "it returns")

    def use(self, harness: Any, subject: str) -> None:
        """Continue with the harness that the last call returned."""
        self.harness, self.subject = harness, getattr(harness, subject)
        self._names |= {id(harness): "h", id(self.subject): subject}
        if not self.is_recording:
            return
        assert self._last is not None, "a harness comes from a call"
        self._lines[-1] = f"h = {self._last[0]}"
        self._lines.append(f"{subject} = h.{subject}")

    def name(self, value: object, name: str) -> None:
        """Name the result of the last call in the script."""
        if self.is_recording:
            assert self._last is not None, "only results have names"
            self._lines[-1] = f"{name} = {self._last[0]}"
            self._last = None
        self._names[id(value)] = name
        self._kept.append(value)

    def give_name(self, value: object, name: str, line: str) -> None:
        """Name an object that the check made; ``line`` is the line of the script that makes it."""
        if line not in self._header:
            self._header.append(line)
        self._names[id(value)] = name
        self._kept.append(value)

    def call(self, receiver: object, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method; an exception breaks the checked law."""
        code = self._code(receiver, method, args, kwargs)
        return self._run(code, lambda: getattr(receiver, method)(*args, **kwargs))

    def listed(self, receiver: object, method: str) -> list[Any]:
        """Call a method, and take all items from the iterator that it returns."""
        code = f"list({self._code(receiver, method, (), {})})"
        limit = self.max_listed
        return list(self._run(code, lambda: list(islice(getattr(receiver, method)(), limit))))

    def step(self, iterator: Iterator[Any]) -> Any:
        """Take one item from a named iterator; None at its end."""
        return self._run(f"next({self._names[id(iterator)]}, None)", lambda: next(iterator, None))

    def read(self, receiver: object, attribute: str) -> Any:
        """Read an attribute."""
        code = f"{self._names[id(receiver)]}.{attribute}"
        return self._run(code, lambda: getattr(receiver, attribute))

    def refused(
        self,
        error: type[Exception],
        receiver: object,
        method: str,
        *args: Any,
        law: str | None = None,
        **kwargs: Any,
    ) -> Exception:
        """Call a method that must raise ``error``."""
        code = self._code(receiver, method, args, kwargs)
        return self.refuses(error, code, lambda: getattr(receiver, method)(*args, **kwargs), law)

    def refuses(
        self,
        error: type[Exception],
        code: str,
        function: Callable[[], object],
        law: str | None = None,
    ) -> Exception:
        """Run a call that must raise ``error``; ``code`` is its line in the script."""
        self._last = None
        self._begin(code)
        raised: Exception | None = None
        got = "no error"
        try:
            got = f"no error, {_RESULT.repr(function())}"
        except Exception as caught:
            raised, got = caught, _exception(caught)
        if not isinstance(raised, error):
            what = f"{code} must raise {error.__name__}"
            self._lines += ["try:", f"    {code}", f"except {error.__name__}:", "    pass"]
            self._lines += ["else:", f"    raise AssertionError({what!r})"]
            self._asserts = True
            self.fail(what, got, error.__name__, law)
        self._lines += [f"with suppress({error.__name__}):", f"    {code}"]
        return raised

    def line(self, code: str) -> None:
        """Add a line to the script for a step that was not recorded."""
        self._lines.append(code)
        self._last = None

    def derive(self) -> None:
        """Mark the next value as derived from the last result, not as equal to it by chance.

        If one line of a script cannot express the derivation, the script runs the check itself.
        """
        self._last = None

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Omit read-only calls from the script, unless such a call fails."""
        length = len(self._lines)
        yield
        del self._lines[length:]
        self._last = None

    def equal(self, got: object, expected: object, what: str, law: str | None = None) -> None:
        """Break the law unless two values are equal."""
        if got != expected:
            if self._last is not None and self._last[1] == got:
                self._lines[-1] = f"got = {self._last[0]}"
                self._lines.append(f"assert got == {_source(expected)}, got")
                self._asserts = True
            self.fail(what, _RESULT.repr(got), _RESULT.repr(expected), law)

    def true(
        self, holds: bool, what: str, got: object, expected: str, law: str | None = None
    ) -> None:
        """Break the law unless a condition is true."""
        if not holds:
            self.fail(what, _RESULT.repr(got), expected, law)

    def fail(self, what: str, got: str, expected: str, law: str | None = None) -> NoReturn:
        """Break the law."""
        broken = law if law is not None and "*" in self.law else self.law
        told = f"# {broken}: {what}: got {got}, expected {expected}".splitlines()
        script = self.script() if self._asserts and not self.is_timed else self._check_again()
        script += "\n# ".join(told) + "\n"
        raise LawBroken(broken, what, got=got, expected=expected, script=script)

    def script(self) -> str:
        """Return the calls so far as Python code."""
        return "\n".join(self._header + self._lines) + "\n"

    def _check_again(self) -> str:
        """Return a script with the calls as comments, which runs the check again."""
        check = running_check()
        if check is None:
            return self.script()
        effort = current_effort()
        call = f"{check.__name__}(factory)"
        if effort != Effort():
            call = f"with use_effort({effort!r}): {call}"
        return "\n".join(
            [
                import_line(self._factory),
                "from kvview.testing.effort import Effort, use_effort",
                f"from {check.__module__} import {check.__name__}",
                "",
                *self._calls_as_comments(),
                f"{call}  # raises LawBroken",
                "",
            ]
        )

    def _calls_as_comments(self) -> Iterator[str]:
        yield "# Among its calls are these:"
        for call in cut_repetitions(self._header[_NUM_IMPORTS:] + self._lines):
            for line in call.splitlines():  # because a repr may have several lines
                yield f"#   {line}"

    def _begin(self, code: str) -> None:
        watchdog.next_call()
        self._begun = code

    def _run(self, code: str, function: Callable[[], Any]) -> Any:
        self._begin(code)
        try:
            result = function()
        except Exception as error:
            self._lines.append(code)
            self._asserts = True
            self.fail(f"{code} must not raise", _exception(error), "no error")
        if not self.is_recording:
            return result
        self._last = (code, result)
        self._lines.append(code if result is None else f"{code}  # -> {_RESULT.repr(result)}")
        return result

    def _code(
        self, receiver: object, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """Return the line of a call; without a recording only the method's name, to save time."""
        if not self.is_recording:
            return method
        shown = [self._shown(arg) for arg in args]
        shown += [f"{key}={value!r}" for key, value in kwargs.items()]
        return f"{self._names[id(receiver)]}.{method}({', '.join(shown)})"

    def _shown(self, value: object) -> str:
        if type(value) is tuple and len(value) > 1:
            return f"({', '.join(map(self._shown, value))})"
        if type(value) is list:
            return f"[{', '.join(map(self._shown, value))}]"
        return self._names.get(id(value)) or repr(value)


def _source(value: object) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    return repr(value)


def _exception(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def import_line(factory: Callable[[], Any]) -> str:
    """Return the line of a script that imports a factory."""
    made_of = getattr(factory, "made_of", None)
    if made_of is not None:  # the kit made the factory from a class
        return f"{import_line(made_of)}\n{getattr(factory, 'made_by', '')}"
    module = getattr(factory, "__module__", None)
    name = getattr(factory, "__qualname__", None)
    if target := target_of(factory):
        return f"from kvview.testing import load_target\nfactory = load_target({target!r})"
    if module is None or name is None or not name.isidentifier() or module == "__main__":
        return f"factory = ...  # the factory that was checked: {name or factory!r}"
    return f"from {module} import {name} as factory"
