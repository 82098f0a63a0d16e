"""vLLM's own offloading managers under the kit, bare and behind the adapter.

The laws that a release breaks are expected failures of the bare manager; behind the adapter
nothing fails.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from offloading_tiers import (  # type: ignore[import-not-found]
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

import vllm
from kvview import (
    LookupResult,
    ReqContext,
    UnsupportedEngineError,
    make_offload_key,
)
from kvview.testing import PROFILES, BoundCheck, ManagerPlayer, parametrize_with_checks
from kvview.testing.search import search
from kvview_vllm.offloading import VLLMOffloadingManager
from kvview_vllm.releases import NEWEST_TESTED
from kvview_vllm.releases.release import find_class

HIT, MISS = LookupResult.HIT, LookupResult.MISS
CTX = ReqContext("r")
_RELEASE = re.match(r"\d+\.\d+\.\d+", vllm.__version__)


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


RELEASE = number(_RELEASE[0]) if _RELEASE else number(NEWEST_TESTED)

_NO_ROOM = "up to 0.29 ARC evicts no key although some are idle: vLLM PR #55461"

ANY_CALLER = {"OFF-2", "OFF-3", "OFF-5", "OFF-6", "OFF-8", "OFF-9", "EVENT-1", "EVENT-2"}
"""Laws that the bare managers break in calls that vLLM does not make.

They assert where OFF-2 raises, after they have protected keys; they assert a completion too many
at best; and they store a key twice if one ``prepare_store`` names it twice.
"""


def broken_laws(policy: str) -> set[str]:
    """Return the laws that the bare manager of this release breaks in calls of its connector."""
    broken = {"OFF-11"} if policy == "arc" else set()
    if TRANSFERS_ARE_USES and policy == "lru":
        broken |= {"OFF-10"}  # the end of a transfer is a use: 0.24 to 0.30
    if not SEAM.lookup_results:
        broken |= {"OFF-6"}  # lookup says that a key being stored is a miss: up to 0.24
    if RELEASE < (0, 18):
        broken |= {"OFF-3", "OFF-1", "OFF-5"}  # a store evicts its own input: vLLM PR #35846
    if RELEASE < (0, 30) and policy == "arc":
        broken |= {
            "OFF-3",
            "OFF-5",
            "EVENT-2",
        }  # ARC refuses stores that fit
    return broken


def keys(*numbers: int) -> list[Any]:
    return [make_offload_key(b"k%d" % n, 0) for n in numbers]


def store(manager: Any, *numbers: int) -> None:
    output = manager.prepare_store(keys(*numbers), CTX)
    manager.complete_store(output.keys_to_store, CTX)


# --- the kit ---


@parametrize_with_checks(Tier)
def test_lru_satisfies_the_laws(check: BoundCheck) -> None:
    check()


@pytest.mark.ends
@parametrize_with_checks(KeyedTier)
def test_a_tier_addressed_by_key_satisfies_the_laws(check: BoundCheck) -> None:
    check()


@pytest.mark.skipif("arc" not in BareTier.policies, reason="this release has no ARC")
def test_arc_breaks_its_published_order_only() -> None:
    """It evicts from T1 at its target size too, and stores keys found in B1 or B2 into T1."""
    broken = search(ManagerPlayer, ARCTier, PROFILES["ci"]).failures
    assert "OFF-11" in broken
    refuses_fitting_stores = {"OFF-3"} if RELEASE < (0, 30) else set()
    assert broken.keys() <= {"OFF-11"} | refuses_fitting_stores, broken


@pytest.mark.parametrize("policy", BareTier.policies)
def test_a_bare_manager_breaks_the_known_laws_only(policy: str) -> None:  # VOFF-1
    tier = BareTier if policy == "lru" else BareARCTier
    broken = broken_laws(policy)
    of_connector = search(ConnectorPlayer, tier, PROFILES["ci"]).failures
    assert of_connector.keys() <= broken, of_connector
    assert bool(of_connector) is bool(broken)
    of_any_caller = search(ManagerPlayer, tier, PROFILES["ci"]).failures
    assert of_any_caller.keys() & {"OFF-2", "OFF-9"}
    assert of_any_caller.keys() <= broken | ANY_CALLER, of_any_caller


# --- behaviour that the kit does not check ---


def test_a_manager_with_an_unknown_signature_is_refused() -> None:
    class Fork(type(make_manager())):  # type: ignore[misc]
        def prepare_store(self, keys: Any, deadline: float) -> None: ...

    forked = make_manager()
    forked.__class__ = Fork
    with pytest.raises(UnsupportedEngineError) as caught:
        VLLMOffloadingManager(lambda: forked)
    for part in ("offloading seam", vllm.__version__, "prepare_store(keys, deadline)"):
        assert part in str(caught.value)


def test_a_spec_without_pages_is_passed_on() -> None:  # VOFF-2
    manager = VLLMOffloadingManager(make_keyed_manager)
    output = manager.prepare_store(keys(0, 1), CTX)
    assert output is not None
    assert list(output.store_spec.keys) == keys(0, 1)  # type: ignore[attr-defined]
    manager.complete_store(keys(0, 1), CTX)
    assert list(manager.prepare_load(keys(1), CTX).keys) == keys(1)  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(make_manager(), "lock"), reason="no lock before 0.33")
def test_every_call_but_shutdown_holds_the_lock() -> None:
    lock = threading.Lock()
    held: dict[str, bool] = {}

    class Locked(type(make_manager())):  # type: ignore[misc]
        lock = property(lambda self: lock)

        def __getattribute__(self, name: str) -> Any:
            held[name] = held.get(name, True) and lock.locked()
            return super().__getattribute__(name)

    manager = make_manager()
    manager.__class__ = Locked
    adapted = VLLMOffloadingManager(lambda: manager)
    held.clear()
    store(adapted, 0)
    for method, *given in (
        ("prepare_load", keys(0), CTX),
        ("complete_load", keys(0), CTX),
        ("touch", keys(0), CTX),
        ("on_new_request", CTX),
        ("on_request_finished", CTX),
        ("on_schedule_end",),
        ("has_pending_work",),
        ("lookup", keys(0)[0], CTX),
        ("reset",),
    ):
        getattr(adapted, method)(*given)
    list(adapted.take_events())
    adapted.shutdown()
    entered = {name for name in vars(find_class("OffloadingManager")) if name in held}
    assert {name for name in entered if not held[name]} == {"lock", "shutdown"}
    assert {"lookup", "prepare_load", "prepare_store", "reset_cache"} <= entered


def test_a_reset_keeps_pages_below_a_store_threshold() -> None:
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
