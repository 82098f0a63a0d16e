"""Targets: what ``path/to/file.py:Name`` and ``package.module:Name`` stand for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from kvview.connector import Connector
from kvview.errors import ConfigError


def load_connector(target: str) -> type[Connector]:
    """Import the connector class that a target names.

    Args:
        target: ``path/to/file.py:Class`` or ``package.module:Class``.

    Raises:
        ConfigError: The target does not import, or names no ``Connector``.
    """
    location, colon, name = target.rpartition(":")
    if not colon or not location or not name:
        raise ConfigError(
            f"target {target!r}: expected 'path/to/file.py:Class' or 'package.module:Class'"
        )
    module = _import(target, location)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Connector)):
        connectors = sorted(
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Connector) and value is not Connector
        )
        what = "no such name" if found is None else "not a subclass of kvview.Connector"
        raise ConfigError(
            f"target {target!r}: {name!r} is {what}; connectors there: "
            f"{', '.join(connectors) or 'none'}"
        )
    return found


def load_target(target: str) -> Any:
    """What a target names: a class or a factory.

    Args:
        target: ``package.module:name`` or ``path/to/file.py:name``.

    Raises:
        ConfigError: It does not import, or there is no such name.
    """
    location, colon, name = target.rpartition(":")
    if not colon or not location or not name:
        raise ConfigError(
            f"target {target!r}: expected 'package.module:factory' or 'path/to/file.py:factory'"
        )
    module = _import(target, location)
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if _is_own_factory(value, module)]
        raise ConfigError(
            f"target {target!r}: {location} has no {name!r}; "
            f"it has: {', '.join(known) or 'nothing'}"
        )
    return getattr(module, name)


def _is_own_factory(value: object, module: object) -> bool:
    own = getattr(value, "__module__", None) == getattr(module, "__name__", None)
    return own and callable(value) and not getattr(value, "__name__", "_").startswith("_")


def _import(target: str, location: str) -> ModuleType:
    try:
        if not location.endswith(".py"):
            return importlib.import_module(location)
        path = Path(location)
        if not path.is_file():
            raise ConfigError(f"target {target!r}: there is no file {location!r}")
        # Registered under a name of its own, so that dataclasses and pickle find it.
        name = f"kvview_target_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, "a .py file always has a loader"
        assert spec.loader is not None, "a .py file always has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"target {target!r} does not import: {type(error).__name__}: {error}"
        ) from error
