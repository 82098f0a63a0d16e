"""A tier with a budget of bytes, and the calls of both managers beyond the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import given, settings, strategies as st

from kvview import OffloadKey, make_offload_key
from kvview.testing.offloading.machine import OffloadingMachine
from kvview.testing.suites.conformance import observable, of_state, operation
from kvview_reference.harness import ReferenceManager
from kvview_reference.offloading import ByteBudgetManager

KEYS = [make_offload_key(bytes([number]), 0) for number in range(9)]
LARGEST = 10
BUDGET = 3 * LARGEST


# --- the laws of managers ---


class DropsKeysMachine(OffloadingMachine):
    """Also evicts keys, and discards keys of which some are being loaded."""

    @operation("OFF-8", keys=of_state(lambda m: m.any_keys()))
    def discard(self, keys: Sequence[OffloadKey]) -> None:
        model = self.model
        got = self.call(self.manager, "discard", keys)
        gone = [key for key in dict.fromkeys(keys) if key in model.stored]
        self.equal(got, gone, "discard returns the keys that were held")
        for key in gone:
            model.order.forget(key)
            if key in model.loads:
                model.late_loads[key] = model.loads.pop(key)
        self.drop(gone)

    @operation("OFF-1", number=st.integers(0, 12))
    def evict(self, number: int) -> None:
        may_go = self.model.may_go(())
        got = self.call(self.manager, "evict", number)
        self.equal(len(got), min(number, len(may_go)), "evict frees as many keys as it can")
        self.true(may_go.issuperset(got), "no key in flight is evicted", got, f"some of {may_go}")
        self.judge(self.model.order.replace([], got, may_go), got)
        self.drop(got)

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.model.stored.discard(key)
            self.model.due.append(("-", key))
            if key not in self.model.late:
                self.model.pages.pop(key, None)


class CountsMachine(DropsKeysMachine):
    """Also compares the counts of a manager of pages."""

    @observable("OFF-5")
    def counts(self) -> None:
        model, held = self.model, sorted(self.model.stored)[:4]
        manager: Any = self.manager
        in_flight = len(model.storing) + len(model.loads) + len(model.late)
        self.equal(manager.num_free_blocks(), model.num_free(), "the free pages")
        self.equal(manager.num_protected_blocks(), in_flight, "the pages of transfers")
        for keys in (held, [*held[:2], self.keys[-1], *held[2:]]):
            expected = [*(key in model.stored for key in keys), False].index(False)
            self.equal(manager.num_leading_hits(keys), expected, "the leading hits")


class TestDroppedKeys(ReferenceManager):
    """Dropped keys are no longer held, and their loads continue."""

    machine: ClassVar[type[DropsKeysMachine]] = CountsMachine


def of_one_size(num_blocks: int, *args: Any, **options: Any) -> ByteBudgetManager:
    """A budget of as many pages as a manager of equal pages has."""
    return ByteBudgetManager(num_blocks, lambda keys: [1] * len(keys), 1, *args, **options)


class TestByteBudget(TestDroppedKeys):
    """A budget of equal pages, whose pages are numbered beyond the number of pages that fit."""

    lacks = ("arc", "pages")
    machine = DropsKeysMachine
    Manager: Any = staticmethod(of_one_size)


# --- pages that differ in size ---


def largest(keys: Sequence[OffloadKey]) -> list[int]:
    """Pages of two groups, of which one is half as large."""
    return [LARGEST - 5 * (KEYS.index(key) % 2) for key in keys]


STORES = st.tuples(
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    st.integers(0, LARGEST),
    st.sampled_from(("end", "keep open", "load")),
)


@settings(max_examples=300, deadline=None)
@given(stores=st.lists(STORES, max_size=20))
def test_the_least_recently_used_keys_are_evicted_as_far_as_the_bytes_are_needed(
    stores: list[tuple[list[OffloadKey], int, str]],
) -> None:
    manager = ByteBudgetManager(BUDGET, largest, LARGEST)
    sizes: dict[OffloadKey, int] = {}  # the least recently used first
    protected: set[OffloadKey] = set()
    for keys, num_bytes, end in stores:
        new = [key for key in keys if key not in sizes]
        reserved = dict(zip(new, largest(new), strict=True))
        output = manager.prepare_store(keys)
        may_go = [key for key in sizes if key not in protected and key not in keys]
        room = BUDGET - sum(sizes.values())
        expected = []
        while sum(reserved.values()) > room and may_go:
            expected.append(may_go.pop(0))
            room += sizes[expected[-1]]
        if sum(reserved.values()) > room:
            assert output is None
            continue
        assert output is not None
        assert (output.keys_to_store, output.evicted_keys) == (new, expected)
        for key in expected:
            del sizes[key]
        sizes |= dict(reversed(reserved.items()))
        protected.update(new)
        if end != "keep open":
            manager.complete_store(new)
            manager.resize(new, min(num_bytes, sum(reserved.values())))
            # Rounded up, so that the bytes in memory are never more than the budget.
            total = max(1, sum(reserved.values()))
            sizes |= {k: -(-size * min(num_bytes, total) // total) for k, size in reserved.items()}
            protected.difference_update(new)
        if end == "load" and new:
            manager.prepare_load(new)
            protected.update(new)
    assert sum(sizes.values()) <= BUDGET
