r"""An L2 adapter of LMCache with the interface of a store, so that the kit can check it.

    kvview check kvview_lmcache.l2_adapter_store:L2AdapterStore --option adapter=fs \
      --option base_path={tmp}

1. The adapter receives the arguments that LMCache would pass: a key (model, rank and hash), and the
   memory of a page.
2. No result of the adapter is cached: each lookup queries the adapter again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvview.tier import Namespace, Polled


@dataclass(slots=True, eq=False)
class _Task:
    task: int
    num_keys: int
    is_get: bool
    objects: list[Any]


class L2AdapterStore(Polled):
    """A :class:`~kvview.tier.TierStore` over an adapter that comes with LMCache.

    Args:
        namespace: Namespace of the store; LMCache's key contains only the model and the rank of the
            namespace.
        adapter: Type of the adapter, ``"fs"`` for example.
        options: Options of the adapter.
    """

    verifies = True  # LMCache does not verify pages

    def __init__(self, namespace: Namespace, adapter: str = "fs", **options: Any) -> None:
        given = json.dumps({"type": adapter, **options})
        parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[given]))
        self._adapter: Any = create_l2_adapter(parsed.adapters[0])
        self._tasks: dict[int, _Task] = {}
        self._queried: dict[int, list[bytes]] = {}
        self._found: dict[bytes, bool] = {}
        self._stored: dict[int, Any] = {}
        super().__init__(namespace)

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        """Return the result for each key, once, or None until the lookup of the key has ended."""
        if self._is_closed:
            return [False] * len(keys)
        for task in [*self._queried]:
            bits = self._adapter.query_lookup_and_lock_result(task)
            if bits is not None:
                queried = self._queried.pop(task)
                self._found |= {key: bits.test(n) for n, key in enumerate(queried)}
        flags: list[bool | None] = [self._found.pop(key, None) for key in keys]
        waiting = {key for queried in self._queried.values() for key in queried}
        new = [k for k, flag in zip(keys, flags, strict=True) if flag is None and k not in waiting]
        if new:
            task = self._adapter.submit_lookup_and_lock_task([self._key(key) for key in new], {})
            self._queried[task] = new
        return flags

    def delete(self, keys: Sequence[bytes], /) -> None:
        """Delete keys, and wait until they are deleted, as LMCache does."""
        if not self._is_closed:
            self._adapter.delete([self._key(key) for key in keys])

    def begin(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], *, is_get: bool
    ) -> None:
        """Submit a task."""
        objects = [_memory(page) for page in pages]
        submit = self._adapter.submit_load_task if is_get else self._adapter.submit_store_task
        task = submit([self._key(key) for key in keys], objects)
        self._tasks[job] = _Task(task, len(keys), is_get, objects)

    def end(self) -> None:
        """Close the adapter."""
        self.collect()
        self._adapter.close()

    def collect(self) -> None:
        """Report the tasks that have ended; a store task has one result for all of its keys."""
        self._stored |= self._adapter.pop_completed_store_tasks()
        for job, entry in [*self._tasks.items()]:
            if entry.is_get:
                bits = self._adapter.query_load_result(entry.task)
                if bits is None:
                    continue
                flags = [bits.test(n) for n in range(entry.num_keys)]
            elif entry.task in self._stored:
                flags = [bool(self._stored.pop(entry.task).is_successful())] * entry.num_keys
            else:
                continue
            del self._tasks[job]
            self.report(job, flags)

    def _key(self, key: bytes) -> Any:
        return ObjectKey(
            chunk_hash=key, model_name=self.namespace.model, kv_rank=self.namespace.rank
        )


def _memory(page: memoryview) -> Any:
    """Wrap a page in a memory object of LMCache."""
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
