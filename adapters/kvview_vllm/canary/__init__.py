"""A canary in a real server: any connector of vLLM, with digests of sampled blocks.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CanaryConnector",
      "kv_connector_module_path": "kvview_vllm.canary", "kv_role": "kv_both",
      "kv_connector_extra_config": {"canary": {"connector": "OffloadingConnector"},
                                    "cpu_bytes_to_use": 8000000000}}'

The check of raw connectors uses the laws of calls (:mod:`.call_laws`) and must not import vLLM, so
the connectors are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvview_vllm.canary.wrapper.canary_connector import (
        CanaryConnector as CanaryConnector,
        CanaryOneGroupConnector as CanaryOneGroupConnector,
    )

__all__ = ["CanaryConnector", "CanaryOneGroupConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("kvview_vllm.canary.wrapper.canary_connector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
