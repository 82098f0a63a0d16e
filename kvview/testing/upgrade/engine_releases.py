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
    """What differs between two releases, of what a connector uses.

    Args:
        owner: The class or module of the engine.
        name: Of the method, the field or what is imported.
        told: What changed, in one line.
        breaks: Whether the connector, as it is written, fails on it.
        where: Where the connector uses it, ``file:line``; empty for what it lacks.
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
        """The releases that names stand for, each once, in order.

        Raises:
            KVViewError: One of them names none.
        """

    def fetch(self, release: str, on_progress: Callable[[str], None], /) -> Path:
        """A folder that comes first on the import path of what runs in this release.

        Raises:
            KVViewError: It cannot be had; one line.
        """

    def environment(self) -> Mapping[str, str]:
        """What is set for a process that imports it, unless the user has set it."""

    def changes(self, target: str, old: Path, new: Path, /) -> list[Change]:
        """What changed, of what a connector uses, by the sources of two releases.

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
