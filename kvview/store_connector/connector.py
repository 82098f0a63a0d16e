"""The base class of connectors that keep pages by key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from typing_extensions import override

from kvview.connector import Connector, ConnectorConfig, SchedulerConnector, WorkerConnector
from kvview.errors import ConfigError
from kvview.options import make_with_options, parse_options
from kvview.store_connector.behaviour import Behaviour, Mode
from kvview.store_connector.page_levels import Pages
from kvview.store_connector.page_policy import Policy
from kvview.store_connector.scheduler import StoreScheduler
from kvview.store_connector.transform import Transform
from kvview.store_connector.worker import StoreWorker
from kvview.targets import load_target
from kvview.tier import (
    AsyncStore,
    GuardedTier,
    Namespace,
    Threaded,
    TierStore,
    is_tier_store,
)

_CPU_BLOCKS = 10_000
_STORE_BLOCKS = 1_000_000


class StoreOptions(BaseModel):
    """Options of :class:`StoreConnector`; all other options are passed to the store.

    Attributes:
        store: Target of the store, which replaces the store that the class names.
        cpu_blocks: Blocks in host memory; 0 for none. The default is 10,000 without a store, else
            0.
        cpu_bytes: Budget of host memory in bytes, counted after the transform.
        store_blocks: Maximum of blocks in the store; the least recently used blocks are deleted
            first.
        weights: Model and revision of its weights. With this option, pages are kept for later runs
            and shared with other engines. Without it, a store starts empty in each run. Also change
            the text when the type of the KV cache or the parallelism changes.
        mode: The moment at which blocks are stored, see :class:`StoreConnector`.
        prefetch: Whether pages are copied from the store to memory while their request waits.
        enable_events: Whether KV events are recorded.
        deadline: Seconds after which an unfinished job of the store counts as failed.
        lookup_deadline: Seconds after which a lookup in the store is a miss.
    """

    model_config = ConfigDict(extra="allow", frozen=True, coerce_numbers_to_str=True)

    store: str | None = None
    cpu_blocks: NonNegativeInt | None = None
    cpu_bytes: PositiveInt | None = None
    store_blocks: PositiveInt | None = None
    weights: str = ""
    mode: Mode = "victim"
    prefetch: bool = False
    enable_events: bool = False
    deadline: PositiveFloat = 30.0
    lookup_deadline: PositiveFloat = 2.0


class StoreConnector(Connector):
    """Keeps KV in host memory, in a store of pages by key, or in both.

    1. A subclass names its store, transform and policy. Without a store, blocks are kept in host
       memory.
    2. :class:`StoreOptions` lists the options; all other options are passed to the store.
    3. The option ``mode`` sets the moment at which a block is stored. ``"victim"``: a block is
       stored when the GPU is about to evict it, and a page moves from memory to the store when
       memory is full. ``"exclusive"``: as ``"victim"``, and a page leaves memory once it is loaded.
       ``"eager"``: a block is stored in memory and in the store while its request runs.
       ``"finish"``: as ``"eager"``, but when the request ends. If the pool does not support
       :class:`~kvview.SupportsGiveBack`, or if the connector has room for less than a quarter of
       the GPU's blocks, the modes ``"victim"`` and ``"exclusive"`` also store at the end of the
       request.
    4. If a page is missing or damaged, its load fails, and the engine computes the blocks.

    Raises:
        ConfigError: An option is wrong, or the store has no such option.
    """

    contract_version = "1.0"

    store: ClassVar[Callable[..., TierStore] | None] = None
    """Class of the store, called with a :class:`~kvview.tier.Namespace` and options."""
    transform: ClassVar[type[Transform]] = Transform
    """Class of the transform that is applied to pages."""
    policy: ClassVar[type[Policy]] = Policy
    """Class of the policy; each level has its own instance."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Options that differ from the defaults of :class:`StoreOptions`."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.options = options = parse_options(StoreOptions, {**self.defaults, **config.options})
        make: Any = load_target(options.store) if options.store else type(self).store
        extra = options.model_extra or {}
        if make is None and extra:
            raise ConfigError(
                f"unknown options {sorted(extra)}: the connector has no store. Known "
                f"options: {', '.join(StoreOptions.model_fields)}"
            )
        if make is not None and not is_tier_store(make):
            raise ConfigError(f"store {options.store or make!r} is not a class of tier stores")
        if options.cpu_blocks is not None and options.cpu_bytes is not None:
            raise ConfigError("cpu_blocks and cpu_bytes set the same budget; give one of them")
        has_budget, can_delete = options.store_blocks is not None, hasattr(make, "delete")
        if has_budget and not can_delete:
            raise ConfigError("store_blocks needs a store with the method delete(keys)")
        if options.weights and make is not None and _never_finds(make):
            raise ConfigError("weights needs a store with the method has(key), or find(key)")
        self._deletes = can_delete and (has_budget or not options.weights)
        self._open_store: Callable[[], GuardedTier] | None = None
        if make is not None:
            namespace = Namespace("kvview.StoreConnector", options.weights or "of one run")
            try:
                inspect.signature(make).bind(namespace, **extra)
            except TypeError as error:
                raise ConfigError(
                    f"options {sorted(extra)} do not fit the store {make.__qualname__}: {error}"
                ) from None
            self._open_store = partial(_open_store, make, namespace, options)
        self._memory = options.cpu_bytes or options.cpu_blocks
        if self._memory is None:
            self._memory = 0 if make else _CPU_BLOCKS
        self._transform = self.transform()

    @override
    def make_scheduler(self) -> SchedulerConnector:
        options, is_shared = self.options, bool(self.options.weights)
        behaviour = Behaviour(
            mode=options.mode,
            prefetch=options.prefetch,
            memory=self._memory or 0,
            is_in_bytes=options.cpu_bytes is not None,
            store=(options.store_blocks or _STORE_BLOCKS) if self._open_store else 0,
            can_delete=self._deletes,
            policy=self.policy,
            max_bytes=self._transform.max_bytes,
            shared=self._open_store() if self._open_store and is_shared else None,
            events=options.enable_events,
        )
        return StoreScheduler(self.config.geometry, behaviour)

    @override
    def make_worker(self) -> WorkerConnector:
        return StoreWorker(self._make_pages)

    def _make_pages(self, page_bytes: Sequence[int], rank: int, wake: Callable[[], None]) -> Pages:
        store = self._open_store() if self._open_store else None
        if store is not None:
            store.on_wake_up(wake)
        pages = Pages(page_bytes, self._transform, store, rank)
        pages.deletes, pages.max_memory = self._deletes, self.options.cpu_bytes
        return pages


def _never_finds(make: Any) -> bool:
    """Whether a class of stores uses the default lookups, which find no key."""
    is_default = getattr(make, "has", None) is Threaded.has
    return is_default or getattr(make, "find", None) is AsyncStore.find


def _open_store(make: Any, namespace: Namespace, options: StoreOptions) -> GuardedTier:
    store = make_with_options(make, options.model_extra or {}, namespace, flag="options")
    return GuardedTier(
        store,
        namespace,
        deadline=options.deadline,
        lookup_deadline=options.lookup_deadline,
        checksum="xxh3" if find_spec("xxhash") else "crc32",
    )
