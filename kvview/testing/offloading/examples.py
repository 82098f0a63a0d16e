"""A check of the offloading contract that the model cannot state: growth of memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvview.offloading import ReqContext
from kvview.testing.cost import growth_of
from kvview.testing.harness import Capability as C
from kvview.testing.offloading.player import ManagerPlayer
from kvview.testing.search import example

_TOLERATED_GROWTH = 32_768  # bytes


@example(ManagerPlayer, "OFF-5", C.SIZED)
def check_off_5_growth_of_keys_that_are_gone(tier: ManagerPlayer) -> None:
    """Growth: evicted keys, failed stores and ended loads keep no memory allocated."""
    if tier.can(C.STORE_THRESHOLD):  # above 1 a manager remembers offers of keys
        tier.use(tier.call(tier.harness, "with_threshold", 1), "manager")
    manager: Any = tier.subject
    no_request = ReqContext()  # a manager may remember the keys of a request until it ends

    def serve(times: int) -> None:
        for _ in range(times):
            stored, failed = tier.fresh(1), tier.fresh(1)
            manager.prepare_store(failed, no_request)
            manager.complete_store(failed, no_request, success=False)
            manager.prepare_store(stored, no_request)
            manager.complete_store(stored, no_request)
            manager.prepare_load(stored, no_request)
            manager.touch(stored + failed, no_request)
            manager.complete_load(stored, no_request)
            list(manager.take_events())

    grown = growth_of(partial(serve, 700), partial(serve, 100))
    tier.true(
        grown <= _TOLERATED_GROWTH,
        "keys that are gone leave no memory behind",
        grown,
        f"at most {_TOLERATED_GROWTH} bytes",
    )
