"""The base class of connectors that keep pages by key."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt
from typing_extensions import override

from kvview.connector import (
    Connector,
    ConnectorConfig,
    FullBlock,
    RequestInfo,
    SchedulerConnector,
    WorkerConnector,
)
from kvview.errors import ConfigError
from kvview.options import make_with_options, parse_options
from kvview.targets import load_target
from kvview.tier import (
    AsyncStore,
    GuardedTier,
    Namespace,
    Threaded,
    TierStore,
    is_tier_store,
)
from kvview_reference.offloading import CachePolicy
from kvview_reference.offloading.policies import policy_factory
from kvview_reference.store_connector.named_pages import Pages, stored_bytes
from kvview_reference.store_connector.planning.page_index import Mode, TierSettings
from kvview_reference.store_connector.planning.store_scheduler import StoreScheduler
from kvview_reference.store_connector.transform import Transform
from kvview_reference.store_connector.worker import HostWorker, StoreWorker
from kvview_reference.transfer.host_pages import HostPages

_CPU_BLOCKS = 10_000
_STORE_BLOCKS = 1_000_000
_MODEL = "kvview.StoreConnector"
_HEAD_BYTES = 128  # at least, of the head that a store adds to a page
_NOTE_BYTES = 4096  # of the files of a store that contain no page


class StoreOptions(BaseModel):
    """Options of :class:`StoreConnector`; all other options are passed to the store.

    Attributes:
        store: Target of the store, which replaces the store that the class names.
        cpu_blocks: Blocks in host memory; 0 for none. The default is 10,000 without a store, else
            0. Without a transform, their memory is allocated at the start, and each block is copied
            once.
        cpu_bytes: Budget of host memory in bytes, counted after the transform. Each block is copied
            twice, so without a transform, ``cpu_blocks`` is about twice as fast.
        store_blocks: Maximum of blocks in the store of each rank; the least recently used blocks
            are deleted first. With ``weights``, the store itself keeps the limit for the pages of
            all runs and engines together, in bytes of the largest blocks, so its class must have
            the option ``max_bytes``.
        weights: Model and revision of its weights. With this option, pages are kept for later runs
            and shared with other engines. Without it, a store starts empty in each run, and the run
            has its own namespace. Also change the text when the type of the KV cache or the
            parallelism changes.
        mode: The moment at which blocks are stored, see :class:`StoreConnector`.
        prefetch: Whether pages are copied from the store to memory while their request waits.
        policy: Order of eviction of each level: ``lru``, ``arc``, another registered name, or a
            target. The default is the policy that the class names, or ``lru``.
        store_threshold: Number of times that a block must be computed before it is stored.
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
    policy: str | None = None
    store_threshold: PositiveInt = 1
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
    5. If memory displaces pages faster than the store writes them, fewer blocks are stored, because
       a store of blocks ends only when the displaced pages are written.

    Raises:
        ConfigError: An option is wrong, or the store has no such option.
    """

    contract_version = "1.0"

    store: ClassVar[Callable[..., TierStore] | None] = None
    """Class of the store, called with a :class:`~kvview.tier.Namespace` and options."""
    transform: ClassVar[type[Transform]] = Transform
    """Class of the transform that is applied to pages."""
    policy: ClassVar[str | Callable[..., CachePolicy]] = "lru"
    """Name or class of the policy; each level has its own instance."""
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
        self._make_store = make
        is_shared = make is not None and bool(options.weights)
        self._limits_shared = is_shared and options.store_blocks is not None
        self._deletes = hasattr(make, "delete") and not is_shared
        if options.store_blocks is not None and not (self._deletes or is_shared):
            raise ConfigError("store_blocks needs a store with the method delete(keys)")
        if make is not None:
            _require_fitting(make, options)
        self._memory = options.cpu_bytes or options.cpu_blocks
        if self._memory is None:
            self._memory = 0 if make else _CPU_BLOCKS
        self._transform = self.transform()
        self._policy = options.policy or type(self).policy
        policy_factory(self._policy)  # so that an unknown name is refused here
        # Pages of one size are copied between the GPU and numbered host pages.
        uses_host_pages = options.cpu_bytes is None and type(self).transform is Transform
        self._num_host_pages = self._memory if uses_host_pages else 0
        self._has_names = make is not None or not uses_host_pages

    def admits(self, block: FullBlock, request: RequestInfo) -> bool:
        """Whether a computed block is stored; other blocks must be computed again.

        The method is called on the scheduler's thread, perhaps again for a block, so it must not
        wait. A client may send any value in ``request.content.transfer_params``.
        """
        return True

    @override
    def make_scheduler(self) -> SchedulerConnector:
        options, is_shared = self.options, bool(self.options.weights)
        has_store = self._make_store is not None
        if not self._memory and not has_store:
            return SchedulerConnector()
        in_bytes = options.cpu_bytes is not None
        settings = TierSettings(
            mode=options.mode,
            prefetch=options.prefetch,
            memory_blocks=0 if in_bytes else self._memory or 0,
            memory_bytes=options.cpu_bytes or 0,
            store_blocks=(options.store_blocks or _STORE_BLOCKS) if has_store else 0,
            can_delete=self._deletes,
            policy=self._policy,
            store_threshold=options.store_threshold,
            max_bytes=self._transform.max_bytes,
            shared=self._open_store(0) if has_store and is_shared else None,
            has_names=self._has_names,
            events=options.enable_events,
            admits=None if type(self).admits is StoreConnector.admits else self.admits,
        )
        return StoreScheduler(self.config.geometry, settings)

    @override
    def make_worker(self) -> WorkerConnector:
        if not self._memory and self._make_store is None:
            return WorkerConnector()
        if not self._has_names:
            return HostWorker(self._num_host_pages)
        return StoreWorker(self._num_host_pages, self._make_pages)

    def _make_pages(self, host: HostPages, rank: int, wake: Callable[[], None]) -> Pages:
        store: GuardedTier | None = None
        if self._make_store is not None:
            budget: dict[str, int] = {}
            if self._limits_shared:
                largest = stored_bytes(self._transform, max(host.page_bytes)) + _HEAD_BYTES
                budget["max_bytes"] = largest * (self.options.store_blocks or 0) + _NOTE_BYTES
            store = self._open_store(rank, **budget)
            store.on_wake_up(wake)
        return Pages(
            host,
            self._transform,
            store,
            deletes=self._deletes,
            max_memory=self.options.cpu_bytes,
            uses_host_pages=self._num_host_pages > 0,
        )

    def _open_store(self, rank: int, **budget: int) -> GuardedTier:
        """Open the store of a rank, whose pages differ from those of the other ranks."""
        options = self.options
        run = "" if options.weights else uuid.uuid4().hex
        namespace = Namespace(_MODEL, options.weights or "of one run", rank=rank, run=run)
        given = {**(options.model_extra or {}), **budget}
        return GuardedTier(
            make_with_options(self._make_store, given, namespace, flag="options"),
            namespace,
            deadline=options.deadline,
            lookup_deadline=options.lookup_deadline,
            keeps_evicted=False,
            checksum="xxh3" if find_spec("xxhash") else "crc32",
        )

    @classmethod
    @override
    def checked_parts(cls, options: Mapping[str, Any]) -> Iterable[tuple[Any, Mapping[str, Any]]]:
        """List the store with its options, the transform, and the class of the policy."""
        given = {**cls.defaults, **options}
        own = {name: given.pop(name, None) for name in StoreOptions.model_fields}
        store: Any = load_target(own["store"]) if own["store"] else cls.store
        policy = own["policy"] or cls.policy
        if isinstance(policy, str):
            policy = load_target(policy) if ":" in policy else None
        transform: Any = None if cls.transform is Transform else cls.transform
        if transform is not None and not own["weights"]:  # then no other process decodes its pages
            from kvview.testing.tier.transform_suite import suite_of_transform

            transform = suite_of_transform(transform, is_shared=False)
        if store is not None and _never_finds(store):  # then the connector makes no lookups
            from kvview.testing.tier.suite import suite_of  # imports Hypothesis

            store = suite_of(store, given, lacks=["lookups"])
        parts: Any = (store, given), (transform, {}), (policy, {})
        return [(part, settings) for part, settings in parts if part is not None]

    @classmethod
    def tier_store(cls) -> Any:
        """Return the class of the store, for engines that use it as a tier.

        Raises:
            ConfigError: The connector has a transform, which no other engine applies.
        """
        if cls.transform is not Transform:
            raise ConfigError(
                f"connector {cls.__qualname__!r} has a transform, but a transform is not applied "
                "when another engine uses the store as a tier; pass the connector's store as the "
                "target, and compress in the store"
            )
        return cls.store


def _never_finds(make: Any) -> bool:
    """Whether a class of stores uses the default lookups, which find no key."""
    is_default = getattr(make, "has", None) is Threaded.has
    return is_default or getattr(make, "find", None) is AsyncStore.find


def _require_fitting(make: Any, options: StoreOptions) -> None:
    """Refuse options that a class of stores cannot use.

    Raises:
        ConfigError: The class lacks an option or a method.
    """
    if options.weights and _never_finds(make):
        raise ConfigError("weights needs a store with the method has(key), or find(key)")
    extra, budget = options.model_extra or {}, dict[str, int]()
    if options.weights and options.store_blocks is not None:
        if "max_bytes" in extra:
            raise ConfigError("store_blocks and max_bytes set the same budget; give one of them")
        if "max_bytes" not in inspect.signature(make).parameters:
            raise ConfigError(
                f"store_blocks with weights needs a store with the option max_bytes, because only "
                f"the store sees the pages of other runs; {make.__qualname__} has no such option, "
                f"so drop store_blocks or weights"
            )
        budget = {"max_bytes": 1}
    try:
        inspect.signature(make).bind(Namespace(_MODEL, "any"), **extra, **budget)
    except TypeError as error:
        raise ConfigError(
            f"options {sorted(extra)} do not fit the store {make.__qualname__}: {error}"
        ) from None
