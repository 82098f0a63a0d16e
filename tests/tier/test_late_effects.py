"""Right stores whose threads are late: the check of a tier must not blame them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from typing_extensions import override

from kvview.testing.tier.machine import TierMachine
from kvview.testing.tier.suite import suite_of
from kvview_reference.tier import FileStore

pytest.importorskip("xxhash")

MOMENT = 0.02  # seconds
BUDGET, PAGE = 100_000, 4096
OLD = {b"old %d" % number: PAGE for number in range(22)}
NEW = {b"new %d" % number: PAGE for number in range(4)}


class LateNotices(FileStore):
    """Reports an eviction a moment after it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.has_evicted = threading.Event()
        super().__init__(*args, **options)

    @override
    def on_evicted(self, evicted: Callable[[Sequence[bytes]], None], /) -> None:
        def report(keys: Sequence[bytes]) -> None:
            self.has_evicted.set()
            time.sleep(MOMENT)
            evicted(keys)

        super().on_evicted(report)


class EvictsDuringALoad(LateNotices):
    """Evicts the first key after its page was read, and before the load is reported."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_loading = False
        self.has_read = threading.Event()
        make_head = self._format.head

        def head(key: bytes, page: memoryview) -> bytes:
            if self.is_loading and key in OLD:
                self.has_read.set()
                self.has_evicted.wait()
            return make_head(key, page)

        self._format.head = head  # type: ignore[method-assign]

    @override
    def store(self, key: bytes, page: memoryview, *, is_replaced: bool) -> bool:
        if self.is_loading:
            self.has_read.wait()
        return super().store(key, page, is_replaced=is_replaced)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[TierMachine]:
    """A machine on a store with a budget, which holds the old keys."""
    made = suite_of(request.param, {"root": "{tmp}"}).Machine()
    assert isinstance(made, TierMachine)
    made.start(max_bytes=BUDGET)
    for key, size in OLD.items():
        made.move("put", {key: size})
    yield made
    made.teardown()


@pytest.mark.parametrize("machine", [LateNotices], indirect=True)
def test_a_load_may_miss_a_key_whose_eviction_is_reported_a_moment_later(
    machine: TierMachine,
) -> None:
    machine.submit("put", NEW)
    machine.store.has_evicted.wait()
    for key, size in OLD.items():
        machine.submit("get", {key: size})
    machine.wait()
    assert not OLD.keys() <= machine.model.held.keys()


@pytest.mark.parametrize("machine", [EvictsDuringALoad], indirect=True)
def test_a_load_may_end_well_before_the_eviction_of_its_key_is_reported(
    machine: TierMachine,
) -> None:
    machine.store.is_loading = True
    first = next(iter(OLD))
    machine.submit("get", {first: PAGE})
    machine.submit("put", NEW)
    machine.wait()
    assert first in machine.model.gone
