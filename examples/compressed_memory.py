"""A complete connector: compressed pages in host memory, with a budget in bytes.

    kvview check examples/compressed_memory.py:CompressedConnector --option 'cpu_bytes={bytes}'

Host memory is a level of ``StoreConnector`` itself, so the author only writes the transform.
"""

import zlib

from kvview_reference.store_connector import StoreConnector, Transform


class Zlib(Transform):
    """Compresses pages."""

    def max_bytes(self, page_bytes: int) -> int:
        return page_bytes + page_bytes // 1000 + 64

    def encode(self, key: bytes, page: memoryview) -> bytes:
        return zlib.compress(page, 1)

    def decode(self, key: bytes, data: memoryview, page: memoryview) -> None:
        page[:] = zlib.decompress(data)


class CompressedConnector(StoreConnector):
    """Its option ``cpu_bytes`` is the number of bytes that compressed pages may take."""

    transform = Zlib
    defaults = {"cpu_bytes": 1 << 30}  # noqa: RUF012
