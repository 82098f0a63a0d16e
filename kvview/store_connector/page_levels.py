"""The bytes of both levels: pages in memory, and a guarded store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from kvview.store_connector.store_plan import PagePlace, StoreSpec, group_of
from kvview.store_connector.transform import Transform
from kvview.tier import GuardedTier

_LENGTH_BYTES = 4  # of the length that precedes the bytes of a page in a store

PageData = bytes | memoryview
"""The encoded bytes of a page, which do not change."""
EndOfSave = Callable[[list[bool]], None]
"""Receives a flag for each page: whether it is kept."""
EndOfLoad = Callable[[list[PageData | None]], None]
"""Receives the bytes of each page for :meth:`Pages.decode`; None for a page that is missing."""
ItemT = TypeVar("ItemT")
_EndOfJob = Callable[[Sequence[bool]], None]
_StartOfJob = Callable[[GuardedTier, int, Sequence[bytes], Sequence[memoryview]], None]


class _Batch(Generic[ItemT]):
    """Pages whose loads or stores end one by one and are reported together."""

    def __init__(self, items: list[ItemT], end: Callable[[list[ItemT]], None]) -> None:
        self._items = items
        self._num_open = len(items)
        self._end = end
        if not items:
            end([])

    def end_page(self, index: int, item: ItemT) -> None:
        self._items[index] = item
        self._num_open -= 1
        if not self._num_open:
            self._end(self._items)


@dataclass(eq=False, slots=True)
class _Page:
    """A page that memory holds, or that the store is reading or writing."""

    data: PageData | None = None
    in_memory: bool = False
    """Whether memory keeps the data."""
    in_store: bool = False
    """Whether the store shall hold the page."""
    is_stored: bool = False
    """Whether the store holds the page."""
    is_busy: bool = False
    """Whether the store is reading or writing the page."""


class Pages:
    """Moves each page to its place, and finds pages in memory and in the store.

    All calls come from one thread, and none of them waits. The store has at most one job for a page
    at a time.

    Args:
        page_bytes: Bytes of a page of each KV-cache group.
        transform: Transform that is applied to every page.
        store: The guarded store; None for no store.
        rank: Rank of this worker; the ranks have different pages under the same key.
    """

    deletes = True
    """Whether pages without a place are deleted from the store."""
    max_memory: int | None = None
    """Bytes that the pages in memory may take, None for any number."""

    def __init__(
        self, page_bytes: Sequence[int], transform: Transform, store: GuardedTier | None, rank: int
    ) -> None:
        self._page_bytes = page_bytes
        self._transform = transform
        self._store = store
        self._suffix = rank.to_bytes(2, "big") if rank else b""
        self._used = 0
        self._pages: dict[bytes, _Page] = {}
        self._readers: defaultdict[bytes, list[tuple[_Batch[PageData | None], int]]]
        self._readers = defaultdict(list)
        self._writers: defaultdict[bytes, list[tuple[_Batch[bool], int]]] = defaultdict(list)
        self._numbers = count()
        self._jobs: dict[int, _EndOfJob] = {}

    def load(self, names: Sequence[bytes], end: EndOfLoad) -> None:
        """Load pages; ``end`` is called when every page was found or has failed."""
        empty: list[PageData | None] = [None] * len(names)
        batch = _Batch(empty, end)
        absent: list[bytes] = []
        for index, name in enumerate(names):
            page = self._pages.get(name)
            if page is None:
                page = self._pages[name] = _Page(in_store=True, is_stored=True)
            if page.data is not None:
                batch.end_page(index, page.data)
            else:
                self._readers[name].append((batch, index))
                absent.append(name)
        self._settle(absent)

    def save(self, spec: StoreSpec, rows: Iterable[memoryview], end: EndOfSave) -> None:
        """Keep rows; ``end`` is called when every row is kept or has failed.

        A row is encoded before the next one is taken.
        """
        batch = _Batch([False] * len(spec.names), end)
        for index, (name, row) in enumerate(zip(spec.names, rows, strict=True)):
            data = self._encode(name, row)
            page = self._pages.get(name)
            if page is None:
                page = self._pages[name] = _Page()
            if data is None or not self._keep(page, data, in_memory=spec.in_memory):
                self._keep(page, None)
                batch.end_page(index, False)
            elif spec.in_store:
                page.in_store, page.is_stored = True, False
                self._writers[name].append((batch, index))
            else:
                batch.end_page(index, True)
        self._settle(spec.names)

    def decode(self, name: bytes, data: PageData) -> memoryview:
        """Return the row of a page that was loaded.

        Raises:
            Exception: The transform cannot read the bytes.
        """
        if type(self._transform).decode is Transform.decode:
            return memoryview(data)
        row = memoryview(bytearray(self._page_bytes[group_of(name)]))
        self._transform.decode(name, memoryview(data), row)
        return row

    def place(self, places: Sequence[PagePlace]) -> None:
        """Move pages to their new places."""
        for name, in_memory, in_store in places:
            page = self._pages.get(name)
            if page is None:
                page = self._pages[name] = _Page(is_stored=True)
            has_room = self._keep(page, page.data, in_memory=in_memory)
            page.in_store = in_store or not has_room
        self._settle(name for name, _, _ in places)

    def num_bytes(self, names: Iterable[bytes]) -> int:
        """Return the bytes that pages take in memory."""
        held = (self._pages.get(name) for name in names)
        return sum(len(page.data or b"") for page in held if page is not None and page.in_memory)

    @property
    def is_waiting(self) -> bool:
        """Whether a job of the store is in flight."""
        return bool(self._jobs)

    def poll(self) -> None:
        """End the jobs that the store has ended."""
        for number, flags in self._store.poll() if self._store else ():
            self._jobs.pop(number)(flags)

    def close(self) -> None:
        """Release everything; loads and stores that have not ended are not reported."""
        if self._store is not None:
            self._store.close()
        self._pages.clear()

    # --- memory ---

    def _keep(self, page: _Page, data: PageData | None, *, in_memory: bool = False) -> bool:
        """Change the data of a page; returns False without a change if memory has no room."""
        used = self._used + (len(data) if data and in_memory else 0)
        used -= len(page.data) if page.data and page.in_memory else 0
        if self.max_memory is not None and self._used < used > self.max_memory:
            return False
        self._used, page.data, page.in_memory = used, data, in_memory
        return True

    def _encode(self, name: bytes, row: memoryview) -> PageData | None:
        try:
            encoded = self._transform.encode(name, row)
            data = row if encoded is row and row.readonly else bytes(encoded)
        except Exception:
            return None
        return data if len(data) <= self._transform.max_bytes(len(row)) else None

    # --- the store ---

    def _settle(self, names: Iterable[bytes]) -> None:
        """Start the jobs that move pages to their places, except for pages that have a job."""
        gets: list[bytes] = []
        puts: list[bytes] = []
        for name in names:
            page = self._pages.get(name)
            if page is None or page.is_busy:
                continue
            if page.data is None and (page.in_memory or name in self._readers):
                gets.append(name)
            elif page.data is not None and page.in_store and not page.is_stored:
                puts.append(name)
            else:
                self._leave(name, page)
        if gets:
            rows = [memoryview(bytearray(self._stored_bytes(name))) for name in gets]
            self._start(GuardedTier.get, gets, rows, partial(self._end_gets, gets, rows))
        if puts:
            rows = [self._padded(name) for name in puts]
            self._start(GuardedTier.put, puts, rows, partial(self._end_puts, puts))

    def _leave(self, name: bytes, page: _Page) -> None:
        """Drop data that memory does not keep, and delete a page that the store does not keep."""
        if page.is_stored and not page.in_store and self._store and self.deletes:
            self._store.delete([name + self._suffix])
            page.is_stored = False
        if not page.in_memory:
            del self._pages[name]

    def _start(
        self, call: _StartOfJob, names: Sequence[bytes], rows: list[memoryview], end: _EndOfJob
    ) -> None:
        if self._store is None:
            end([False] * len(names))
            return
        for name in names:
            self._pages[name].is_busy = True
        number = next(self._numbers)
        self._jobs[number] = end
        call(self._store, number, [name + self._suffix for name in names], rows)

    def _end_gets(
        self, names: Sequence[bytes], rows: Sequence[memoryview], flags: Sequence[bool]
    ) -> None:
        for name, row, flag in zip(names, rows, flags, strict=True):
            page = self._pages[name]
            page.is_busy = False
            data = page.data
            if data is None and flag:
                data = self._unpadded(row)
            if data is None or not self._keep(page, data, in_memory=page.in_memory):
                page.in_store = page.in_store or page.in_memory  # the page stays in the store
                self._keep(page, None)
            for reader, place in self._readers.pop(name, ()):
                reader.end_page(place, data)
        self._settle(names)

    def _end_puts(self, names: Sequence[bytes], flags: Sequence[bool]) -> None:
        for name, flag in zip(names, flags, strict=True):
            page = self._pages[name]
            page.is_busy = False
            page.is_stored = flag
            page.in_store = page.in_store and flag  # a failed put is not tried again
            for batch, index in self._writers.pop(name, ()):
                batch.end_page(index, flag)
        self._settle(names)

    def _stored_bytes(self, name: bytes) -> int:
        return _LENGTH_BYTES + self._transform.max_bytes(self._page_bytes[group_of(name)])

    def _padded(self, name: bytes) -> memoryview:
        """Format a page for the store: its length, its bytes, and zeros."""
        data = self._pages[name].data or b""
        stored = bytearray(self._stored_bytes(name))
        stored[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "big")
        stored[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        return memoryview(stored)

    def _unpadded(self, stored: memoryview) -> bytes:
        length = int.from_bytes(stored[:_LENGTH_BYTES], "big")
        return bytes(stored[_LENGTH_BYTES : _LENGTH_BYTES + length])
