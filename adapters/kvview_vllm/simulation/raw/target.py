"""The arguments of ``KVTransferConfig`` for a raw connector's target and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from kvview import ConfigError
from kvview.errors import line_of
from kvview_vllm.releases.versions import vllm

TRANSFER_CONFIG = "kv_transfer_config"
"""The option that holds a whole ``--kv-transfer-config``."""


def split_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """``KVTransferConfig`` arguments, without the class.

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
    """Return a connector's class, and the classes of the children of a ``MultiConnector``."""
    return [connector_class, *_children(config)]


def _children(config: Mapping[str, Any]) -> Iterator[type]:
    for child in config.get("kv_connector_extra_config", {}).get("connectors", ()):
        yield _factory().get_connector_class(vllm("config").KVTransferConfig(**child))
        yield from _children(child)


@contextmanager
def registered(connector_class: type | None) -> Iterator[None]:
    """Make vLLM build this class: up to 0.21 a registered name has priority over a module path."""
    if connector_class is None:
        yield
        return
    with patch.dict(_factory()._registry, {connector_class.__name__: lambda: connector_class}):
        yield


def _factory() -> Any:
    return vllm("distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
