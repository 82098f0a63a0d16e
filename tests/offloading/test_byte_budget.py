"""A tier with a budget of bytes, and the calls of both managers beyond the contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview import LookupResult, OffloadKey, make_offload_key
from kvview.testing import BoundCheck, Capability, parametrize_with_checks
from kvview_reference.harness import ReferenceManager
from kvview_reference.offloading import ByteBudgetManager, CPUOffloadingManager

KEYS = [make_offload_key(bytes([number]), 0) for number in range(12)]
LARGEST = 10
CAPACITY = 3


def largest(keys: Sequence[OffloadKey]) -> list[int]:
    """Pages of two groups, of which one is half as large."""
    return [LARGEST - 5 * (KEYS.index(key) % 2) for key in keys]


def of_one_size(num_blocks: int, *args: Any, **options: Any) -> ByteBudgetManager:
    """A budget of as many pages as a manager of equal pages has."""
    return ByteBudgetManager(num_blocks, lambda keys: [1] * len(keys), 1, *args, **options)


class ByteBudgetHarness(ReferenceManager):
    """Whose pages are numbered beyond the number of pages that fit."""

    Manager: Any = staticmethod(of_one_size)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities - {Capability.PAGES, Capability.TIER_COUNTS}


@parametrize_with_checks(ByteBudgetHarness, seeds=20)
def test_a_budget_of_equal_pages_satisfies_every_law(check: BoundCheck) -> None:
    check()


MOVES = st.tuples(
    st.sampled_from(
        ("store", "end", "fail", "load", "loaded", "touch", "discard", "evict", "reset")
    ),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    st.integers(0, LARGEST),
)
MANAGERS: dict[str, Callable[[str], CPUOffloadingManager]] = {
    "blocks": lambda policy: CPUOffloadingManager(CAPACITY, policy, True),
    "bytes": lambda policy: ByteBudgetManager(CAPACITY * LARGEST, largest, LARGEST, policy, True),
}


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("kind", MANAGERS)
@settings(max_examples=200, deadline=None)
@given(moves=st.lists(MOVES, max_size=40))
def test_no_key_in_flight_loses_its_page_and_no_budget_is_exceeded(
    kind: str, policy: str, moves: list[tuple[str, list[OffloadKey], int]]
) -> None:
    """A model with the bytes, pages and recency of all keys; of ARC it knows no recency."""
    manager = MANAGERS[kind](policy)
    by_bytes = manager if isinstance(manager, ByteBudgetManager) else None
    order: list[OffloadKey] = []  # the least recently used first
    sizes: dict[OffloadKey, int] = {}
    storing: dict[OffloadKey, int] = {}  # by page
    loads: Counter[OffloadKey] = Counter()
    pages: dict[OffloadKey, int] = {}
    late: Counter[OffloadKey] = Counter()  # loads whose key was dropped
    advertised: set[OffloadKey] = set()

    def drop(keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            order.remove(key)
            del sizes[key]
            if key not in late:
                del pages[key]

    def expect_victims(victims: Sequence[OffloadKey], protected: Sequence[OffloadKey] = ()) -> None:
        may_go = [key for key in order if not (key in storing or key in loads or key in protected)]
        assert set(victims) <= set(may_go)
        if policy == "lru":
            assert list(victims) == may_go[: len(victims)]
        drop(victims)

    for move, keys, number in moves:
        loadable = [key for key in keys if key in order and key not in storing]
        if move == "store":
            new = [key for key in keys if key not in order and key not in late]
            fitting = new[: manager.num_storable(new)]
            output = manager.prepare_store(fitting)
            assert output is not None
            assert output.keys_to_store == fitting
            expect_victims(output.evicted_keys)
            order += reversed(fitting)
            sizes |= dict(zip(fitting, largest(fitting), strict=True))
            taken = manager.pages_of(fitting)
            assert not set(taken) & set(pages.values())
            pages |= dict(zip(fitting, taken, strict=True))
            storing |= dict.fromkeys(fitting, 0)
        elif move in ("end", "fail"):
            ended = [key for key in keys if key in storing]
            manager.complete_store(ended, success=move == "end")
            for key in ended:
                del storing[key]
            if move == "fail":
                drop(ended)
            elif by_bytes is not None and ended:
                by_bytes.resize(ended, num_bytes := min(number, sum(map(sizes.__getitem__, ended))))
                reserved = max(1, sum(map(sizes.__getitem__, ended)))
                sizes |= {key: -(-sizes[key] * num_bytes // reserved) for key in ended}
        elif move == "load":
            assert list(manager.prepare_load(loadable).block_ids) == [pages[k] for k in loadable]
            loads.update(loadable)
        elif move == "loaded":
            ended = [key for key in keys if key in loads or key in late]
            manager.complete_load(ended)
            for key in ended:
                counts = late if key in late else loads
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
                    if counts is late:
                        del pages[key]
        elif move == "touch":
            manager.touch(keys)
            used = [key for key in reversed(keys) if key in order]
            order = [key for key in order if key not in used] + used
        elif move == "discard":
            assert manager.discard(keys) == loadable
            late += Counter({key: loads.pop(key) for key in loadable if key in loads})
            drop(loadable)
        elif move == "evict":
            victims = manager.evict(number % 3)
            free = [key for key in order if key not in storing and key not in loads]
            assert len(victims) == min(number % 3, len(free))
            expect_victims(victims)
        elif not storing:
            manager.reset()
            late += loads
            loads.clear()
            drop([*order])
        for event in manager.take_events():
            assert advertised.isdisjoint(event.keys) != event.removed
            advertised.symmetric_difference_update(event.keys)
        assert advertised == set(manager.loadable_keys()) == set(order) - storing.keys()
        assert all(
            manager.is_in_flight(key) == (key in storing or key in loads or key in late)
            for key in KEYS
        )
        assert all((manager.lookup(key) is LookupResult.HIT) == (key in advertised) for key in KEYS)
        assert sum(sizes.values()) <= CAPACITY * LARGEST if by_bytes else len(pages) <= CAPACITY


def test_a_page_that_became_smaller_leaves_room() -> None:
    manager = ByteBudgetManager(2 * LARGEST, lambda keys: [LARGEST] * len(keys), LARGEST)
    manager.prepare_store(KEYS[:2])
    assert manager.num_storable(KEYS[2:5]) == 0
    manager.complete_store(KEYS[:2])
    manager.resize(KEYS[:2], LARGEST)
    output = manager.prepare_store(KEYS[2:3])
    assert output is not None
    assert not output.evicted_keys
