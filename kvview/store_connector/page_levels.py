"""The bytes of both levels: pages in memory, and a store behind its guard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from kvview.store_connector.store_plan import Move, group_of
from kvview.store_connector.transform import Transform
from kvview.tier import GuardedTier

_LENGTH_BYTES = 4  # in a store, before a page that was transformed

EndOfBatch = Callable[[list[bool]], None]
"""Receives a flag for each page of a batch: whether it was moved."""


class _Batch:
    """Pages that end one by one, and are reported together."""

    def __init__(self, number: int, end: EndOfBatch) -> None:
        self._flags = [False] * number
        self._num_open = number
        self._end = end
        if not number:
            end([])

    def end_page(self, index: int, flag: bool) -> None:
        self._flags[index] = flag
        self._num_open -= 1
        if not self._num_open:
            self._end(self._flags)


@dataclass(eq=False)
class _Get:
    """A page on its way from the store, and the pages that wait for it."""

    data: bytearray
    is_kept: bool = False
    is_deleted: bool = False
    waiting: list[tuple[_Batch, int, memoryview]] = field(default_factory=list)


class PageLevels:
    """Finds a page wherever it is: in memory, on its way, or in the store.

    All calls come from one thread, and none of them waits.

    Args:
        page_bytes: Of a page, per KV-cache group.
        transform: Applied to every page; None for none.
        store: Behind its guard; None for none.
        rank: Of this worker, whose pages of a key differ from those of another rank.
        max_memory: Bytes that the pages in memory may take, None for any number.
    """

    def __init__(
        self,
        page_bytes: Sequence[int],
        transform: Transform | None,
        store: GuardedTier | None,
        rank: int = 0,
        max_memory: int | None = None,
    ) -> None:
        self._page_bytes = page_bytes
        self._transform = transform
        self._store = store
        self._suffix = rank.to_bytes(2, "big") if rank else b""
        self._max_memory = max_memory
        self._used = 0
        self._memory: dict[bytes, bytes] = {}
        self._writing: dict[bytes, bytes] = {}  # from memory to the store
        self._unwanted: set[bytes] = set()  # of those: to be deleted once they are written
        self._gets: dict[bytes, _Get] = {}
        self._numbers = count()
        self._ends: dict[int, EndOfBatch] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether the store works on something."""
        return bool(self._ends)

    def load(self, names: Sequence[bytes], pages: Sequence[memoryview], end: EndOfBatch) -> None:
        """Fill pages; ``end`` is called when all of them are filled or have failed."""
        batch = _Batch(len(names), end)
        absent: dict[bytes, _Get] = {}
        for index, (name, page) in enumerate(zip(names, pages, strict=True)):
            data = self._at_hand(name)
            if data is not None:
                batch.end_page(index, self._decode(name, data, page))
                continue
            get = self._gets.get(name)
            if get is None:
                get = absent[name] = self._new_get(name)
            get.waiting.append((batch, index, page))
        self._start(absent)

    def save(
        self,
        names: Sequence[bytes],
        pages: Sequence[memoryview],
        end: EndOfBatch,
        *,
        in_memory: bool,
        in_store: bool,
    ) -> None:
        """Keep pages; ``end`` is called when all of them are kept or have failed."""
        kept: dict[bytes, bytes] = {}
        for name, page in zip(names, pages, strict=True):
            data = self._encode(name, page)
            if data is not None and (not in_memory or self._keep(name, data)):
                kept[name] = data

        def end_puts(flags: Sequence[bool]) -> None:
            written = {name for name, flag in zip(kept, flags, strict=True) if flag}
            for name in kept.keys() - written:
                self._drop(name)
            end([name in written for name in names])

        if in_store and kept:
            self._put(kept, end_puts)
        else:
            end_puts([True] * len(kept))

    def num_bytes(self, names: Iterable[bytes]) -> int:
        """Bytes that pages take in memory."""
        return sum(len(self._memory.get(name, b"")) for name in names)

    def move(self, moves: Iterable[tuple[Move, bytes]]) -> None:
        """Move pages between the levels, or forget them."""
        gets: dict[bytes, _Get] = {}
        puts: dict[bytes, bytes] = {}
        for move, name in moves:
            if move is Move.DROP:
                self._drop(name)
            elif move is Move.DEMOTE:
                self._unwanted.discard(name)
                if name in self._memory:
                    puts[name] = self._writing[name] = self._memory[name]
                elif name in self._gets:
                    self._gets[name].is_deleted = False  # it is on its way up, and stays below
                self._drop(name)
            elif move is Move.DELETE:
                self._delete(name)
            elif name in self._writing:
                self._keep(name, self._writing[name])
                if move is Move.RAISE:
                    self._unwanted.add(name)
            else:
                get = self._gets.get(name)
                if get is None:
                    get = gets[name] = self._new_get(name)
                get.is_kept, get.is_deleted = True, move is Move.RAISE
        if puts:
            self._put(puts, partial(self._end_demotions, list(puts)))
        self._start(gets)

    def poll(self) -> None:
        """End the batches for which the store has finished its part."""
        for number, flags in self._store.poll() if self._store else ():
            self._ends.pop(number)(list(flags))

    def close(self) -> None:
        """Release everything; batches that are not ended never are."""
        if self._store is not None:
            self._store.close()
        self._memory.clear()
        self._writing.clear()

    # --- memory ---

    def _at_hand(self, name: bytes) -> bytes | None:
        data = self._memory.get(name)
        return self._writing.get(name) if data is None else data

    def _keep(self, name: bytes, data: bytes) -> bool:
        self._drop(name)
        if self._max_memory is not None and self._used + len(data) > self._max_memory:
            return False
        self._memory[name] = data
        self._used += len(data)
        return True

    def _drop(self, name: bytes) -> None:
        self._used -= len(self._memory.pop(name, b""))
        if name in self._gets:
            self._gets[name].is_kept = False

    def _encode(self, name: bytes, page: memoryview) -> bytes | None:
        if self._transform is None:
            return bytes(page)
        try:
            data = bytes(self._transform.encode(name, page))
        except Exception:
            return None
        return data if len(data) <= self._transform.max_bytes(len(page)) else None

    def _decode(self, name: bytes, data: bytes | memoryview, page: memoryview) -> bool:
        try:
            if self._transform is None:
                page[:] = data
            else:
                self._transform.decode(name, memoryview(data), page)
        except Exception:
            return False
        return True

    # --- the store ---

    def _new_get(self, name: bytes) -> _Get:
        get = self._gets[name] = _Get(bytearray(self._stored_bytes(name)))
        return get

    def _stored_bytes(self, name: bytes) -> int:
        page_bytes = self._page_bytes[group_of(name)]
        if self._transform is None:
            return page_bytes
        return _LENGTH_BYTES + self._transform.max_bytes(page_bytes)

    def _padded(self, name: bytes, data: bytes) -> memoryview:
        if self._transform is None:
            return memoryview(data)
        length = len(data).to_bytes(_LENGTH_BYTES, "big")
        return memoryview((length + data).ljust(self._stored_bytes(name), b"\0"))

    def _unpadded(self, stored: bytearray) -> memoryview:
        view = memoryview(stored)
        if self._transform is None:
            return view
        length = int.from_bytes(view[:_LENGTH_BYTES], "big")
        return view[_LENGTH_BYTES : _LENGTH_BYTES + length]

    def _start(self, gets: Mapping[bytes, _Get]) -> None:
        if not gets:
            return
        end = partial(self._end_gets, gets)
        if self._store is None:
            end([False] * len(gets))
            return
        number = next(self._numbers)
        self._ends[number] = end
        pages = [memoryview(get.data) for get in gets.values()]
        self._store.get(number, [name + self._suffix for name in gets], pages)

    def _end_gets(self, gets: Mapping[bytes, _Get], flags: Sequence[bool]) -> None:
        for (name, get), flag in zip(gets.items(), flags, strict=True):
            self._gets.pop(name, None)
            data = self._unpadded(get.data)
            for batch, index, page in get.waiting:
                batch.end_page(index, flag and self._decode(name, data, page))
            if flag and get.is_kept:
                self._keep(name, bytes(data))
            if flag and get.is_deleted:
                self._delete(name)

    def _put(self, pages: Mapping[bytes, bytes], end: EndOfBatch) -> None:
        assert self._store is not None, "the scheduler half plans for a store only if there is one"
        number = next(self._numbers)
        self._ends[number] = end
        padded = [self._padded(name, data) for name, data in pages.items()]
        self._store.put(number, [name + self._suffix for name in pages], padded)

    def _end_demotions(self, names: Sequence[bytes], flags: Sequence[bool]) -> None:
        for name in names:
            self._writing.pop(name, None)
            if name in self._unwanted:
                self._unwanted.discard(name)
                self._delete(name)

    def _delete(self, name: bytes) -> None:
        if name in self._writing:
            self._unwanted.add(name)
        elif self._store is not None:
            self._store.delete([name + self._suffix])
