r"""The other way round: an L2 adapter of LMCache's seen as a store, so that the kit judges it.

    kvview check kvview_lmcache.l2_adapter_store:L2AdapterStore --option adapter=fs \
      --option base_path={tmp}

1. The adapter has what LMCache would give it: a key of model, rank and hash, and memory.
2. Nothing is made better on the way: each lookup asks the adapter again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvview.tier import Namespace
from kvview.tier.store import require_tier_job

_BETWEEN_POLLS = 0.0003  # seconds


@dataclass(slots=True, eq=False)
class _Job:
    task: int
    num_keys: int
    is_get: bool
    objects: list[Any]


class L2AdapterStore:
    """A :class:`~kvview.tier.TierStore` over an adapter that comes with LMCache.

    Args:
        namespace: Of it LMCache's key holds the model and the rank, and nothing else.
        adapter: Type of the adapter, ``"fs"`` for example.
        options: The adapter's own.
    """

    verifies = True  # nothing stands in front of it in LMCache

    def __init__(self, namespace: Namespace, adapter: str = "fs", **options: Any) -> None:
        self._namespace = namespace
        given = json.dumps({"type": adapter, **options})
        parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[given]))
        self._adapter: Any = create_l2_adapter(parsed.adapters[0])
        self._jobs: dict[int, _Job] = {}
        self._done: list[tuple[int, list[bool]]] = []
        self._asked: dict[int, list[bytes]] = {}
        self._found: dict[bytes, bool] = {}
        self._stored: dict[int, Any] = {}
        self._is_closed = False

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        """What the adapter says; each answer is given once."""
        if self._is_closed:
            return [False] * len(keys)
        for task in [*self._asked]:
            bits = self._adapter.query_lookup_and_lock_result(task)
            if bits is not None:
                asked = self._asked.pop(task)
                self._found |= {key: bits.test(n) for n, key in enumerate(asked)}
        flags: list[bool | None] = [self._found.pop(key, None) for key in keys]
        waiting = {key for asked in self._asked.values() for key in asked}
        ask = [k for k, flag in zip(keys, flags, strict=True) if flag is None and k not in waiting]
        if ask:
            task = self._adapter.submit_lookup_and_lock_task([self._key(key) for key in ask], {})
            self._asked[task] = ask
        return flags

    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start to store."""
        self._start(job, keys, pages, is_get=False)

    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        """Start to load."""
        self._start(job, keys, pages, is_get=True)

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Delete, and wait for it, as LMCache does."""
        if not self._is_closed:
            self._adapter.delete([self._key(key) for key in keys])

    def poll(self) -> list[tuple[int, list[bool]]]:
        """Tasks that ended; of a store LMCache knows one flag for all keys."""
        if not self._is_closed:
            self._collect()
        done, self._done = self._done, []
        return done

    def drain(self, timeout: float, /) -> bool:
        """Wait for all tasks."""
        end = time.monotonic() + timeout
        while self._jobs and not self._is_closed:
            self._collect()
            if time.monotonic() > end:
                break
            time.sleep(_BETWEEN_POLLS)
        return not self._jobs

    def close(self) -> None:
        """Close the adapter; what was in flight has failed."""
        if not self._is_closed:
            self._collect()
            self._is_closed = True
            self._adapter.close()
        self._done += [(job, [False] * entry.num_keys) for job, entry in self._jobs.items()]
        self._jobs.clear()

    def _start(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], is_get: bool
    ) -> None:
        require_tier_job(keys, pages, is_get=is_get, in_flight=job in self._jobs)
        if self._is_closed or not keys:
            self._done.append((job, [False] * len(keys)))
            return
        objects = [_memory(page) for page in pages]
        submit = self._adapter.submit_load_task if is_get else self._adapter.submit_store_task
        task = submit([self._key(key) for key in keys], objects)
        self._jobs[job] = _Job(task, len(keys), is_get, objects)

    def _collect(self) -> None:
        self._stored |= self._adapter.pop_completed_store_tasks()
        for job, entry in [*self._jobs.items()]:
            if entry.is_get:
                bits = self._adapter.query_load_result(entry.task)
                if bits is None:
                    continue
                flags = [bits.test(n) for n in range(entry.num_keys)]
            elif entry.task in self._stored:
                flags = [bool(self._stored.pop(entry.task).is_successful())] * entry.num_keys
            else:
                continue
            del self._jobs[job]
            self._done.append((job, flags))

    def _key(self, key: bytes) -> Any:
        return ObjectKey(
            chunk_hash=key, model_name=self._namespace.model, kv_rank=self._namespace.rank
        )


def _memory(page: memoryview) -> Any:
    """LMCache's own kind of object, over a page."""
    made = torch.frombuffer(page, dtype=torch.uint8)
    metadata = MemoryObjMetadata(
        shape=made.shape,
        dtype=torch.uint8,
        address=made.data_ptr(),
        phy_size=made.numel(),
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(made, metadata, parent_allocator=None)
