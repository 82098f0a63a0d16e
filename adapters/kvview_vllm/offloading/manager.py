"""vLLM's offloading managers, of every release, as :class:`kvview.OffloadingManager`.

The managers rely on their only caller, vLLM's OffloadingConnector: it only loads keys
that it looked up, completes once, and never offers a key twice. Here a ledger of the
transfers in flight satisfies the laws for any caller. Mistakes inside a release's policy
cannot be fixed from outside; the tests list them.

Source: ``vllm/v1/kv_offload/``, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from kvview import (
    CPULoadStoreSpec,
    KeyNotLoadableError,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferNotInFlightError,
    make_offload_key,
)
from kvview_vllm.offloading.offloading_canary import check_vllm_managers
from kvview_vllm.offloading.translated import NO_REQUEST, TranslatedManager
from kvview_vllm.releases import OffloadingSeam, refusal
from kvview_vllm.releases.calls import loses_touched_stores, pages_of_backend, store_threshold

if TYPE_CHECKING:
    from kvview import OffloadingManager, SupportsRequestHooks, SupportsStepHooks


P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_Page = int | None
"""A host page; None where the manager names no pages, so that only keys can be protected."""


@dataclass(slots=True)
class _Late:
    """A key that a transfer from an earlier reset period still uses."""

    page: _Page
    num_loads: int  # 0: it is being stored
    placeholder: OffloadKey | None  # holds the page inside the manager


def _locked(
    method: Callable[Concatenate[VLLMOffloadingManager, P], ResultT],
) -> Callable[Concatenate[VLLMOffloadingManager, P], ResultT]:
    """Hold the manager's lock during a whole call, so that its lookups stay true (0.33)."""

    @wraps(method)
    def call(self: VLLMOffloadingManager, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        with self._manager.lock:
            return method(self, *args, **kwargs)

    return call


class VLLMOffloadingManager:
    """A vLLM manager that satisfies the laws of the offloading contract.

    1. A call that breaks a law raises before it reaches the manager.
    2. A key offered twice in one call is stored once.
    3. ``reset`` takes the manager's own ``reset_cache`` or, where there is none,
       a new manager. Pages in flight are kept out of its reach by placeholders,
       which it takes for stores in progress, until their transfers end (OFF-8). If a
       manager names no pages, it is enough to keep their keys from it.
    4. Events are the manager's own; a reset adds the missing removals.
    5. The side effects of a refused store are kept: the policy may have learnt from the
       offer, and ARC refuses fitting keys when only T1 has room (up to 0.29, vLLM #55461),
       up to 0.18 after evictions, which are reported.

    Args:
        make: Makes an empty vLLM manager; called once, and at each reset of a release
            without ``reset_cache``.

    Raises:
        UnsupportedEngineError: The manager has a shape that no tested release has.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        check_vllm_managers()
        self._make = make
        self._is_shut = False
        self._stores: dict[OffloadKey, _Page] = {}
        self._loads: Counter[OffloadKey] = Counter()
        self._load_pages: dict[OffloadKey, _Page] = {}
        self._late: dict[OffloadKey, _Late] = {}
        self._events: list[OffloadingEvent] = []
        self._advertised: dict[str, dict[OffloadKey, None]] = {}  # by medium, in order
        self._manager = TranslatedManager(make())
        self.release = self._manager.release
        self._capacity = pages_of_backend(self._manager.manager)

    @_locked
    def lookup(self, key: OffloadKey, ctx: ReqContext = NO_REQUEST, /) -> LookupResult:
        """Whether a key is held and loadable now (OFF-6); changes no order."""
        return self._lookup(key, ctx)

    @_locked
    def prepare_load(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /
    ) -> LoadStoreSpec:
        """Protect keys from eviction until ``complete_load``, and return their pages.

        Raises:
            KeyNotLoadableError: A key is not held or not ready; nothing was protected.
        """
        for key in keys:
            if (result := self._lookup(key, ctx)) is not LookupResult.HIT:
                raise KeyNotLoadableError(
                    f"OFF-2: lookup of key {key.hex()} returns {result.name}; only load keys for "
                    f"which it returns HIT"
                )
        spec = self._manager.prepare_load(keys, ctx)
        self._loads.update(keys)
        self._load_pages.update(_pages_of(keys, spec))
        return spec

    @_locked
    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /) -> None:
        """End one ``prepare_load`` of these keys.

        Raises:
            TransferNotInFlightError: More loads would end than were prepared (OFF-9).
        """
        ended = Counter(keys)
        for key, times in ended.items():
            late = self._late.get(key)
            if times > (late.num_loads if late else self._loads[key]):
                raise _not_in_flight(key, "load")
        self._manager.complete_load([key for key in keys if key not in self._late], ctx)
        for key, times in ended.items():
            if key not in self._late:
                self._loads[key] -= times
                if not self._loads[key]:
                    del self._loads[key], self._load_pages[key]
                continue
            self._late[key].num_loads -= times
            if not self._late[key].num_loads:
                self._release([key])

    @_locked
    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /) -> None:
        """Record that a request used these keys; the first one becomes the most recent."""
        if loses_touched_stores(self._manager.manager):
            keys = [key for key in keys if key not in self._stores]
        self._manager.touch(keys, ctx)

    @_locked
    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /
    ) -> PrepareStoreOutput | None:
        """Make room for new keys and protect them until ``complete_store`` (OFF-3)."""
        offered = [key for key in dict.fromkeys(keys) if key not in self._late]
        kept: list[OffloadKey] = []
        if self._capacity is not None:
            # Up to 0.17 keys of the input may be evicted for it (vLLM #35846), and up to
            # 0.18 a refusal of ARC comes after evictions.
            results = {key: self._lookup(key, ctx) for key in offered}
            kept = [key for key in offered if results[key] is LookupResult.HIT]
            num_new = sum(result is LookupResult.MISS for result in results.values())
            num_protected = len(self._stores) + len(self._late) + len({*self._loads, *kept})
            if num_new and num_new > self._capacity - num_protected:
                return None
            self._manager.prepare_load(kept, ctx)
        try:
            output = self._manager.prepare_store(offered, ctx)
        finally:
            if kept:
                self._manager.complete_load(kept, ctx)
        if output is not None:
            self._stores.update(_pages_of(output.keys_to_store, output.store_spec))
        elif self._capacity is not None:
            self._report_lost_keys()
        return output

    @_locked
    def complete_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /, success: bool = True
    ) -> None:
        """End the stores of these keys: loadable from now, or gone (OFF-4).

        Raises:
            TransferNotInFlightError: A key is not being stored (OFF-9).
        """
        ended = dict.fromkeys(keys)
        for key in ended:
            late = self._late.get(key)
            if key not in self._stores and (late is None or late.num_loads):
                raise _not_in_flight(key, "store")
        current = [key for key in ended if key in self._stores]
        self._manager.complete_store(current, ctx, success=success)
        for key in current:
            del self._stores[key]
        self._release([key for key in ended if key in self._late])

    @_locked
    def take_events(self) -> list[OffloadingEvent]:
        """Events since the last call, in order; empty if the manager has events switched off."""
        self._gather_events()
        events, self._events = self._events, []
        return events

    @_locked
    def reset(self) -> None:
        """Forget every key (OFF-8, EVENT-5)."""
        self._gather_events()
        for medium, keys in self._advertised.items():
            if keys:
                self._events.append(OffloadingEvent(tuple(keys), medium, removed=True))
        self._advertised.clear()
        in_flight = [(key, late.page, late.num_loads) for key, late in self._late.items()]
        in_flight += [(key, page, 0) for key, page in self._stores.items()]
        in_flight += [(key, page, self._loads[key]) for key, page in self._load_pages.items()]
        for forgotten in (self._late, self._stores, self._loads, self._load_pages):
            forgotten.clear()
        if self.release.cache_reset:
            self._manager.reset()
        else:
            self._manager = TranslatedManager(self._make())
        if in_flight:
            placeholders = self._hold_pages({page for _, page, _ in in_flight if page is not None})
            for key, page, num_loads in in_flight:
                placeholder = None if page is None else placeholders[page]
                self._late[key] = _Late(page, num_loads, placeholder)

    def shutdown(self) -> None:
        """Release the manager's resources; callable twice."""
        if not self._is_shut:
            self._is_shut = True
            self._manager.shutdown()

    @_locked
    def on_new_request(self, ctx: ReqContext, /) -> None:
        """Notify the manager of a new request."""
        self._manager.on_new_request(ctx)

    @_locked
    def on_request_finished(self, ctx: ReqContext, /) -> None:
        """Notify the manager of the end of a request; its transfers may complete later."""
        self._manager.on_request_finished(ctx)

    @_locked
    def on_schedule_end(self) -> None:
        """Notify the manager of the end of a step."""
        self._manager.on_schedule_end()

    @_locked
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although nothing is scheduled."""
        return self._manager.has_pending_work()

    def _lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        if key in self._stores:
            return LookupResult.HIT_PENDING
        if key in self._late:
            return LookupResult.MISS
        return self._manager.lookup(key, ctx)

    def _gather_events(self) -> None:
        for event in self._manager.take_events():
            self._events.append(event)
            advertised = self._advertised.setdefault(event.medium, {})
            if not event.removed:
                advertised.update(dict.fromkeys(event.keys))
                continue
            for key in event.keys:
                advertised.pop(key, None)

    def _report_lost_keys(self) -> None:
        """Report keys that a refused store evicted without an event."""
        self._gather_events()
        for medium, keys in self._advertised.items():
            lost = [key for key in keys if self._manager.lookup(key) is LookupResult.MISS]
            if lost:
                self._events.append(OffloadingEvent(tuple(lost), medium, removed=True))
            for key in lost:
                del keys[key]

    def _hold_pages(self, pages: set[int]) -> dict[int, OffloadKey]:
        """Make an empty manager store placeholders in exactly these pages."""
        if not pages:
            return {}
        wanted = [make_offload_key(b"kvview placeholder %d" % n, 0) for n in range(max(pages) + 1)]
        output = None
        for _ in range(store_threshold(self._manager.manager)):
            for key in wanted:  # up to 0.28 lookups count towards the threshold, then offers
                self._manager.lookup(key)
            output = self._manager.prepare_store(wanted)
            if output and output.keys_to_store:
                break
        given = _pages_of(output.keys_to_store, output.store_spec) if output else {}
        held = {page: key for key, page in given.items() if page is not None}
        if not pages <= held.keys():
            raise refusal(
                OffloadingSeam.seam,
                f"an empty manager that allocates the pages {sorted(held)}, although pages up to "
                f"{max(pages)} are in flight",
                "pages from 0 on, so that pages in flight can be kept",
            )
        surplus = [key for page, key in held.items() if page not in pages]
        self._manager.complete_store(surplus, success=False)
        return held

    def _release(self, keys: Collection[OffloadKey]) -> None:
        """Return the pages of ended late transfers to the manager."""
        ended = [self._late.pop(key).placeholder for key in keys]
        placeholders = [key for key in ended if key is not None]
        if placeholders:
            self._manager.complete_store(placeholders, success=False)


def _pages_of(keys: Collection[OffloadKey], spec: LoadStoreSpec) -> dict[OffloadKey, _Page]:
    if not isinstance(spec, CPULoadStoreSpec):
        return dict.fromkeys(keys)
    return dict(zip(keys, spec.block_ids, strict=True))


def _not_in_flight(key: OffloadKey, direction: str) -> TransferNotInFlightError:
    return TransferNotInFlightError(
        f"OFF-9: no {direction} of key {key.hex()} is in flight; complete each transfer once"
    )


if TYPE_CHECKING:
    _manager: OffloadingManager = VLLMOffloadingManager(object)
    _request: SupportsRequestHooks = VLLMOffloadingManager(object)
    _step: SupportsStepHooks = VLLMOffloadingManager(object)
