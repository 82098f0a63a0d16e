"""A trial of a tier below vLLM's host memory, with one page.

vLLM's own spec makes the tier, and the trial makes the same calls as vLLM's manager. The page
belongs to a model named "kvview doctor".
"""

from __future__ import annotations

import os
import time
from typing import Any

from kvview.tier import Namespace
from kvview.tier.bases.threaded import Threaded
from kvview_vllm.releases.build.tier_specs import PAGE_BYTES, make_tiering_spec
from kvview_vllm.releases.compat.calls import make_known
from kvview_vllm.releases.compat.tiers import lookup_answers, make_tier_job
from kvview_vllm.releases.compat.versions import vllm

_SECONDS = 60.0
_BETWEEN_POLLS = 0.001
_TIER: dict[str, Any] = {
    "cpu_bytes_to_use": 4 * PAGE_BYTES,
    "spec_name": "KVViewTieringSpec",
    "spec_module_path": "kvview_vllm.tier",
    "secondary_tiers": [{"type": "kvview", "store": f"{__name__}:MemoryStore", "weights": "any"}],
}
_SEED = "PYTHONHASHSEED"


class MemoryStore(Threaded):
    """Keeps pages in this process, so that vLLM's tiers can be tried without a user's store."""

    def __init__(self, namespace: Namespace) -> None:
        self._pages: dict[bytes, bytes] = {}
        super().__init__(namespace, threads=1)

    def has(self, key: bytes, /) -> bool:
        """Whether the key was written."""
        return key in self._pages

    def read_into(self, key: bytes, page: memoryview, /) -> bool:
        """Copy the page."""
        found = self._pages.get(key)
        if found is None or len(found) != len(page):
            return False
        page[:] = found
        return True

    def write(self, key: bytes, page: memoryview, /) -> bool:
        """Copy the page."""
        self._pages[key] = bytes(page)
        return True


def try_tier() -> str:
    """Try a tier that keeps its pages in this process; the trial sets a hash seed if none is set.

    Returns:
        The problem; empty if the trial succeeded.
    """
    is_set = _SEED in os.environ
    os.environ.setdefault(_SEED, "0")
    try:
        manager = make_tiering_spec(_TIER, Namespace("kvview doctor", "any")).get_manager()
        try:
            return _try_page(manager, manager.secondary_tiers[0])
        finally:
            manager.shutdown()
    finally:
        if not is_set:
            del os.environ[_SEED]


def _try_page(manager: Any, tier: Any) -> str:
    base = vllm("v1.kv_offload.base")
    view = manager.primary_tier.get_kv_memoryview()
    memory, size = view.cast("B"), view.strides[0]
    key = base.make_offload_key(os.urandom(32), 0)
    content = os.urandom(size)
    try:
        memory[:size] = content
        tier.submit_store(make_tier_job(1, [key], [0], is_load=False))
        if not _success(tier):
            return "a page could not be stored"
        context = make_known(base.ReqContext, req_id="kvview doctor")
        tier.on_new_request(context)
        flags = {answer: flag for flag, answer in lookup_answers().items()}
        until = time.monotonic() + _SECONDS
        while (flag := flags[tier.lookup(key, context)]) is None and time.monotonic() < until:
            time.sleep(_BETWEEN_POLLS)
        if not flag:
            return "a page that was stored is not found"
        memory[:size] = bytes(size)
        tier.submit_load(make_tier_job(2, [key], [0], is_load=True))
        if not _success(tier) or memory[:size] != content:
            return "a page that was stored cannot be loaded"
    finally:
        memory.release()
    return ""


def _success(tier: Any) -> bool:
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        for result in tier.get_finished_jobs():
            return bool(result.success)
        time.sleep(_BETWEEN_POLLS)
    return False
