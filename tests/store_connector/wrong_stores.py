"""Stores and policies with a mistake of their author, for ``test_wrong_stores.py``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from typing_extensions import override

from kvview import StoreConnector, Transform
from kvview.tier import Namespace, Threaded


class Memory(Threaded):
    """The right store, which the others change."""

    def __init__(self, namespace: Namespace) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.number = count()
        super().__init__(namespace)

    @override
    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        page[:] = self.pages[key]
        return True

    @override
    def write(self, key: bytes, page: memoryview, /) -> bool:
        self.pages[key] = bytes(page)
        return True

    def delete(self, keys: Sequence[bytes], /) -> None:
        for key in keys:
            self.pages.pop(key, None)


class Right(StoreConnector):
    """Keeps pages as it should."""

    store = Memory
    defaults = {"store_blocks": 1000}  # noqa: RUF012


class HalfAPage(Right):
    """Keeps half of each page."""

    class store(Memory):
        @override
        def write(self, key: bytes, page: memoryview, /) -> bool:
            half = len(page) // 2
            self.pages[key] = bytes(page[:half]) + bytes(len(page) - half)
            return True


class LosesWrites(Right):
    """Reports every second page as written, and does not write it."""

    class store(Memory):
        @override
        def write(self, key: bytes, page: memoryview, /) -> bool:
            return next(self.number) % 2 == 0 or super().write(key, page)


class KeepsTheView(Right):
    """Keeps the page of the caller instead of a copy."""

    class store(Memory):
        @override
        def write(self, key: bytes, page: memoryview, /) -> bool:
            self.pages[key] = page  # type: ignore[assignment]
            return True


class FillsNothing(Right):
    """Reports a load that it did not make."""

    class store(Memory):
        @override
        def read_into(self, key: bytes, page: memoryview, /) -> bool:
            return True


class ForgetsToReturn(Right):
    """Does not return True after a load."""

    class store(Memory):
        @override
        def read_into(self, key: bytes, page: memoryview, /) -> bool:
            super().read_into(key, page)
            return None  # type: ignore[return-value]


class DeletesTooMuch(Right):
    """Deletes everything instead of the given keys."""

    class store(Memory):
        @override
        def delete(self, keys: Sequence[bytes], /) -> None:
            self.pages.clear()


class OneWayTransform(Right):
    """Changes each page, and does not change it back."""

    class transform(Transform):
        @override
        def encode(self, key: bytes, page: memoryview) -> bytes:
            return bytes(255 - byte for byte in page)
