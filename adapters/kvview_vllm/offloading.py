"""A wrapper that gives a vLLM offloading manager of any release the interface of kvview's managers.

- VOFF-1 The wrapper only translates the manager's results, so if a release breaks a law, the
  wrapper breaks it too.
- VOFF-2 A spec that lists ``block_ids`` names host pages and is converted to a spec of kvview. Any
  other spec, for example with keys or files, is passed on unmodified, because only the manager's
  own worker reads it.

Source: ``vllm/v1/kv_offload/``, 0.11.0 to 0.33.0; :mod:`kvview_vllm.releases` recognises the
shape of a manager.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

from kvview import (
    CPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvview_vllm.releases import probe_offloading, require_class
from kvview_vllm.releases.compat.calls import has_block_ids, lock_of, make_known, medium_name
from kvview_vllm.releases.compat.calls import make_cpu_manager as make_cpu_manager

NO_REQUEST = ReqContext()


class TranslatedManager:
    """The wrapper of a vLLM manager (VOFF-1).

    1. The calls of a request share one vLLM context, from the first call to
       ``on_request_finished``; calls without a request id share no context.
    2. A call does nothing if the release does not have its method.
    3. The caller must hold ``lock`` during each call except ``shutdown`` (0.33).

    Args:
        manager: A manager of ``vllm.v1.kv_offload``.

    Raises:
        UnsupportedEngineError: The manager has a shape that no tested release has.
    """

    def __init__(self, manager: Any) -> None:
        self.release = probe_offloading(manager)
        self.manager: Any = manager
        self._contexts: dict[str, Any] = {}

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The manager's lock, which is not re-entrant; a no-op before 0.33."""
        return lock_of(self.manager)

    def lookup(self, key: OffloadKey, ctx: ReqContext = NO_REQUEST, /) -> LookupResult:
        """Return whether a key is stored; before 0.25 a key in the middle of a store is a MISS."""
        if self.release.prefix_lookup:
            result = self.manager.lookup([key])
        else:
            result = self.manager.lookup(key, self._context(ctx))
        if self.release.lookup_results:
            return LookupResult[result.name]
        if result is None:
            return LookupResult.RETRY
        return LookupResult.HIT if result else LookupResult.MISS

    def prepare_load(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /
    ) -> LoadStoreSpec:
        """Protect keys, and return their pages (VOFF-2)."""
        return _translated(self.manager.prepare_load(keys, *self._request(ctx)))

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /) -> None:
        """End a load."""
        self.manager.complete_load(keys, *self._completion(ctx))

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /) -> None:
        """Record that a request used these keys."""
        self.manager.touch(keys, *self._completion(ctx))

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /
    ) -> PrepareStoreOutput | None:
        """Make room for new keys."""
        output = self.manager.prepare_store(keys, *self._request(ctx))
        if output is None:
            return None
        if self.release.prefix_lookup:
            stored, evicted = output.block_hashes_to_store, output.block_hashes_evicted
        else:
            stored, evicted = output.keys_to_store, output.evicted_keys
        return PrepareStoreOutput(stored, _translated(output.store_spec), evicted)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        ctx: ReqContext = NO_REQUEST,
        /,
        success: bool = True,
    ) -> None:
        """End a store."""
        self.manager.complete_store(keys, *self._completion(ctx), success=success)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, except those that vLLM does not publish."""
        events = []
        for event in list(self.manager.take_events()):
            if self.release.metadata_events and event.metadata_only:  # a failed store
                continue
            keys = event.block_hashes if self.release.prefix_lookup else event.keys
            events.append(OffloadingEvent(tuple(keys), medium_name(event.medium), event.removed))
        return events

    def reset(self) -> None:
        """Drop every key, if the release supports this (0.22)."""
        if self.release.cache_reset:
            self.manager.reset_cache()

    def shutdown(self) -> None:
        """Release the manager's resources, if the release supports this (0.20)."""
        if self.release.manager_shutdown:
            self.manager.shutdown()

    def on_new_request(self, ctx: ReqContext, /) -> None:
        """Notify the manager of a new request."""
        if self.release.request_hooks:
            self.manager.on_new_request(self._context(ctx))

    def on_request_finished(self, ctx: ReqContext, /) -> None:
        """Notify the manager of the end of a request."""
        if self.release.request_hooks:
            self.manager.on_request_finished(self._context(ctx))
        self._contexts.pop(ctx.req_id, None)

    def _request(self, ctx: ReqContext) -> tuple[Any, ...]:
        return () if self.release.prefix_lookup else (self._context(ctx),)

    def _completion(self, ctx: ReqContext) -> tuple[Any, ...]:
        return (self._context(ctx),) if self.release.completion_context else ()

    def _context(self, ctx: ReqContext) -> Any:
        context = self._contexts.get(ctx.req_id)
        if context is None:
            params = None if ctx.kv_transfer_params is None else dict(ctx.kv_transfer_params)
            values = {"req_id": ctx.req_id, "kv_transfer_params": params}
            context = make_known(require_class("ReqContext"), **values)
            if ctx.req_id:
                self._contexts[ctx.req_id] = context
        return context


def _translated(spec: Any) -> LoadStoreSpec:
    if has_block_ids(spec):
        return CPULoadStoreSpec([int(page) for page in spec.block_ids])
    opaque: LoadStoreSpec = spec
    return opaque
