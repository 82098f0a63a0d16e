"""A connector that passes every hook of the installed release on to another connector.

The hooks are read from ``KVConnectorBase_V1`` at import, so hooks of new releases are passed on.

Source: ``KVConnectorBase_V1``, vllm/distributed/kv_transfer/kv_connector/v1/base.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from kvview_vllm.canary.wrapper.canary_messages import CanaryMetadata
from kvview_vllm.canary.wrapper.canary_options import unwrap
from kvview_vllm.releases import reading

with reading("connector", "the interface of connectors"):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


def _method(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(KVConnectorBase_V1, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], CanaryMetadata):
            args = args[0].wrapped, *args[1:]
        return getattr(self._child, name)(*args, **kwargs)

    call.__isabstractmethod__ = False  # type: ignore[attr-defined] # copied from the base class
    return call


def _class_method(name: str) -> classmethod[Any, Any, Any]:
    inner = getattr(KVConnectorBase_V1, name).__func__

    @functools.wraps(inner)
    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            found = unwrap(argument)
            if found is None:
                continue
            kind, config = found
            given = [config if one is argument else one for one in args]
            named = {key: config if one is argument else one for key, one in kwargs.items()}
            return getattr(kind, name)(*given, **named)
        return inner(cls, *args, **kwargs)

    return classmethod(call)


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self._child, name))


def _hooks() -> dict[str, Any]:
    hooks: dict[str, Any] = {}
    for name in dir(KVConnectorBase_V1):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(KVConnectorBase_V1, name)
        if isinstance(member, classmethod):
            hooks[name] = _class_method(name)
        else:
            hooks[name] = _method(name) if inspect.isfunction(member) else _attribute(name)
    return hooks


PassedOn: Any = type(KVConnectorBase_V1)("PassedOn", (KVConnectorBase_V1,), _hooks())
"""The base class of a connector whose attribute ``_child`` receives all hooks."""


class DelegatingConnector(PassedOn):  # type: ignore[misc]
    """Passes all hooks, properties and other attributes on to :attr:`_child`.

    Derived classes set :attr:`_child` when they are constructed.
    """

    _child: Any

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the wrapped connector has."""
        if name == "_child" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._child, name)
