r"""``KVViewHiCache``: a storage backend of SGLang's cache controller over any tier store.

    python -m sglang.launch_server ... --enable-hierarchical-cache \
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvview", "module_path": "kvview_sglang",
        "class_name": "KVViewHiCache", "interface_v1": 1,
        "tier": {"weights": "REVISION",
                 "store": "my_store.py:Store", "options": {"root": "/kv"}}}'

1. SGLang's storage threads call these methods; each call waits for its pages, at most until the
   guard's deadline.
2. The key of a page includes the properties that decide its bytes and that SGLang's own key lacks:
   the pool, its type, layout, dtype and shape, and the rank unless ranks share the page.

Source: ``HiCacheStorage``, sglang/srt/mem_cache/hicache_storage.py, and
storage/backend_factory.py, 0.5.23.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from kvview import ConfigError, TierJobError
from kvview.bridge import TierOptions, open_tier
from kvview.errors import one_line
from kvview.options import parse_options
from kvview.tier import Namespace
from kvview_sglang.storage_meter import StorageMeter

_log = logging.getLogger(__name__)
_BETWEEN_POLLS = 0.0003  # seconds
_SHAPE = ("layout", "dtype", "page_size", "layer_num", "head_num", "head_dim", "kv_cache_dim",
          "start_layer", "end_layer", "storage_format_tag")  # fmt: skip


class KVViewHiCache(HiCacheStorage):  # type: ignore[misc]
    """A storage backend over any :class:`~kvview.tier.TierStore`.

    Args:
        storage_config: ``HiCacheStorageConfig``; its ``extra_config`` has an entry ``tier`` with
            the fields of :class:`~kvview.bridge.TierOptions`.
        given: Another argument of SGLang, which is not used.

    Raises:
        ConfigError: An option that cannot be used, or unknown model or weights.
        NamespaceMismatchError: The store already holds pages of other weights or another layout.
    """

    def __init__(self, storage_config: Any, given: Any = None) -> None:
        config = storage_config
        self._is_mla = bool(config.is_mla_model)
        self._rank = f"{config.tp_rank}"
        shards = [
            (name, getattr(config, name, None))
            for name in ("pp_rank", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size",
                         "tp_lcm_size", "should_split_heads", "logical_page_size")
        ]  # fmt: skip
        try:
            settings = (config.extra_config or {}).get("tier")
            if not isinstance(settings, dict):
                raise ConfigError(
                    "the extra config needs an object 'tier' with 'store' and 'weights'"
                )
            options = parse_options(TierOptions, settings)
            namespace = Namespace(
                str(config.model_name or ""),
                weights=options.weights,
                layout=repr([self._is_mla, *shards]),
                tensor_parallel=config.tp_size,
                pipeline_parallel=config.pp_size,
            )
            self.guard = open_tier(options, namespace)
        except ConfigError as error:
            raise ConfigError(f"kvview_sglang, extra config: {error}") from None
        self._meter = (
            StorageMeter(self.guard, options.store, config)
            if config.enable_storage_metrics
            else None
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._done: dict[int, list[bool]] = {}

    # --- v2: pages of several pools ---

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of each pool; return a flag for each page."""
        return {each.name: self._transfer(each, self._set_pages) for each in transfers}

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of each pool; return a flag for each page."""
        return {each.name: self._transfer(each, self._get_pages) for each in transfers}

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Return the longest prefix that can be restored in every pool."""
        stored = self._held(PoolName.KV, keys)
        num = _leading(stored)
        hits: dict[Any, int] = {PoolName.KV: num} if num else {}
        restorable = set(range(1, num + 1))
        for each in pool_transfers or ():
            policy = each.hit_policy
            if policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                # Groups of blocks are not stored here, and never shorten a hit; later policies
                # are unknown.
                if str(policy.value) != "block_groups":
                    restorable.clear()
                continue
            flags = self._held(each.name, keys)
            window = max(1, len(each.keys or ()))
            whole = policy == PoolHitPolicy.ALL_PAGES
            fine = {
                length
                for length in range(1, num + 1)
                if all(flags[0 if whole else max(0, length - window) : length])
            }
            if fine:
                hits[each.name] = max(fine)
            restorable &= fine
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    # --- v1: pages of one pool ---

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages; return a flag for each page."""
        pool = self.mem_pool_host
        return self._set_pages(PoolName.KV, keys, pool, _places(host_indices, keys, pool))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages; return a flag for each page."""
        pool = self.mem_pool_host
        return self._get_pages(PoolName.KV, keys, pool, _places(host_indices, keys, pool))

    # --- the older calls: tensors ---

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store one page."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages; return whether all were stored."""
        return all(self._put(PoolName.KV, keys, values))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load one page into a tensor and return the tensor, or None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Load pages into tensors and return the tensors, with None for each miss."""
        flags = self._get(PoolName.KV, keys, target_locations)
        return [
            tensor if flag else None for flag, tensor in zip(flags, target_locations, strict=True)
        ]

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self._held(PoolName.KV, [key])[0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of stored pages before the first missing page."""
        return _leading(self._held(PoolName.KV, keys))

    def get_stats(self) -> Any:
        """Return SGLang's own storage metrics, for the jobs since the last call."""
        return None if self._meter is None else self._meter.take()

    def close(self) -> None:
        """Fail the jobs in flight and close the store."""
        self.guard.close()

    # --- below ---

    def _transfer(self, transfer: Any, move: Callable[..., list[bool]]) -> list[bool]:
        pool, keys = self.registered_pools[transfer.name], transfer.keys or []
        return move(transfer.name, keys, pool, _places(transfer.host_indices, keys, pool))

    def _set_pages(self, name: Any, keys: list[str], pool: Any, places: list[int]) -> list[bool]:
        if len(places) != len(keys):
            return [False] * len(keys)
        return self._put(name, keys, [pool.get_data_page(place, flat=True) for place in places])

    def _get_pages(self, name: Any, keys: list[str], pool: Any, places: list[int]) -> list[bool]:
        if len(places) != len(keys):
            return [False] * len(keys)
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        flags = self._get(name, keys, pages)
        for flag, place, page in zip(flags, places, pages, strict=True):
            if flag:
                pool.set_from_flat_data_page(place, page)
        return flags

    def _put(self, name: Any, keys: list[str], tensors: Sequence[Any]) -> list[bool]:
        pages = [_bytes(tensor.contiguous()) for tensor in tensors]
        return self._moved(self.guard.put, name, keys, pages)

    def _get(self, name: Any, keys: list[str], tensors: Sequence[Any]) -> list[bool]:
        return self._moved(self.guard.get, name, keys, [_bytes(tensor) for tensor in tensors])

    def _moved(
        self, call: Callable[..., None], name: Any, keys: list[str], pages: list[memoryview]
    ) -> list[bool]:
        """Run a job, and wait for its end, at most until its deadline."""
        began = time.monotonic()
        try:
            with self._lock:
                job = next(self._numbers)
                call(job, self._keys(name, keys), pages)
        except TierJobError as error:
            _log.error("pages of %s fail: %s", name, one_line(error))
            return [False] * len(keys)
        while True:
            with self._lock:
                self._done.update(self.guard.poll())
                flags = self._done.pop(job, None)
            if flags is not None:
                break
            time.sleep(_BETWEEN_POLLS)
        if self._meter is not None:
            num_bytes = sum(len(page) for page, flag in zip(pages, flags, strict=True) if flag)
            is_get = call == self.guard.get
            self._meter.count(sum(flags), num_bytes, time.monotonic() - began, is_get=is_get)
        return flags

    def _held(self, name: Any, keys: list[str]) -> list[bool]:
        flags = self.guard.lookup(made := self._keys(name, keys))
        while None in flags:
            time.sleep(_BETWEEN_POLLS)
            flags = self.guard.lookup(made)
        return [bool(flag) for flag in flags]

    def _keys(self, name: Any, keys: list[str]) -> list[bytes]:
        is_shared = self._is_mla and name != PoolName.MAMBA
        pool = getattr(self, "mem_pool_host", None) if name == PoolName.KV else None
        pool = pool or getattr(self, "registered_pools", {}).get(name)
        facts = [type(pool).__name__, *((item, str(getattr(pool, item, ""))) for item in _SHAPE)]
        salt = repr([str(name), "" if is_shared else self._rank, facts]).encode()
        made = hashlib.blake2b(salt, digest_size=32)
        found = []
        for key in keys:
            each = made.copy()
            each.update(key.encode())
            found.append(each.digest())
        return found


def _bytes(tensor: Any) -> memoryview:
    return memoryview(tensor.view(torch.uint8).reshape(-1).numpy())


def _places(indices: Any, keys: list[str], pool: Any) -> list[int]:
    """Return the position of each page's first token; empty unless each key has one page."""
    size = getattr(pool, "page_size", 1) or 1
    if indices is None or indices.numel() != len(keys) * size:
        return []
    return [int(indices[number * size]) for number in range(len(keys))]


def _leading(flags: Sequence[bool]) -> int:
    return [*flags, False].index(False)
