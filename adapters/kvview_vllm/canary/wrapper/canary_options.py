"""The options of the canary, and the configuration of the connector that it wraps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvview import ConfigError
from kvview.options import parse_options
from kvview_vllm.releases import reading

with reading("connector", "the interface of connectors"):
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

_KEY = "canary"


class CanaryOptions(BaseModel):
    """The entry ``canary`` of ``kv_connector_extra_config``.

    Args:
        connector: Name of the wrapped connector, as in ``kv_connector``.
        module_path: Its module, as in ``kv_connector_module_path``; None for connectors of vLLM.
        sample: One block in this many is digested, chosen by the first byte of its hash.
        on_difference: Reaction to wrong KV: only log it, let vLLM compute the blocks, or stop.
        incidents: Folder for the files of incidents; None for log lines only, without a recorder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    connector: str
    module_path: str | None = None
    sample: int = Field(default=64, ge=1, le=256)
    on_difference: Literal["log", "recompute", "stop"] = "log"
    incidents: str | None = None


def canary_options(transfer_config: Any) -> CanaryOptions:
    """Read the options out of a ``KVTransferConfig``.

    Raises:
        ConfigError: The entry is missing or has an unknown key.
    """
    entry = (transfer_config.kv_connector_extra_config or {}).get(_KEY)
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f'kv_connector_extra_config needs an entry "canary" that names the wrapped connector, '
            f'got {entry!r}; add "canary": {{"connector": "OffloadingConnector"}}'
        )
    try:
        return parse_options(CanaryOptions, entry)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: canary: {error}") from None


def wrapped_transfer_config(transfer_config: Any) -> Any:
    """Return the ``KVTransferConfig`` of the wrapped connector."""
    options = canary_options(transfer_config)
    wrapped = copy.copy(transfer_config)
    wrapped.kv_connector = options.connector
    wrapped.kv_connector_module_path = options.module_path
    extra = transfer_config.kv_connector_extra_config
    wrapped.kv_connector_extra_config = {key: extra[key] for key in extra if key != _KEY}
    return wrapped


def wrapped_config(vllm_config: Any) -> Any:
    """Return the ``VllmConfig`` of the wrapped connector."""
    wrapped = copy.copy(vllm_config)
    wrapped.kv_transfer_config = wrapped_transfer_config(vllm_config.kv_transfer_config)
    return wrapped


def wrapped_class(transfer_config: Any) -> type:
    """Return the class of the wrapped connector.

    Args:
        transfer_config: Its own ``KVTransferConfig`` (:func:`wrapped_transfer_config`).
    """
    kind: type = KVConnectorFactory.get_connector_class(transfer_config)
    return kind


def unwrap(argument: Any) -> tuple[type, Any] | None:
    """Return the wrapped class and its configuration for an argument of a class method.

    Args:
        argument: A ``VllmConfig``, a ``KVTransferConfig`` or a ``kv_connector_extra_config``; None
            is returned for any other argument.
    """
    if isinstance(argument, VllmConfig):
        config = wrapped_config(argument)
        return wrapped_class(config.kv_transfer_config), config
    if isinstance(argument, KVTransferConfig):
        config = wrapped_transfer_config(argument)
        return wrapped_class(config), config
    if isinstance(argument, Mapping) and _KEY in argument:
        outer = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=dict(argument))
        config = wrapped_transfer_config(outer)
        return wrapped_class(config), config.kv_connector_extra_config
    return None
