"""The bytes of all pages that a worker half keeps: in host memory, in a store, or on their way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from kvview.tier import GuardedTier
from kvview_reference.store_connector.store_plan import PagePlace, StoreSpec, group_of
from kvview_reference.store_connector.transform import Transform
from kvview_reference.transfer.host_pages import HostPages

_LENGTH_BYTES = 4  # of the length that precedes the bytes of a page in a store

PageData = bytes | memoryview
"""The encoded bytes of a page; a view if they are in a host page."""


class FoundPage(NamedTuple):
    """A page that was loaded."""

    data: PageData
    host_page: int | None
    """Number of the host page that holds the bytes."""


EndOfSave = Callable[[list[bool]], None]
"""Receives a flag for each page: whether it is kept."""
EndOfLoad = Callable[[list[FoundPage | None]], None]
"""Receives each page; None for a page that is missing."""
ItemT = TypeVar("ItemT")
_EndOfJob = Callable[[Sequence[bool]], None]
_StartOfJob = Callable[[GuardedTier, int, Sequence[bytes], Sequence[memoryview]], None]


def stored_bytes(transform: Transform, page_bytes: int) -> int:
    """Return the bytes that a store keeps of a page of this size."""
    return _LENGTH_BYTES + transform.max_bytes(page_bytes)


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
    """A page in memory, or a page that the store is reading or writing."""

    data: PageData | None = None
    """The encoded bytes; a view of the host page if ``host_page`` is set. None until known."""
    padded: memoryview | None = None
    """The page as the store keeps it, of which ``data`` is a view; None if it is not prepared."""
    host_page: int | None = None
    """Number of the host page that keeps the bytes or will keep them."""
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
        host: Host memory of the worker.
        transform: Transform that is applied to every page that is not in a host page.
        store: The guarded store; None for no store.
        deletes: Whether pages without a place are deleted from the store.
        max_memory: Bytes that pages in memory may take outside of host pages; None for any number.
        uses_host_pages: Whether pages in memory are in the host pages that the scheduler half
            chose; otherwise their encoded bytes are kept.
    """

    def __init__(
        self,
        host: HostPages,
        transform: Transform,
        store: GuardedTier | None,
        *,
        deletes: bool,
        max_memory: int | None,
        uses_host_pages: bool,
    ) -> None:
        self._host = host
        self._transform = transform
        self._store = store
        self._deletes = deletes
        self._max_memory = max_memory
        self._uses_host_pages = uses_host_pages
        self._used = 0
        self._pages: dict[bytes, _Page] = {}
        self._readers: defaultdict[bytes, list[tuple[_Batch[FoundPage | None], int]]]
        self._readers = defaultdict(list)
        self._writers: defaultdict[bytes, list[tuple[_Batch[bool], int]]] = defaultdict(list)
        self._numbers = count()
        self._jobs: dict[int, _EndOfJob] = {}

    def load(self, names: Sequence[bytes], end: EndOfLoad) -> None:
        """Load pages; ``end`` is called when every page was found or has failed."""
        batch = _Batch[FoundPage | None]([None] * len(names), end)
        absent: list[bytes] = []
        for index, name in enumerate(names):
            page = self._pages.get(name)
            if page is None:
                page = self._pages[name] = _Page(in_store=True, is_stored=True)
            if page.data is not None:
                batch.end_page(index, FoundPage(page.data, page.host_page))
            else:
                self._readers[name].append((batch, index))
                absent.append(name)
        self._settle(absent)

    def save(
        self,
        spec: StoreSpec,
        kept: Iterable[memoryview | None],
        end: EndOfSave,
        displaced: Sequence[bytes] = (),
    ) -> None:
        """Keep pages; ``end`` is called when every page is kept or has failed.

        Args:
            spec: The pages; those with host pages were copied there.
            kept: The bytes of each page, encoded before the next one is taken; None for a page that
                could not be copied.
            end: Receives the results of the pages.
            displaced: Pages that the store must have written, or failed to write, before the end.
                So blocks are stored only as fast as the store writes the pages that memory loses.
        """
        num_pages = len(spec.names)
        batch = _Batch([False] * (num_pages + len(displaced)), lambda f: end(f[:num_pages]))
        for index, name in enumerate(displaced, num_pages):
            self._writers[name].append((batch, index))
        in_memory = bool(spec.host_pages)
        host_pages = spec.host_pages if self._uses_host_pages else ()
        for index, (name, content) in enumerate(zip(spec.names, kept, strict=True)):
            page = self._pages.get(name)
            if page is None:
                page = self._pages[name] = _Page()
            data: PageData | None = content
            if content is not None and not host_pages:
                data = self._copy(name, page, content, in_memory=in_memory)
            if data is None or not self._keep(page, data, in_memory=in_memory):
                self._keep(page, None)
                batch.end_page(index, False)
                continue
            page.host_page = host_pages[index] if host_pages else None
            if spec.in_store:
                page.in_store, page.is_stored = True, False
                self._writers[name].append((batch, index))
            else:
                batch.end_page(index, True)
        self._settle(spec.names)

    def decode(self, name: bytes, data: PageData) -> memoryview:
        """Return the bytes of the block of a page that was loaded.

        Raises:
            Exception: The transform cannot read the bytes.
        """
        if type(self._transform).decode is Transform.decode:
            return memoryview(data)
        row = memoryview(bytearray(self._host.page_bytes[group_of(name)]))
        self._transform.decode(name, memoryview(data), row)
        return row

    def place(self, places: Sequence[PagePlace]) -> list[bytes]:
        """Move pages to their new places; returns those that memory keeps until they are stored."""
        for name, host_page, in_store in places:
            page = self._pages.get(name)
            if page is None:
                page = self._pages[name] = _Page(is_stored=True)
            page.in_store = in_store
            if self._uses_host_pages:
                self._leave_host_page(page, host_page)
            elif not self._keep(page, page.data, in_memory=host_page is not None):
                page.in_store = True
        if self._uses_host_pages:  # now that no page needs its former host page
            for name, host_page, _ in places:
                self._enter_host_page(name, self._pages[name], host_page)
        self._settle(place.name for place in places)
        return [place.name for place in places if self._leaves_memory(place.name)]

    def _leaves_memory(self, name: bytes) -> bool:
        """Whether only a job of the store still needs the bytes of a page."""
        page = self._pages.get(name)
        return page is not None and page.is_busy and not page.in_memory and page.data is not None

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

    def view(self, name: bytes, host_page: int) -> memoryview:
        """Return the bytes of a host page that holds a page of this name."""
        return self._host.page(host_page, self._host.page_bytes[group_of(name)])

    def _leave_host_page(self, page: _Page, host_page: int | None) -> None:
        """Free the host page of a page that moves to another one or to none."""
        if page.host_page is None or page.host_page == host_page:
            return
        page.host_page, page.in_memory = None, False
        if page.data is not None:
            is_needed = host_page is not None or (page.in_store and not page.is_stored)
            page.data = bytes(page.data) if is_needed else None

    def _enter_host_page(self, name: bytes, page: _Page, host_page: int | None) -> None:
        """Give a page a host page, to which its bytes move once they are known."""
        if host_page is None or page.host_page == host_page:
            return
        data, page.host_page, page.in_memory = page.data, host_page, True
        if data is not None:
            page.data = self.view(name, host_page)
            page.data[:] = data

    def _keep(self, page: _Page, data: PageData | None, *, in_memory: bool = False) -> bool:
        """Change the data of a page; returns False without a change if memory has no room."""
        used = self._used + (len(data) if data and in_memory else 0)
        used -= len(page.data) if page.data and page.in_memory else 0
        if self._max_memory is not None and self._used < used > self._max_memory:
            return False
        self._used, page.data, page.in_memory = used, data, in_memory
        return True

    def _copy(
        self, name: bytes, page: _Page, content: memoryview, *, in_memory: bool
    ) -> PageData | None:
        """Encode and copy a page, once: as the store keeps it, if memory does not keep it."""
        try:
            encoded = self._transform.encode(name, content)
            if len(encoded) > self._transform.max_bytes(len(content)):
                return None
            if in_memory:
                return bytes(encoded)
            page.padded = self._pad(name, encoded)
        except Exception:
            return None
        return page.padded[_LENGTH_BYTES : _LENGTH_BYTES + len(encoded)]

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
            rows = [self._take_padded(name) for name in puts]
            self._start(GuardedTier.put, puts, rows, partial(self._end_puts, puts))

    def _leave(self, name: bytes, page: _Page) -> None:
        """Drop data that memory does not keep, and delete a page that the store does not keep."""
        if page.is_stored and not page.in_store and self._store and self._deletes:
            self._store.delete([name])
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
        call(self._store, number, names, rows)

    def _end_gets(
        self, names: Sequence[bytes], rows: Sequence[memoryview], flags: Sequence[bool]
    ) -> None:
        for name, row, flag in zip(names, rows, flags, strict=True):
            page = self._pages[name]
            page.is_busy = False
            if page.data is None and flag:
                length = int.from_bytes(row[:_LENGTH_BYTES], "big")
                self._fill(name, page, row[_LENGTH_BYTES : _LENGTH_BYTES + length])
            found = None
            if page.data is not None:
                found = FoundPage(page.data, page.host_page)
            else:
                page.in_store = page.in_store or page.in_memory  # the page stays in the store
                page.in_memory, page.host_page = False, None
            for reader, place in self._readers.pop(name, ()):
                reader.end_page(place, found)
        self._settle(names)

    def _fill(self, name: bytes, page: _Page, data: memoryview) -> None:
        """Set the bytes of a page that the store has returned."""
        if page.host_page is not None:
            view = self.view(name, page.host_page)
            if len(data) == len(view):
                view[:] = data
                page.data = view
        elif not self._keep(
            page, bytes(data) if page.in_memory else data, in_memory=page.in_memory
        ):
            page.in_store, page.in_memory = True, False  # memory has no room
            page.data = data

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
        return stored_bytes(self._transform, self._host.page_bytes[group_of(name)])

    def _take_padded(self, name: bytes) -> memoryview:
        page = self._pages[name]
        padded, page.padded = page.padded, None
        return self._pad(name, page.data or b"") if padded is None else padded

    def _pad(self, name: bytes, data: PageData | bytearray) -> memoryview:
        """Format a page for the store: its length, its bytes, and zeros."""
        stored = memoryview(bytearray(self._stored_bytes(name)))
        stored[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "big")
        stored[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        return stored
