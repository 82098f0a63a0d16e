"""vLLM's own offloading managers under the kit: each release breaks the known laws only."""

from __future__ import annotations

import re
from typing import Any

import pytest
from offloading_tiers import (  # type: ignore[import-not-found]
    SEAM,
    TRANSFERS_ARE_USES,
    ARCOfConnector,
    BareARCTier,
    BareTier,
    OfConnector,
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
from kvview.testing import Effort
from kvview.testing.suites.conformance import find_failures
from kvview_vllm.offloading import TranslatedManager
from kvview_vllm.releases import NEWEST_TESTED

HIT, MISS = LookupResult.HIT, LookupResult.MISS
CTX = ReqContext("r")
_RELEASE = re.match(r"\d+\.\d+\.\d+", vllm.__version__)


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


RELEASE = number(_RELEASE[0]) if _RELEASE else number(NEWEST_TESTED)

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
        broken |= {
            "OFF-3",
            "OFF-5",
            "EVENT-2",
        }  # ARC refuses stores that fit
    return broken


def keys(*numbers: int) -> list[Any]:
    return [make_offload_key(b"k%d" % n, 0) for n in numbers]


# --- the kit ---


@pytest.mark.parametrize("policy", BareTier.policies)
def test_a_bare_manager_breaks_the_known_laws_only(policy: str) -> None:  # VOFF-1
    is_lru, broken = policy == "lru", broken_laws(policy)
    of_connector = find_failures(OfConnector if is_lru else ARCOfConnector, Effort())
    assert of_connector.keys() <= broken, of_connector
    assert bool(of_connector) is bool(broken)
    of_any_caller = find_failures(BareTier if is_lru else BareARCTier, Effort())
    assert of_any_caller.keys() & {"OFF-2", "OFF-9"}
    assert of_any_caller.keys() <= broken | ANY_CALLER, of_any_caller


# --- behaviour that the kit does not check ---


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
    manager = TranslatedManager(make_keyed_manager())
    output = manager.prepare_store(keys(0, 1), CTX)
    assert output is not None
    assert list(output.store_spec.keys) == keys(0, 1)  # type: ignore[attr-defined]
    manager.complete_store(keys(0, 1), CTX)
    assert list(manager.prepare_load(keys(1), CTX).keys) == keys(1)  # type: ignore[attr-defined]
