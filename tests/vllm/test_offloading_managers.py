"""vLLM's own offloading managers under the kit: each release breaks the known laws only."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, ClassVar

import pytest
from typing_extensions import override

import vllm
from kvview import ConfigError, ReqContext, UnsupportedEngineError, make_offload_key
from kvview.testing import Effort, OffloadingConformance
from kvview.testing.offloading.machine import KeyLists, Keys, OffloadingMachine
from kvview.testing.suites.conformance import find_failures
from kvview_vllm.offloading import TranslatedManager, make_cpu_manager
from kvview_vllm.releases import NEWEST_TESTED, probe_offloading

CTX = ReqContext("r")


def make_manager(policy: str = "lru", capacity: int = 8) -> Any:
    """Make a manager of the release, with events."""
    return make_cpu_manager(capacity, policy, enable_events=True)


def known_policies() -> tuple[str, ...]:
    """Return the eviction policies of this release; 0.11.0 has no ARC."""
    try:
        make_manager("arc")
    except ConfigError:
        return ("lru",)
    return "lru", "arc"


SEAM = probe_offloading(make_manager())
_ABSENT = {"store_threshold", "tier_counts", "leading_hits"}
_ABSENT |= set() if SEAM.cache_reset else {"resets"}
_policy = getattr(make_manager(), "_policy", None)

TRANSFERS_ARE_USES = "Load job completion" in str(type(_policy).__doc__)
"""Whether LRU counts the end of a transfer as a use, as its docstring states in 0.24 to 0.30."""


class BareTier(OffloadingConformance):
    """The bare LRU manager, translated to kvview's calls."""

    lacks: ClassVar[Collection[str]] = _ABSENT | {"arc"}
    policy = "lru"
    policies = known_policies()

    @override
    def make(self, capacity: int) -> Any:
        return TranslatedManager(make_manager(self.policy, capacity))

    def with_policy(self, name: str) -> Any:
        return make_manager(name)


class BareARCTier(BareTier):
    lacks = _ABSENT | {"lru"}
    policy = "arc"


class ConnectorMachine(OffloadingMachine):
    """Makes the calls of vLLM's OffloadingConnector alone.

    It names a key once, completes the transfers that it started, and never resets.
    """

    be_refused = finish_twice_in_one_call = reset = None  # type: ignore[assignment]

    @override
    def any_keys(self) -> KeyLists:
        return super().any_keys().map(lambda keys: [*dict.fromkeys(keys)])

    @override
    def begin_load(self, keys: Keys) -> None:
        super().begin_load([*dict.fromkeys(keys)])


class OfConnector(BareTier):
    machine = ConnectorMachine


class ARCOfConnector(BareARCTier):
    machine = ConnectorMachine


_RELEASE = re.match(r"\d+\.\d+\.\d+", vllm.__version__)
RELEASE = tuple(map(int, (_RELEASE[0] if _RELEASE else NEWEST_TESTED).split(".")))

ANY_CALLER = {"OFF-2", "OFF-3", "OFF-5", "OFF-6", "OFF-8", "OFF-9"}
ANY_CALLER |= {"EVENT-1", "EVENT-2", "EVENT-5"}
"""Laws that the bare managers break in calls that vLLM does not make.

They assert where OFF-2 raises, after they have protected keys; they assert a completion too many
at best; and they store a key twice if one ``prepare_store`` names it twice. Then their events
differ from their keys (EVENT-2), which is EVENT-5 if the events are read after a reset.
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
        broken |= {"OFF-3", "OFF-5", "EVENT-2"}  # ARC refuses stores that fit
    return broken


@pytest.mark.parametrize("policy", BareTier.policies)
def test_a_bare_manager_breaks_the_known_laws_only(policy: str) -> None:  # VOFF-1
    is_lru, broken = policy == "lru", broken_laws(policy)
    of_connector = find_failures(OfConnector if is_lru else ARCOfConnector, Effort())
    assert of_connector.keys() <= broken, of_connector
    assert bool(of_connector) is bool(broken)
    of_any_caller = find_failures(BareTier if is_lru else BareARCTier, Effort())
    assert of_any_caller.keys() & {"OFF-2", "OFF-9"}
    assert of_any_caller.keys() <= broken | ANY_CALLER, of_any_caller


def test_a_manager_with_an_unknown_signature_is_refused() -> None:
    class Fork(type(make_manager())):  # type: ignore[misc]
        def prepare_store(self, keys: Any, deadline: float) -> None: ...

    forked = make_manager()
    forked.__class__ = Fork
    with pytest.raises(UnsupportedEngineError) as caught:
        TranslatedManager(forked)
    for part in ("offloading seam", vllm.__version__, "prepare_store(keys, deadline)"):
        assert part in str(caught.value)


def test_a_spec_without_pages_is_passed_on() -> None:  # VOFF-2
    real: Any = make_manager()
    manager, prepare_store, files = TranslatedManager(real), real.prepare_store, object()
    key = make_offload_key(b"k", 0)

    def with_files(*args: Any) -> Any:
        output = prepare_store(*args)
        output.store_spec = files
        return output

    real.prepare_store, real.prepare_load = with_files, lambda *_: files
    output = manager.prepare_store([key], CTX)
    assert output is not None
    assert output.store_spec is files
    manager.complete_store([key], CTX)
    assert manager.prepare_load([key], CTX) is files
