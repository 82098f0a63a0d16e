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
from kvview.testing import PROFILES, BoundCheck, ManagerPlayer, parametrize_with_checks
from kvview.testing.search import search
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
        ConnectorPlayer,
        KeyedTier,
        Tier,
        make_keyed_manager,
        make_manager,
    )

from kvview_vllm.offloading import VLLMOffloadingManager
from kvview_vllm.releases import NEWEST_TESTED
from kvview_vllm.releases.release import find_class

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
CTX = ReqContext("r")
_RELEASE = re.match(r"\d+\.\d+\.\d+", vllm.__version__)


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


RELEASE = number(_RELEASE[0]) if _RELEASE else number(NEWEST_TESTED)

_NO_ROOM = "up to 0.29 ARC finds no room where there is some: vLLM PR #55461"

ANY_CALLER = {"OFF-2", "OFF-3", "OFF-5", "OFF-6", "OFF-8", "OFF-9", "EVENT-1", "EVENT-2"}
"""Laws that the bare managers break when they get calls that vLLM does not make.

They assert where OFF-2 raises, after protecting keys; a completion too many is asserted at
best; and a key that one ``prepare_store`` names twice is stored twice.
"""


def broken_laws(policy: str) -> set[str]:
    """The laws that the bare manager of this release may break by the calls of its connector."""
    broken = {"OFF-11"} if policy == "arc" else set()
    if TRANSFERS_ARE_USES and policy == "lru":
        broken |= {"OFF-10"}  # the end of a transfer is a use: 0.24 to 0.30
    if not SEAM.lookup_results:
        broken |= {"OFF-6"}  # lookup says that a key being stored is a miss: up to 0.24
    if RELEASE < (0, 18):
        broken |= {"OFF-3", "OFF-1", "OFF-5"}  # a store evicts its own input: vLLM PR #35846
    if RELEASE < (0, 30) and policy == "arc":
        broken |= {"OFF-3", "OFF-5", "EVENT-2"}  # ARC refuses what fits, up to 0.18 after evictions
    return broken


def keys(*numbers: int) -> list[Any]:
    return [make_offload_key(b"k%d" % n, 0) for n in numbers]


def store(manager: Any, *numbers: int) -> None:
    output = manager.prepare_store(keys(*numbers), CTX)
    manager.complete_store(output.keys_to_store, CTX)


@pytest.fixture(params=BareTier.policies)
def manager(request: pytest.FixtureRequest) -> VLLMOffloadingManager:
    return VLLMOffloadingManager(lambda: make_manager(request.param))


# --- the kit ---


@parametrize_with_checks(Tier)
def test_lru(check: BoundCheck) -> None:
    check()


@parametrize_with_checks(KeyedTier)
def test_addressed_by_key(check: BoundCheck) -> None:
    check()


@pytest.mark.skipif("arc" not in BareTier.policies, reason="this release has no ARC")
def test_arc() -> None:
    """It evicts from T1 at its target size too, and stores what is found in B1 or B2 into T1."""
    broken = search(ManagerPlayer, ARCTier, PROFILES["ci"]).failures
    assert "OFF-11" in broken
    refuses_what_fits = {"OFF-3"} if RELEASE < (0, 30) else set()
    assert broken.keys() <= {"OFF-11"} | refuses_what_fits, broken


@pytest.mark.parametrize("policy", BareTier.policies)
def test_bare_manager(policy: str) -> None:  # VOFF-1
    tier = BareTier if policy == "lru" else BareARCTier
    broken = broken_laws(policy)
    of_connector = search(ConnectorPlayer, tier, PROFILES["ci"]).failures
    assert of_connector.keys() <= broken, of_connector
    assert bool(of_connector) is bool(broken)
    of_anyone = search(ManagerPlayer, tier, PROFILES["ci"]).failures
    assert of_anyone.keys() & {"OFF-2", "OFF-9"}
    assert of_anyone.keys() <= broken | ANY_CALLER, of_anyone


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
