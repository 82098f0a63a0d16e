"""The guard: its laws over a pool that checks, and over one that does not."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

import pytest

from kvview import (
    BlockNotHeldError,
    ConfigError,
    GPUBlockPoolView,
    GuardedView,
    KVViewError,
    OffloadKey,
    PinBudgetExceeded,
    StaleBlockError,
    SupportsBlockKeys,
    SupportsFreeCount,
    SupportsHolds,
    SupportsPoolSize,
    UnknownBlockError,
    ViewClosedError,
    WrongThreadError,
    make_offload_key,
)
from kvview_reference.pool import BlockPool


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class TrustingPool:
    """A pool that checks nothing, like an engine's: what reaches it has happened."""

    num_blocks = 10
    null_block_id = 0

    def __init__(self) -> None:
        self.ref_cnt = [0] * self.num_blocks
        self.queue = list(range(1, self.num_blocks))

    def touch_blocks(self, block_ids: Sequence[int], /) -> None:
        for block_id in block_ids:
            if self.ref_cnt[block_id] == 0:
                self.queue.remove(block_id)
            self.ref_cnt[block_id] += 1

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        # As vLLM up to 0.23 (vllm#42571): counts first, then queues each mention.
        for block_id in block_ids:
            self.ref_cnt[block_id] -= 1
        self.queue += [block_id for block_id in block_ids if self.ref_cnt[block_id] == 0]

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        return iter(
            [(0, key("null")), *((block_id, key(f"h{block_id}")) for block_id in self.queue)]
        )


def key(name: str) -> OffloadKey:
    return make_offload_key(name.encode(), 0)


@pytest.fixture
def pool() -> BlockPool:
    pool = BlockPool(10)
    block_ids = pool.allocate_blocks(9)
    pool.cache_blocks(block_ids, [f"h{i}".encode() for i in block_ids], block_size=16)
    pool.free_blocks(block_ids)
    return pool


def test_a_guard_is_a_view_and_has_the_queries_of_the_view_under_it(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    assert isinstance(guard, GPUBlockPoolView)
    assert isinstance(guard, SupportsBlockKeys)
    assert isinstance(guard, SupportsFreeCount)
    assert isinstance(guard, SupportsPoolSize)
    assert isinstance(guard, SupportsHolds)
    bare = GuardedView(TrustingPool())
    assert not isinstance(bare, SupportsBlockKeys)
    assert not isinstance(bare, SupportsFreeCount)
    assert guard.block_keys([3])[0] == (key("h3"),)


def test_pool_2_a_block_named_twice_is_queued_once() -> None:
    bare = TrustingPool()
    bare.touch_blocks([3, 3])
    bare.free_blocks([3, 3])
    assert bare.queue.count(3) == 2  # what happens without a guard

    trusting = TrustingPool()
    guard = GuardedView(trusting)
    guard.touch_blocks([3, 3, 4])
    guard.free_blocks([3, 4, 3])
    assert sorted(trusting.queue) == list(range(1, 10))


@pytest.mark.parametrize("wrong", [-1, 10, True, 1.0, "1", None])
def test_pool_3_4_a_wrong_id_changes_nothing(wrong: object) -> None:
    trusting = TrustingPool()
    guard = GuardedView(trusting)
    guard.touch_blocks([1, 2])
    for call in (guard.touch_blocks, guard.free_blocks, guard.lease):
        with pytest.raises(UnknownBlockError, match="POOL-4"):
            call([1, wrong])  # type: ignore[list-item]
    assert trusting.ref_cnt[:3] == [0, 1, 1]
    assert guard.held_blocks() == {1: 1, 2: 1}


def test_pool_4_freeing_more_than_held_changes_nothing() -> None:
    trusting = TrustingPool()
    guard = GuardedView(trusting)
    trusting.touch_blocks([5])  # the engine's own
    guard.touch_blocks([1])
    for block_ids in ([5], [1, 5], [1, 1]):
        with pytest.raises(BlockNotHeldError, match="POOL-4"):
            guard.free_blocks(block_ids)
    assert (trusting.ref_cnt[1], trusting.ref_cnt[5]) == (1, 1)
    assert guard.stats.refused == 3


def test_pool_5_the_null_block_is_skipped_and_never_yielded() -> None:
    trusting = TrustingPool()
    guard = GuardedView(trusting)
    guard.touch_blocks([0, 1, 0])
    assert trusting.ref_cnt[:2] == [0, 1]
    guard.free_blocks([0, 1, 0, 0])
    assert 0 not in [block_id for block_id, _ in guard.iter_free_block_ids_with_hash()]


def test_pool_10_after_close_everything_raises_and_what_was_held_is_told(pool: BlockPool) -> None:
    guard = GuardedView(pool.view(), owner="me")
    guard.touch_blocks([1, 1])
    lease = guard.lease([2], job="job 7")
    walk = guard.iter_free_block_ids_with_hash()
    next(walk)
    assert guard.close() == {1: 2, 2: 1}
    assert guard.close() == {}
    calls = (
        lambda: guard.touch_blocks([1]),
        lambda: guard.free_blocks([1]),
        lambda: guard.lease([1]),
        lambda: next(walk),
        guard.held_blocks,
        guard.release_expired,
        lambda: guard.num_free_blocks(),
    )
    for call in calls:
        with pytest.raises(ViewClosedError, match="POOL-10"):
            call()
    assert lease.release() is False
    assert {leak.job for leak in guard.leaks()} == {None, "job 7"}


def test_a_lease_ends_once_on_every_path(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    with guard.lease([1, 0, 2, 1]) as lease:
        assert guard.held_blocks() == {1: 2, 2: 1}
        assert lease.release() is True
    assert lease.release() is False
    with pytest.raises(ZeroDivisionError), guard.lease([3]):
        raise ZeroDivisionError
    assert guard.held_blocks() == {}
    assert pool.num_free_blocks() == 9


def test_leased_references_can_not_be_freed_as_plain_ones(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    lease = guard.lease([1])
    with pytest.raises(BlockNotHeldError, match="beside 1 leased"):
        guard.free_blocks([1])
    guard.touch_blocks([1])
    lease.release()
    guard.free_blocks([1])
    assert pool.num_free_blocks() == 9


def test_leases_expire_in_deadline_order_whatever_the_order_of_insertion(pool: BlockPool) -> None:
    clock = Clock()
    guard = GuardedView(pool.view(), clock=clock)
    long = guard.lease([1], job="long", ttl=100)
    guard.lease([2], job="short", ttl=1)
    renewed = guard.lease([3], job="renewed", ttl=2)
    guard.lease([4], job="for ever")
    renewed.renew(50)
    clock.time = 10
    assert [leak.job for leak in guard.release_expired()] == ["short"]
    assert guard.held_blocks() == {1: 1, 3: 1, 4: 1}
    clock.time = 60
    guard.touch_blocks([9])  # any call releases what has expired
    assert guard.held_blocks() == {1: 1, 4: 1, 9: 1}
    with pytest.raises(BlockNotHeldError, match="renewed"):
        renewed.renew(5)
    long.renew(1)
    clock.time = 70
    assert [leak.job for leak in guard.release_expired()] == ["long"]
    assert guard.stats.expired == 3


def test_a_lease_of_what_was_seen_refuses_a_reused_block(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    seen = dict(guard.iter_free_block_ids_with_hash())
    guard.lease([1, 2], expected_keys=[seen[1], seen[2]]).release()
    pool.free_blocks(pool.allocate_blocks(3))  # evicts the victims 1, 2 or 3
    free_before = pool.num_free_blocks()
    victims = [block_id for block_id in seen if not pool.block_keys([block_id])[0]]
    with pytest.raises(StaleBlockError, match="does not hold"):
        guard.lease(victims[:1], expected_keys=[seen[victims[0]]])
    assert pool.num_free_blocks() == free_before
    with pytest.raises(ConfigError, match="one key a block"):
        guard.lease([5], expected_keys=[])


def test_pin_budget(pool: BlockPool) -> None:
    guard = GuardedView(pool.view(), pin_budget=0.5)
    guard.touch_blocks([1, 2, 3])
    guard.touch_blocks([1, 2, 3, 4, 4])  # counts blocks, not references
    lease = guard.lease([5])
    for call in (guard.touch_blocks, guard.lease):
        with pytest.raises(PinBudgetExceeded, match="budget is 5 of 10"):
            call([5, 6])
    lease.release()
    guard.touch_blocks([6])
    assert guard.stats.peak_held == 9
    with pytest.raises(ConfigError, match="share"):
        GuardedView(pool.view(), pin_budget=1.5)


def test_another_thread_is_refused(pool: BlockPool) -> None:
    guard = GuardedView(pool.view())
    errors: list[BaseException] = []

    def call() -> None:
        try:
            guard.touch_blocks([1])
        except WrongThreadError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert guard.held_blocks() == {}


def test_leak_report_names_owner_job_age_and_line(pool: BlockPool) -> None:
    clock = Clock()
    guard = GuardedView(pool.view(), owner="my connector", clock=clock, trace=True)
    guard.touch_blocks([1, 2])
    clock.time = 5
    guard.lease([3], job=42)
    clock.time = 6
    plain, leased = guard.leaks()
    assert (plain.owner, plain.job, plain.block_ids, plain.age) == ("my connector", None, (1, 2), 6)
    assert (leased.job, leased.block_ids, leased.age) == (42, (3,), 1)
    assert "test_guard.py" in str(plain)
    assert "test_leak_report" in str(leased)
    assert guard.leaks(older_than=3) == [plain]


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_never_hurt_a_pool_that_does_not_check(seed: int) -> None:
    rng = random.Random(seed)
    trusting = TrustingPool()
    clock = Clock()
    guard = GuardedView(trusting, clock=clock, pin_budget=0.8)
    leases = []
    for _ in range(300):
        block_ids = [
            rng.randrange(-1, 12) if rng.random() < 0.1 else rng.randrange(10)
            for _ in range(rng.randrange(5))
        ]
        clock.time += rng.random()
        try:
            match rng.randrange(5):
                case 0:
                    guard.touch_blocks(block_ids)
                case 1 | 2:
                    guard.free_blocks(block_ids)
                case 3:
                    leases.append(guard.lease(block_ids, ttl=rng.choice([None, 0.5, 3])))
                case 4 if leases:
                    leases.pop(rng.randrange(len(leases))).release()
        except KVViewError:
            pass
        guard.release_expired()
        held = guard.held_blocks()
        assert trusting.ref_cnt == [held.get(block_id, 0) for block_id in range(10)]
        assert sorted(trusting.queue) == [b for b in range(1, 10) if b not in held]
