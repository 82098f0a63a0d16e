"""Connectors that keep their pages when vLLM resets all caches (vLLM 0.33.0).

``reset_prefix_cache(reset_connector=True)`` calls ``reset_cache`` of the connector, for example
after an update of the weights. The base class does nothing and returns None, and vLLM continues.

This script needs no GPU, no model and no kvview. ``python connectors_without_reset.py`` prints
whether each installed connector overrides ``reset_cache``. Expected: each does.
"""

from importlib import import_module

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

for target in (
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector:MooncakeStoreConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector:LMCacheConnectorV1",
    "openlake_client.openlake_connector:OpenLakeConnector",
    "vllm_kvblockd.connector:KvblockdConnector",
    "redhare.vllm_connector.connector:RedhareConnector",
    "spoolcache.vllm.connector:SpoolCacheConnector",
    "semblend_vllm_connector.connector:SemBlendVllmConnector",
    "tierkv.connectors.vllm.connector:TierKVConnector",
    "avp.connectors.vllm_kv_connector:AVPKVConnectorV1Dynamic",
    "stratacache.adapters.vllm.connector_v1:StrataCacheConnectorV1",
    "vllm_connector.nano_kv_connector:NanoKVConnector",
):
    module, _, name = target.partition(":")
    try:
        cls = getattr(import_module(module), name)
    except ImportError as error:
        print(f"{name}: not installed ({error})")
        continue
    kept = cls.reset_cache is KVConnectorBase_V1.reset_cache
    print(f"{name}: {'KEEPS ITS PAGES' if kept else 'resets them'}")
