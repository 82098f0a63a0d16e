"""``KVViewL2Adapter``: an L2 adapter of LMCache's storage manager over any tier store.

    lmcache server ... --l2-adapter '{"type": "plugin",
      "module_path": "kvview_lmcache", "class_name": "KVViewL2Adapter",
      "adapter_params": {"weights": "REVISION",
                         "store": "my_store.py:Store", "options": {"root": "/kv"}}}'

1. LMCache does not pass weights and dtype to an adapter, so the user configures them.
2. The key of a page contains every field of LMCache's key (model, rank, group, hash, salt).
3. The memory of a page belongs to LMCache, so the guard copies it, and no store accesses it.

Source: ``L2AdapterInterface``, lmcache/v1/distributed/l2_adapters/base.py, 0.5.6.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvview import ConfigError, TierJobError
from kvview.bridge import TierOptions, open_tier
from kvview.errors import one_line
from kvview.options import parse_options
from kvview.tier import Namespace

_log = logging.getLogger(__name__)
_LONGEST_SLEEP = 0.05  # seconds, because deadlines pass without a wake-up


class LMCacheTierOptions(TierOptions):
    """The settings in ``adapter_params``.

    Args:
        kv_dtype: Dtype of the KV cache, needed if it is not the default; LMCache does not pass the
            dtype.
    """

    kv_dtype: str = ""


@dataclass(slots=True, eq=False)
class _Task:
    keys: list[Any]
    objects: list[Any]  # keeps LMCache's memory alive until the job is reported
    sizes: list[int]
    is_load: bool


@dataclass(slots=True, eq=False)
class _Lookup:
    keys: list[bytes]
    flags: list[bool | None]


def key_bytes(key: Any) -> bytes:
    """Convert an ``ObjectKey`` to a key of the store, with every field that distinguishes pages."""
    parts = (
        key.model_name.encode(),
        str(key.kv_rank).encode(),
        str(key.object_group_id).encode(),
        key.chunk_hash,
        key.cache_salt.encode(),
    )
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hashlib.blake2b(text, digest_size=32).digest()


class KVViewL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """An L2 adapter over any :class:`~kvview.tier.TierStore`.

    Args:
        params: ``adapter_params``; see :class:`LMCacheTierOptions`.
        given: Other arguments of LMCache (``l1_memory_desc``), which are not used.

    Raises:
        ConfigError: An option that cannot be used, or unknown weights.
        NamespaceMismatchError: The store already holds pages of other weights or another layout.
    """

    def __init__(self, params: Mapping[str, Any], **given: Any) -> None:
        super().__init__()
        try:
            options = parse_options(LMCacheTierOptions, params)
            namespace = Namespace(
                "as LMCache's keys say",
                weights=options.weights,
                kv_dtype=options.kv_dtype,
                hash_seed=os.environ.get("PYTHONHASHSEED", ""),
            )
            self.guard = open_tier(options, namespace)
        except ConfigError as error:
            raise ConfigError(f"kvview_lmcache, adapter_params: {error}") from None
        self._stored_fd, self._found_fd, self._loaded_fd = (
            create_event_notifier() for _ in range(3)
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._tasks: dict[int, _Task] = {}
        self._lookups: dict[int, _Lookup] = {}
        self._stored: dict[int, Any] = {}
        self._found: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self._sizes: dict[Any, int] = {}
        """Sizes of the pages that this process stored, because LMCache counts bytes by salt."""
        self._keys: dict[bytes, Any] = {}  # LMCache's keys of the entries in _sizes
        self._is_closed = False
        self._awake = threading.Event()
        self.guard.on_wake_up(self._awake.set)
        self._thread = threading.Thread(target=self._run, name="kvview-lmcache", daemon=True)
        self._thread.start()

    def get_store_event_fd(self) -> int:
        """File descriptor that becomes readable when a store task has ended."""
        return int(self._stored_fd.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """File descriptor that becomes readable when a lookup task has ended."""
        return int(self._found_fd.fileno())

    def get_load_event_fd(self) -> int:
        """File descriptor that becomes readable when a load task has ended."""
        return int(self._loaded_fd.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start a store job."""
        return self._submit(self.guard.put, keys, objects, is_load=False)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start a load job."""
        return self._submit(self.guard.get, keys, objects, is_load=True)

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        """Start a lookup without locks; if a page is removed before its load, the load fails."""
        lookup = _Lookup([key_bytes(key) for key in keys], [None] * len(keys))
        with self._lock:
            task = next(self._numbers)
            self._lookups[task] = lookup
        self._awake.set()
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the ended store tasks; a task has failed if one of its keys has failed."""
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return one bit for each key, once, after the lookup has ended; otherwise None."""
        with self._lock:
            return self._found.pop(task_id, None)

    def query_load_result(self, task_id: int) -> Any:
        """Return one bit for each key, once, after the load has ended; otherwise None."""
        with self._lock:
            return self._loaded.pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing, because lookups take no locks."""

    def delete(self, keys: list[Any]) -> None:
        """Make keys a miss."""
        made = [key_bytes(key) for key in keys]
        self.guard.delete(made)
        self._count_gone(made)

    def report_status(self) -> dict[str, Any]:
        """Return whether the store is in use, and the counters of the guard."""
        stats = self.guard.stats
        return {
            "is_healthy": self.guard.is_healthy and not self._is_closed,
            "type": type(self).__name__,
            "store": type(self.guard.store).__name__,
            **{name: getattr(stats, name) for name in stats.__slots__},
        }

    def close(self) -> None:
        """Fail the jobs in flight and close the store; a second call does nothing."""
        if self._is_closed:
            return
        self.guard.close()
        self._is_closed = True
        self._awake.set()
        self._thread.join()
        self._collect()
        for notifier in (self._stored_fd, self._found_fd, self._loaded_fd):
            notifier.close()

    def _submit(
        self, call: Callable[..., None], keys: list[Any], objects: list[Any], is_load: bool
    ) -> int:
        pages = [memoryview(each.byte_array).cast("B") for each in objects]
        entry = _Task([*keys], [*objects], [len(page) for page in pages], is_load)
        with self._lock:
            task = next(self._numbers)
            self._tasks[task] = entry
            try:
                call(task, [key_bytes(key) for key in keys], pages)
            except TierJobError as error:
                _log.error("task %s fails: %s", task, one_line(error))
                self.guard.put(task, (), ())  # so that the job is reported
        self._awake.set()  # because a deadline does not wake the thread
        return task

    def _run(self) -> None:
        while not self._is_closed:
            is_waiting = self._tasks or self._lookups
            self._awake.wait(_LONGEST_SLEEP if is_waiting else None)
            self._awake.clear()
            self._collect()

    def _collect(self) -> None:
        evicted = self.guard.take_evicted()  # before the stores are reported
        for task, flags in self.guard.poll():
            with self._lock:
                entry = self._tasks.pop(task)
            good = [n for n, flag in enumerate(flags) if flag]
            if entry.is_load:
                self._notify_keys_accessed([entry.keys[n] for n in good])
                with self._lock:
                    self._loaded[task] = _bits(len(entry.keys), good)
                self._loaded_fd.notify()
            else:
                self._count_stored(entry, good)
                is_whole = len(good) == len(entry.keys)
                num_bytes = sum(entry.sizes[n] for n in good)
                with self._lock:
                    self._stored[task] = L2StoreResult(is_whole, num_bytes)
                self._stored_fd.notify()
        self._count_gone(evicted)
        self._look_up()

    def _count_gone(self, made: Sequence[bytes]) -> None:
        """Reduce LMCache's counts by the pages that the store no longer has."""
        with self._lock:
            keys = [self._keys.pop(each) for each in made if each in self._keys]
            sizes = [self._sizes.pop(key) for key in keys]
        if keys:
            self._notify_keys_deleted(keys, sizes)

    def _count_stored(self, entry: _Task, good: Sequence[int]) -> None:
        with self._lock:
            new = [n for n in good if entry.keys[n] not in self._sizes]
            self._sizes |= {entry.keys[n]: entry.sizes[n] for n in new}
            self._keys |= {key_bytes(entry.keys[n]): entry.keys[n] for n in new}
        if new:
            sizes = [entry.sizes[n] for n in new]
            self._notify_keys_stored([entry.keys[n] for n in new], sizes)

    def _look_up(self) -> None:
        with self._lock:
            waiting = [*self._lookups.items()]
        for task, lookup in waiting:
            unknown = [n for n, flag in enumerate(lookup.flags) if flag is None]
            results = self.guard.lookup([lookup.keys[n] for n in unknown])
            for n, flag in zip(unknown, results, strict=True):
                lookup.flags[n] = flag
            if None not in lookup.flags:
                with self._lock:
                    del self._lookups[task]
                    hits = [n for n, flag in enumerate(lookup.flags) if flag]
                    self._found[task] = _bits(len(lookup.flags), hits)
                self._found_fd.notify()


def _bits(num: int, places: Sequence[int]) -> Any:
    found = Bitmap(num)
    for place in places:
        found.set(place)
    return found
