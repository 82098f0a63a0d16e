"""Transforms of pages before they are stored and after they are loaded, such as compression."""

from __future__ import annotations


class Transform:
    """Encodes pages before they are kept, and decodes them for a load; the default only copies.

    1. Both methods run on the worker's thread, on pages of one block each.
    2. If one of the methods raises, the page fails, and the engine computes the block again.
    3. In memory a page occupies the bytes that ``encode`` returned. In a store every page is padded
       to ``max_bytes``, because the pages of a store have one size. To save space in a store,
       compress in the ``write`` of the store.
    4. With ``weights``, other processes decode the pages, so both methods must depend on their
       arguments only, not on a secret of the process.
    """

    def max_bytes(self, page_bytes: int) -> int:
        """Return the maximum number of bytes that ``encode`` returns for a page."""
        return page_bytes

    def encode(self, key: bytes, page: memoryview) -> bytes | bytearray | memoryview:
        """Return the bytes to keep for a page; ``page`` is valid during the call only."""
        return page

    def decode(self, key: bytes, data: memoryview, page: memoryview) -> None:
        """Fill a page from the bytes that ``encode`` returned."""
        page[:] = data
