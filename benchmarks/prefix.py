"""The prefix search compared with vLLM's: ms for one long prompt, by mix of KV-cache groups.

    python benchmarks/prefix.py [--vllm-sources DIR] [--rounds N]

Both coordinators have the same blocks cached and search the same prompt, in turns, in one
process. Hashes are digests, and the pools were used before, so that block ids are scattered.
Prompts are registered in the order of their blocks; in the case ``shuffled`` in random order, which
no engine does, so that every lookup misses the processor's caches. The speedup is vLLM's time over
kvview's.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from typing import Any, NamedTuple

from harness import (  # type: ignore[import-not-found, unused-ignore]
    PEER,
    Figures,
    beside_vllm,
    take_turns,
)

from kvview import (
    BlockHash,
    CacheGeometry,
    CacheGroup,
    ConnectorConfig,
    EngineFacts,
    FullAttention,
    Mamba,
    RequestInfo,
    SlidingWindow,
)
from kvview.keys import make_offload_keys
from kvview_reference.geometry import KVCacheCoordinator
from kvview_reference.pool import BlockPool
from kvview_reference.store_connector import StoreConnector
from kvview_reference.store_connector.planning.store_scheduler import StoreScheduler

BLOCK_SIZE = 16
SIZES = (1_000, 8_000, 64_000)
HASHES = [sha256(number.to_bytes(4, "big")).digest() for number in range(max(SIZES))]

IsCached = Callable[[int, int, int], bool]
"""Whether block i of n is cached in group g."""


class Case(NamedTuple):
    """A mix of groups, and the cached part of a prompt."""

    groups: tuple[CacheGroup, ...]
    is_cached: IsCached
    target: float
    is_shuffled: bool = False


FULL, MAMBA = FullAttention(BLOCK_SIZE), Mamba(BLOCK_SIZE)
NARROW, WIDE = SlidingWindow(BLOCK_SIZE, 1024), SlidingWindow(BLOCK_SIZE, 4096)
CASES = {
    "full": Case((FULL,), lambda g, i, n: True, 3.0),
    "full shuffled": Case((FULL,), lambda g, i, n: True, 3.0, is_shuffled=True),
    "full nothing cached": Case((FULL,), lambda g, i, n: False, 1.0),
    "full half cached": Case((FULL,), lambda g, i, n: 2 * i < n, 3.0),
    "full window": Case((FULL, WIDE), lambda g, i, n: True, 1.5),
    "full window half": Case((FULL, WIDE), lambda g, i, n: g == 0 or 2 * i < n, 1.5),
    "full two windows": Case((FULL, NARROW, WIDE), lambda g, i, n: True, 1.5),
    "full mamba every 64": Case((FULL, MAMBA), lambda g, i, n: g == 0 or i % 64 == 63, 1.5),
    "full mamba first": Case((FULL, MAMBA), lambda g, i, n: g == 0 or i == 0, 1.5),
    "full nothing else": Case((FULL, MAMBA), lambda g, i, n: g == 0, 1.5),
    "window holes": Case((WIDE,), lambda g, i, n: i % 64 != 63, 1.5),
    "window first": Case((WIDE,), lambda g, i, n: i < 16, 1.5),
    "mamba first": Case((MAMBA,), lambda g, i, n: i == 0, 1.5),
    "interleaved mamba": Case((FULL, MAMBA, MAMBA), lambda g, i, n: g == 0 or i % 2 == g % 2, 0.67),
}


def shuffled(num_blocks: int) -> list[int]:
    return random.Random(num_blocks).sample(range(num_blocks), num_blocks)


def cached_blocks(case: Case, group: int, n: int) -> list[int]:
    """Number the cached blocks of a group, in the order of registration."""
    numbers = shuffled(n) if case.is_shuffled else range(n)
    return [i for i in numbers if case.is_cached(group, i, n)]


def our_search(case: Case, n: int) -> Callable[[], int]:
    pool = BlockPool(n * len(case.groups) + 10)
    coordinator = KVCacheCoordinator(
        case.groups, pool, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
    )
    used = pool.allocate_blocks(pool.num_free_blocks())
    pool.free_blocks([used[i] for i in shuffled(len(used))])
    for group in range(len(case.groups)):
        numbers = cached_blocks(case, group, n)
        block_ids = pool.allocate_blocks(len(numbers))
        hashes = [HASHES[i] for i in numbers]
        pool.cache_blocks(block_ids, hashes, block_size=BLOCK_SIZE, group_idx=group)
        pool.free_blocks(block_ids)
    prompt = HASHES[:n]
    return lambda: coordinator.find_longest_cache_hit(prompt, n * BLOCK_SIZE)[1]


def vllm_search(case: Case, n: int) -> Callable[[], int]:
    interface: Any = import_module("vllm.v1.kv_cache_interface")
    utils: Any = import_module("vllm.v1.core.kv_cache_utils")
    make = import_module("vllm.v1.core.kv_cache_coordinator").get_kv_cache_coordinator
    half: Any = import_module("torch").float16

    def spec(index: int, group: CacheGroup) -> Any:
        layer = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": half}
        if isinstance(group, FullAttention):
            return interface.FullAttentionSpec(**layer)
        if isinstance(group, SlidingWindow):
            return interface.SlidingWindowSpec(**layer, sliding_window=group.sliding_window)
        shapes = ((8 * (index + 1),),)  # equal specs are looked up as one
        return interface.MambaSpec(
            block_size=BLOCK_SIZE, shapes=shapes, dtypes=(half,), mamba_cache_mode="align"
        )

    groups = [
        interface.KVCacheGroupSpec([f"layer{i}"], spec(i, g)) for i, g in enumerate(case.groups)
    ]
    facts = {
        "kv_cache_config": interface.KVCacheConfig(n * len(groups) + 10, [], groups),
        "max_model_len": (n + 1) * BLOCK_SIZE,
        "use_eagle": False,
        "enable_caching": True,
        "enable_kv_cache_events": False,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "hash_block_size": BLOCK_SIZE,
        "scheduler_block_size": BLOCK_SIZE,
        "max_in_flight_tokens": 8192,
    }
    coordinator = make(
        **{k: v for k, v in facts.items() if k in inspect.signature(make).parameters}
    )
    pool = coordinator.block_pool
    used = pool.get_new_blocks(pool.get_num_free_blocks())
    pool.free_blocks([used[i] for i in shuffled(len(used))])
    for group in range(len(groups)):
        numbers = cached_blocks(case, group, n)
        blocks = pool.get_new_blocks(len(numbers))
        for i, block in zip(numbers, blocks, strict=True):
            key = utils.make_block_hash_with_group_id(HASHES[i], group)
            pool._insert_block_hash(key, block, BLOCK_SIZE)
        pool.free_blocks(blocks)
    prompt = HASHES[:n]
    return lambda: coordinator.find_longest_cache_hit(prompt, n * BLOCK_SIZE)[1]


def our_lookups(n: int) -> Callable[[], int]:
    """Make the search of a connector in a CPU tier that holds the prompt."""
    config = ConnectorConfig(CacheGeometry.single(BLOCK_SIZE), {"cpu_blocks": n})
    scheduler = StoreConnector(config).make_scheduler()
    assert isinstance(scheduler, StoreScheduler)
    scheduler.on_engine_ready(EngineFacts(n, (1,), n))
    memory = scheduler._index.memory
    assert memory is not None
    hashes = [BlockHash(block_hash) for block_hash in HASHES[:n]]
    keys = make_offload_keys(hashes, 0)
    memory.prepare_store(keys)
    memory.complete_store(keys)
    request = RequestInfo("r", n * BLOCK_SIZE + 1, hashes)
    return lambda: scheduler.match_prefix(request, 0) or 0


def vllm_lookups(n: int) -> Callable[[], int]:
    """Make that of vLLM's offloading connector, with the keys made before."""
    base: Any = import_module("vllm.v1.kv_offload.base")
    manager: Any = import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager(n)
    keys, context = make_offload_keys(HASHES[:n], 0), base.ReqContext("r")
    manager.prepare_store(keys, context)
    manager.complete_store(keys, context)
    package = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
    scheduler = import_module(f"{package}.scheduler").OffloadingConnectorScheduler
    search = scheduler._maximal_prefix_lookup
    half = object.__new__(scheduler)  # with the attributes that the search reads
    half.manager = manager
    no_events = base.OffloadingKVEventsConfig(False, False)
    half._events_tracker = import_module(f"{package}.events").OffloadingEventsTracker(no_events)
    return lambda: search(half, keys, context, None, None, 0) * BLOCK_SIZE


def measure(rounds: int) -> None:
    figures = Figures("ms", 1e3, PEER, "blocks hit")
    for name, case in CASES.items():
        for n in SIZES:
            ours, theirs = our_search(case, n), vllm_search(case, n)
            hit = ours()
            assert hit == theirs(), (name, n, hit, theirs())
            times = take_turns(
                [ours, theirs],
                repeats=max(1, 8_000 // n),
                rounds=rounds if name != "interleaved mamba" else min(rounds, 3),
            )
            figures.ratio(f"{name} {n}", times, case.target, hit // BLOCK_SIZE)
    for n in SIZES:
        ours, theirs = our_lookups(n), vllm_lookups(n)
        assert ours() == theirs() == n * BLOCK_SIZE
        times = take_turns([ours, theirs], repeats=max(1, 8_000 // n), rounds=rounds)
        figures.ratio(f"lookups in a manager {n}", times, 1.5, n)
    figures.show()


main = beside_vllm(measure, 5)

if __name__ == "__main__":
    main()
