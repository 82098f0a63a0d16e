"""The bytes of both levels: a page is found wherever it is, also on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    make_offload_key,
)
from kvview_reference.store_connector import Transform, named_pages
from kvview_reference.store_connector.named_pages import FoundPage, Pages
from kvview_reference.store_connector.store_plan import EPOCH_BYTES, PagePlace, StoreSpec
from kvview_reference.transfer import host_pages
from kvview_reference.transfer.host_pages import HostPages

NUM_BYTES = 64
NUM_HOST_PAGES = 3
CONTENTS = {
    make_offload_key(bytes([number]), 0) + bytes(EPOCH_BYTES): bytes([number, number + 1] * 32)
    for number in range(0, 12, 2)
}
A, B, C, *_ = NAMES = list(CONTENTS)


class HeldTier:
    """A guarded store that ends its jobs only while it is not held; without a thread."""

    def __init__(self) -> None:
        self.is_held = False
        self.fails = False
        self.pages: dict[bytes, bytes] = {}
        self.jobs: list[tuple[int, Callable[[], list[bool]]]] = []

    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        def end() -> list[bool]:
            if not self.fails:
                self.pages.update((key, bytes(page)) for key, page in zip(keys, pages, strict=True))
            return [not self.fails] * len(keys)

        self.jobs.append((job, end))

    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        def end() -> list[bool]:
            for key, page in zip(keys, pages, strict=True):
                page[:] = self.pages.get(key, bytes(len(page)))
            return [key in self.pages and not self.fails for key in keys]

        self.jobs.append((job, end))

    def poll(self) -> list[tuple[int, list[bool]]]:
        jobs, self.jobs = (self.jobs, []) if not self.is_held else ([], self.jobs)
        return [(job, end()) for job, end in jobs]

    def delete(self, keys: Sequence[bytes], /) -> None:
        for key in keys:
            self.pages.pop(key, None)

    def close(self) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def _no_thread_and_little_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named_pages, "GuardedTier", HeldTier)
        patch.setattr(host_pages, "_STAGING_BYTES", 1 << 10)
        yield


class Halves(Transform):
    """Keeps every second byte, because the others follow from them."""

    def max_bytes(self, page_bytes: int) -> int:
        return page_bytes // 2

    def encode(self, key: bytes, page: memoryview) -> bytes:
        return bytes(page[::2])

    def decode(self, key: bytes, data: memoryview, page: memoryview) -> None:
        page[:] = bytes(value for even in data for value in (even, even + 1))


class Levels:
    """Both levels over a store that can be held."""

    def __init__(
        self,
        transform: type[Transform] = Transform,
        *,
        uses_host_pages: bool = True,
        max_memory: int | None = None,
    ) -> None:
        tensor = torch.zeros((4, NUM_BYTES), dtype=torch.int8)
        caches = [CanonicalKVCacheTensor(tensor, NUM_BYTES)]
        self.host = HostPages(
            CanonicalKVCaches(caches, [[CanonicalKVCacheRef(0, NUM_BYTES)]]),
            NUM_HOST_PAGES if uses_host_pages else 0,
        )
        self.store = HeldTier()
        self.uses_host_pages = uses_host_pages
        self.pages = Pages(
            self.host,
            transform(),
            self.store,  # type: ignore[arg-type]
            deletes=True,
            max_memory=max_memory,
            uses_host_pages=uses_host_pages,
        )

    def settle(self) -> None:
        self.store.is_held = False
        while self.pages.is_waiting:
            self.pages.poll()

    def save(
        self, name: bytes, host_page: int | None, *, in_store: bool, displaced: Sequence[bytes] = ()
    ) -> list[bool]:
        """Save a page; returns a list that receives the flag when the page is kept."""
        ended: list[bool] = []
        kept = memoryview(CONTENTS[name])
        if host_page is not None and self.uses_host_pages:
            view = self.pages.view(name, host_page)
            view[:] = kept
            kept = view
        host_pages = [] if host_page is None else [host_page]
        self.pages.save(StoreSpec([name], host_pages, in_store), [kept], ended.extend, displaced)
        return ended

    def place(self, **places: tuple[int | None, bool]) -> None:
        """Move pages, by the name of the constant."""
        named = [(globals()[letter], *place) for letter, place in places.items()]
        self.pages.place([PagePlace(*place) for place in named])

    def load(self, name: bytes) -> list[bytes | None]:
        """Load a page; returns a list that receives its bytes, or None for a failure."""
        loaded: list[bytes | None] = []

        def end(pages: list[FoundPage | None]) -> None:
            for page in pages:
                if page is not None and page.host_page is not None:
                    assert bytes(page.data) == bytes(self.host.page(page.host_page, NUM_BYTES))
                loaded.append(page and bytes(self.pages.decode(name, page.data)))

        self.pages.load([name], end)
        return loaded

    def memory(self) -> set[bytes]:
        return {name for name in NAMES if self.pages.num_bytes([name])}


Place = tuple[bool, bool]  # in memory, in the store
KEPT: list[Place] = [(True, False), (False, True), (True, True)]
MOVES = st.tuples(
    st.sampled_from(("save", "move", "load", "hold", "poll")),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    st.lists(st.sampled_from([*KEPT, (False, False)]), min_size=1),
)


@pytest.mark.parametrize(
    ("transform", "uses_host_pages"), [(Transform, True), (Transform, False), (Halves, False)]
)
@settings(max_examples=150, deadline=None)
@given(moves=st.lists(MOVES, max_size=30))
def test_each_page_is_where_the_plans_put_it(
    transform: type[Transform],
    uses_host_pages: bool,
    moves: list[tuple[str, list[bytes], list[Place]]],
) -> None:
    levels = Levels(transform, uses_host_pages=uses_host_pages)
    held: dict[bytes, tuple[int | None, bool]] = {}
    loads: list[tuple[bytes, list[bytes | None]]] = []

    def choose(names: list[bytes], places: list[Place]) -> dict[bytes, tuple[int | None, bool]]:
        """Give host pages to pages, in turn, as far as they are free."""
        kept = {place[0] for name, place in held.items() if name not in names}
        free = [page for page in range(NUM_HOST_PAGES) if page not in kept]
        chosen = {}
        for name, (in_memory, in_store) in zip(names, cycle(places)):
            page = free.pop() if in_memory and free else None
            chosen[name] = page, in_store or (in_memory and page is None)
        return chosen

    for move, names, places in moves:
        loading = {name for name, pages in loads if not pages}
        if move == "save":
            for name, place in choose([n for n in names if n not in held], places).items():
                if place != (None, False):
                    levels.save(name, place[0], in_store=place[1])
                    held[name] = place
        elif move == "move":
            moved = choose([n for n in names if n in held and n not in loading], places)
            levels.pages.place([PagePlace(name, *place) for name, place in moved.items()])
            held |= moved
            held = {name: place for name, place in held.items() if place != (None, False)}
        elif move == "load":
            loads += [(name, levels.load(name)) for name in names if name in held]
        elif move == "hold":
            levels.store.is_held = places[0][0]
        else:
            levels.pages.poll()
    levels.settle()
    loads += [(name, levels.load(name)) for name in held]
    levels.settle()
    assert loads == [(name, [CONTENTS[name]]) for name, _ in loads]
    assert levels.memory() == {name for name, place in held.items() if place[0] is not None}
    assert set(levels.store.pages) == {name for name, place in held.items() if place[1]}
    assert levels.pages._pages.keys() == levels.memory()
    levels.pages.close()
    levels.host.close()


@pytest.mark.parametrize("uses_host_pages", [True, False])
def test_a_page_that_the_store_lost_or_damaged_fails(uses_host_pages: bool) -> None:
    levels = Levels(uses_host_pages=uses_host_pages)
    loaded = [levels.load(A)]
    levels.settle()
    levels.save(A, None, in_store=True)
    levels.settle()
    levels.store.fails = True
    levels.place(A=(0, False))
    loaded.append(levels.load(A))
    levels.settle()
    assert loaded == [[None], [None]]
    assert levels.store.pages, "a page that was not moved stays"
    assert not levels.memory()


def test_a_stored_page_of_another_size_fails() -> None:
    levels = Levels()
    levels.save(A, None, in_store=True)
    levels.settle()
    levels.store.pages[A] = (3).to_bytes(4, "big") + bytes(NUM_BYTES)
    levels.place(A=(0, True))
    loaded = levels.load(A)
    levels.settle()
    assert loaded == [None]
    assert not levels.memory()


def test_a_store_that_fails_is_not_tried_again() -> None:
    levels = Levels()
    levels.store.fails = True
    ended = levels.save(A, 0, in_store=True)
    levels.settle()
    assert ended == [False]
    assert not levels.store.jobs


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_ends_once_the_store_has_written_the_pages_that_leave_memory(fails: bool) -> None:
    levels = Levels()
    levels.save(A, 0, in_store=False)
    levels.store.is_held, levels.store.fails = True, fails
    displaced = levels.pages.place([PagePlace(A, None, True)])
    ended = levels.save(B, 0, in_store=False, displaced=displaced)
    levels.pages.poll()
    assert ended == []
    levels.settle()
    assert ended == [True]


def test_a_transform_that_returns_too_much_fails_the_page() -> None:
    class Grows(Transform):
        def encode(self, key: bytes, page: memoryview) -> bytes:
            return bytes(page) + b"more"

    levels = Levels(Grows, uses_host_pages=False)
    assert levels.save(A, 0, in_store=False) == [False]
    assert not levels.memory()


def test_a_page_for_which_memory_has_no_room_stays_in_the_store() -> None:
    levels = Levels(uses_host_pages=False, max_memory=NUM_BYTES)
    assert levels.save(A, 0, in_store=False) == [True]
    assert levels.save(B, 1, in_store=False) == [False]
    levels.save(B, None, in_store=True)
    levels.settle()
    levels.place(B=(1, False))
    levels.settle()
    assert levels.memory() == {A}
    assert len(levels.store.pages) == 1
    levels.place(A=(None, False), B=(1, False))
    levels.settle()
    assert levels.memory() == {B}
