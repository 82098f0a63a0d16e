"""A complete connector that keeps the KV of requests in host memory.

    kvview check examples/host_memory.py:HostMemoryConnector --option 'store_blocks={blocks}'

The author only writes the store. ``StoreConnector`` adds jobs, holds, threads, the handling of
failures and resets, and the eviction of the least recently used pages.
"""

from collections.abc import Sequence

from kvview.tier import Namespace, Threaded
from kvview_reference.store_connector import StoreConnector


class HostMemoryStore(Threaded):
    """Keeps pages in a dictionary."""

    def __init__(self, namespace: Namespace) -> None:
        self.pages: dict[bytes, bytes] = {}
        super().__init__(namespace)  # last, because it starts the threads that call the store

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        page[:] = self.pages[key]
        return True

    def write(self, key: bytes, page: memoryview, /) -> bool:
        self.pages[key] = bytes(page)
        return True

    def delete(self, keys: Sequence[bytes], /) -> None:
        self.remove_later(keys, lambda key: self.pages.pop(key, None))


class HostMemoryConnector(StoreConnector):
    """The option ``store_blocks`` is the number of blocks that host memory holds."""

    store = HostMemoryStore
    defaults = {"store_blocks": 10_000}  # noqa: RUF012
