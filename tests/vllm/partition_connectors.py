"""A connector whose keys are made of chosen properties, so that each can be omitted or added."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from examples.host_cache import HostCacheConnector, HostCacheScheduler, HostCacheWorker
from kvview import (
    BlockHash,
    BlockIds,
    CanonicalKVCaches,
    ConnectorConfig,
    OffloadKey,
    RequestInfo,
    SchedulerConnector,
    TransferResult,
    WorkerConnector,
)

SETTINGS = "{model} {revision} {dtype} {cache_dtype} {block_size} {ranks} {rank} {layout}"
_NUM_SLOTS = 64


class _Store:
    """Pages that outlive an engine, in a file at its end."""

    def __init__(self, folder: str) -> None:
        self.slots: OrderedDict[OffloadKey, int] = OrderedDict()
        self.free_slots = list(range(_NUM_SLOTS))
        self.pages: list[torch.Tensor] = []
        self.file = Path(folder) / "pages"
        if self.file.exists():
            self.slots, self.free_slots, self.pages = pickle.loads(self.file.read_bytes())

    def save(self) -> None:
        self.file.write_bytes(pickle.dumps((self.slots, self.free_slots, self.pages)))


_STORES: dict[str, _Store] = {}
_LIVES = count()


class KeyedConnector(HostCacheConnector):
    """The example, which names each block by a digest of the properties of its prefix.

    Options: ``name`` of the store, ``engine``, a text of the engine's settings, ``ignores``, the
    properties that the key does not contain, and ``adds``, ``request``, ``life`` or ``salt`` (of
    Python's ``hash``), which the key contains although the KV does not depend on it.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(replace(config, options={"cpu_blocks": _NUM_SLOTS}))
        self.options = config.options
        name = config.options["name"]
        if name not in _STORES:
            _STORES[name] = _Store(name)
        self.store = _STORES[name]

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return _Scheduler(self)

    @override
    def make_worker(self) -> WorkerConnector:
        return _Worker(self.store)


class _Scheduler(HostCacheScheduler):
    def __init__(self, connector: KeyedConnector) -> None:
        super().__init__(connector.config, _NUM_SLOTS)
        options = connector.options
        self.engine = options["engine"]
        self.ignores = options.get("ignores", "").split()
        self.adds = options.get("adds", "")
        self.life = f"{os.getpid()} {next(_LIVES)}"
        self.save = connector.store.save
        self.slots, self.free_slots = connector.store.slots, connector.store.free_slots

    def named(self, request: RequestInfo) -> RequestInfo:
        """Return the request with other hashes."""
        blocks = range(len(request.block_hashes))
        return replace(request, block_hashes=[self.digest(request, block) for block in blocks])

    def digest(self, request: RequestInfo, block: int) -> BlockHash:
        content = request.content
        tags = {"lora": "lora", "mm": "item", "cache_salt": "salt", "prompt_embeds": "embeds"}
        added: dict[str, object] = {"request": request.request_id, "life": self.life}
        added["salt"] = hash("salt")
        parts: list[object] = [self.engine, added.get(self.adds)]
        has_tokens = "tokens" not in self.ignores
        num_tokens = (block + 1) * self.geometry.hash_block_size
        parts.append(list(content.token_ids[:num_tokens]) if has_tokens else block)
        for keys in content.extra_keys[: block + 1]:
            for key in keys or ():
                if tags[key[0]] not in self.ignores:
                    parts.append(key[:2] if "path" in self.ignores and key[0] == "lora" else key)
        return BlockHash(hashlib.sha256(repr(parts).encode()).digest())

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
        return super().match_prefix(self.named(request), num_computed_tokens)

    @override
    def on_blocks_allocated(self, request: RequestInfo, block_ids: BlockIds, *given: int) -> None:
        super().on_blocks_allocated(self.named(request), block_ids, *given)

    @override
    def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
        super().store(self.named(request), block_ids)
        for slots, _ in self.stores.values():  # found at once: one rank's report ends no job
            self.slots.update(slots)

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self.save()


class _Worker(HostCacheWorker):
    def __init__(self, store: _Store) -> None:
        super().__init__(_NUM_SLOTS)
        self.store = store

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.store.pages = self.host = self.store.pages or self.host

    @override
    def copy(
        self, job_id: int, src: Any, src_pages: list[torch.Tensor], dst: Any, dst_pages: list[Any]
    ) -> TransferResult:
        """Copy as much of each page as both sides have, because block sizes may differ."""
        sizes = [min(a.shape[1], b.shape[1]) for a, b in zip(src_pages, dst_pages, strict=True)]
        src_pages = [pages[:, :size] for pages, size in zip(src_pages, sizes, strict=True)]
        dst_pages = [pages[:, :size] for pages, size in zip(dst_pages, sizes, strict=True)]
        return super().copy(job_id, src, src_pages, dst, dst_pages)
