"""A cache policy as a target, which the reference's manager uses in the checks of managers."""

from __future__ import annotations

from typing import Any

from kvview.errors import ConfigError
from kvview.testing.suites.conformance import import_lines

_METHODS = ("admit", "touch", "release", "remove")


def is_cache_policy(target: object) -> bool:
    """Return whether a target is a class of cache policies."""
    has_methods = (callable(getattr(target, name, None)) for name in _METHODS)
    return isinstance(target, type) and all(has_methods)


def suite_of_policy(found: Any) -> Any:
    """Make the suite of a manager with a policy.

    Raises:
        ConfigError: No installed engine has such a manager.
    """
    from kvview.testing.connector.run.engine import load_engines  # imports torch

    engines: Any = load_engines()
    if not hasattr(engines, "suite_of_policy"):
        raise ConfigError(f"engine {engines.name!r} has no manager that takes a cache policy")
    name = f"{found.__name__}Suite"
    imports = f"{import_lines(found)}\nfrom {__name__} import suite_of_policy"
    made_by = f"{imports}\n\n{name} = suite_of_policy({found.__qualname__})"
    members = {"made_by": made_by, "__module__": found.__module__}
    return type(name, (engines.suite_of_policy(found),), members)
