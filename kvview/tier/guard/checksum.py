"""Checksums of pages, which include the key and the namespace of the page (TIER-1)."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

from kvview.errors import ConfigError
from kvview.tier.namespace import Namespace

CHECKSUMS = ("xxh3", "crc32")
"""Known checksums: xxh3 needs the extra ``tier``; crc32 comes with Python, at a tenth the speed."""

SEAL_BYTES = 16
"""Length of a seal in bytes."""

_MAGIC = {"xxh3": b"kvtX", "crc32": b"kvtC"}


class PageSeal:
    """Makes and compares the seals of one namespace.

    A page that belongs to another key or another namespace has the wrong seal.

    Args:
        namespace: Namespace of the pages.
        checksum: One of :data:`CHECKSUMS`.

    Raises:
        ConfigError: The checksum is unknown, or its library is not installed.
    """

    def __init__(self, namespace: Namespace, checksum: str = "xxh3") -> None:
        self._digest = namespace.digest
        self._sum = _function(checksum)
        self._magic = _MAGIC[checksum]

    @staticmethod
    def name_of(seal: bytes) -> str:
        """Return the name of the checksum that made a seal; empty if the bytes are not a seal."""
        return next((name for name, magic in _MAGIC.items() if seal[:4] == magic), "")

    def of(self, key: bytes, page: memoryview) -> bytes:
        """Return the seal of a page, which has :data:`SEAL_BYTES` bytes."""
        salt = hashlib.blake2b(key, key=self._digest, digest_size=8).digest()
        found = self._sum(page, int.from_bytes(salt, "big"))
        length = len(page) & 0xFFFFFFFF
        return self._magic + length.to_bytes(4, "big") + found.to_bytes(8, "big")


def _function(name: str) -> Callable[[memoryview, int], int]:
    if name == "crc32":
        return lambda page, seed: zlib.crc32(page, seed & 0xFFFFFFFF) ^ seed >> 32
    if name != "xxh3":
        raise ConfigError(f"unknown checksum {name!r}; known: {', '.join(CHECKSUMS)}")
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        raise ConfigError(
            "checksum 'xxh3' needs xxhash: pip install 'kvview[tier]', or set checksum to 'crc32'"
        ) from None
    return xxh3_64_intdigest
