"""A canary for offloading, which calls managers of both sides once with the installed classes.

vLLM's own manager of host pages is called as a kvview manager, and a kvview manager is called as
vLLM calls its own managers. Both calls build the real arguments and read the results. Neither
manager has pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from kvview import (
    MEDIUM_CPU,
    CPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    make_offload_key,
)
from kvview_vllm.offloading.translated import NO_REQUEST, TranslatedManager, make_cpu_manager
from kvview_vllm.releases import OffloadingSeam, expect, installed, reading, require_class
from kvview_vllm.releases.calls import lock_of, make_known, medium_name

_SEAM = OffloadingSeam.seam
_KEY = make_offload_key(b"%032d" % 1, 0)
_SPEC = CPULoadStoreSpec([0])
_NAME = "kvview canary"


@cache
@reading(_SEAM, "the key of an offloaded block")
def check_keys() -> None:
    """Compare the bytes of an offloaded block's key, once per process.

    Raises:
        UnsupportedEngineError: The bytes differ from those of the tested releases.
    """
    if not installed().offloading.prefix_lookup:  # in older releases keys are block hashes
        key = require_class("make_offload_key")(b"%032d" % 1, 1)
        expect(_SEAM, "bytes of a key", bytes(key), make_offload_key(b"%032d" % 1, 1))


@cache
@reading(_SEAM, "a manager of vLLM, used dry")
def check_vllm_managers() -> None:
    """Store, load and evict in a manager of vLLM, once per process.

    Raises:
        UnsupportedEngineError: A result differs from the result of the tested releases.
    """
    check_keys()
    manager = TranslatedManager(make_cpu_manager(1, enable_events=True))
    context = ReqContext(req_id=_NAME)
    with manager.lock:
        manager.on_new_request(context)
        expect(_SEAM, "a key that is not there", manager.lookup(_KEY), LookupResult.MISS)
        output = manager.prepare_store([_KEY], context)
        stored = None if output is None else list(output.keys_to_store)
        expect(_SEAM, "keys to store", stored, [_KEY])
        manager.complete_store([_KEY], context)
        expect(_SEAM, "a key that is there", manager.lookup(_KEY), LookupResult.HIT)
        expect(_SEAM, "pages of a load", manager.prepare_load([_KEY], context), _SPEC)
        manager.complete_load([_KEY], context)
        manager.touch([_KEY], context)
        other = make_offload_key(b"%032d" % 2, 0)
        output = manager.prepare_store([other], context)
        evicted = None if output is None else list(output.evicted_keys)
        expect(_SEAM, "evicted keys", evicted, [_KEY])
        manager.complete_store([other], context, success=False)
        events = [(event.keys, event.medium) for event in manager.take_events()]
        expect(_SEAM, "events", events, [((_KEY,), MEDIUM_CPU)] * 2)
        manager.on_schedule_end()
        manager.has_pending_work()
        manager.on_request_finished(context)
        manager.reset()
    manager.shutdown()


@cache
@reading(_SEAM, "a manager of kvview, called dry")
def check_our_managers() -> None:
    """Call a kvview manager as vLLM does, once per process.

    Raises:
        UnsupportedEngineError: A result differs from the result of the tested releases.
    """
    # Imported here, because a wrapper of vLLM's managers does not need it.
    from kvview_vllm.offloading.for_vllm import ManagerForVLLM

    check_keys()
    release, tier = installed().offloading, _Tier()  # type: ignore[abstract]
    manager = ManagerForVLLM(tier, 16)
    context: Any = None
    if not release.prefix_lookup:
        values = {"req_id": _NAME, "kv_transfer_params": {"a": 1}}
        context = make_known(require_class("ReqContext"), **values)
    with lock_of(manager):
        if release.request_hooks:
            manager.on_new_request(context)
        for tier.answer in LookupResult:
            manager.lookup(iter([_KEY]) if release.prefix_lookup else _KEY, context)
        output = manager.prepare_store(iter([_KEY]), context)
        if release.prefix_lookup:
            stored, evicted = output.block_hashes_to_store, output.block_hashes_evicted
        else:
            stored, evicted = output.keys_to_store, output.evicted_keys
        found = (stored, evicted, output.store_spec.spec)
        expect(_SEAM, "the output of prepare_store", found, ([_KEY], [_KEY], _SPEC))
        manager.complete_store([_KEY], context)
        expect(_SEAM, "pages", manager.prepare_load([_KEY], context).spec, _SPEC)
        manager.complete_load([_KEY], context)
        (event,) = manager.take_events()
        keys = event.block_hashes if release.prefix_lookup else event.keys
        facts = (list(keys), medium_name(event.medium), event.removed)
        expect(_SEAM, "an event", facts, ([_KEY], MEDIUM_CPU, False))
        manager.on_schedule_end()
        if context is not None:
            manager.on_request_finished(context)
        manager.reset_cache()
    params = [dict(each.kv_transfer_params or {}) for each in tier.contexts]
    wanted = {} if context is None else {"a": 1}
    expect(_SEAM, "the parameters of a request", wanted in params or not params, True)


class _Tier(OffloadingManager):
    """A kvview manager with one page; its other methods do nothing."""

    answer = LookupResult.MISS

    def __init__(self) -> None:
        self.contexts: list[ReqContext] = []

    def lookup(self, key: OffloadKey, ctx: ReqContext = NO_REQUEST, /) -> LookupResult:
        self.contexts.append(ctx)
        return self.answer

    def prepare_load(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /
    ) -> LoadStoreSpec:
        return _SPEC

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /
    ) -> PrepareStoreOutput:
        return PrepareStoreOutput(list(keys), _SPEC, list(keys))

    def take_events(self) -> Iterator[OffloadingEvent]:
        yield OffloadingEvent((_KEY,), MEDIUM_CPU, removed=False)
