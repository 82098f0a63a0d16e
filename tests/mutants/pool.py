"""Wrong pools and views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvview import (
    BlockRemoved,
    GPUBlockPoolView,
    GPUEvent,
    GuardedView,
    NotAnOffloadKeyError,
    OffloadKey,
    StaleBlockError,
    make_offload_key,
)
from kvview.guard.lease import GuardedLease
from kvview.testing import Mutant
from kvview_reference.harness import GuardedReferencePool, ReferencePool
from kvview_reference.pool import BlockPool
from kvview_reference.pool_view import BlockPoolView

from .list_pool import ListPool
from .planting import planter

MUTANTS: list[Mutant] = []
planted = planter(MUTANTS)


# --- POOL-1 ---


@planted("POOL-1", "check_pool_1_touched_free_block_leaves_the_queue", "vllm#39702")
class LeavesWhatIsTouchedInTheQueue(ListPool):
    """A touched block can still be evicted before it is used."""

    def take(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.refs[block] += 1
            self.held[block] += 1


@planted(
    "POOL-1",
    "check_pool_1_block_in_use_stays_held_when_the_engine_releases_it",
    "vllm#52360",
)
class TakesNoReferenceOnBlocksInUse(ListPool):
    """A block in use when it is touched goes when its request is preempted."""

    def take(self, block_ids: Sequence[int]) -> None:
        super().take([block for block in block_ids if self.refs[block] == 0])
        self.held.update(block for block in block_ids if block not in self.held)

    def release(self, block_ids: Sequence[int], /) -> None:
        super().release([block for block in block_ids if self.refs[block] > 0])


@planted("POOL-1", "check_pool_1_freed_block_stays_with_the_engine")
class FreesForTheEngineToo(ListPool):
    """The last free of the view frees the block, whoever else holds it."""

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        super().free_blocks(block_ids)
        shared = [b for b in dict.fromkeys(block_ids) if self.refs[b] and b not in self.held]
        for block in shared:
            self.refs[block] = 0
        self.enqueue(shared)


@planted("POOL-1", "check_pool_1_touched_hashed_block_is_not_evicted", "vllm#42289")
class EvictsTheHashOfWhatIsTouched(ListPool):
    """A touch keeps the block and drops its hash: the hit is gone when it is used."""

    def take(self, block_ids: Sequence[int]) -> None:
        super().take(block_ids)
        self.evict(block_ids)


# --- POOL-2 ---


@planted("POOL-2", "check_pool_2_block_freed_twice_in_one_call_is_queued_once", "vllm#42571")
class QueuesABlockTwice(ListPool):
    """All counts go down first, then each mention is queued."""

    def release(self, block_ids: Sequence[int], /) -> None:
        for block in block_ids:
            self.refs[block] -= 1
        self.enqueue([block for block in block_ids if self.refs[block] == 0])


@planted("POOL-2", "check_pool_2_hashed_block_freed_twice_in_one_call_is_queued_once")
class QueuesAHashedBlockTwice(ListPool):
    """As above, for hashed blocks only: the walk yields one twice."""

    def enqueue(self, block_ids: Sequence[int]) -> None:
        super().enqueue(block_ids)
        last = block_ids[0] if block_ids and len(self.held) == 0 else None
        if last in self.hashes and last is not None:
            self.queue.append(last)


@planted("POOL-2", "check_pool_2_occurrences_in_one_touch_count")
class TouchesEachBlockOfACallOnce(ListPool):
    """Repeats inside one touch are dropped."""

    def take(self, block_ids: Sequence[int]) -> None:
        super().take(list(dict.fromkeys(block_ids)))


@planted("POOL-2", "check_pool_2_two_touches_need_two_frees")
class RemembersThatNotHowOften(ListPool):
    """What is held already is not counted again."""

    def take(self, block_ids: Sequence[int]) -> None:
        super().take([block for block in block_ids if block not in self.held])

    def check_held(self, block_ids: Sequence[int]) -> None:
        super().check_held(list(dict.fromkeys(block_ids)))


# --- POOL-3 ---


@planted("POOL-3", "check_pool_3_failed_touch_takes_nothing")
class TouchesUntilAnIdIsWrong(ListPool):
    """Ids are checked one by one, on the way."""

    def touch_blocks(self, block_ids: Sequence[int], /) -> None:
        for block in block_ids:
            super().touch_blocks([block])


@planted("POOL-3", "check_pool_3_failed_free_gives_nothing_back")
class FreesUntilAnIdIsWrong(ListPool):
    """Frees are checked one by one, on the way."""

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        for block in block_ids:
            super().free_blocks([block])


# --- POOL-4 ---


@planted("POOL-4", "check_pool_4_unknown_ids_are_refused")
class CountsNegativeIdsFromTheEnd(ListPool):
    """Block -1 is the last one, as for any list."""

    def check(self, block_ids: Sequence[int]) -> None:
        super().check([abs(block) if type(block) is int else block for block in block_ids])


@planted("POOL-4", "check_pool_4_only_an_int_names_a_block")
class TakesABoolForAnInt(ListPool):
    """True is block 1."""

    def check(self, block_ids: Sequence[int]) -> None:
        super().check([int(block) if isinstance(block, bool) else block for block in block_ids])


@planted("POOL-4", "check_pool_4_engine_references_can_not_be_freed", "ascend#15990")
class KeepsNoLedger(ListPool):
    """Whoever frees drops a reference, the engine's or another connector's."""

    def check_held(self, block_ids: Sequence[int]) -> None:
        if any(self.refs[block] == 0 for block in block_ids):
            super().check_held(block_ids)


@planted("POOL-4", "check_pool_4_more_frees_than_touches_are_refused")
class ForgivesAFreeTooMany(ListPool):
    """What is not held is dropped from the call without a word."""

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        self.check(block_ids)
        left = Counter(self.held)
        kept = []
        for block in block_ids:
            if left[block] > 0:
                kept.append(block)
                left[block] -= 1
        super().free_blocks(kept)


# --- POOL-5 ---


@planted("POOL-5", "check_pool_5_null_block_is_skipped_by_touch_and_free", "UCM#1053")
class QueuesTheNullBlock(ListPool):
    """Null blocks of a block table end in the free queue."""

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        super().free_blocks(block_ids)
        if self.null_block_id in block_ids and self.null_block_id not in self.queue:
            self.enqueue([0])


@planted("POOL-5", "check_pool_5_null_block_is_never_yielded")
class YieldsTheNullBlock(ListPool):
    """The placeholder is in the walk, under a hash of nothing."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        yield 0, make_offload_key(b"nothing", 0)
        yield from super().iter_free_block_ids_with_hash()


# --- POOL-6 ---


@planted("POOL-6", "check_pool_6_taking_a_few_costs_the_same_in_a_large_pool")
class CopiesTheQueueFirst(ReferencePool):
    """A walk begins with a copy of everything: the scheduler pays for all each time."""

    def make_view(self) -> GPUBlockPoolView:
        class View(BlockPoolView):
            def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
                yield from list(super().iter_free_block_ids_with_hash())

        return View(self.pool, "mutant")


@planted("POOL-6", "check_pool_6_block_with_several_hashes_yields_each")
class YieldsThePrimaryHashOnly(ListPool):
    """Other groups that share the block are never offloaded."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        seen = set()
        for block, block_hash in super().iter_free_block_ids_with_hash():
            if block not in seen:
                yield block, OffloadKey(block_hash)
            seen.add(block)


@planted("POOL-6", "check_pool_6_allocated_block_lost_its_hash")
class KeepsTheHashOfWhatIsAllocated(ListPool):
    """A block that was given to somebody else is yielded under its old hash."""

    def allocate(self, num_blocks: int, /) -> list[int]:
        before = {block: list(hashes) for block, hashes in self.hashes.items()}
        blocks = super().allocate(num_blocks)
        self.hashes = before
        return blocks


@planted("POOL-6", "check_pool_6_walk_yields_free_hashed_blocks_in_eviction_order")
class WalksByBlockId(ListPool):
    """The walk goes by id, not by what is evicted next."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        yield from sorted(super().iter_free_block_ids_with_hash())


@planted("POOL-6", "check_pool_6_walk_leaves_out_what_is_in_use_or_unhashed")
class YieldsWhatIsInUse(ListPool):
    """Everything that has a hash is yielded, in use or not."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        yield from super().iter_free_block_ids_with_hash()
        for block, hashes in self.hashes.items():
            if self.refs[block]:
                yield block, OffloadKey(hashes[0])


# --- POOL-7 ---


@planted("POOL-7", "check_pool_7_walk_goes_on_when_what_it_yields_is_touched", "vllm#41120")
class StopsWhenItsBlockIsTouched(ListPool):
    """The walk follows the links of a block that has left the list."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        for block, block_hash in super().iter_free_block_ids_with_hash():
            yield block, OffloadKey(block_hash)
            if self.refs[block]:
                return


@planted("POOL-7", "check_pool_7_block_touched_ahead_is_not_yielded")
class YieldsWhatWasTaken(ListPool):
    """The walk is a snapshot: it yields blocks that were taken since."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        for item in list(super().iter_free_block_ids_with_hash()):
            self.check_open()
            yield item
            self.check_open()


@planted("POOL-7", "check_pool_7_walk_of_the_whole_queue_goes_on")
class YieldsTheQueueOfThen(ListPool):
    """The walk of the whole queue is a snapshot, that of the hashed blocks is none."""

    def iter_free_block_ids(self) -> Iterator[int]:
        self.check_open()
        yield from list(self.queue)


@planted("POOL-7", "check_pool_7_block_freed_while_walking_is_not_part_of_the_walk")
class WalksTheQueueAsItGrows(ListPool):
    """What is freed while walking is walked too: touch and free, and it never ends."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        self.check_open()
        done: Counter[int] = Counter()
        while True:
            ahead = [b for b in self.queue if b in self.hashes and done[b] <= self.joined[b]]
            if not ahead:
                return
            done[ahead[0]] = self.time + 1
            yield ahead[0], OffloadKey(self.hashes[ahead[0]][0])
            self.check_open()


@planted("POOL-7", "check_pool_7_block_evicted_ahead_is_not_yielded", "vllm#57505")
class YieldsAHashThatHasMoved(ListPool):
    """The hash is read when the walk begins; by then it may be another block's."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        self.check_open()
        began = self.time
        known = [(block, h) for block in self.queue for h in self.hashes.get(block, ())]
        for block, block_hash in known:
            if self.refs[block] == 0 and self.joined[block] <= began:
                yield block, OffloadKey(block_hash)
                self.check_open()


# --- POOL-8 to POOL-11 ---


@planted("POOL-8", "check_pool_8_hash_carries_the_group_in_four_big_endian_bytes")
class PacksTheGroupLittleEndian(ListPool):
    """The group index is packed in the machine's byte order."""

    def pack(self, block_hash: bytes, group_idx: int) -> bytes:
        return block_hash + group_idx.to_bytes(4, "little")


@planted("POOL-8", "check_pool_8_hash_carries_the_group_in_four_big_endian_bytes")
class LeavesTheGroupOut(ListPool):
    """Two groups with the same hash are one key."""

    def pack(self, block_hash: bytes, group_idx: int) -> bytes:
        return block_hash


@planted("POOL-8", "check_pool_8_what_is_no_key_is_refused")
class MissesWhatIsNoKey(ListPool):
    """A block hash handed over for a key is a miss, in silence, for ever."""

    def check_key(self, key: bytes) -> None:
        pass


@planted("POOL-6", "check_pool_6_queries_tell_what_the_walk_tells")
class LeavesOutWhatHasNoKey(ListPool):
    """A block without a key makes the list shorter: all others answer for a neighbour."""

    def primary_keys(self, block_ids: Sequence[int], /) -> list[OffloadKey | None]:
        return [key for key in super().primary_keys(block_ids) if key is not None]


@planted("POOL-8", "check_pool_8_lease_refuses_what_is_no_key")
class CallsWhatIsNoKeyReused(GuardedReferencePool):
    """A lease that expects a block hash says that the block was reused."""

    def make_view(self) -> GPUBlockPoolView:
        class View(GuardedView):
            def lease(self, block_ids: Sequence[int], **options: Any) -> GuardedLease:
                try:
                    return super().lease(block_ids, **options)
                except NotAnOffloadKeyError as error:
                    raise StaleBlockError(str(error)) from error

        return View(self.pool.view("mutant"))


@planted("POOL-9", "check_pool_9_reset_is_refused_while_the_view_holds")
class ResetsUnderTheView(ListPool):
    """A reset asks for the engine's references only."""

    def reset(self) -> bool:
        own = Counter({block: refs for block, refs in enumerate(self.refs) if refs})
        if own - self.held:
            return False
        self.hashes.clear()
        return True


@planted("POOL-9", "check_pool_9_refused_reset_keeps_the_cache")
class ForgetsBeforeItRefuses(ListPool):
    """A reset that is refused has cleared the cache already."""

    def reset(self) -> bool:
        self.hashes.clear()
        return super().reset()


@planted("POOL-9", "check_pool_9_held_blocks_tells_what_is_held")
class HandsOutItsLedger(ListPool):
    """``held_blocks`` is the ledger itself, not a snapshot."""

    def held_blocks(self) -> Mapping[int, int]:
        return self.held

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        ledger = self.held
        super().free_blocks(block_ids)
        ledger.clear()
        ledger.update(self.held)
        self.held = ledger


@planted("POOL-10", "check_pool_10_closed_view_refuses_every_call")
class WorksAfterItsEngine(ListPool):
    """A closed view goes on with the pool of an engine that is gone."""

    def check_open(self) -> None:
        pass


@planted("POOL-10", "check_pool_10_closed_view_refuses_every_call")
class WalksOnAfterClose(ListPool):
    """Calls are refused, and a walk that was begun goes on."""

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        self.check_open()
        return iter(list(super().iter_free_block_ids_with_hash()))


@planted("POOL-10", "check_pool_10_close_reports_what_was_held")
class ClosesWithoutAReport(ListPool):
    """What is still held at the end leaks without a word."""

    def close(self) -> Mapping[int, int]:
        super().close()
        return {}


@planted("POOL-11", "check_pool_11_hashed_blocks_are_evicted_in_the_order_given")
class EvictsInReverse(ListPool):
    """The last block of a call is evicted first."""

    def enqueue(self, block_ids: Sequence[int]) -> None:
        super().enqueue(block_ids[::-1])


@planted("POOL-11", "check_pool_11_last_mention_of_a_block_counts")
class QueuesByTheFirstMention(ListPool):
    """A block that a call names twice is evicted as if it had been named once, at first."""

    def in_order(self, block_ids: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(block_ids))


@planted("POOL-11", "check_pool_11_block_touched_and_freed_goes_to_the_end")
class PutsBackWhereItWas(ListPool):
    """A hashed block that was held comes back at the head of the queue."""

    def enqueue(self, block_ids: Sequence[int]) -> None:
        super().enqueue(block_ids)
        if any(block in self.hashes for block in self.queue[: -len(block_ids) or None]):
            back = [block for block in block_ids if block in self.hashes]
            self.queue = back + [block for block in self.queue if block not in back]


# --- POOL-12 ---


@planted("POOL-12", "check_pool_12_what_is_given_back_is_evicted_next")
class GivesBackAsItFrees(ListPool):
    """What was held to be read comes back as the most recent block (LazyOffload's churn)."""

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        self.free_blocks(block_ids)


@planted("POOL-12", "check_pool_12_what_is_given_back_is_evicted_next")
class ForgetsWhatIsGivenBack(ListPool):
    """A block gets to the head by losing its hash: its KV is lost while it is free."""

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        super().give_back_blocks(block_ids)
        self.evict([block for block in block_ids if block in self.queue])


@planted("POOL-12", "check_pool_12_order_given_counts_hashed_or_not")
class PutsUnhashedFirst(ListPool):
    """Unhashed blocks of a call overtake the hashed ones."""

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        super().give_back_blocks(sorted(block_ids, key=lambda block: block in self.hashes))


@planted("POOL-12", "check_pool_12_order_given_counts_hashed_or_not")
class PrependsOneByOne(ListPool):
    """Each block goes to the head by itself: the last of a call is evicted first."""

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        super().give_back_blocks(block_ids[::-1])


@planted("POOL-12", "check_pool_12_later_calls_come_first")
class QueuesBehindWhatWasGivenBack(ListPool):
    """Blocks join the end of those given back before, not the head."""

    given: tuple[int, ...] = ()

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        super().give_back_blocks(block_ids)
        self.given = (*[b for b in self.given if b not in block_ids], *block_ids)
        head = [block for block in self.given if block in self.queue]
        self.queue = head + [block for block in self.queue if block not in head]


@planted("POOL-12", "check_pool_12_last_mention_of_a_block_counts")
class GivesBackByTheFirstMention(ListPool):
    """A block that a call names twice stands where it was named first."""

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        self.free_blocks(block_ids)
        freed = [block for block in dict.fromkeys(block_ids) if block in self.queue]
        self.queue = freed + [block for block in self.queue if block not in freed]


@planted("POOL-12", "check_pool_12_block_in_use_stays_in_use")
class QueuesWhatIsInUse(ListPool):
    """Every block named is put at the head, in use or not."""

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        self.free_blocks(block_ids)
        real = self.in_order(self.real(block_ids))
        self.queue = real + [block for block in self.queue if block not in real]


@planted("POOL-12", "check_pool_12_refusals_change_nothing")
class GivesBackUntilAnIdIsWrong(ListPool):
    """Blocks are given back one by one, on the way."""

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        for block in block_ids[::-1]:
            super().give_back_blocks([block])


# --- several views, and what the engine tells ---


@planted("POOL-4", "check_pool_4_views_of_one_pool_are_told_apart")
class HasOneAccountForAll(ReferencePool):
    """One connector gives back what another one holds."""

    def another_view(self) -> GPUBlockPoolView:
        return self.view


@planted("EVENT-2", "check_event_2_prefix_cache_tells_what_it_holds")
class ForgetsToTellEvictions(ReferencePool):
    """A router sends requests to a replica that has evicted their prefix."""

    def take_events(self) -> list[GPUEvent]:
        return [event for event in super().take_events() if not isinstance(event, BlockRemoved)]


@planted("POOL-3", "check_pool_3_refused_move_of_the_engine_changes_nothing")
class SharesUntilAnIdIsWrong(ReferencePool):
    """A request that hits blocks takes them one by one; those before a wrong one stay taken."""

    def share(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.pool.touch_blocks([block_id])


@planted("POOL-11", "check_pool_11_touches_again_and_again_keep_the_queue")
class TidiesUpInTheWrongOrder(ReferencePool):
    """Once much was touched without an allocation, the queue is put together anew, by ids."""

    def __init__(self, num_blocks: int = 24) -> None:
        super().__init__(num_blocks)
        self.pool = _TidyPool(num_blocks)
        self.view = self.make_view()


class _TidyPool(BlockPool):
    num_touched = 0

    def touch_blocks(self, block_ids: Iterable[int]) -> None:
        blocks = list(block_ids)
        super().touch_blocks(blocks)
        self.num_touched += len(blocks)
        if self.num_touched > 4 * self.num_blocks > 400:
            self.num_touched = 0
            self.move_to_head(sorted(filter(self.primary_key, self.free_block_ids())))

    def primary_key(self, block_id: int) -> object:
        return self.primary_keys([block_id])[0]
