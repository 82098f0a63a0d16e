"""The plainest right pool: a list for the free queue, and a view in the same class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from kvview import (
    BlockNotHeldError,
    FreeBlockWalk,
    GPUBlockPoolView,
    OffloadKey,
    UnknownBlockError,
    ViewClosedError,
    make_offload_key,
    require_offload_key,
)
from kvview.testing import Capability


class ListPool:
    """Harness and view in one; every method is a place where a mutant goes wrong."""

    capabilities = frozenset(
        {
            Capability.CACHE,
            Capability.MANY_HASHES,
            Capability.EVICT,
            Capability.RESET,
            Capability.CLOSE,
            Capability.HOLDS,
            Capability.FREE_COUNT,
            Capability.FREE_ORDER,
            Capability.GIVE_BACK,
            Capability.BLOCK_KEYS,
            Capability.FIND_CACHED,
            Capability.RESUMABLE_WALK,
            Capability.REUSE_NOTICE,
        }
    )
    null_block_id: int | None = 0

    def __init__(self, num_blocks: int = 24) -> None:
        self.num_blocks = num_blocks
        self.queue = list(range(1, self.num_blocks))
        self.refs = [0] * self.num_blocks
        self.hashes: dict[int, list[bytes]] = {}
        self.joined = [0] * self.num_blocks
        self.place = [0] * self.num_blocks  # as joined, and below zero what joined at the head
        self.time = 0
        self.held: Counter[int] = Counter()
        self.is_closed = False
        self.watched: dict[int, Callable[[int], None]] = {}

    def sized(self, num_blocks: int, /) -> ListPool:
        return type(self)(num_blocks)

    @property
    def view(self) -> GPUBlockPoolView:
        return self

    # --- the engine ---

    def allocate(self, num_blocks: int, /) -> list[int]:
        blocks = self.queue[:num_blocks]
        del self.queue[:num_blocks]
        for block in blocks:
            self.refs[block] = 1
            self.hashes.pop(block, None)
        self.tell(blocks)
        return blocks

    def tell(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if block in self.watched:
                with suppress(Exception):
                    self.watched.pop(block)(block)

    def release(self, block_ids: Sequence[int], /) -> None:
        for block in block_ids:
            self.refs[block] -= 1
        self.enqueue([block for block in self.in_order(block_ids) if self.refs[block] == 0])

    def in_order(self, block_ids: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(reversed(block_ids)))[::-1]

    def enqueue(self, block_ids: Sequence[int]) -> None:
        self.time += 1
        for block in block_ids:
            self.joined[block] = self.place[block] = self.time
        self.queue[:0] = [block for block in block_ids if block not in self.hashes]
        self.queue += [block for block in block_ids if block in self.hashes]

    def cache(
        self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group_idx: int
    ) -> None:
        for block, block_hash in zip(block_ids, block_hashes, strict=True):
            self.hashes.setdefault(block, []).append(self.pack(block_hash, group_idx))

    def pack(self, block_hash: bytes, group_idx: int) -> bytes:
        return make_offload_key(block_hash, group_idx)

    def evict(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.hashes.pop(block, None)

    def reset(self) -> bool:
        if any(self.refs):
            return False
        self.hashes.clear()
        self.tell(list(self.watched))
        return True

    def close(self) -> Mapping[int, int]:
        held, self.held = dict(self.held), Counter()
        self.is_closed = True
        self.watched.clear()
        return held

    # --- the view ---

    def check_open(self) -> None:
        if self.is_closed:
            raise ViewClosedError("POOL-10: closed")

    def check(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if type(block) is not int or not 0 <= block < self.num_blocks:
                raise UnknownBlockError(f"POOL-4: {block!r}")

    def real(self, block_ids: Sequence[int]) -> list[int]:
        return [block for block in block_ids if block != self.null_block_id]

    def touch_blocks(self, block_ids: Sequence[int], /) -> None:
        self.check_open()
        self.check(block_ids)
        self.take(self.real(block_ids))

    def take(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if self.refs[block] == 0:
                self.queue.remove(block)
            self.refs[block] += 1
            self.held[block] += 1

    def free_blocks(self, block_ids: Sequence[int], /) -> None:
        self.check_open()
        self.check(block_ids)
        block_ids = self.real(block_ids)
        self.check_held(block_ids)
        self.held = +(self.held - Counter(block_ids))
        self.release(block_ids)

    def give_back_blocks(self, block_ids: Sequence[int], /) -> None:
        self.free_blocks(block_ids)
        freed = [block for block in self.in_order(block_ids) if block in self.queue]
        self.queue = freed + [block for block in self.queue if block not in freed]
        for block in freed:
            self.place[block] = -self.time

    def check_held(self, block_ids: Sequence[int]) -> None:
        if Counter(block_ids) - self.held:
            raise BlockNotHeldError("POOL-4: not held")

    def iter_free_block_ids_with_hash(self) -> Iterator[tuple[int, OffloadKey]]:
        self.check_open()
        began = self.time
        for block in list(self.queue):
            for block_hash in list(self.hashes.get(block, ())):
                is_there = block_hash in self.hashes.get(block, ())
                if self.refs[block] == 0 and is_there and self.joined[block] <= began:
                    yield block, OffloadKey(block_hash)
                    self.check_open()

    def walk_free_blocks(self) -> FreeBlockWalk:
        self.check_open()
        return ListWalk(self)

    def free_blocks_with_notice(
        self, block_ids: Sequence[int], on_reuse: Callable[[int], None], /
    ) -> None:
        self.free_blocks(block_ids)
        self.watched.update((block, on_reuse) for block in self.real(block_ids))

    def block_keys(self, block_ids: Sequence[int], /) -> list[tuple[OffloadKey, ...]]:
        self.check_open()
        self.check(block_ids)
        return [tuple(map(OffloadKey, self.hashes.get(block, ()))) for block in block_ids]

    def primary_keys(self, block_ids: Sequence[int], /) -> list[OffloadKey | None]:
        return [next(iter(keys), None) for keys in self.block_keys(block_ids)]

    def find_cached_block(self, key: OffloadKey, /) -> int | None:
        self.check_open()
        self.check_key(key)
        return next((block for block, keys in self.hashes.items() if key in keys), None)

    def check_key(self, key: bytes) -> None:
        require_offload_key(key)

    def iter_free_block_ids(self) -> Iterator[int]:
        self.check_open()
        began = self.time
        for block in list(self.queue):
            if self.refs[block] == 0 and self.joined[block] <= began:
                yield block
                self.check_open()

    def num_free_blocks(self) -> int:
        self.check_open()
        return len(self.queue)

    def held_blocks(self) -> Mapping[int, int]:
        self.check_open()
        return dict(self.held)


class ListWalk:
    """A walk that goes on: the queue, less what was passed and has stayed since."""

    def __init__(self, pool: ListPool) -> None:
        self.pool = pool
        self.is_closed = False
        self.passed: dict[int, int] = {}  # by block: the place that it had

    def check_open(self) -> None:
        self.pool.check_open()
        if self.is_closed:
            raise ViewClosedError("POOL-13: closed")

    def ahead(self) -> list[int]:
        pool = self.pool
        passed = max(self.passed.values(), default=-pool.time - 1)
        return [b for b in pool.queue if b in pool.hashes and self.is_ahead(b, passed)]

    def is_ahead(self, block: int, passed: int) -> bool:
        # A call to free is one place: what joined with it is told apart by name.
        place = self.pool.place[block]
        return place > passed or (place == passed and self.passed.get(block) != place)

    def take(self, max_blocks: int, /) -> list[tuple[int, OffloadKey]]:
        self.check_open()
        taken = self.ahead()[:max_blocks]
        self.passed.update((block, self.pool.place[block]) for block in taken)
        return [(block, OffloadKey(key)) for block in taken for key in self.pool.hashes[block]]

    def restart(self) -> None:
        self.check_open()
        self.passed.clear()

    def close(self) -> None:
        self.is_closed = True
