"""A cache policy as a target, which the reference's manager uses in the checks of managers."""

from __future__ import annotations

from typing import Any

from kvview.errors import ConfigError
from kvview.testing.conformance import import_lines
from kvview.testing.connector.run.engine import load_engines
from kvview.testing.harness import Factory

_METHODS = ("admit", "touch", "release", "remove")


def as_factory(found: Factory) -> Factory:
    """Return a target; for a cache policy, the suite of a manager with that policy."""
    if not isinstance(found, type):
        return found
    if not all(callable(getattr(found, name, None)) for name in _METHODS):
        return found
    engines: Any = load_engines()
    if not hasattr(engines, "suite_of_policy"):
        raise ConfigError(f"engine {engines.name!r} has no manager that takes a cache policy")
    return _suite_of(found, engines.suite_of_policy(found))


def _suite_of(policy: type, suite: type) -> type:
    """Return the suite, whose scripts make it again."""
    name = f"{policy.__name__}Suite"

    def lines(cls: type) -> str:
        imported = f"{import_lines(policy)}\nfrom {__name__} import as_factory"
        return f"{imported}\n\n{name} = as_factory({policy.__qualname__})"

    members = {"source": classmethod(lines), "__module__": policy.__module__}
    return type(name, (suite,), members)
