"""The releases of an engine, as the engine's own package brings them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from kvview.errors import ConfigError

ENTRY_POINTS = "kvview.releases"
"""Group of the entry points that name a class of :class:`Releases`, by the name of the engine."""


@dataclass(frozen=True)
class Change:
    """A difference between two releases in a part that a connector uses.

    Args:
        owner: The class or module of the engine.
        name: Name of the method, field or import.
        told: The change, in one line.
        breaks: Whether the connector fails because of it.
        where: Place of its use, ``file:line``; empty for a missing method.
    """

    owner: str
    name: str
    told: str
    breaks: bool
    where: str


class Releases(Protocol):
    """The releases of an engine.

    An entry point :data:`ENTRY_POINTS` names its class, so that nothing else of the engine is
    imported to compare releases; or it is a static member of the engine's factory.
    """

    def resolve(self, names: Sequence[str], /) -> list[str]:
        """Return the releases that the names match, each once, in order.

        Raises:
            KVViewError: One of them names none.
        """

    def fetch(self, release: str, on_progress: Callable[[str], None], /) -> Path:
        """Return the folder that comes first on the import path in this release.

        Raises:
            KVViewError: It is not available; one line.
        """

    def environment(self) -> Mapping[str, str]:
        """Return the environment of a process that imports it, unless the user has set it."""

    def changes(self, target: str, old: Path, new: Path, /) -> list[Change]:
        """Return the changes between two releases in the parts that a connector uses.

        Args:
            target: As for ``kvview check``; it is read, not imported.
            old: What :meth:`fetch` gave.
            new: The same.

        Raises:
            KVViewError: The source of the target cannot be found or read.
        """


def load_releases(engine: str) -> Releases:
    """The releases of an engine, by the name of the engine.

    Raises:
        ConfigError: It has none.
    """
    bring: Callable[[], Releases] | None = None
    for point in entry_points(group=ENTRY_POINTS, name=engine):
        bring = point.load()
    if bring is None:
        from kvview.testing.connector.harness import load_factory_class

        bring = getattr(load_factory_class(engine), "releases", None)
    if bring is None:
        raise ConfigError(f"engine {engine!r} brings no releases to check in")
    return bring()
