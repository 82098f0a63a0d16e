"""The fold of events."""

from __future__ import annotations

import pytest

from kvview import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    EventOrderError,
    OffloadingEvent,
    OffloadKey,
    fold_events,
    make_offload_key,
)
from kvview.events import FoldedEvents

A, B, C = (make_offload_key(name, 0) for name in (b"a", b"b", b"c"))


def stored(*keys: OffloadKey, medium: str = MEDIUM_CPU) -> OffloadingEvent:
    return OffloadingEvent(keys, medium, removed=False)


def removed(*keys: OffloadKey, medium: str = MEDIUM_CPU) -> OffloadingEvent:
    return OffloadingEvent(keys, medium, removed=True)


# --- fold_events ---


def test_event_1_a_removal_needs_a_store_before_it() -> None:
    with pytest.raises(EventOrderError, match=f"EVENT-1: event 1 removes key {B.hex()} .*'CPU'"):
        fold_events([stored(A), removed(B)])
    with pytest.raises(ValueError, match="EVENT-1"):
        fold_events([stored(A), removed(A, A)])


def test_event_2_the_fold_is_the_set_of_loadable_keys() -> None:
    events = [stored(A, B), stored(A, medium="DISK"), removed(A), stored(A), removed(B, A)]
    assert fold_events(iter(events)) == {MEDIUM_CPU: set(), "DISK": {A}}
    fold: FoldedEvents[OffloadKey] = FoldedEvents()
    changes = [
        fold.change(MEDIUM_CPU, A, removed=is_removal) for is_removal in (False, False, True, True)
    ]
    assert changes == [True, False, True, False]
    for is_removal in (False, False, True):  # two blocks of the GPU have one key
        assert fold.change(MEDIUM_GPU, A, removed=is_removal)
    assert fold.advertised() == {A}
    assert fold.clear_gpu() == {A: 1}
    assert fold.advertised() == set()
