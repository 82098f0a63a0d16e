"""Private pages of the guard, which a store receives instead of the engine's pages."""

from __future__ import annotations

from collections.abc import Sequence

from kvview.tier.guard.checksum import SEAL_BYTES, PageSeal

_MOST_SPARE_BYTES = 128 << 20


class PrivatePages:
    """Makes and reuses private pages, and copies bytes between them and the engine's pages.

    1. With seals, the seal of a page is stored after its bytes.
    2. Without seals no page is reused, because a late write into a reused page would go undetected.

    Args:
        seal: Makes the seals of the namespace; None for no seals.
    """

    def __init__(self, seal: PageSeal | None) -> None:
        self._seal = seal
        self._extra = SEAL_BYTES if seal else 0
        self._spare: dict[int, list[bytearray]] = {}  # free pages by length

    def to_get(self, pages: Sequence[memoryview]) -> list[bytearray]:
        """Return one empty private page for each page of a load."""
        return [self._take(len(page)) for page in pages]

    def to_put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bytearray]:
        """Return a private copy of each page of a store."""
        made = []
        for key, page in zip(keys, pages, strict=True):
            private = self._take(len(page))
            private[: len(page)] = page
            if self._seal is not None:
                private[len(page) :] = self._seal.of(key, page)
            made.append(private)
        return made

    def copy_out(self, key: bytes, private: bytearray, page: memoryview) -> bool:
        """Copy a loaded page to the engine; returns False if the bytes differ from the put.

        The check reads the engine's copy, because the store may still change the private page.
        """
        page[:] = memoryview(private)[: len(page)]
        return self._seal is None or self._seal.of(key, page) == private[len(page) :]

    def give_back(self, privates: Sequence[bytearray]) -> None:
        """Take back the pages of a job that the store has reported."""
        for private in privates if self._seal is not None else ():
            if sum(size * len(held) for size, held in self._spare.items()) < _MOST_SPARE_BYTES:
                self._spare.setdefault(len(private), []).append(private)

    def _take(self, num_bytes: int) -> bytearray:
        size = num_bytes + self._extra
        spare = self._spare.get(size)
        return spare.pop() if spare else bytearray(size)
