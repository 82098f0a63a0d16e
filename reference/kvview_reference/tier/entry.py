"""The head that precedes a page on any medium."""

from __future__ import annotations

import struct

from kvview.tier import Namespace
from kvview.tier.guard.checksum import SEAL_BYTES, PageSeal

HEAD = struct.Struct(f"<8sQ{SEAL_BYTES}sH")  # magic, bytes of the page, seal, bytes of the key
MAGIC = b"kvvtier1"
NO_SEAL = bytes(SEAL_BYTES)
MOST_BYTES = 0x7FFFF000  # of an entry, because the system writes at most this much at once


class EntryFormat:
    """The heads of the entries of one namespace; in an entry, the page follows the head.

    Args:
        namespace: Namespace of the entries.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` if the checksum of the guard is enough.

    Raises:
        ConfigError: The checksum is unknown, or its library is not installed.
    """

    def __init__(self, namespace: Namespace, checksum: str) -> None:
        self._seal = None if checksum == "none" else PageSeal(namespace, checksum)

    @staticmethod
    def head_bytes(key: bytes) -> int:
        """Return the length of the head of a key's entry."""
        return HEAD.size + len(key)

    def head(self, key: bytes, page: memoryview) -> bytes:
        """Return the head of this page, which is different for every page."""
        seal = NO_SEAL if self._seal is None else self._seal.of(key, page)
        return HEAD.pack(MAGIC, len(page), seal, len(key)) + key
