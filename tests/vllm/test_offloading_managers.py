"""vLLM's own offloading managers under the kit: as they are, and behind the adapter.

What a release breaks is an expected failure of the bare manager; behind the
adapter nothing fails.
"""

from __future__ import annotations

import re
import threading
import warnings
from typing import Any

import pytest

from kvview import (
    KeyNotLoadableError,
    LookupResult,
    ReqContext,
    SupportsRequestHooks,
    SupportsStepHooks,
    TransferNotInFlightError,
    UnsupportedEngineError,
    fold_events,
    make_offload_key,
)
from kvview.testing import BoundCheck, parametrize_with_checks
from kvview_vllm.simulation import scheduler as cpu_scheduler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    vllm = pytest.importorskip("vllm", reason="needs a vLLM release", exc_type=ImportError)
    pytest.importorskip(  # a submodule: this very folder is named vllm
        "vllm.version", reason="needs a vLLM release", exc_type=ImportError
    )
    cpu_scheduler.prepare()
    from offloading_tiers import (  # type: ignore[import-not-found]
        CAPACITY,
        SEAM,
        TRANSFERS_ARE_USES,
        ARCTier,
        BareARCTier,
        BareTier,
        KeyedTier,
        Tier,
        make_keyed_manager,
        make_manager,
    )

from kvview_vllm.offloading import VLLMOffloadingManager
from kvview_vllm.releases import NEWEST_TESTED
from kvview_vllm.releases.calls import loses_touched_stores, pages_of_backend
from kvview_vllm.releases.release import find_class

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
CTX = ReqContext("r")
_RELEASE = re.match(r"\d+\.\d+\.\d+", vllm.__version__)


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


RELEASE = number(_RELEASE[0]) if _RELEASE else number(NEWEST_TESTED)

_ASSERTS = "asserts where OFF-2 raises, after protecting keys: vllm/v1/kv_offload, all releases"
_ONCE = "a completion too many is asserted at best: vllm/v1/kv_offload, all releases"
_NO_PENDING = "up to 0.24 lookup says a key being stored is a miss: vllm/v1/kv_offload"
_OWN_INPUT = "up to 0.17 a store evicts its own input: vLLM PR #35846"
_PARTIAL = "up to 0.18 ARC evicts, then refuses: vllm/v1/kv_offload/arc_manager.py"
_RESET = (
    "reset_cache forgets transfers in flight and has no events; vLLM's scheduler ignores late "
    "completions instead: vllm/v1/kv_offload/cpu/manager.py, 0.22 and later"
)
_REPEATS = "a key that one prepare_store names twice is stored twice: vllm/v1/kv_offload"
_TRANSFERS = "0.24 to 0.30 take the end of a transfer for a use: cpu/policies/lru.py"
_TOUCHED = "up to 0.16 a key that is touched while it is stored is lost: arc_manager.py"
_ARC = (
    "evicts from T1 at its target size too, and stores what is found in B1 or B2 into T1: "
    "vllm/v1/kv_offload, arc_manager.py and cpu/policies/arc.py, all releases"
)
_NO_ROOM = "up to 0.29 ARC finds no room where there is some: vLLM PR #55461"
OWN_ARC = {
    "check_off_11_arc_is_the_published_algorithm": _ARC,
    "check_off_11_arc_new_key_beside_one_that_comes_again": _ARC,
}
if RELEASE < (0, 30):
    OWN_ARC["check_off_3_what_may_go_is_found"] = _NO_ROOM


def broken_laws(policy: str) -> dict[str, str]:
    """The checks that the bare manager of this release fails, and why."""
    broken = {
        "check_off_2_load_of_what_is_not_ready_is_refused": _ASSERTS,
        "check_off_2_failed_load_protects_nothing": _ASSERTS,
        "check_off_3_key_offered_twice_is_stored_once": _REPEATS,
        "check_off_3_repeats_need_no_room": _REPEATS,
        "check_off_4_failed_store_is_gone": _ASSERTS,
        "check_off_5_capacity_outlives_every_failure": _ASSERTS,
        "check_event_1_each_key_is_told_once": _REPEATS,
        "check_off_9_completion_that_nothing_waits_for_is_refused": _ONCE,
        "check_off_9_store_is_completed_once": _ONCE,
        "check_off_9_store_may_be_completed_in_several_calls": _ONCE,
        "check_off_9_page_of_a_failed_store_is_given_back_once": _ONCE,
        "check_off_9_as_many_loads_are_completed_as_were_prepared": _ONCE,
        "check_off_9_refused_completion_of_stores_changes_nothing": _ONCE,
        "check_off_9_refused_completion_of_loads_changes_nothing": _ONCE,
    }
    if policy == "arc":
        broken |= OWN_ARC
        if RELEASE < (0, 17) and loses_touched_stores(make_manager(policy)):
            broken["check_off_11_arc_touch_under_store_is_the_first_use"] = _TOUCHED
    else:
        broken["check_off_10_lru_refused_calls_are_no_uses"] = _ASSERTS
    if policy == "lru" and TRANSFERS_ARE_USES:
        broken |= {
            "check_off_10_lru_nothing_else_is_a_use": _TRANSFERS,
            "check_off_10_lru_key_in_flight_keeps_its_place": _TRANSFERS,
            "check_off_10_lru_store_in_flight_keeps_its_place": _TRANSFERS,
        }
    if not SEAM.lookup_results:
        broken |= {
            "check_off_1_key_under_store_is_not_evicted": _NO_PENDING,
            "check_off_3_store_leaves_out_what_is_held": _NO_PENDING,
            "check_off_4_failure_of_some_keys_leaves_the_others": _NO_PENDING,
            "check_off_4_store_may_succeed_in_part": _NO_PENDING,
            "check_off_6_lookup_follows_a_store": _NO_PENDING,
        }
    if RELEASE < (0, 18):
        broken |= {
            "check_off_1_two_loads_of_a_key_need_two_completions": _OWN_INPUT,
            "check_off_3_store_never_evicts_its_own_input": _OWN_INPUT,
        }
    if policy == "arc" and pages_of_backend(make_manager()) is not None:
        broken["check_off_3_refused_store_changes_nothing"] = _PARTIAL
        broken["check_off_2_key_loaded_twice_has_its_page_twice"] = _PARTIAL
    if policy == "lru" and pages_of_backend(make_manager()) is not None:
        broken["check_off_9_completion_that_names_a_key_twice"] = _ONCE
    if SEAM.cache_reset:
        broken |= {
            "check_off_8_reset_forgets_every_key": _ASSERTS,
            "check_off_8_late_store_is_not_taken_for_a_newer_one": _RESET,
            "check_off_8_late_load_may_still_be_completed": _RESET,
            "check_off_8_pages_in_flight_are_not_reused": _RESET,
            "check_off_8_completions_of_before_and_after_in_one_call": _RESET,
            "check_off_8_resets_one_after_another": _RESET,
            "check_event_1_removal_follows_a_store": _RESET,
            "check_event_5_reset_removes_everything_advertised": _RESET,
            "check_event_5_reset_follows_what_was_not_taken_yet": _RESET,
            "check_off_9_late_transfer_is_completed_once_too": _ONCE,
        }
    return broken


# The search would end at one of these failures, and say nothing new.
SCENARIOS = ("check_off_[0-9]*", "check_event_*")


def keys(*numbers: int) -> list[Any]:
    return [make_offload_key(b"k%d" % n, 0) for n in numbers]


def store(manager: Any, *numbers: int) -> None:
    output = manager.prepare_store(keys(*numbers), CTX)
    manager.complete_store(output.keys_to_store, CTX)


@pytest.fixture(params=BareTier.policies)
def manager(request: pytest.FixtureRequest) -> VLLMOffloadingManager:
    return VLLMOffloadingManager(lambda: make_manager(request.param))


# --- the kit ---


@parametrize_with_checks(BareTier, broken_laws("lru"), select=SCENARIOS)
def test_bare_lru(check: BoundCheck) -> None:
    # VOFF-1
    check()


@parametrize_with_checks(Tier)
def test_lru(check: BoundCheck) -> None:
    check()


@parametrize_with_checks(KeyedTier)
def test_addressed_by_key(check: BoundCheck) -> None:
    check()


if "arc" in BareTier.policies:

    @parametrize_with_checks(BareARCTier, broken_laws("arc"), select=SCENARIOS)
    def test_bare_arc(check: BoundCheck) -> None:
        check()

    @parametrize_with_checks(ARCTier, OWN_ARC)
    def test_arc(check: BoundCheck) -> None:
        check()


# --- what the kit does not ask ---


def test_unknown_shape_is_refused() -> None:
    class Fork(type(make_manager())):  # type: ignore[misc]
        def prepare_store(self, keys: Any, deadline: float) -> None: ...

    forked = make_manager()
    forked.__class__ = Fork
    with pytest.raises(UnsupportedEngineError) as caught:
        VLLMOffloadingManager(lambda: forked)
    for part in ("offloading seam", vllm.__version__, "prepare_store(keys, deadline)"):
        assert part in str(caught.value)


def test_spec_without_pages_is_handed_on() -> None:  # VOFF-2
    manager = VLLMOffloadingManager(make_keyed_manager)
    output = manager.prepare_store(keys(0, 1), CTX)
    assert output is not None
    assert list(output.store_spec.keys) == keys(0, 1)  # type: ignore[attr-defined]
    manager.complete_store(keys(0, 1), CTX)
    assert list(manager.prepare_load(keys(1), CTX).keys) == keys(1)  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(make_manager(), "lock"), reason="no lock before 0.33")
def test_the_lock_is_held_in_every_call_but_shutdown() -> None:
    lock = threading.Lock()
    held: dict[str, bool] = {}

    class Locked(type(make_manager())):  # type: ignore[misc]
        lock = property(lambda self: lock)

        def __getattribute__(self, name: str) -> Any:
            held[name] = held.get(name, True) and lock.locked()
            return super().__getattribute__(name)

    manager = make_manager()
    manager.__class__ = Locked
    kept = VLLMOffloadingManager(lambda: manager)
    held.clear()
    store(kept, 0)
    kept.prepare_load(keys(0), CTX)
    kept.complete_load(keys(0), CTX)
    kept.touch(keys(0), CTX)
    kept.on_new_request(CTX)
    kept.on_request_finished(CTX)
    kept.on_schedule_end()
    kept.has_pending_work()
    list(kept.take_events())
    kept.lookup(keys(0)[0], CTX)
    kept.prepare_store(keys(1), CTX)
    kept.reset()
    kept.shutdown()
    entered = {name for name in vars(find_class("OffloadingManager")) if name in held}
    assert {name for name in entered if not held[name]} == {"lock", "shutdown"}
    assert {"lookup", "prepare_load", "prepare_store", "reset_cache"} <= entered


def test_key_offered_twice_is_stored_once(manager: VLLMOffloadingManager) -> None:
    output = manager.prepare_store(keys(1, 1, 2, 1), CTX)
    assert output is not None
    assert output.keys_to_store == keys(1, 2)
    manager.complete_store(keys(1, 2), CTX)
    store(manager, *range(10, 10 + CAPACITY))
    assert all(manager.lookup(key) is HIT for key in keys(*range(10, 10 + CAPACITY)))


def test_transfers_are_completed_once(manager: VLLMOffloadingManager) -> None:
    store(manager, 0)
    manager.prepare_load(keys(0, 0), CTX)
    with pytest.raises(TransferNotInFlightError, match="OFF-9"):
        manager.complete_load(keys(0, 0, 0), CTX)
    manager.complete_load(keys(0), CTX)
    manager.complete_load(keys(0), CTX)
    for again in (manager.complete_load, manager.complete_store):
        with pytest.raises(TransferNotInFlightError, match="OFF-9"):
            again(keys(0), CTX)
    assert manager.lookup(keys(0)[0]) is HIT


def test_completion_that_names_one_wrong_key_ends_nothing(manager: VLLMOffloadingManager) -> None:
    manager.prepare_store(keys(0, 1), CTX)
    with pytest.raises(TransferNotInFlightError):
        manager.complete_store(keys(0, 7, 1), CTX)
    assert [manager.lookup(key) for key in keys(0, 1)] == [PENDING, PENDING]


def test_touch_of_a_key_being_stored_keeps_it(manager: VLLMOffloadingManager) -> None:
    manager.prepare_store(keys(0, 1), CTX)
    manager.touch(keys(0, 1), CTX)
    manager.complete_store(keys(0, 1), CTX)
    assert [manager.lookup(key) for key in keys(0, 1)] == [HIT, HIT]


def test_reset_after_reset_still_keeps_pages_in_flight(manager: VLLMOffloadingManager) -> None:
    store(manager, 0, 1)
    busy = set(manager.prepare_load(keys(1), CTX).block_ids)  # type: ignore[attr-defined]
    manager.reset()
    manager.reset()
    output = manager.prepare_store(keys(*range(10, 10 + CAPACITY - 1)), CTX)
    assert output is not None
    assert not busy & set(output.store_spec.block_ids)  # type: ignore[attr-defined]
    manager.complete_store(output.keys_to_store, CTX)
    assert manager.prepare_store(keys(1, 30), CTX).evicted_keys  # type: ignore[union-attr]
    with pytest.raises(KeyNotLoadableError):
        manager.prepare_load(keys(1), CTX)
    manager.complete_load(keys(1), CTX)
    manager.complete_store(keys(30), CTX)
    store(manager, 1)
    assert manager.lookup(keys(1)[0]) is HIT


def test_reset_holds_pages_below_a_store_threshold() -> None:
    if "store_threshold" not in vars(make_manager()):
        pytest.skip("this release filters stores in a manager of its own")
    manager = VLLMOffloadingManager(lambda: make_manager(store_threshold=3))
    for _ in range(3):  # up to 0.28 lookups are counted, then offers
        assert [manager.lookup(key) for key in keys(0, 1)] == [MISS, MISS]
        output = manager.prepare_store(keys(0, 1), CTX)
    assert output is not None
    assert output.keys_to_store == keys(0, 1)
    manager.reset()
    manager.complete_store(keys(0, 1), CTX)
    assert [manager.lookup(key) for key in keys(0, 1)] == [MISS, MISS]


def test_hooks_reach_every_release(manager: VLLMOffloadingManager) -> None:
    assert isinstance(manager, SupportsRequestHooks)
    assert isinstance(manager, SupportsStepHooks)
    for name in ("a", "b", "a"):
        context = ReqContext(name, {"hint": 1})
        manager.on_new_request(context)
        manager.prepare_store(keys(ord(name)), context)
        manager.on_schedule_end()
        assert not manager.has_pending_work()
        manager.on_request_finished(context)
        if manager.lookup(keys(ord(name))[0]) is PENDING:
            manager.complete_store(keys(ord(name)), context)
    assert [manager.lookup(key) for key in keys(ord("a"), ord("b"))] == [HIT, HIT]


def starved_arc() -> VLLMOffloadingManager:
    """ARC that wants a larger T1 than it has, all of T2 being loaded; five keys are idle."""
    if "arc" not in BareTier.policies:
        pytest.skip("this release has no ARC")
    manager = VLLMOffloadingManager(lambda: make_manager("arc"))
    for key in range(CAPACITY + 4):
        store(manager, key)
    manager.touch(keys(0, 1, 2, 3), CTX)
    loading = keys(9, 10, 11)
    manager.touch(loading, CTX)
    manager.prepare_load(loading, CTX)
    return manager


@pytest.mark.xfail(RELEASE < (0, 30), reason=_NO_ROOM, strict=True)
def test_arc_makes_room_where_there_is_some() -> None:
    assert starved_arc().prepare_store(keys(20, 21, 22), CTX) is not None


def test_arc_that_refuses_advertises_only_what_is_loadable() -> None:
    manager = starved_arc()
    manager.prepare_store(keys(20, 21, 22), CTX)
    loadable = {key for key in keys(*range(30)) if manager.lookup(key) is HIT}
    assert fold_events(manager.take_events()) == {"CPU": loadable}
