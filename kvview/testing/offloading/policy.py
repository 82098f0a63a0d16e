"""A cache policy as a target, which the reference's manager uses in the checks of managers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvview.errors import ConfigError
from kvview.testing.harness import Factory

_METHODS = ("admit", "touch", "release", "remove")


@dataclass(frozen=True)
class ManagerOfPolicy:
    """Makes the harness of a manager with a policy.

    Args:
        made_of: Class of the policy.
    """

    made_of: type
    made_by = (
        "from kvview.testing.offloading.policy import as_factory\nfactory = as_factory(factory)"
    )

    def __call__(self) -> Any:
        """Make a harness in its first state."""
        from kvview.testing.connector.run.engine import load_engines

        engines = load_engines()
        if not hasattr(engines, "manager_of_policy"):
            raise ConfigError(f"engine {engines.name!r} has no manager that takes a cache policy")
        return engines.manager_of_policy(self.made_of)


def as_factory(found: Factory) -> Factory:
    """Return the factory of a target; for a cache policy, it makes a manager with that policy."""
    if isinstance(found, type) and all(callable(getattr(found, name, None)) for name in _METHODS):
        return ManagerOfPolicy(found)
    return found
