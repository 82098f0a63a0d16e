"""The laws of the pool contract, one small scenario each."""

from __future__ import annotations

from kvview.errors import (
    BlockNotHeldError,
    NotAnOffloadKeyError,
    UnknownBlockError,
    ViewClosedError,
)
from kvview.keys import make_offload_key
from kvview.testing.checks import check
from kvview.testing.cost import cost_of_first
from kvview.testing.harness import Capability, Factory
from kvview.testing.pool.driver import PoolDriver, pool_check

CACHE = Capability.CACHE


class _Index:
    """Has ``__index__``, as a numpy scalar has, and is no int."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"type('Index', (), {{'__index__': lambda self: {self.value}}})()"


NOT_INTS = (True, 1.0, "1", None, b"1", _Index(1))


# --- POOL-1: what is touched is not allocated ---


@pool_check("POOL-1")
def check_pool_1_touched_free_block_leaves_the_queue(pool: PoolDriver) -> None:
    """A free block that was touched is not allocated until it was freed."""
    first, second = pool.blocks[0], pool.blocks[-1]
    pool.touch([first])
    pool.touch([second])
    pool.check_held(first, second)
    pool.free([first])
    pool.check_free(first)
    pool.free([second])
    pool.check_free(first, second)


@pool_check("POOL-1", CACHE)
def check_pool_1_touched_hashed_block_is_not_evicted(pool: PoolDriver) -> None:
    """What was seen in the walk and touched is still there after the pool ran full."""
    blocks = pool.hashed(3)
    pool.touch(blocks[:1])
    pool.check_held(blocks[0])
    pool.free(blocks[:1])
    pool.equal(pool.walk(), pool.expected_walk(), "a block that was held until now keeps its hash")


@pool_check("POOL-1")
def check_pool_1_block_in_use_stays_held_when_the_engine_releases_it(pool: PoolDriver) -> None:
    """A block that the engine used when it was touched does not become free without a free."""
    blocks = pool.allocate(2)
    pool.touch(blocks)
    pool.release(blocks)
    pool.check_held(*blocks)
    pool.free(blocks)
    pool.check_free(*blocks)


@pool_check("POOL-1")
def check_pool_1_freed_block_stays_with_the_engine(pool: PoolDriver) -> None:
    """The engine keeps a block that the view touched and freed in the meantime."""
    blocks = pool.allocate(2)
    pool.touch(blocks)
    pool.free(blocks)
    pool.check_held(*blocks)
    pool.release(blocks)
    pool.check_free(*blocks)


# --- POOL-2: N touches, N frees ---


@pool_check("POOL-2")
def check_pool_2_two_touches_need_two_frees(pool: PoolDriver) -> None:
    """Calls count: a block touched twice is still held after one free."""
    block = pool.blocks[2]
    pool.touch([block])
    pool.touch([block])
    pool.free([block])
    pool.check_held(block)
    pool.free([block])
    pool.check_free(block)


@pool_check("POOL-2")
def check_pool_2_occurrences_in_one_touch_count(pool: PoolDriver) -> None:
    """Occurrences in one call count one by one: three need three frees."""
    block, other = pool.blocks[2], pool.blocks[3]
    pool.touch([block, other, block, block])
    pool.free([block, other])
    pool.check_held(block)
    pool.free([block])
    pool.check_held(block)
    pool.free([block])
    pool.check_free(block, other)


@pool_check("POOL-2")
def check_pool_2_block_freed_twice_in_one_call_is_queued_once(pool: PoolDriver) -> None:
    """A block named twice in one free is in the free queue once (vLLM #42571)."""
    block, other = pool.blocks[1], pool.blocks[4]
    pool.touch([block, other, block])
    pool.free([block, other, block])
    pool.check_free(block, other)


@pool_check("POOL-2", CACHE)
def check_pool_2_hashed_block_freed_twice_in_one_call_is_queued_once(pool: PoolDriver) -> None:
    """As for an unhashed block, and a walk yields it once."""
    blocks = pool.hashed(3)
    pool.touch([blocks[1], blocks[1], blocks[0]])
    pool.free([blocks[1], blocks[1], blocks[0]])
    walked = pool.walk()
    pool.equal(len(walked), 3, "a walk yields each of three hashed blocks once")
    pool.check_free(*blocks)


# --- POOL-3: all or nothing ---


@pool_check("POOL-3")
def check_pool_3_failed_touch_takes_nothing(pool: PoolDriver) -> None:
    """A touch that names an unknown block has taken no reference on the others."""
    free, used = pool.blocks[1], pool.allocate(1)[0]
    pool.refuse(UnknownBlockError, "touch_blocks", [free, used, pool.num_blocks])
    pool.refuse(UnknownBlockError, "touch_blocks", [free, used, "1"])
    pool.release([used])
    pool.check_free(free, used)
    pool.refuse(BlockNotHeldError, "free_blocks", [free])


@pool_check("POOL-3")
def check_pool_3_failed_free_gives_nothing_back(pool: PoolDriver) -> None:
    """A free that raises, for whatever id and wherever it stands, has freed nothing."""
    first, second, other = pool.blocks[1:4]
    pool.touch([first, second, second])
    for error, wrong in (
        (UnknownBlockError, [first, second, pool.num_blocks]),
        (UnknownBlockError, [first, "1"]),
        (BlockNotHeldError, [first, second, other]),
        (BlockNotHeldError, [second, first, first]),
    ):
        pool.refuse(error, "free_blocks", wrong)
        pool.check_held(first, second)
    pool.free([second])
    pool.check_held(first, second)
    pool.free([first, second])
    pool.check_free(first, second)


# --- POOL-4: only what is a block, only what is held ---


@pool_check("POOL-4")
def check_pool_4_unknown_ids_are_refused(pool: PoolDriver) -> None:
    """Ids outside the pool raise UnknownBlockError, negative ones too."""
    for wrong in (pool.num_blocks, -1, -pool.num_blocks, 10**12):
        pool.refuse(UnknownBlockError, "touch_blocks", [wrong])
        pool.refuse(UnknownBlockError, "free_blocks", [wrong])
    pool.check_free()


@pool_check("POOL-4")
def check_pool_4_only_an_int_names_a_block(pool: PoolDriver) -> None:
    """Bool, float, str, None, bytes and numpy scalars raise UnknownBlockError."""
    for wrong in NOT_INTS:
        pool.refuse(UnknownBlockError, "touch_blocks", [wrong])
    pool.touch([1] if pool.null != 1 else [])
    for wrong in NOT_INTS:
        pool.refuse(UnknownBlockError, "free_blocks", [wrong])
    pool.check_free()


@pool_check("POOL-4")
def check_pool_4_engine_references_can_not_be_freed(pool: PoolDriver) -> None:
    """What only the engine holds can not be freed through the view."""
    blocks = pool.allocate(2)
    pool.refuse(BlockNotHeldError, "free_blocks", blocks[:1])
    pool.check_held(*blocks)
    pool.touch(blocks)
    pool.free(blocks)
    pool.refuse(BlockNotHeldError, "free_blocks", blocks[:1])
    pool.check_held(*blocks)


@pool_check("POOL-4")
def check_pool_4_more_frees_than_touches_are_refused(pool: PoolDriver) -> None:
    """Freeing a free block, or one time more than it was touched, raises."""
    block = pool.blocks[2]
    pool.refuse(BlockNotHeldError, "free_blocks", [block])
    pool.touch([block])
    pool.refuse(BlockNotHeldError, "free_blocks", [block, block])
    pool.free([block])
    pool.refuse(BlockNotHeldError, "free_blocks", [block])
    pool.check_free(block)


@pool_check("POOL-4", Capability.POOL_SIZE)
def check_pool_4_view_knows_the_size_of_the_pool(pool: PoolDriver) -> None:
    """``num_blocks`` and ``null_block_id`` are the pool's."""
    pool.equal(pool.read(pool.view, "num_blocks"), pool.num_blocks, "num_blocks counts all blocks")
    if pool.null is not None:
        pool.equal(pool.read(pool.view, "null_block_id"), pool.null, "null_block_id is the pool's")


@pool_check("POOL-4", Capability.IS_FREE, Capability.BLOCK_KEYS)
def check_pool_4_queries_refuse_unknown_ids(pool: PoolDriver) -> None:
    """``is_free``, ``block_keys`` and ``primary_keys`` raise UnknownBlockError as touch does."""
    known = pool.blocks[0]
    for wrong in (pool.num_blocks, -1, "1", True):
        pool.refused(UnknownBlockError, pool.view, "is_free", wrong)
        pool.refused(UnknownBlockError, pool.view, "block_keys", [known, wrong])
        pool.refused(UnknownBlockError, pool.view, "primary_keys", [known, wrong])


# --- POOL-5: the null block ---


@pool_check("POOL-5")
def check_pool_5_null_block_is_skipped_by_touch_and_free(pool: PoolDriver) -> None:
    """Null blocks among others, in any number, change nothing; they need no touch before."""
    if pool.null is None:
        return
    null, block = pool.null, pool.blocks[1]
    pool.free([null])
    pool.touch([null, block, null])
    pool.free([null, null, null, block])
    pool.check_free(block)
    pool.touch([null])
    pool.check_free()
    if pool.can(Capability.HOLDS):
        held = pool.call(pool.view, "held_blocks")
        pool.equal(dict(held), {}, "the null block is never held")


@pool_check("POOL-5", CACHE)
def check_pool_5_null_block_is_never_yielded(pool: PoolDriver) -> None:
    """Neither as it is nor after touch and free is the null block in a walk."""
    pool.hashed(2)
    if pool.null is not None:
        pool.touch([pool.null, pool.null])
        pool.free([pool.null])
    ids = [block for block, _ in pool.walk()]
    pool.true(pool.null not in ids, "a walk never yields the null block", ids, "without null")
    if pool.can(Capability.IS_FREE) and pool.null is not None:
        pool.equal(pool.call(pool.view, "is_free", pool.null), False, "the null block is not free")


# --- POOL-6: the walk ---


@pool_check("POOL-6", CACHE)
def check_pool_6_walk_yields_free_hashed_blocks_in_eviction_order(pool: PoolDriver) -> None:
    """Each free block with a hash once, in the order in which they are evicted."""
    pool.hashed(5, reverse=True)
    pool.equal(pool.walk(), pool.expected_walk(), "a walk yields free hashed blocks, each once")
    order = [block for block, _ in pool.walk()]
    allocated = pool.allocate(len(pool.free_blocks))
    evicted = [block for block in allocated if block in order]
    pool.equal(evicted, order, "a walk goes in the order in which blocks are evicted")


@pool_check("POOL-6", CACHE)
def check_pool_6_walk_leaves_out_what_is_in_use_or_unhashed(pool: PoolDriver) -> None:
    """Blocks held by the engine or the view, and blocks without a hash, are not yielded."""
    blocks = pool.hashed(4)
    pool.touch(blocks[1:2])
    used = pool.allocate(2)
    pool.cache(used)
    pool.release(used[:1])
    pool.equal(pool.walk(), pool.expected_walk(), "a walk yields free hashed blocks only")


@pool_check("POOL-6", CACHE)
def check_pool_6_allocated_block_lost_its_hash(pool: PoolDriver) -> None:
    """A block that was allocated again is not yielded under what it held before."""
    pool.hashed(4)
    pool.check_free()
    pool.equal(pool.walk(), [], "a walk yields nothing after everything was evicted")


@pool_check("POOL-6", CACHE, Capability.EVICT)
def check_pool_6_evicted_block_is_not_yielded(pool: PoolDriver) -> None:
    """A free block that the engine dropped from its cache holds nothing reusable."""
    blocks = pool.hashed(4)
    pool.evict(blocks[1:3])
    pool.equal(pool.walk(), pool.expected_walk(), "a walk leaves evicted blocks out")
    pool.check_free(*blocks)


@pool_check("POOL-6", CACHE, Capability.MANY_HASHES)
def check_pool_6_block_with_several_hashes_yields_each(pool: PoolDriver) -> None:
    """One item a hash, the primary first, one after the other."""
    blocks = pool.allocate(3)
    pool.cache(blocks)
    pool.cache(blocks[1:2], group_idx=1)
    pool.cache(blocks[1:2], group_idx=2)
    pool.release(blocks)
    pool.equal(pool.walk(), pool.expected_walk(), "a walk yields each hash of a block")


@pool_check("POOL-6", CACHE, Capability.SIZED)
def check_pool_6_taking_a_few_costs_the_same_in_a_large_pool(pool: PoolDriver) -> None:
    """Eight items of a walk over 4,096 blocks cost about what they cost over 256."""
    costs = []
    for num_blocks in (256, 4096):
        pool.resize(num_blocks)
        pool.hashed(len(pool.blocks))
        costs.append(cost_of_first(pool.start_walk, 8))
    small, large = costs
    limit = small.times(3)
    pool.true(
        large.lines <= limit.lines and large.num_bytes <= limit.num_bytes,
        "a walk is lazy: taking 8 items costs O(8), not O(pool)",
        large,
        f"at most {limit} (3 x that of 256 blocks, and a little)",
    )


@pool_check("POOL-6", CACHE, Capability.FREE_ORDER)
def check_pool_6_whole_queue_is_in_eviction_order(pool: PoolDriver) -> None:
    """``iter_free_block_ids`` gives all free blocks, in the order of allocation."""
    blocks = pool.hashed(4, reverse=True)
    pool.touch(blocks[:1])
    order = pool.listed(pool.view, "iter_free_block_ids")
    allocated = pool.allocate(len(pool.free_blocks))
    pool.equal(order, allocated, "iter_free_block_ids is the order of allocation")


@pool_check("POOL-6", CACHE)
def check_pool_6_queries_tell_what_the_walk_tells(pool: PoolDriver) -> None:
    """The optional queries that are declared agree with each other at every step."""
    pool.check_queries()
    blocks = pool.hashed(5, reverse=True)
    pool.check_queries()
    pool.touch([blocks[0], blocks[2], blocks[2]])
    pool.check_queries()
    pool.allocate(len(pool.free_blocks) - 1)
    pool.check_queries()
    pool.free([blocks[2], blocks[0]])
    pool.check_queries()
    pool.free([blocks[2]])
    pool.check_queries()


# --- POOL-8 to POOL-11 (POOL-7 is in walk_checks) ---


@pool_check("POOL-8", CACHE)
def check_pool_8_hash_carries_the_group_in_four_big_endian_bytes(pool: PoolDriver) -> None:
    """What is yielded is the block hash and the group index, packed as an OffloadKey."""
    blocks = pool.allocate(3)
    groups = (0, 3, 0x0102)
    for block, group_idx in zip(blocks, groups, strict=True):
        pool.call(pool.harness, "cache", [block], [b"hash"], group_idx)
        pool.hashes[block] = [make_offload_key(b"hash", group_idx)]
    pool.release(blocks)
    pool.equal(pool.walk(), pool.expected_walk(), "a hash is block hash + 4-byte group index")


@pool_check("POOL-8", CACHE, Capability.FIND_CACHED)
def check_pool_8_find_cached_block_takes_the_packed_hash(pool: PoolDriver) -> None:
    """A packed hash finds its block, free or in use, and nothing once it was evicted."""
    blocks = pool.allocate(2)
    keys = pool.cache(blocks, group_idx=1)
    pool.release(blocks[:1])
    for block, key in zip(blocks, keys, strict=True):
        found = pool.call(pool.view, "find_cached_block", key)
        pool.equal(found, block, "find_cached_block finds a cached block, free or in use")
    other = make_offload_key(keys[0][:-4], 0)
    found = pool.call(pool.view, "find_cached_block", other)
    pool.equal(found, None, "the same hash in another group is another key")
    pool.check_free()
    found = pool.call(pool.view, "find_cached_block", keys[0])
    pool.equal(found, None, "an evicted hash is not found")


@pool_check("POOL-8", CACHE, Capability.FIND_CACHED)
def check_pool_8_what_is_no_key_is_refused(pool: PoolDriver) -> None:
    """A block hash handed over for a key is no miss in silence (KEY-3)."""
    (block,) = pool.allocate(1)
    block_hash = bytes(range(32, 64))
    pool.call(pool.harness, "cache", [block], [block_hash], 0)
    pool.hashes[block] = [make_offload_key(block_hash, 0)]
    pool.release([block])
    for wrong in (block_hash, b"", bytes(4), block_hash + bytes([0, 1, 0, 0])):
        pool.refused(NotAnOffloadKeyError, pool.view, "find_cached_block", wrong)
    found = pool.call(pool.view, "find_cached_block", pool.hashes[block][0])
    pool.equal(found, block, "find_cached_block finds a cached block")


@pool_check("POOL-8", CACHE, Capability.LEASES, Capability.BLOCK_KEYS)
def check_pool_8_lease_refuses_what_is_no_key(pool: PoolDriver) -> None:
    """A block hash among ``expected_keys`` is no stale block, but a mistake (KEY-3)."""
    blocks = pool.hashed(2)
    key = pool.hashes[blocks[0]][0]
    for wrong in (bytes(range(32, 64)), b""):
        pool.refused(NotAnOffloadKeyError, pool.view, "lease", blocks, expected_keys=[key, wrong])
    pool.check_free(*blocks)


@pool_check("POOL-9", Capability.RESET)
def check_pool_9_reset_is_refused_while_the_view_holds(pool: PoolDriver) -> None:
    """The engine's cache reset returns False as long as one reference is held."""
    block = pool.blocks[1]
    pool.touch([block])
    pool.equal(pool.call(pool.harness, "reset"), False, "a reset is refused while a view holds")
    pool.free([block])
    pool.equal(pool.call(pool.harness, "reset"), True, "a reset is done when nothing is held")


@pool_check("POOL-9", Capability.RESET, CACHE)
def check_pool_9_refused_reset_keeps_the_cache(pool: PoolDriver) -> None:
    """A refused reset forgets no hash; a reset that was done forgets all, and no block."""
    blocks = pool.hashed(3)
    pool.touch(blocks[:1])
    pool.equal(pool.call(pool.harness, "reset"), False, "a reset is refused while a view holds")
    pool.free(blocks[:1])
    pool.equal(pool.walk(), pool.expected_walk(), "a refused reset forgets no hash")
    pool.equal(pool.call(pool.harness, "reset"), True, "a reset is done when nothing is held")
    pool.equal(pool.walk(), [], "a reset forgets every hash")
    pool.hashes.clear()
    pool.hashed_free.clear()
    pool.check_free(*blocks)


@pool_check("POOL-9", Capability.HOLDS)
def check_pool_9_held_blocks_tells_what_is_held(pool: PoolDriver) -> None:
    """``held_blocks`` counts references, and its result does not change afterwards."""
    first, second = pool.blocks[1:3]
    pool.touch([first, second, first])
    held = pool.call(pool.view, "held_blocks")
    pool.equal(dict(held), {first: 2, second: 1}, "held_blocks counts references")
    pool.free([first, first])
    pool.equal(dict(held), {first: 2, second: 1}, "held_blocks returns a snapshot")
    held = pool.call(pool.view, "held_blocks")
    pool.equal(dict(held), {second: 1}, "held_blocks forgets what was freed")


@pool_check("POOL-10", Capability.CLOSE)
def check_pool_10_closed_view_refuses_every_call(pool: PoolDriver) -> None:
    """After ``close`` every method, and every open walk, raises ViewClosedError."""
    block = pool.blocks[1]
    pool.touch([block])
    walk = pool.start_walk()
    if pool.can(CACHE):
        pool.hashed(2)
        pool.step(walk)
    pool.call(pool.harness, "close")
    for method, blocks in (
        ("touch_blocks", [block]),
        ("free_blocks", [block]),
        ("touch_blocks", []),
    ):
        pool.refuse(ViewClosedError, method, blocks)
    pool.refuses(ViewClosedError, "next(walk)", lambda: next(walk))
    code = "next(view.iter_free_block_ids_with_hash())"
    pool.refuses(ViewClosedError, code, lambda: next(pool.view.iter_free_block_ids_with_hash()))
    for capability, method, args in (
        (Capability.FREE_COUNT, "num_free_blocks", ()),
        (Capability.IS_FREE, "is_free", (block,)),
        (Capability.BLOCK_KEYS, "block_keys", ([block],)),
        (Capability.BLOCK_KEYS, "primary_keys", ([block],)),
        (Capability.FIND_CACHED, "find_cached_block", (b"hash\0\0\0\0",)),
        (Capability.RESUMABLE_WALK, "walk_free_blocks", ()),
        (Capability.REUSE_NOTICE, "free_blocks_with_notice", ([block], id)),
        (Capability.HOLDS, "held_blocks", ()),
    ):
        if pool.can(capability):
            pool.refused(ViewClosedError, pool.view, method, *args)


@pool_check("POOL-10", Capability.CLOSE)
def check_pool_10_close_reports_what_was_held(pool: PoolDriver) -> None:
    """``close`` tells every reference still held; a second one tells nothing."""
    first, second = pool.blocks[1:3]
    pool.touch([first, second, first])
    still_held = pool.call(pool.harness, "close")
    pool.equal(dict(still_held), {first: 2, second: 1}, "close reports what was held")
    again = pool.call(pool.harness, "close")
    pool.equal(dict(again), {}, "closing twice reports nothing")


@pool_check("POOL-11", CACHE)
def check_pool_11_hashed_blocks_are_evicted_in_the_order_given(pool: PoolDriver) -> None:
    """The order inside a call counts, and calls come after the calls before them."""
    pool.has_order = True
    blocks = pool.allocate(6)
    pool.cache(blocks)
    pool.touch(blocks)
    pool.release(blocks)
    pool.free([blocks[4], blocks[1], blocks[3]])
    pool.free([blocks[5], blocks[0], blocks[2]])
    order = [block for block, _ in pool.walk()]
    pool.equal(order, [blocks[i] for i in (4, 1, 3, 5, 0, 2)], "a walk is in the order given")
    pool.check_free(*blocks)


@pool_check("POOL-11", CACHE)
def check_pool_11_last_mention_of_a_block_counts(pool: PoolDriver) -> None:
    """A block that one call names several times is set free by its last mention."""
    pool.has_order = True
    one, two, three = blocks = pool.allocate(3)
    pool.cache(blocks)
    pool.touch([one, one, two, three])
    pool.release(blocks)
    pool.free([one, two, one, three])
    order = [block for block, _ in pool.walk()]
    pool.equal(order, [two, one, three], "a walk is in the order of the last mentions")
    pool.check_free(*blocks)


@pool_check("POOL-11", CACHE)
def check_pool_11_block_touched_and_freed_goes_to_the_end(pool: PoolDriver) -> None:
    """A hashed block that was held in between is evicted after those that were not."""
    pool.has_order = True
    blocks = pool.hashed(4)
    pool.touch(blocks[:2])
    pool.free([blocks[0], blocks[1]])
    order = [block for block, _ in pool.walk()]
    pool.equal(order, [*blocks[2:], *blocks[:2]], "what was freed last is evicted last")
    pool.check_free(*blocks)


@check("POOL-*", contract="pool")
def check_pool_any_sequence_of_calls(factory: Factory) -> None:
    """Random calls of engine and view, compared with an oracle after each."""
    from kvview.testing.pool.machine import run_pool_machine  # hypothesis is slow to import

    run_pool_machine(factory)
