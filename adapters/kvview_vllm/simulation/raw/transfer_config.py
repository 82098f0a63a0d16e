"""The arguments of ``KVTransferConfig`` for a raw connector's target and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from kvview import ConfigError
from kvview.errors import line_of
from kvview_vllm.releases.compat.calls import finds_old_constructor
from kvview_vllm.releases.compat.versions import vllm

TRANSFER_CONFIG = "kv_transfer_config"
"""The option that holds a whole ``--kv-transfer-config``."""


def split_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``KVTransferConfig``, without the class.

    Args:
        options: ``kv_connector_extra_config``, with :data:`TRANSFER_CONFIG` next to its keys.

    Raises:
        ConfigError: The configuration is not a mapping, or has a key that vLLM does not know.
    """
    extra = dict(options)
    config = extra.pop(TRANSFER_CONFIG, {})
    if not isinstance(config, Mapping):
        raise ConfigError(f"kv_transfer_config must be a JSON object, got {config!r}")
    given = config.get("kv_connector_extra_config", {})
    merged = {**config, "kv_connector_extra_config": {**given, **extra}}
    try:
        vllm("config").KVTransferConfig(
            **{**merged, "kv_connector": "Any", "kv_role": merged.get("kv_role", "kv_both")}
        )
    except Exception as error:
        raise ConfigError(f"vLLM refuses the kv_transfer_config: {line_of(error)}") from error
    return merged


def classes_of(connector_class: type, config: Mapping[str, Any]) -> list[type]:
    """Return a connector's class, and those of the children of a ``MultiConnector`` or a canary.

    Args:
        connector_class: The connector.
        config: Configuration of the connector, as :func:`split_options` returns it.

    Raises:
        ConfigError: vLLM refuses the configuration of a child.
    """
    names = {kind.__name__ for kind in connector_class.__mro__}
    extra = config["kv_connector_extra_config"]
    children: Any = extra.get("connectors", []) if "MultiConnector" in names else []
    if "CanaryOneGroupConnector" in names:
        entry = extra.get("canary", {})
        wrapped = {"kv_connector": entry.get("connector"), "kv_role": "kv_both"}
        path = {"kv_connector_module_path": entry.get("module_path")}
        children = [wrapped | path | {"kv_connector_extra_config": extra}]
    return [connector_class, *_classes(children)]


def _classes(children: Any) -> Iterator[type]:
    if not isinstance(children, Sequence) or isinstance(children, str):
        raise ConfigError(f"connectors must be a JSON list of objects, got {children!r}")
    for child in children:
        if not isinstance(child, Mapping):
            raise ConfigError(f"each entry of connectors must be a JSON object, got {child!r}")
        try:
            kind = _factory().get_connector_class(vllm("config").KVTransferConfig(**child))
        except Exception as error:
            raise ConfigError(
                f"vLLM refuses entry {child!r} of connectors: {line_of(error)}"
            ) from error
        yield from classes_of(kind, {"kv_connector_extra_config": {}} | dict(child))


@contextmanager
def registered(connector_class: type | None) -> Iterator[None]:
    """Make vLLM build this class, because up to 0.21 a registered name overrides a module path."""
    if connector_class is None:
        yield
        return
    factory = _factory()
    with ExitStack() as stack:
        names = {connector_class.__name__: lambda: connector_class}
        stack.enter_context(patch.dict(factory._registry, names))
        for name, method in finds_old_constructor(factory, connector_class).items():
            stack.enter_context(patch.object(factory, name, method))
        yield


def _factory() -> Any:
    return vllm("distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
