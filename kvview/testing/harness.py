"""The harnesses that implementers write, one small class for each contract.

A harness contains the object under test, and makes the calls that an engine would make. A factory,
which takes no arguments, makes a new harness for every check. Each optional method belongs to a
capability. If a harness does not declare a capability, the methods of the capability are not
called, and the checks that need these methods are skipped and listed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

from kvview.pool import GPUBlockPoolView
from kvview.tier import Namespace, TierStore
from kvview.transfer import CanonicalKVCaches, TransferWorker

Contract = Literal["pool", "offloading", "transfer", "connector", "tier", "handoff"]
"""The contract of a harness.

A connector class is its own harness, and the kit makes a harness of a class of stores.
"""

Factory = Callable[..., Any]
"""Makes a new harness in its first state; every check makes at least one.

For connectors, the class itself is passed.
"""

MIN_POOL_BLOCKS = 16
MIN_GPU_BLOCKS = 8
MIN_CPU_BLOCKS = 8
MIN_BLOCKS_PER_GROUP = 4


@dataclass(frozen=True)
class Need:
    """One method or attribute that a contract or a capability requires.

    Args:
        on: ``"harness"``, or the attribute of the harness that must have the method.
        name: Name of the method or attribute.
        num_args: Positional arguments that the method must take; None for an attribute.
        keywords: Optional arguments that the method must accept by name.
    """

    on: str
    name: str
    num_args: int | None
    keywords: tuple[str, ...] = ()


def needs_of(*texts: str) -> tuple[Need, ...]:
    """Parse needs such as ``"view.is_free(1)"``: owner, name, and number of arguments."""
    needs = []
    for text in texts:
        on, _, method = text.partition(".")
        name, _, num_args = method.rstrip(")").partition("(")
        needs.append(Need(on, name, int(num_args) if num_args else None))
    return tuple(needs)


class Capability(StrEnum):
    """A feature of an implementation beyond the core, which a harness must declare.

    Attributes:
        value: Name by which a harness declares the capability.
        contracts: The contracts that have the capability.
        needs: The methods and attributes that the capability requires.
    """

    contracts: frozenset[str]
    needs: tuple[Need, ...]

    def __new__(cls, value: str, contracts: str, *needs: str) -> Capability:
        """Make a member from its needs, given as text."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.contracts = frozenset(contracts.split())
        member.needs = needs_of(*needs)
        return member

    # handoff
    NAMES_THE_KV = "names_the_kv", "handoff"
    """The parameters of a handoff name its KV completely (:class:`kvview.handoff.Handoff`)."""

    # pool
    CACHE = "cache", "pool", "harness.cache(3)"
    """``cache(block_ids, block_hashes, group_idx)`` caches blocks; the prefix cache is on."""
    MANY_HASHES = "many_hashes", "pool", "harness.cache(3)"
    """A block that is cached twice under different hashes keeps both."""
    EVICT = "evict", "pool", "harness.evict(1)"
    """``evict(block_ids)``: the engine drops blocks from its prefix cache."""
    RESET = "reset", "pool", "harness.reset(0)"
    """``reset() -> bool`` resets the cache, and returns False if the engine refused."""
    CLOSE = "close", "pool", "harness.close(0)"
    """``close() -> {block_id: count}``: the engine shuts down and closes the view."""
    SIZED = "sized", "pool", "harness.sized(1)"
    """``sized(num_blocks)``: a new harness over a pool of another size."""
    POOL_SIZE = "pool_size", "pool", "view.num_blocks", "view.null_block_id"
    """The view has ``num_blocks`` and ``null_block_id``."""
    FREE_COUNT = "free_count", "pool", "view.num_free_blocks(0)"
    """The view has ``num_free_blocks()``."""
    IS_FREE = "is_free", "pool", "view.is_free(1)"
    """The view has ``is_free(block_id)``."""
    BLOCK_KEYS = "block_keys", "pool", "view.block_keys(1)", "view.primary_keys(1)"
    """The view has ``block_keys(block_ids)`` and ``primary_keys(block_ids)``."""
    FIND_CACHED = "find_cached", "pool", "view.find_cached_block(1)"
    """The view has ``find_cached_block(key)``."""
    FREE_ORDER = "free_order", "pool", "view.iter_free_block_ids(0)"
    """The view has ``iter_free_block_ids()``."""
    GIVE_BACK = "give_back", "pool", "view.give_back_blocks(1)"
    """The view has ``give_back_blocks(block_ids)``."""
    RESUMABLE_WALK = "resumable_walk", "pool", "view.walk_free_blocks(0)"
    """The view has ``walk_free_blocks()``."""
    REUSE_NOTICE = "reuse_notice", "pool", "view.free_blocks_with_notice(2)"
    """The view has ``free_blocks_with_notice(block_ids, on_reuse)``."""
    HOLDS = "holds", "pool", "view.held_blocks(0)"
    """The view has ``held_blocks()``."""
    VIEWS = "views", "pool", "harness.another_view(0)"
    """``another_view()`` makes another view of the same pool."""
    SHARE = "share", "pool", "harness.share(1)"
    """``share(block_ids)``: the engine takes one more reference on each block, free or in use."""
    ENGINE_REFUSES = "engine_refuses", "pool", "harness.share(1)"
    """``release``, ``cache``, ``evict`` and ``share`` raise for impossible blocks, as a view does.
    """
    GPU_EVENTS = "gpu_events", "pool", "harness.telling(0)"
    """``telling()`` makes a harness whose engine emits events of its prefix cache.

    Its ``take_events()`` returns the events since the last call, as :class:`~kvview.BlockStored`,
    :class:`~kvview.BlockRemoved` and :class:`~kvview.AllBlocksCleared`.
    """

    # offloading
    RESETS = "resets", "offloading"
    """``OffloadingManager.reset`` forgets all keys."""
    EVENTS = "events", "offloading"
    """``take_events`` reports stored and removed keys."""
    PAGES = "pages", "offloading"
    """Specs name their pages with ``block_ids``."""
    POLICIES = "policies", "offloading", "suite.with_policy(1)", "suite.policies"
    """``with_policy(name)`` makes a manager with a policy; ``policies`` lists the known names."""
    LRU = "lru", "offloading"
    """The manager evicts the key that was used longest ago (OFF-10)."""
    ARC = "arc", "offloading"
    """The manager evicts keys by ARC (OFF-11)."""
    STORE_THRESHOLD = "store_threshold", "offloading", "suite.with_threshold(2)"
    """``with_threshold(capacity, num_offers)`` makes a manager that stores a key at this offer; at
    the first, as ``make`` does, if the number is 1."""

    TIER_COUNTS = (
        "tier_counts",
        "offloading",
        "manager.num_free_blocks(0)",
        "manager.num_protected_blocks(0)",
    )
    """The manager has ``num_free_blocks()``, the blocks that a store may take without an eviction,
    and ``num_protected_blocks()``, the blocks that transfers use, including those of transfers
    older than a reset."""
    LEADING_HITS = "leading_hits", "offloading", "manager.num_leading_hits(1)"
    """The manager has ``num_leading_hits(keys)``, which returns the number of keys before the first
    key that is not a hit."""

    # transfer
    FAIL = "fail", "transfer", "harness.fail_next(0)"
    """``fail_next()``: the copy of the job that is submitted next fails."""
    PAUSE = "pause", "transfer tier", "harness.pause(0)", "harness.resume(0)"
    """``pause()`` and ``resume()``: copies that are submitted between them start at ``resume``."""
    FAIL_BLOCK = "fail_block", "transfer", "harness.fail_block(1)"
    """``fail_block(number)``: in the store that is submitted next, the copy of one GPU block fails.
    Blocks are counted in the order of the job; copies of other blocks may succeed."""
    WORKERS = "workers", "transfer", "harness.with_caches(2)"
    """``with_caches(kv_caches, num_cpu_blocks)`` makes a worker over other KV caches; the checks
    shut the worker down."""
    COMPUTE = "compute", "transfer", "harness.hold_compute(0)", "harness.release_compute(0)"
    """``hold_compute()`` and ``release_compute()``: work that enters the worker's compute stream
    between both calls ends at ``release_compute`` (:class:`~kvview.testing.GatedComputeStream`)."""
    COMPUTE_FAILS = "compute_fails", "transfer", "harness.fail_compute(1)"
    """``fail_compute(when)``: at the next submitted job the compute stream raises, when the worker
    records an event (``"mark"``) or waits for the event (``"wait"``)."""
    TIER_SPEC = "tier_spec", "transfer", "harness.tier_spec(1)"
    """``tier_spec(pages)`` makes a spec that names pages of the tier, by keys, offsets, files or in
    any other way. Without this capability the checks use :class:`~kvview.CPULoadStoreSpec`, and the
    worker must refuse a page that does not exist."""
    HOST_BYTES = "host_bytes", "transfer", "worker.host_bytes"
    """The worker has ``host_bytes``, the size of its tier in host memory; 0 after shutdown."""

    # tier
    REOPEN = "reopen", "tier", "harness.reopen(0)"
    """``reopen()`` makes a harness over the same bytes, after the earlier store was closed."""
    NAMESPACES = "namespaces", "tier", "harness.with_namespace(1)"
    """``with_namespace(namespace)`` makes another harness in the same place."""
    DAMAGE = "damage", "tier", "harness.damage(1)"
    """``damage(how)`` corrupts the entries on the medium (``"flip"``, ``"cut"``, ``"grow"``,
    ``"swap"``), and returns the number of entries."""
    VERIFIES = "verifies", "tier", "harness.damage(1)"
    """The store itself detects damaged bytes, even without a guard."""
    GONE = "gone", "tier", "harness.lose_medium(0)", "harness.folder"
    """``lose_medium()`` removes the medium (``folder``) while the store is open."""
    BUDGET = "budget", "tier", "harness.with_budget(1)", "harness.occupied_bytes(0)"
    """``with_budget(max_bytes)`` makes a harness whose store has a budget and a new place;
    ``occupied_bytes()`` returns the bytes that this store takes."""
    KILL = "kill", "tier", "harness.start_writer(1)"
    """``start_writer(keys)`` starts a process that opens the same place and puts keys; ``keys`` has
    the size of each page (:class:`kvview.testing.tier.writer.Writer`)."""
    DELETE = "delete", "tier", "store.delete(1)"
    """The store has ``delete(keys)``."""
    USAGE = "usage", "tier", "store.usage(0)"
    """The store has ``usage()``."""
    TOUCH = "touch", "tier", "store.touch(1)"
    """The store has ``touch(keys)``."""


class PoolHarness(Protocol):
    """A view under test and its engine; a new harness holds and caches no block.

    1. Block ids are 0 to ``num_blocks - 1``. In a new harness all blocks except the null block are
       free.
    2. ``allocate`` and ``release`` are calls of the engine that bypass the view; the view is not
    notified. The engine and the view may both hold a block.
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
        """Id of the placeholder block that is never allocated; None if the pool has none."""
        ...

    @property
    def capabilities(self) -> Collection[str]:
        """Optional features of this implementation."""
        ...

    def allocate(self, num_blocks: int, /) -> Sequence[int]:
        """Allocate blocks for a request, with one reference each; their hashes are evicted."""
        ...

    def release(self, block_ids: Sequence[int], /) -> None:
        """Release one of the engine's references on each block, in the order of eviction."""
        ...


class TransferHarness(Protocol):
    """A transfer worker under test, and the KV caches that it reads and writes.

    1. ``kv_caches`` holds torch tensors. The checks fill and compare the whole storages of the
       tensors, including the bytes between and after the rows.
    2. More groups, tensors, paddings and gaps make the checks more thorough. With pages so large
    that a job moves more than 1 MiB, the checks also cover large jobs.
    """

    @property
    def worker(self) -> TransferWorker:
        """The worker under test."""
        ...

    @property
    def kv_caches(self) -> CanonicalKVCaches[Any]:
        """The KV caches, with at least 8 blocks per tensor, and 4 for each group."""
        ...

    @property
    def num_cpu_blocks(self) -> int:
        """Number of pages of the tier that the checks may use, at least 8 and 4 for each group."""
        ...

    @property
    def blocks_per_chunk(self) -> int:
        """Number of GPU blocks in one host block."""
        ...

    @property
    def capabilities(self) -> Collection[str]:
        """Optional features of this implementation."""
        ...


class TierHarness(Protocol):
    """A store under test, which at first holds no key, and keeps 16 MiB before it evicts a key."""

    @property
    def store(self) -> TierStore:
        """The store under test."""
        ...

    @property
    def namespace(self) -> Namespace:
        """Namespace of the store."""
        ...

    @property
    def capabilities(self) -> Collection[str]:
        """Optional features of this implementation."""
        ...

    def end(self) -> None:
        """Close the store and remove its files after a check; may be called twice."""
        ...


class HandoffHarness(Protocol):
    """Two engines with a network between them, which a new harness has not started."""

    @property
    def engines(self) -> Mapping[str, Any]:
        """The engines by name."""
        ...

    def start(self, scenarios: Any, network: Any, lease_seconds: float, /) -> None:
        """Build both engines."""
        ...


SUBJECTS: Mapping[Contract, tuple[str, type, type]] = {
    "pool": ("view", GPUBlockPoolView, PoolHarness),
    "transfer": ("worker", TransferWorker, TransferHarness),
    "tier": ("store", TierStore, TierHarness),
    "handoff": ("engines", object, HandoffHarness),
}
"""For each contract, the attribute that identifies its harness, and the two protocols."""


def capabilities_of(contract: Contract) -> list[Capability]:
    """Return the capabilities that a harness of a contract may declare."""
    return [one for one in Capability if contract in one.contracts]


def required_by(contract: Contract) -> list[Need]:
    """Return the methods and attributes that every harness of a contract has."""
    subject, of_subject, of_harness = SUBJECTS[contract]
    return [*members(subject, of_subject), *members("harness", of_harness)]


def members(on: str, protocol: type) -> Iterator[Need]:
    """Yield the methods and attributes of a protocol, as needs of one object."""
    for name, member in vars(protocol).items():
        if name.startswith("_") or name == "capabilities":
            continue
        if isinstance(member, property):
            yield Need(on, name, None)
        elif inspect.isfunction(member):
            _, *parameters = inspect.signature(member).parameters.values()
            keywords = tuple(one.name for one in parameters if one.default is not one.empty)
            yield Need(on, name, len(parameters) - len(keywords), keywords)
