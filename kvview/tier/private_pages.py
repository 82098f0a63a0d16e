"""Pages of the guard's own: a store is given these, and never the engine's."""

from __future__ import annotations

from collections.abc import Sequence

from kvview.tier.checksum import SEAL_BYTES, PageSeal

_MOST_SPARE_BYTES = 128 << 20


class PrivatePages:
    """Makes them, uses them again, and carries bytes between them and the engine's.

    1. Behind the bytes of a page stands its seal, if there are seals.
    2. Without seals none is used again: nobody would see who still writes into one.

    Args:
        seal: Of the namespace, None for none.
    """

    def __init__(self, seal: PageSeal | None) -> None:
        self._seal = seal
        self._extra = SEAL_BYTES if seal else 0
        self._spare: dict[int, list[bytearray]] = {}  # by length

    def to_get(self, pages: Sequence[memoryview]) -> list[bytearray]:
        """Room for what a store loads, one a page."""
        return [self._take(len(page)) for page in pages]

    def to_put(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bytearray]:
        """Copies for a store to keep, one a page."""
        made = []
        for key, page in zip(keys, pages, strict=True):
            private = self._take(len(page))
            private[: len(page)] = page
            if self._seal is not None:
                private[len(page) :] = self._seal.of(key, page)
            made.append(private)
        return made

    def copy_out(self, key: bytes, private: bytearray, page: memoryview) -> bool:
        """Give the engine what was loaded; False when it is not what was put.

        What is compared is what the engine has then.
        """
        page[:] = memoryview(private)[: len(page)]
        return self._seal is None or self._seal.of(key, page) == private[len(page) :]

    def give_back(self, privates: Sequence[bytearray]) -> None:
        """A store has reported the job that these were for."""
        for private in privates if self._seal is not None else ():
            if sum(size * len(held) for size, held in self._spare.items()) < _MOST_SPARE_BYTES:
                self._spare.setdefault(len(private), []).append(private)

    def _take(self, num_bytes: int) -> bytearray:
        size = num_bytes + self._extra
        spare = self._spare.get(size)
        return spare.pop() if spare else bytearray(size)
