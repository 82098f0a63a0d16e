"""A kvview offloading manager with the interface of vLLM's managers, for OffloadingConnector.

- VOFF-3 The manager never receives a key twice in one call of ``touch`` or ``prepare_store``.
- VOFF-4 In releases in which vLLM touches no keys (0.31 and later), a request's keys are touched
  when it finishes, so that the head of a prefix is evicted last.
- VOFF-5 After ``reset_cache`` vLLM does not report the jobs in flight, so they are completed
  immediately. Their pages stay safe, because a transfer worker keeps the order of jobs that touch
  the same page (XFER-3).

Source: ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvview import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    SupportsRequestHooks,
    SupportsStepHooks,
    get_offload_group_idx,
)
from kvview_vllm.offloading.media import Media
from kvview_vllm.releases import installed, require_class
from kvview_vllm.releases.calls import make_known

_Manager: Any = require_class("OffloadingManager")
_LoadStoreSpec: Any = require_class("LoadStoreSpec")
_Output: Any = require_class("PrepareStoreOutput")
_Event: Any = require_class("OffloadingEvent")
_release = installed().offloading


class PagesSpec(_LoadStoreSpec):  # type: ignore[misc]
    """The message of a kvview manager to its worker, passed through unread.

    Args:
        spec: The manager's result: pages, keys or any other object that pickles.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    @staticmethod
    def medium() -> str:
        """The name that distinguishes transfers in releases up to 0.24."""
        return "kvview"


class ManagerForVLLM(_Manager):  # type: ignore[misc]
    """The manager that an OffloadingSpec returns to vLLM.

    Args:
        manager: The kvview manager.
        block_size: Number of tokens of an offloaded block, for events up to 0.19.
        media: A map from the manager's media to vLLM's names.

    Raises:
        ConfigError: vLLM does not have a medium of the manager or of ``media`` (VOFF-6).
    """

    def __init__(
        self, manager: OffloadingManager, block_size: int, media: Mapping[str, str] | None = None
    ) -> None:
        self.manager = manager
        self._media = Media(manager, media or {})
        self._block_size = block_size
        self._stores: set[OffloadKey] = set()
        self._loads: Counter[OffloadKey] = Counter()
        self._used: dict[str, dict[OffloadKey, None]] = {}  # by request, in order of use

    def lookup(self, key: Any, req_context: Any = None) -> Any:
        """Return the result for one key, or the number of hits of a prefix."""
        if _release.prefix_lookup:
            return self._count_hits(key)
        result = self.manager.lookup(key, _context(req_context))
        if _release.lookup_results:
            return require_class("LookupResult")[result.name]
        return None if result is LookupResult.RETRY else result is LookupResult.HIT

    def prepare_load(self, keys: Iterable[Any], req_context: Any = None) -> PagesSpec:
        """Protect keys, and return their pages."""
        keys = list(keys)
        spec = self.manager.prepare_load(keys, _context(req_context))
        self._loads.update(keys)
        self._use(keys, req_context)
        return PagesSpec(spec)

    def complete_load(self, keys: Iterable[Any], req_context: Any = None) -> None:
        """End a load."""
        keys = list(keys)
        self.manager.complete_load(keys, _context(req_context))
        self._loads -= Counter(keys)

    def touch(self, keys: Iterable[Any], req_context: Any = None) -> None:
        """Pass the touches of releases before 0.31 to the manager."""
        self.manager.touch(list(dict.fromkeys(keys)), _context(req_context))

    def prepare_store(self, keys: Iterable[Any], req_context: Any = None) -> Any:
        """Make room for new keys."""
        keys = list(dict.fromkeys(keys))
        output = self.manager.prepare_store(keys, _context(req_context))
        if output is None:
            return None
        stored, evicted = list(output.keys_to_store), list(output.evicted_keys)
        self._stores.update(stored)
        self._use(keys, req_context)
        return make_known(
            _Output,
            keys_to_store=stored,
            block_hashes_to_store=stored,  # their names up to 0.19
            store_spec=PagesSpec(output.store_spec),
            evicted_keys=evicted,
            block_hashes_evicted=evicted,
        )

    def complete_store(
        self, keys: Iterable[Any], req_context: Any = None, success: bool = True
    ) -> None:
        """End a store."""
        keys = list(keys)
        self.manager.complete_store(keys, _context(req_context), success=success)
        self._stores.difference_update(keys)

    def take_events(self) -> list[Any]:
        """Return the manager's events since the last call, as vLLM's events."""
        return [
            make_known(
                _Event,
                keys=keys,
                block_hashes=keys,
                block_size=self._block_size,
                medium=medium,
                removed=removed,
            )
            for event in self.manager.take_events()
            for keys, medium, removed in self._media.publish(event)
        ]

    def reset_cache(self) -> None:
        """Drop every key; vLLM no longer reports the jobs in flight (VOFF-5)."""
        self.manager.reset()
        stores, self._stores = self._stores, set()
        loads, self._loads = self._loads, Counter()
        if stores:
            self.manager.complete_store(list(stores), ReqContext(), success=False)
        if loads:
            self.manager.complete_load(list(loads.elements()), ReqContext())
        self._used.clear()

    def shutdown(self) -> None:
        """Release the manager's resources."""
        self.manager.shutdown()

    def on_new_request(self, req_context: Any) -> Any:
        """Notify the manager of a new request."""
        if isinstance(self.manager, SupportsRequestHooks):
            self.manager.on_new_request(_context(req_context))
        return make_known(require_class("RequestOffloadingContext"))

    def on_request_finished(self, req_context: Any) -> None:
        """Notify the manager of the end of a request, and touch its keys (VOFF-4)."""
        context = _context(req_context)
        if used := self._used.pop(context.req_id, None):
            self.manager.touch(_in_prefix_order(used, req_context), context)
        if isinstance(self.manager, SupportsRequestHooks):
            self.manager.on_request_finished(context)

    def on_schedule_end(self, context: Any = None) -> None:
        """Notify the manager of the end of a step."""
        if isinstance(self.manager, SupportsStepHooks):
            self.manager.on_schedule_end()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping (0.24)."""
        return isinstance(self.manager, SupportsStepHooks) and self.manager.has_pending_work()

    def _count_hits(self, keys: Iterable[Any]) -> int | None:
        num_hits = 0
        for key in keys:
            result = self.manager.lookup(key, ReqContext())
            if result is LookupResult.RETRY and _release.lookup_retry:
                return None
            if result is not LookupResult.HIT:
                break
            num_hits += 1
        return num_hits

    def _use(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        if _release.key_positions:  # because vLLM touches no keys in these releases
            self._used.setdefault(req_context.req_id, {}).update(dict.fromkeys(keys))


def _context(req_context: Any) -> ReqContext:
    if req_context is None:  # up to 0.20 not every call has a request
        return ReqContext()
    req_id = req_context.req_id if _release.request_ids else ""
    return ReqContext(req_id, req_context.kv_transfer_params)


def _in_prefix_order(keys: Iterable[OffloadKey], req_context: Any) -> list[OffloadKey]:
    def place(key: OffloadKey) -> tuple[int, int]:
        position = req_context.get_offload_key_position(key)
        return (0 if position is None else position), get_offload_group_idx(key)

    return sorted(keys, key=place)
