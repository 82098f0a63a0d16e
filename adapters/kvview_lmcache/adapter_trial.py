"""``kvview doctor --tier``: LMCache's factory makes the adapter; a page is stored and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvview.tier import Namespace
from kvview.tier.trial import try_store
from kvview_lmcache.l2_adapter_store import L2AdapterStore


def try_tier(given: Mapping[str, Any]) -> str:
    """Try a user's ``--l2-adapter`` of LMCache.

    Returns:
        A description of the problem; empty without a problem.
    """
    options = {name: value for name, value in given.items() if name != "type"}
    store = L2AdapterStore(Namespace("kvview doctor", "any"), str(given.get("type")), **options)
    try:
        return try_store(store)
    finally:
        store.close()
