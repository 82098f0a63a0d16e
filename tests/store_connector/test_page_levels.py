"""The bytes of both levels: a page is found wherever it is, also on its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from kvview_reference.store_connector.page_levels import PageData, Pages

from kvview import Transform, make_offload_key
from kvview.tier import GuardedTier, Namespace
from kvview.tier.store import require_tier_job
from kvview_reference.store_connector.store_plan import EPOCH_BYTES, StoreSpec

PAGE = bytes(range(64))
NAME = make_offload_key(b"hash", 0) + bytes(EPOCH_BYTES)


@dataclass
class HeldStore:
    """A store that ends its jobs only when it is released."""

    is_held: bool = False
    pages: dict[bytes, bytes] = field(default_factory=dict)
    jobs: list[tuple[int, Callable[[], list[bool]]]] = field(default_factory=list)

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        return [key in self.pages for key in keys]

    def put(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        require_tier_job(keys, pages, is_get=False, in_flight=False)

        def end() -> list[bool]:
            self.pages.update((key, bytes(page)) for key, page in zip(keys, pages, strict=True))
            return [True] * len(keys)

        self.jobs.append((job, end))

    def get(self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], /) -> None:
        def end() -> list[bool]:
            for key, page in zip(keys, pages, strict=True):
                if key in self.pages:
                    page[:] = self.pages[key]
            return [key in self.pages for key in keys]

        self.jobs.append((job, end))

    def poll(self) -> list[tuple[int, list[bool]]]:
        jobs, self.jobs = (self.jobs, []) if not self.is_held else ([], self.jobs)
        return [(job, end()) for job, end in jobs]

    def delete(self, keys: Sequence[bytes], /) -> None:
        for key in keys:
            self.pages.pop(key, None)

    def drain(self, timeout: float, /) -> bool:
        return not self.jobs

    def close(self) -> None: ...


class Levels:
    """Both levels over a :class:`HeldStore`."""

    def __init__(self, transform: type[Transform] = Transform) -> None:
        self.store = HeldStore()
        namespace = Namespace("m", weights="1")
        self.guard = GuardedTier(self.store, namespace, checksum="none")
        self.pages = Pages([len(PAGE)], transform(), self.guard, rank=0)

    def settle(self) -> None:
        while self.pages.is_waiting:
            assert self.guard.drain(10)
            self.pages.poll()

    def wait_until_deleted(self) -> None:
        until = time.monotonic() + 10
        while self.store.pages and time.monotonic() < until:
            time.sleep(0.001)
        assert not self.store.pages

    def save(self, *, in_memory: bool, in_store: bool) -> list[bool]:
        ended: list[bool] = []
        page = memoryview(PAGE)
        self.pages.save(StoreSpec([NAME], in_memory, in_store), [page], ended.extend)
        self.settle()
        return ended

    def place(self, *, in_memory: bool = False, in_store: bool = False) -> None:
        self.pages.place([(NAME, in_memory, in_store)])

    def load(self) -> tuple[list[bool], bytes]:
        ended: list[PageData | None] = []
        self.pages.load([NAME], ended.extend)
        self.store.is_held = False
        self.settle()
        found = [bytes(self.pages.decode(NAME, data)) for data in ended if data is not None]
        return [data is not None for data in ended], b"".join(found)


@pytest.fixture
def levels() -> Iterator[Levels]:
    made = Levels()
    yield made
    made.pages.close()


@pytest.mark.parametrize(("in_memory", "in_store"), [(True, False), (False, True), (True, True)])
def test_a_page_comes_back_from_each_level(levels: Levels, in_memory: bool, in_store: bool) -> None:
    assert levels.save(in_memory=in_memory, in_store=in_store) == [True]
    assert bool(levels.pages.num_bytes([NAME])) is in_memory
    assert bool(levels.store.pages) is in_store
    assert levels.load() == ([True], PAGE)


def test_a_page_is_found_on_its_way_down_and_below(levels: Levels) -> None:
    levels.save(in_memory=True, in_store=False)
    levels.store.is_held = True
    levels.place(in_store=True)
    assert levels.pages.num_bytes([NAME]) == 0
    assert levels.load() == ([True], PAGE)
    assert levels.load() == ([True], PAGE)


def test_a_page_is_found_on_its_way_up(levels: Levels) -> None:
    levels.save(in_memory=False, in_store=True)
    levels.store.is_held = True
    levels.place(in_memory=True)
    assert levels.load() == ([True], PAGE)
    assert levels.pages.num_bytes([NAME]) == len(PAGE)
    levels.wait_until_deleted()


def test_a_fetched_page_that_was_dropped_does_not_stay(levels: Levels) -> None:
    levels.save(in_memory=False, in_store=True)
    levels.store.is_held = True
    levels.place(in_memory=True, in_store=True)
    levels.place(in_store=True)
    assert levels.load() == ([True], PAGE)
    assert levels.pages.num_bytes([NAME]) == 0


def test_a_page_that_turns_around_on_its_way_up_stays_below(levels: Levels) -> None:
    levels.save(in_memory=False, in_store=True)
    levels.place(in_memory=True)
    levels.place(in_store=True)
    levels.settle()
    assert levels.load() == ([True], PAGE)
    levels.guard.close()
    assert levels.store.pages


def test_a_page_that_is_deleted_on_its_way_down_does_not_stay(levels: Levels) -> None:
    levels.save(in_memory=True, in_store=False)
    levels.place(in_store=True)
    levels.place()
    levels.settle()
    levels.wait_until_deleted()


def test_a_page_without_bytes_anywhere_fails(levels: Levels) -> None:
    assert levels.load()[0] == [False]


class Halves(Transform):
    """Keeps every second byte, because the others follow from them; refuses a page of zeros."""

    def max_bytes(self, page_bytes: int) -> int:
        return page_bytes // 2

    def encode(self, key: bytes, page: memoryview) -> bytes:
        return bytes(page[::2])

    def decode(self, key: bytes, data: memoryview, page: memoryview) -> None:
        page[:] = bytes(value for even in data for value in (even, even + 1))


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_transformed_page_comes_back(in_memory: bool) -> None:
    levels = Levels(Halves)
    assert levels.save(in_memory=in_memory, in_store=not in_memory) == [True]
    assert levels.load() == ([True], PAGE)
    levels.pages.close()


def test_a_transform_that_returns_too_much_fails_the_page() -> None:
    class Grows(Transform):
        def encode(self, key: bytes, page: memoryview) -> bytes:
            return bytes(page) + b"more"

    levels = Levels(Grows)
    assert levels.save(in_memory=True, in_store=False) == [False]
    levels.pages.close()


def test_two_ranks_share_no_page() -> None:
    levels = Levels()
    levels.save(in_memory=False, in_store=True)
    levels.pages = Pages([len(PAGE)], Transform(), levels.guard, rank=1)
    assert levels.load()[0] == [False]
    levels.pages.close()


def test_a_page_that_memory_has_no_room_for_stays_below(levels: Levels) -> None:
    levels.save(in_memory=False, in_store=True)
    levels.pages.max_memory = len(PAGE) - 1
    levels.place(in_memory=True)
    levels.settle()
    assert levels.load() == ([True], PAGE)
    assert levels.store.pages
