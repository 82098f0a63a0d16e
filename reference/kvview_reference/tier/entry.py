"""What stands before a page on any medium, and how an entry is judged by it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvview.tier import Namespace
from kvview.tier.checksum import SEAL_BYTES, PageSeal

_HEAD = struct.Struct(f"<8sQ{SEAL_BYTES}sH")  # magic, bytes of the page, seal, bytes of the key
_MAGIC = b"kvvtier1"
_NO_SEAL = bytes(SEAL_BYTES)


class EntryFormat:
    """The heads of one namespace's entries; behind a head stands the page.

    Args:
        namespace: Whose entries.
        checksum: ``"xxh3"``, ``"crc32"``, or ``"none"`` where the guard's is enough.

    Raises:
        ConfigError: There is no such checksum, or its library is not installed.
    """

    def __init__(self, namespace: Namespace, checksum: str) -> None:
        self._seal = None if checksum == "none" else PageSeal(namespace, checksum)

    @staticmethod
    def head_bytes(key: bytes) -> int:
        """Length of the head of a key's entry."""
        return _HEAD.size + len(key)

    def head(self, key: bytes, page: memoryview) -> bytes:
        """What stands before this page, and before no other."""
        seal = _NO_SEAL if self._seal is None else self._seal.of(key, page)
        return _HEAD.pack(_MAGIC, len(page), seal, len(key)) + key


@dataclass(frozen=True)
class StoredEntry:
    """What stands in one entry of a store.

    Args:
        key: Of the page.
        problem: Why it cannot be loaded, empty if it can.
    """

    key: bytes
    problem: str


def read_entry(namespace: Namespace, content: bytes) -> StoredEntry:
    """Look at one entry as a load would."""
    view = memoryview(content)
    if len(view) < _HEAD.size or view[:8] != _MAGIC:
        return StoredEntry(b"", "it has no header")
    _, num_bytes, seal, key_bytes = _HEAD.unpack(view[: _HEAD.size])
    key, page = bytes(view[_HEAD.size :][:key_bytes]), view[_HEAD.size + key_bytes :]
    if len(page) != num_bytes:
        return StoredEntry(key, f"it has {len(page)} bytes of a page of {num_bytes}")
    if seal != _NO_SEAL:
        checksum = PageSeal.name_of(seal)
        if not checksum or PageSeal(namespace, checksum).of(key, page) != seal:
            return StoredEntry(key, "its seal is not that of its bytes")
    return StoredEntry(key, "")
