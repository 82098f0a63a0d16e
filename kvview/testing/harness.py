"""The harnesses that implementers write, one small class for each contract.

A harness holds the object under test and the calls of the engine around it. A
factory without arguments makes a new one for every check. Methods beyond the
required ones belong to a capability: methods of an undeclared capability are
not called, and the checks that need them are skipped and listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

from kvview.geometry import CacheGroup
from kvview.offloading import OffloadingManager
from kvview.pool import GPUBlockPoolView
from kvview.tier import Namespace, TierStore
from kvview.transfer import CanonicalKVCaches, TransferWorker

Contract = Literal["pool", "geometry", "offloading", "transfer", "connector", "tier", "handoff"]
"""The contract that a harness is for; a connector class is its own harness, and of a class of
stores the kit makes one."""

Factory = Callable[..., Any]
"""Makes a harness in its first state; every check calls it at least once. A connector class
is given as it is."""

MIN_POOL_BLOCKS = 16
MIN_CACHED_BLOCKS = 64
MIN_CAPACITY = 8
MIN_GPU_BLOCKS = 8
MIN_CPU_BLOCKS = 8
MIN_BLOCKS_PER_GROUP = 4


class Capability(StrEnum):
    """A feature of an implementation beyond the core; declared, never guessed."""

    # pool
    CACHE = "cache"
    """``cache(block_ids, block_hashes, group_idx)``: the prefix cache is on."""
    MANY_HASHES = "many_hashes"
    """A block that is cached twice under different hashes keeps both."""
    EVICT = "evict"
    """``evict(block_ids)``: the engine drops blocks from its prefix cache."""
    RESET = "reset"
    """``reset() -> bool`` of a pool: False when the engine's cache reset was refused.

    Of a manager: ``OffloadingManager.reset`` does something.
    """
    CLOSE = "close"
    """``close() -> {block_id: count}``: the engine goes and closes the view."""
    SIZED = "sized"
    """``sized(num_blocks)``: a new harness over a pool, or a manager, of another size."""
    POOL_SIZE = "pool_size"
    """The view has ``num_blocks`` and ``null_block_id``."""
    FREE_COUNT = "free_count"
    """The view has ``num_free_blocks()``."""
    IS_FREE = "is_free"
    """The view has ``is_free(block_id)``."""
    BLOCK_KEYS = "block_keys"
    """The view has ``block_keys(block_ids)`` and ``primary_keys(block_ids)``."""
    FIND_CACHED = "find_cached"
    """The view has ``find_cached_block(key)``."""
    FREE_ORDER = "free_order"
    """The view has ``iter_free_block_ids()``."""
    GIVE_BACK = "give_back"
    """The view has ``give_back_blocks(block_ids)``."""
    RESUMABLE_WALK = "resumable_walk"
    """The view has ``walk_free_blocks()``."""
    REUSE_NOTICE = "reuse_notice"
    """The view has ``free_blocks_with_notice(block_ids, on_reuse)``."""
    HOLDS = "holds"
    """The view has ``held_blocks()``."""
    VIEWS = "views"
    """``another_view()``: another view of the same pool."""
    ENGINE_REFUSES = "engine_refuses"
    """``release``, ``cache`` and ``evict`` raise, as a view does, for blocks that the engine cannot
    mean, and so does ``share(block_ids)``: one reference more on each, free or in use."""
    GPU_EVENTS = "gpu_events"
    """``telling()``: a new harness whose engine tells of its prefix cache; ``take_events()`` of
    that is what it told since the last call, as :class:`~kvview.BlockStored`,
    :class:`~kvview.BlockRemoved` and :class:`~kvview.AllBlocksCleared`."""
    LEASES = "leases"
    """The view is a guard: it has ``lease``; ``advance(seconds)`` moves its clock."""
    LEAKS = "leaks"
    """The guard has ``leaks(older_than)``, of things like :class:`~kvview.Leak`."""
    PIN_BUDGET = "pin_budget"
    """``budgeted(num_blocks)``: a new harness whose guard may hold so many blocks."""
    GUARDS = "guards"
    """``guard_over(view, num_blocks)``: another guard, with the clock of the first, over any
    view; it may hold so many blocks, or any number with None."""
    STATS = "stats"
    """The guard has ``stats``, like :class:`~kvview.GuardStats`."""
    TRACE = "trace"
    """``traced()``: a new harness whose guard notes the line that took each hold."""
    ENGINE_SIDE = "engine_side"
    """The guard has what an engine asks of it: ``speak_of(request_id)``, ``accounts()``,
    ``guards()`` and ``free_all()``, as :class:`~kvview.GuardedView`."""
    ONE_THREAD = "one_thread"
    """The view refuses calls from another thread than the one that made it."""

    # geometry
    SLIDING_WINDOW = "sliding_window"
    """``with_geometry`` takes :class:`~kvview.SlidingWindow` groups."""
    CHUNKED_LOCAL = "chunked_local"
    """``with_geometry`` takes :class:`~kvview.ChunkedLocalAttention` groups."""
    MAMBA = "mamba"
    """``with_geometry`` takes :class:`~kvview.Mamba` groups."""
    HYBRID = "hybrid"
    """``with_geometry`` takes several groups."""
    CACHING_OFF = "caching_off"
    """``without_caching()``: a new harness of the same geometry whose prefix cache is off."""

    # offloading
    EVENTS = "events"
    """``take_events`` reports what is stored and removed."""
    PAGES = "pages"
    """Specs name their pages: they have ``block_ids``."""
    POLICIES = "policies"
    """``with_policy(name)`` makes a manager; ``policies`` names the known ones."""
    LRU = "lru"
    """The manager evicts what was used longest ago (OFF-10)."""
    ARC = "arc"
    """The manager evicts as ARC does (OFF-11)."""
    STORE_THRESHOLD = "store_threshold"
    """``with_threshold(num_offers)``: a new harness whose manager stores a key at so many."""

    TIER_COUNTS = "tier_counts"
    """The manager has ``num_free_blocks()``, what a store may take without an eviction, and
    ``num_protected_blocks()``, what transfers use, those from before a reset included."""
    LEADING_HITS = "leading_hits"
    """The manager has ``num_leading_hits(keys)``: how many keys ``lookup`` calls a hit, up to the
    first that it does not."""

    # transfer
    FAIL = "fail"
    """``fail_next()``: the copy of the job that is submitted next fails."""
    PAUSE = "pause"
    """``pause()`` and ``resume()``: copies submitted in between start at ``resume``."""
    FAIL_BLOCK = "fail_block"
    """``fail_block(number)``: in the store that is submitted next, the copy of one GPU block
    fails, counted in the order of the job; the copies of others need not."""
    WORKERS = "workers"
    """``with_caches(kv_caches, num_cpu_blocks)``: makes a worker over other KV caches, which is
    shut down by the checks."""
    COMPUTE = "compute"
    """``hold_compute()`` and ``release_compute()``: what the worker's compute stream is given
    in between ends at ``release_compute`` (:class:`~kvview.testing.GatedComputeStream`)."""
    COMPUTE_FAILS = "compute_fails"
    """``fail_compute(when)``: the compute stream raises at the job that is submitted next, when it
    is asked for a mark (``"mark"``) or waited for (``"wait"``)."""
    TIER_SPEC = "tier_spec"
    """``tier_spec(pages)``: how the tier names its pages, which may be anything: keys, offsets,
    files. Without it by :class:`~kvview.CPULoadStoreSpec`, and any other page is refused."""
    HOST_BYTES = "host_bytes"
    """The worker has ``host_bytes``: of host memory that its tier takes, 0 after shutdown."""

    # tier
    REOPEN = "reopen"
    """``reopen()``: a new harness over the same bytes; the store before is closed by then."""
    NAMESPACES = "namespaces"
    """``with_namespace(namespace)``: a new harness beside this one, in the same place."""
    DAMAGE = "damage"
    """``damage(how)``: spoil what lies on the medium (``"flip"``, ``"cut"``, ``"grow"``,
    ``"swap"``); returns how many entries."""
    VERIFIES = "verifies"
    """The store itself sees damaged bytes, also without a guard."""
    GONE = "gone"
    """``lose_medium()``: the medium, ``folder``, is taken away under the store."""
    BUDGET = "budget"
    """``with_budget(max_bytes)``: a new harness in a place of its own; ``occupied_bytes()`` is
    what its store takes there."""
    KILL = "kill"
    """``start_writer(keys)``: a process that opens the place and puts keys, which are given with
    the bytes of their pages (:class:`kvview.testing.tier.writer.Writer`)."""
    DELETE = "delete"
    """The store has ``delete(keys)``."""
    USAGE = "usage"
    """The store has ``usage()``."""
    TOUCH = "touch"
    """The store has ``touch(keys)``."""
    TIER_GUARD = "tier_guard"
    """``guard(store, namespace, **options)``: the guard under test over any store."""


class PoolHarness(Protocol):
    """A view under test and its engine; fresh: nothing held, nothing cached.

    1. Ids are 0 to ``num_blocks - 1``; all but the null block are free at first.
    2. ``allocate`` and ``release`` are calls of the engine, which bypass the view: a block
       may be in use by both. The view is not notified.
    """

    @property
    def view(self) -> GPUBlockPoolView:
        """The view under test."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included; at least 16."""
        ...

    @property
    def null_block_id(self) -> int | None:
        """The placeholder that is never allocated; None when there is none."""
        ...

    @property
    def capabilities(self) -> Collection[str]:
        """Optional features of this implementation."""
        ...

    def allocate(self, num_blocks: int, /) -> Sequence[int]:
        """Take blocks for a request, one reference each; their hashes are evicted."""
        ...

    def release(self, block_ids: Sequence[int], /) -> None:
        """Release one of the engine's references on each block; the first is evicted first."""
        ...


class Coordinator(Protocol):
    """A coordinator: finds the cached prefix of a request."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, /
    ) -> tuple[Sequence[Sequence[int]], int]:
        """The longest hit of at most ``max_tokens``, with nothing held for it.

        Returns:
            Block ids a group, from block 0 to the end of the hit, and its tokens.
        """
        ...


class GeometryHarness(Protocol):
    """A coordinator under test and its pool; fresh: nothing cached.

    1. A factory may make any geometry; the checks then make their own.
    2. A request is its block hashes: one each ``hash_block_size`` tokens, made from
       all tokens up to its end. Requests with a common prefix share its hashes.
    3. At least 64 blocks are cached at the same time before one is evicted.
    """

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator under test."""
        ...

    @property
    def null_block_id(self) -> int:
        """The block-table entry of a block that is not needed."""
        ...

    @property
    def capabilities(self) -> Collection[str]:
        """Optional features of this implementation."""
        ...

    def with_geometry(
        self, scheduler_block_size: int, hash_block_size: int, groups: Sequence[CacheGroup], /
    ) -> GeometryHarness:
        """A new harness of another geometry; sizes that do not divide are refused (GEO-2)."""
        ...

    def cache(self, block_hashes: Sequence[bytes], group_idx: int, block: int, /) -> int:
        """Cache block number ``block`` of a request in a group, alone; returns its id.

        As if it had been computed and its request had ended: the block is free.
        """
        ...


class ManagerHarness(Protocol):
    """An offloading manager under test; fresh: it holds nothing, and stores every offer."""

    @property
    def manager(self) -> OffloadingManager:
        """The manager under test."""
        ...

    @property
    def capacity(self) -> int:
        """Keys that fit; at least 8."""
        ...

    @property
    def capabilities(self) -> Collection[str]:
        """Optional features of this implementation."""
        ...


class TransferHarness(Protocol):
    """A transfer worker under test, and the KV caches that it reads and writes.

    1. ``kv_caches`` holds torch tensors. The checks fill and compare their whole storages,
       including the bytes between and behind the rows.
    2. The more groups, tensors, paddings and gaps, the more is checked; and with pages so
       large that a job moves more than 1 MiB, the way that a worker moves those.
    """

    @property
    def worker(self) -> TransferWorker:
        """The worker under test."""
        ...

    @property
    def kv_caches(self) -> CanonicalKVCaches[Any]:
        """The KV caches; at least 8 blocks per tensor, 4 for each group."""
        ...

    @property
    def num_cpu_blocks(self) -> int:
        """Pages of the tier that the checks may use, from 0; at least 8, and 4 for each group."""
        ...

    @property
    def blocks_per_chunk(self) -> int:
        """GPU blocks that one host block holds."""
        ...

    @property
    def capabilities(self) -> Collection[str]:
        """Optional features of this implementation."""
        ...


class TierHarness(Protocol):
    """A store under test; fresh: it holds nothing. 16 MiB are kept before one key is evicted."""

    @property
    def store(self) -> TierStore:
        """The store under test."""
        ...

    @property
    def namespace(self) -> Namespace:
        """Its namespace."""
        ...

    @property
    def capabilities(self) -> Collection[str]:
        """Optional features of this implementation."""
        ...

    def end(self) -> None:
        """Close the store and remove its files after a check; callable twice."""
        ...


@dataclass(frozen=True)
class Need:
    """One method or attribute that a contract or a capability requires.

    Args:
        on: ``"harness"`` or the harness's attribute that must have it.
        name: The method or attribute.
        num_args: Positional arguments that the method must take; None for an attribute.
    """

    on: str
    name: str
    num_args: int | None


SUBJECTS: Mapping[Contract, str] = {
    "pool": "view",
    "geometry": "coordinator",
    "offloading": "manager",
    "transfer": "worker",
    "tier": "store",
    "handoff": "engines",
}
"""The attribute that tells what a harness is for."""

REQUIRED: Mapping[Contract, Sequence[Need]] = {
    "pool": (
        Need("view", "touch_blocks", 1),
        Need("view", "free_blocks", 1),
        Need("view", "iter_free_block_ids_with_hash", 0),
        Need("harness", "num_blocks", None),
        Need("harness", "null_block_id", None),
        Need("harness", "allocate", 1),
        Need("harness", "release", 1),
    ),
    "geometry": (
        Need("coordinator", "find_longest_cache_hit", 2),
        Need("harness", "null_block_id", None),
        Need("harness", "with_geometry", 3),
        Need("harness", "cache", 3),
    ),
    "offloading": (
        Need("manager", "lookup", 2),
        Need("manager", "prepare_load", 2),
        Need("manager", "complete_load", 2),
        Need("manager", "touch", 2),
        Need("manager", "prepare_store", 2),
        Need("manager", "complete_store", 3),
        Need("manager", "take_events", 0),
        Need("manager", "reset", 0),
        Need("manager", "shutdown", 0),
        Need("harness", "capacity", None),
    ),
    "transfer": (
        Need("worker", "transfer_async", 2),
        Need("worker", "get_finished", 0),
        Need("worker", "wait", 1),
        Need("worker", "shutdown", 0),
        Need("harness", "kv_caches", None),
        Need("harness", "num_cpu_blocks", None),
        Need("harness", "blocks_per_chunk", None),
    ),
    "tier": (
        Need("store", "lookup", 1),
        Need("store", "put", 3),
        Need("store", "get", 3),
        Need("store", "poll", 0),
        Need("store", "drain", 1),
        Need("store", "close", 0),
        Need("harness", "namespace", None),
        Need("harness", "end", 0),
    ),
    "handoff": (Need("harness", "start", 3),),
}
"""What every harness of a contract has."""

OFFERS: Mapping[Contract, Mapping[Capability, Sequence[Need]]] = {
    "pool": {
        Capability.CACHE: (Need("harness", "cache", 3),),
        Capability.MANY_HASHES: (Need("harness", "cache", 3),),
        Capability.EVICT: (Need("harness", "evict", 1),),
        Capability.RESET: (Need("harness", "reset", 0),),
        Capability.CLOSE: (Need("harness", "close", 0),),
        Capability.SIZED: (Need("harness", "sized", 1),),
        Capability.POOL_SIZE: (
            Need("view", "num_blocks", None),
            Need("view", "null_block_id", None),
        ),
        Capability.FREE_COUNT: (Need("view", "num_free_blocks", 0),),
        Capability.IS_FREE: (Need("view", "is_free", 1),),
        Capability.BLOCK_KEYS: (Need("view", "block_keys", 1), Need("view", "primary_keys", 1)),
        Capability.FIND_CACHED: (Need("view", "find_cached_block", 1),),
        Capability.FREE_ORDER: (Need("view", "iter_free_block_ids", 0),),
        Capability.GIVE_BACK: (Need("view", "give_back_blocks", 1),),
        Capability.RESUMABLE_WALK: (Need("view", "walk_free_blocks", 0),),
        Capability.REUSE_NOTICE: (Need("view", "free_blocks_with_notice", 2),),
        Capability.HOLDS: (Need("view", "held_blocks", 0),),
        Capability.VIEWS: (Need("harness", "another_view", 0),),
        Capability.ENGINE_REFUSES: (Need("harness", "share", 1),),
        Capability.GPU_EVENTS: (Need("harness", "telling", 0),),
        Capability.LEASES: (Need("view", "lease", 1), Need("harness", "advance", 1)),
        Capability.LEAKS: (Need("view", "leaks", 1),),
        Capability.PIN_BUDGET: (Need("harness", "budgeted", 1),),
        Capability.GUARDS: (Need("harness", "guard_over", 2),),
        Capability.STATS: (Need("view", "stats", None),),
        Capability.TRACE: (Need("harness", "traced", 0),),
        Capability.ENGINE_SIDE: (
            Need("view", "speak_of", 1),
            Need("view", "accounts", 0),
            Need("view", "guards", 0),
            Need("view", "free_all", 0),
        ),
        Capability.ONE_THREAD: (),
    },
    "geometry": {
        Capability.SLIDING_WINDOW: (),
        Capability.CHUNKED_LOCAL: (),
        Capability.MAMBA: (),
        Capability.HYBRID: (),
        Capability.CACHING_OFF: (Need("harness", "without_caching", 0),),
    },
    "offloading": {
        Capability.EVENTS: (),
        Capability.PAGES: (),
        Capability.RESET: (),
        Capability.SIZED: (Need("harness", "sized", 1),),
        Capability.POLICIES: (
            Need("harness", "with_policy", 1),
            Need("harness", "policies", None),
        ),
        Capability.LRU: (),
        Capability.ARC: (),
        Capability.STORE_THRESHOLD: (Need("harness", "with_threshold", 1),),
        Capability.TIER_COUNTS: (
            Need("manager", "num_free_blocks", 0),
            Need("manager", "num_protected_blocks", 0),
        ),
        Capability.LEADING_HITS: (Need("manager", "num_leading_hits", 1),),
    },
    "transfer": {
        Capability.FAIL: (Need("harness", "fail_next", 0),),
        Capability.PAUSE: (Need("harness", "pause", 0), Need("harness", "resume", 0)),
        Capability.FAIL_BLOCK: (Need("harness", "fail_block", 1),),
        Capability.COMPUTE: (
            Need("harness", "hold_compute", 0),
            Need("harness", "release_compute", 0),
        ),
        Capability.WORKERS: (Need("harness", "with_caches", 2),),
        Capability.COMPUTE_FAILS: (Need("harness", "fail_compute", 1),),
        Capability.TIER_SPEC: (Need("harness", "tier_spec", 1),),
        Capability.HOST_BYTES: (Need("worker", "host_bytes", None),),
    },
    "connector": {},
    "handoff": {},
    "tier": {
        Capability.PAUSE: (Need("harness", "pause", 0), Need("harness", "resume", 0)),
        Capability.REOPEN: (Need("harness", "reopen", 0),),
        Capability.NAMESPACES: (Need("harness", "with_namespace", 1),),
        Capability.DAMAGE: (Need("harness", "damage", 1),),
        Capability.VERIFIES: (Need("harness", "damage", 1),),
        Capability.GONE: (Need("harness", "lose_medium", 0), Need("harness", "folder", None)),
        Capability.BUDGET: (
            Need("harness", "with_budget", 1),
            Need("harness", "occupied_bytes", 0),
        ),
        Capability.KILL: (Need("harness", "start_writer", 1),),
        Capability.DELETE: (Need("store", "delete", 1),),
        Capability.USAGE: (Need("store", "usage", 0),),
        Capability.TOUCH: (Need("store", "touch", 1),),
        Capability.TIER_GUARD: (Need("harness", "guard", 2),),
    },
}
"""Per contract, the capabilities that may be declared, and what each one needs."""
