"""One vLLM offloading manager of any release, called in kvview's words.

- VOFF-1 What the manager answers is translated and nothing else: where a release
  breaks a law, so does this. :mod:`kvview_vllm.offloading` keeps the laws.
- VOFF-2 A spec that lists ``block_ids`` names host pages and becomes kvview's. Any other,
  one that lists keys or files for example, is handed on as it is: only the worker that
  belongs to the manager reads it.

Source: ``vllm/v1/kv_offload/``, 0.11.0 to 0.33.0; which shape a manager has,
:mod:`kvview_vllm.releases.capabilities` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvview import (
    ConfigError,
    CPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from kvview_vllm.releases.capabilities import OFFLOADING_SEAM, engine_version, refusal
from kvview_vllm.releases.probes import probe_offloading

if TYPE_CHECKING:
    from kvview import OffloadingManager, SupportsRequestHooks, SupportsStepHooks

NO_REQUEST = ReqContext()
_POLICIES = ("lru", "arc")
_PACKAGE = "vllm.v1.kv_offload"


def make_cpu_manager(num_blocks: int, cache_policy: str = "lru", **options: Any) -> Any:
    """The installed vLLM's own manager of host pages, as its own spec makes it.

    Args:
        num_blocks: Capacity, in offloaded blocks.
        cache_policy: ``"lru"`` or ``"arc"``; late releases know more.
        options: ``enable_events``, ``store_threshold`` and others of the release's
            constructor; those that it does not have are left out.

    Raises:
        ValueError: The policy is unknown (OFF-7).
    """
    try:
        backends = import_module("vllm.v1.kv_offload.backends.cpu")
    except ImportError:  # one class for all policies, without a backend, from 0.19 on
        kind = import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager
        sizes = {"num_blocks": num_blocks, "num_chunks": num_blocks, "block_size": 1}
        return make_known(kind, cache_policy=cache_policy, **sizes, **options)
    known = [name for name in _POLICIES if find_spec(f"{_PACKAGE}.{name}_manager")]
    if cache_policy not in known:  # the oldest release has no ARC
        raise ConfigError(f"unknown policy {cache_policy!r}; known: {', '.join(known)}")
    module = import_module(f"{_PACKAGE}.{cache_policy}_manager")
    kind = getattr(module, f"{cache_policy.upper()}OffloadingManager")
    return make_known(kind, backend=backends.CPUBackend(1, num_blocks), **options)


class TranslatedManager:
    """A vLLM manager as it is (VOFF-1).

    1. A request's calls share one context of vLLM's, from the first that names it
       to ``on_request_finished``; calls without a request id share none.
    2. What a release has no method for does nothing.
    3. Whoever calls holds ``lock``, but for ``shutdown`` (0.33).

    Args:
        manager: A manager of ``vllm.v1.kv_offload``.

    Raises:
        UnsupportedEngineError: It has a shape that no tested release has.
    """

    def __init__(self, manager: Any) -> None:
        self.capabilities = probe_offloading(manager)
        self.manager: Any = manager
        self._contexts: dict[str, Any] = {}

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The manager's lock, not re-entrant; before 0.33 there is none to hold."""
        lock: AbstractContextManager[Any] = getattr(self.manager, "lock", nullcontext())
        return lock

    def lookup(self, key: OffloadKey, ctx: ReqContext = NO_REQUEST, /) -> LookupResult:
        """Whether a key is held; before 0.25 a key that is being stored is a MISS."""
        if "prefix_lookup" in self.capabilities:
            answer = self.manager.lookup([key])
        else:
            answer = self.manager.lookup(key, self._context(ctx))
        if "lookup_results" in self.capabilities:
            return LookupResult[answer.name]
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def prepare_load(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /
    ) -> LoadStoreSpec:
        """Protect keys, and say where they are (VOFF-2)."""
        return _translated(self.manager.prepare_load(keys, *self._request(ctx)))

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /) -> None:
        """End a load."""
        self.manager.complete_load(keys, *self._completion(ctx))

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /) -> None:
        """Say that a request used these keys."""
        self.manager.touch(keys, *self._completion(ctx))

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext = NO_REQUEST, /
    ) -> PrepareStoreOutput | None:
        """Make room for new keys."""
        output = self.manager.prepare_store(keys, *self._request(ctx))
        if output is None:
            return None
        if "prefix_lookup" in self.capabilities:
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

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Events since the last call, without those that vLLM does not publish."""
        for event in list(self.manager.take_events()):
            if getattr(event, "metadata_only", False):  # 0.33: a failed store
                continue
            keys = event.block_hashes if "prefix_lookup" in self.capabilities else event.keys
            medium = getattr(event.medium, "value", event.medium)  # an Enum from 0.27 on
            yield OffloadingEvent(tuple(keys), medium, event.removed)

    def reset(self) -> None:
        """Forget every key, where the release can (0.22)."""
        if "cache_reset" in self.capabilities:
            self.manager.reset_cache()

    def shutdown(self) -> None:
        """Release what the manager holds, where the release can (0.20)."""
        if hasattr(self.manager, "shutdown"):
            self.manager.shutdown()

    def on_new_request(self, ctx: ReqContext, /) -> None:
        """A request was seen for the first time."""
        if "request_hooks" in self.capabilities:
            self.manager.on_new_request(self._context(ctx))

    def on_request_finished(self, ctx: ReqContext, /) -> None:
        """A request ended."""
        if "request_hooks" in self.capabilities:
            self.manager.on_request_finished(self._context(ctx))
        self._contexts.pop(ctx.req_id, None)

    def on_schedule_end(self) -> None:
        """The last call of a step."""
        if "step_context" in self.capabilities:
            context = require_class("ScheduleEndContext")(new_req_ids=(), preempted_req_ids=())
            self.manager.on_schedule_end(context)
        elif "request_hooks" in self.capabilities:
            self.manager.on_schedule_end()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping; no release before 0.24 asks."""
        return hasattr(self.manager, "has_pending_work") and bool(self.manager.has_pending_work())

    def _request(self, ctx: ReqContext) -> tuple[Any, ...]:
        return () if "prefix_lookup" in self.capabilities else (self._context(ctx),)

    def _completion(self, ctx: ReqContext) -> tuple[Any, ...]:
        return (self._context(ctx),) if "completion_context" in self.capabilities else ()

    def _context(self, ctx: ReqContext) -> Any:
        context = self._contexts.get(ctx.req_id)
        if context is None:
            params = ctx.kv_transfer_params
            values = {
                "req_id": ctx.req_id,
                "kv_transfer_params": None if params is None else dict(params),
            }
            context = make_known(require_class("ReqContext"), **values)
            if ctx.req_id:
                self._contexts[ctx.req_id] = context
        return context


def _translated(spec: Any) -> LoadStoreSpec:
    if hasattr(spec, "block_ids"):
        return CPULoadStoreSpec([int(page) for page in spec.block_ids])
    opaque: LoadStoreSpec = spec
    return opaque


def find_class(name: str) -> Any:
    """A class of vLLM's offloading interface, wherever the release has it; None without.

    Raises:
        VLLMNotInstalledError: No vLLM can be imported.
    """
    engine_version()
    for module in ("base", "abstract", "spec", "mediums", "worker.worker"):
        try:
            found = getattr(import_module(f"{_PACKAGE}.{module}"), name, None)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(_PACKAGE):
                raise
            continue  # merged into base, or not split off yet
        if found is not None:
            return found
    return None


def require_class(name: str) -> Any:
    """The same where every tested release has it.

    Raises:
        UnsupportedEngineError: This one does not.
    """
    found = find_class(name)
    if found is None:
        raise refusal(OFFLOADING_SEAM, f"no {name}", f"a {name} in {_PACKAGE}")
    return found


def make_known(target: Callable[..., Any], **values: Any) -> Any:
    """Call with only the arguments that this release has."""
    parameters = inspect.signature(target).parameters
    return target(**{name: value for name, value in values.items() if name in parameters})


if TYPE_CHECKING:
    _manager: OffloadingManager = TranslatedManager(None)
    _request: SupportsRequestHooks = TranslatedManager(None)
    _step: SupportsStepHooks = TranslatedManager(None)
