"""Entries that a reset leaves are dropped by later calls."""

from __future__ import annotations

from kvview import make_offload_key
from kvview_reference.offloading import CPUOffloadingManager


def test_offers_below_the_threshold_drop_the_leftovers_of_resets() -> None:
    manager = CPUOffloadingManager(8, store_threshold=3)
    for life in range(50):
        manager.prepare_store([make_offload_key(b"%d %d" % (life, n), 0) for n in range(20)])
        manager.reset()
    assert len(manager._leftovers) <= 2 * 20
