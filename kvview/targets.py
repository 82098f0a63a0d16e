"""Targets: the names ``path/to/file.py:Name`` and ``package.module:Name`` of Python objects.

1. A file is loaded once per process, by its real path. So two spellings of one path are one
   module, and two files with the same stem are two modules.
2. The name of the module depends only on the path of the file, so an object that was pickled here
   can be unpickled in another process that has loaded the same target.
3. A relative path is relative to the current working directory or, if the file does not exist
   there, to the working directory of an earlier load.
4. A file that is edited after it was loaded is not loaded again in the same process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import TypeIs

from kvview.connector import Connector, SchedulerConnector, WorkerConnector
from kvview.connector.hook_errors import where
from kvview.connector.hooks import TARGET_PREFIX
from kvview.errors import ConfigError, did_you_mean, one_line

_ENGINE_BASES = {"KVConnectorBase_V1"}  # compared by name, so that no engine is imported here


def load_connector(target: str) -> type[Connector]:
    """Import the connector class that a target names.

    Args:
        target: ``path/to/file.py:Class`` or ``package.module:Class``; a nested class is written
            ``Outer.Inner``.

    Raises:
        ConfigError: The target cannot be imported, or is not a ``Connector`` class that can be
            built from a :class:`~kvview.ConnectorConfig`.
    """
    return require_connector(load_target(target), f"target {target!r}")


def require_connector(found: object, name: str) -> type[Connector]:
    """Refuse an object that is not a connector class that can be built.

    Args:
        found: The object.
        name: Name of the object, for the error.

    Raises:
        ConfigError: As for :func:`load_connector`.
    """
    if _is_connector_class(found):
        if problem := _why_not_built(found):
            raise ConfigError(f"{name}: {found.__qualname__} {problem}")
        return found
    raise ConfigError(f"{name} is {_described(found)}, not a subclass of Connector; name the class")


def is_connector(found: object) -> bool:
    """Whether an object is meant as a connector, although it may be a half or an instance."""
    parts = (Connector, SchedulerConnector, WorkerConnector)
    return isinstance(found, parts) or (isinstance(found, type) and issubclass(found, parts))


def is_engine_connector(found: object) -> bool:
    """Whether a target is a connector class of an engine, for example vLLM."""
    return isinstance(found, type) and any(kind.__name__ in _ENGINE_BASES for kind in found.__mro__)


def has_store(connector_class: type) -> bool:
    """Whether a connector is made of a store of pages."""
    return getattr(connector_class, "store", None) is not None


def load_target(target: str) -> Any:
    """Import the object that a target names, such as a class or factory.

    Args:
        target: ``package.module:name`` or ``path/to/file.py:name``; names may have dots.

    Raises:
        ConfigError: The module cannot be imported, or has no such name.
    """
    location, colon, name = target.rpartition(":")
    if not colon or not location or not name:
        raise ConfigError(
            f"target {target!r}: expected 'path/to/file.py:Name' or 'package.module:Name'"
        )
    module = _import(target, location)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            close = did_you_mean(part, dir(found)) or f"; it has: {_names_in(module)}"
            raise ConfigError(f"target {target!r}: {location} has no {name!r}{close}")
        found = getattr(found, part)
    return found


def target_of(value: Any) -> str | None:
    """Return the target of a class or function that was loaded from a file, or None."""
    path = _Files.paths.get(getattr(value, "__module__", None) or "")
    if path is None:
        return None
    return f"{path.removeprefix(os.getcwd() + os.sep)}:{value.__qualname__}"


def name_target(kind: type) -> str:
    """Return the target of a class: the loaded target, or one made from its module and name."""
    return target_of(kind) or f"{kind.__module__}:{kind.__qualname__}"


def _is_connector_class(found: object) -> TypeIs[type[Connector]]:
    return isinstance(found, type) and issubclass(found, Connector)


def _names_in(module: ModuleType) -> str:
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    connectors = [
        name
        for name, value in public.items()
        if _is_connector_class(value) and value is not Connector
    ]
    own = [
        name
        for name, value in public.items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(connectors or own) or "nothing"


def _described(found: Any) -> str:
    if isinstance(found, Connector):
        return f"an object of {type(found).__name__}"
    if is_connector(found):
        return "one half of a connector"
    if isinstance(found, type):
        return "a class"
    return f"a {type(found).__name__}"


def _why_not_built(found: type[Connector]) -> str | None:
    if found is Connector:
        return "is the base class, which has no code; name a subclass"
    if inspect.isabstract(found):
        lacks: frozenset[str] = vars(found)["__abstractmethods__"]
        return f"is abstract: it lacks {', '.join(sorted(lacks))}"
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # built in, without a signature
        return None
    try:
        signature.bind(None)
    except TypeError:
        return f"must be built from one argument, the ConnectorConfig: it takes {signature}"
    return None


class _Files:
    """A finder of the import system for modules that are loaded from files.

    The import system provides the locks and the clean-up after a failure, and pickle, dataclasses
    and ``importlib.reload`` find the modules.
    """

    paths: dict[str, str] = {}  # noqa: RUF012 - one table per process, as sys.modules is
    _locations: dict[str, str] = {}  # noqa: RUF012 - paths as written, with their real paths

    @classmethod
    def add(cls, location: str) -> str:
        """Make the module of a file importable, and return the module's name."""
        path = os.path.realpath(location)
        if os.path.isfile(path):
            cls._locations[location] = path
        path = cls._locations.get(location, path)
        stem = re.sub(r"\W", "_", Path(path).stem)
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
        name = f"{TARGET_PREFIX}{stem}_{digest}"
        cls.paths[name] = path
        return name

    @classmethod
    def find_spec(cls, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a module, as the import system requires it."""
        path = cls.paths.get(name)
        return None if path is None else importlib.util.spec_from_file_location(name, path)


sys.meta_path.append(_Files)  # last, because no other finder has such names


def _import(target: str, location: str) -> ModuleType:
    name = location
    if location.endswith(".py"):
        name = _Files.add(location)
        if name not in sys.modules and not os.path.isfile(_Files.paths[name]):
            seen_from = "" if os.path.isabs(location) else f" in {os.getcwd()}"
            raise ConfigError(f"target {target!r}: there is no file {location!r}{seen_from}")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        line = where(error, name) or ""
        file = f"{location.replace('.', os.sep)}.py"
        is_file = name == location and os.path.isfile(file)
        hint = f". Did you mean the file {file}:{target.rpartition(':')[2]}?" if is_file else ""
        raise ConfigError(
            f"target {target!r} cannot be imported: "
            f"{line}{': ' * bool(line)}{one_line(error)}{hint}"
        ) from error
