r"""A complete connector: compressed pages in host memory, in front of files.

    kvview check examples/two_levels.py:TwoLevelConnector \
        --option root={tmp} --option 'cpu_blocks={blocks}/4' --option 'store_blocks={blocks}'

When host memory is full, pages move to files. They move back to host memory when a request needs
them, while this request still waits for blocks.
"""

import zlib

from kvview_reference.store_connector import StoreConnector, Transform
from kvview_reference.tier import FileStore


class Zlib(Transform):
    """Compresses pages."""

    def max_bytes(self, page_bytes: int) -> int:
        return page_bytes + page_bytes // 1000 + 64

    def encode(self, key: bytes, page: memoryview) -> bytes:
        return zlib.compress(page, 1)

    def decode(self, key: bytes, data: memoryview, page: memoryview) -> None:
        page[:] = zlib.decompress(data)


class TwoLevelConnector(StoreConnector):
    """Its options: ``root``, ``cpu_bytes`` or ``cpu_blocks``, ``store_blocks``, ``weights``."""

    store = FileStore
    transform = Zlib
    defaults = {"prefetch": True}  # noqa: RUF012
