"""The capabilities of implementations, and the methods that each of them requires.

A suite checks all capabilities of its contract, except those that its ``lacks`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, Literal

Contract = Literal["pool", "offloading", "transfer", "connector", "tier", "transform", "handoff"]
"""The contract of a target."""

Factory = Callable[..., Any]
"""A target that is checked: a class of connectors, or a suite."""


class Capability(StrEnum):
    """A feature of an implementation beyond the core, which a suite checks unless it lacks it.

    Attributes:
        value: Name of the capability, for ``lacks``.
        contracts: The contracts that have the capability.
        needs: The methods and attributes that the capability requires, each after the name of its
            object among the ``parts`` of the suite.
    """

    contracts: frozenset[str]
    needs: tuple[str, ...]

    def __new__(cls, value: str, contracts: str, *needs: str) -> Capability:
        """Make a member from the names of its contracts and of its needs."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.contracts = frozenset(contracts.split())
        member.needs = needs
        return member

    # handoff
    NAMES_THE_KV = "names_the_kv", "handoff"
    """The parameters of a handoff name its KV completely (:class:`kvview.handoff.Handoff`)."""

    # pool
    CACHE = "cache", "pool", "pool.cache"
    """``cache(block_ids, block_hashes, group_idx)`` caches blocks; the prefix cache is on."""
    MANY_HASHES = "many_hashes", "pool", "pool.cache"
    """A block that is cached twice under different hashes keeps both."""
    EVICT = "evict", "pool", "pool.evict"
    """``evict(block_ids)``: the engine drops blocks from its prefix cache."""
    RESET = "reset", "pool", "pool.reset"
    """``reset() -> bool`` resets the cache, and returns False if the engine refused."""
    CLOSE = "close", "pool", "pool.close"
    """``close() -> {block_id: count}``: the engine shuts down and closes the view."""
    POOL_SIZE = "pool_size", "pool", "view.num_blocks", "view.null_block_id"
    """The view has ``num_blocks`` and ``null_block_id``."""
    FREE_COUNT = "free_count", "pool", "view.num_free_blocks"
    """The view has ``num_free_blocks()``."""
    IS_FREE = "is_free", "pool", "view.is_free"
    """The view has ``is_free(block_id)``."""
    BLOCK_KEYS = "block_keys", "pool", "view.block_keys", "view.primary_keys"
    """The view has ``block_keys(block_ids)`` and ``primary_keys(block_ids)``."""
    FIND_CACHED = "find_cached", "pool", "view.find_cached_block"
    """The view has ``find_cached_block(key)``."""
    FREE_ORDER = "free_order", "pool", "view.iter_free_block_ids"
    """The view has ``iter_free_block_ids()``."""
    GIVE_BACK = "give_back", "pool", "view.give_back_blocks"
    """The view has ``give_back_blocks(block_ids)``."""
    HOLDS = "holds", "pool", "view.held_blocks"
    """The view has ``held_blocks()``."""
    VIEWS = "views", "pool", "pool.another_view"
    """``another_view()`` makes another view of the same pool."""
    SHARE = "share", "pool", "pool.share"
    """``share(block_ids)``: the engine takes one more reference on each block, free or in use."""
    # offloading
    RESETS = "resets", "offloading"
    """``OffloadingManager.reset`` forgets all keys."""
    EVENTS = "events", "offloading"
    """``take_events`` reports stored and removed keys."""
    PAGES = "pages", "offloading"
    """Specs name their pages with ``block_ids``."""
    POLICIES = "policies", "offloading", "suite.with_policy", "suite.policies"
    """``with_policy(name)`` makes a manager with a policy; ``policies`` lists the known names."""
    LRU = "lru", "offloading"
    """The manager evicts the key that was used longest ago (OFF-10)."""
    ARC = "arc", "offloading"
    """The manager evicts keys by ARC (OFF-11)."""
    STORE_THRESHOLD = "store_threshold", "offloading", "suite.with_threshold"
    """``with_threshold(capacity, num_offers)`` makes a manager that stores a key at this offer; at
    the first, as ``make`` does, if the number is 1."""

    # transfer
    FAIL = "fail", "transfer", "suite.fail_next"
    """``fail_next()``: the copy of the job that is submitted next fails."""
    PAUSE = "pause", "transfer", "suite.pause", "suite.resume"
    """``pause()`` and ``resume()``: copies that are submitted between them start at ``resume``."""
    FAIL_BLOCK = "fail_block", "transfer", "suite.fail_block"
    """``fail_block(number)``: in the store that is submitted next, the copy of one GPU block fails.
    Blocks are counted in the order of the job; copies of other blocks may succeed."""
    COMPUTE = "compute", "transfer"
    """The worker waits for the compute stream of its KV caches, which is then a
    :class:`~kvview.testing.GatedComputeStream`."""
    TIER_SPEC = "tier_spec", "transfer", "suite.tier_spec"
    """``tier_spec(pages)`` makes a spec that names pages of the tier, by keys, offsets, files or in
    any other way. Without this capability the checks use :class:`~kvview.CPULoadStoreSpec`, and the
    worker must refuse a page that does not exist."""
    # tier
    REOPEN = "reopen", "tier transform"
    """The place of the store can be opened again, after the earlier store was closed; another
    process can decode the pages of a transform."""
    NAMESPACES = "namespaces", "tier"
    """Stores of several namespaces can be opened in one place."""
    VERIFIES = "verifies", "tier"
    """The store itself detects damaged bytes, even without a guard, and its entries are files that
    the kit can damage."""
    GONE = "gone", "tier"
    """The place of the store is a folder that the kit can remove while the store is open."""
    BUDGET = "budget", "tier"
    """The store takes the option ``max_bytes``, and the kit can count the bytes of its files."""
    SHRINKS = "shrinks", "tier"
    """The bytes of deleted, evicted and incomplete entries leave the medium; a store with
    ``reuses_space = True`` keeps them for new entries."""
    LOOKUPS = "lookups", "tier"
    """Lookups find stored keys; a connector that makes no lookups needs no such store."""
    KILL = "kill", "tier"
    """Another process can import the class of the store."""
    THREADED = "threaded", "tier"
    """The class is derived from :class:`~kvview.tier.Threaded`, so the kit can block its calls."""
    DELETE = "delete", "tier", "store.delete"
    """The store has ``delete(keys)``."""
    USAGE = "usage", "tier", "store.usage"
    """The store has ``usage()``."""
    TOUCH = "touch", "tier", "store.touch"
    """The store has ``touch(keys)``."""


@cache
def capabilities_of(contract: Contract) -> Sequence[Capability]:
    """Return the capabilities that a harness of a contract may declare."""
    return tuple(one for one in Capability if contract in one.contracts)
