"""Any sequence of moves of engine, view and walks on the real block pool.

The oracle is plain dicts and sets. Walks stay open while everything else moves, which
the conformance kit's own search does not do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pools import NULL, Engine  # type: ignore[import-not-found]

from kvview import BlockNotHeldError, OffloadKey, UnknownBlockError
from kvview_vllm import pool, view

CHUNK_SIZES = (pool._FIRST_CHUNK, pool._LARGEST_CHUNK)


class Walked:
    """A walk of the view, and what the oracle knows of it."""

    def __init__(self, walk: Iterator[tuple[int, bytes]], order: list[tuple[int, bytes]]) -> None:
        self.walk = walk
        self.to_come = order
        self.gone: set[int] = set()
        self.yielded: set[tuple[int, bytes]] = set()
        self.engine_took = False
        """Whether the engine took free blocks since: then order is not promised."""


class PoolMachine(RuleBasedStateMachine):
    """The scheduler and two owners' views on one pool, against dicts and sets."""

    @initialize(
        num_blocks=st.integers(2, 40), share=st.sampled_from([0, 0.5, 1]), chunk=st.integers(1, 16)
    )
    def start(self, num_blocks: int, share: float, chunk: int) -> None:
        # Chunks smaller than the real ones, so that small pools fill several.
        pool._FIRST_CHUNK, pool._LARGEST_CHUNK = chunk, 2 * chunk
        self.engine = Engine(num_blocks)
        self.null_references = self.engine.pool.null_block.ref_cnt
        self.views = [view(self.engine.pool, owner=name) for name in ("first", "second")]
        self.held: list[Counter[int]] = [Counter(), Counter()]
        self.engine_held: Counter[int] = Counter()
        self.hashes: dict[int, list[bytes]] = {}
        self.walks: list[Walked] = []
        self.num_blocks = num_blocks
        self.num_hashes = 0
        keys = self.engine.cached_and_free(int(share * (num_blocks - 1)))
        self.hashes.update({block_id: [key] for block_id, key in keys.items()})

    def teardown(self) -> None:
        pool._FIRST_CHUNK, pool._LARGEST_CHUNK = CHUNK_SIZES

    def references(self, block_id: int) -> int:
        return self.engine_held[block_id] + self.held[0][block_id] + self.held[1][block_id]

    def is_free(self, block_id: int) -> bool:
        return block_id != NULL and not self.references(block_id)

    def pick(
        self, data: st.DataObject, block_ids: Sequence[int], min_size: int = 0, max_size: int = 40
    ) -> list[int]:
        if not block_ids:
            return []
        return data.draw(st.lists(st.sampled_from(block_ids), min_size=min_size, max_size=max_size))

    def leave(self, block_ids: Sequence[int], owner: int | None) -> None:
        """Free blocks leave the queue; the first view's walks are those watched."""
        for walked in self.walks:
            walked.gone.update(block_ids)
            walked.engine_took |= owner != 0 and any(map(self.is_free, block_ids))

    @rule(data=st.data())
    def engine_allocates(self, data: st.DataObject) -> None:
        free = [b for b in range(1, self.num_blocks) if self.is_free(b)]
        count = data.draw(st.integers(0, min(len(free), 8)))
        expected = self.engine.queue()[:count]
        self.leave(expected, None)
        assert self.engine.allocate(count) == expected
        for block_id in expected:
            self.engine_held[block_id] = 1
            self.hashes.pop(block_id, None)

    @rule(data=st.data())
    def engine_frees(self, data: st.DataObject) -> None:
        held = sorted(b for b, count in self.engine_held.items() if count)
        block_ids = list(dict.fromkeys(self.pick(data, held)))
        self.engine.free(block_ids)
        self.engine_held.subtract(block_ids)

    @rule(data=st.data())
    def engine_hits(self, data: st.DataObject) -> None:
        block_ids = list(dict.fromkeys(self.pick(data, sorted(self.hashes), max_size=6)))
        self.leave(block_ids, None)
        self.engine.hit(block_ids)
        self.engine_held.update(block_ids)

    @rule(data=st.data(), group=st.integers(0, 2))
    def engine_caches(self, data: st.DataObject, group: int) -> None:
        held = sorted(b for b, count in self.engine_held.items() if count)
        for block_id in dict.fromkeys(self.pick(data, held, max_size=8)):
            self.num_hashes += 1
            block_hash = b"%032d" % (self.num_hashes + self.num_blocks)
            if block_id not in self.hashes:
                self.hashes[block_id] = [self.engine.cache(block_id, block_hash, group)]
            elif self.engine.release.several_hashes:
                self.hashes[block_id].append(self.engine.cache_again(block_id, block_hash, group))

    @rule(data=st.data())
    def engine_evicts(self, data: st.DataObject) -> None:
        if hasattr(self.engine.pool, "evict_blocks"):  # from 0.13
            block_ids = set(self.pick(data, sorted(self.hashes), max_size=2))
            self.engine.pool.evict_blocks(block_ids)
            for block_id in block_ids:
                del self.hashes[block_id]

    @rule()
    def engine_resets(self) -> None:
        nothing_held = all(map(self.is_free, range(1, self.num_blocks)))
        assert self.engine.reset() == nothing_held
        if nothing_held:
            self.hashes.clear()

    @rule(data=st.data(), owner=st.integers(0, 1))
    def touch(self, data: st.DataObject, owner: int) -> None:
        block_ids = self.pick(data, range(self.num_blocks), max_size=12)
        self.leave(block_ids, owner)
        self.views[owner].touch_blocks(block_ids)
        self.held[owner].update(b for b in block_ids if b != NULL)

    @rule(data=st.data(), owner=st.integers(0, 1))
    def free(self, data: st.DataObject, owner: int) -> None:
        block_ids = data.draw(st.permutations([*self.held[owner].elements(), NULL]))
        block_ids = block_ids[: data.draw(st.integers(0, len(block_ids)))]
        last_references = Counter(block_ids)
        freed = [
            b
            for b in list(dict.fromkeys(reversed(block_ids)))[::-1]
            if b in self.hashes and self.references(b) == last_references[b]
        ]
        self.views[owner].free_blocks(block_ids)
        self.held[owner] -= Counter(b for b in block_ids if b != NULL)
        hashed = [b for b in self.engine.queue() if b in self.hashes]
        assert hashed[len(hashed) - len(freed) :] == freed  # POOL-11

    @rule(data=st.data(), owner=st.integers(0, 1))
    def free_too_much(self, data: st.DataObject, owner: int) -> None:
        block_ids = self.pick(data, range(1, self.num_blocks), min_size=1, max_size=6)
        if Counter(block_ids) <= self.held[owner]:
            block_ids += [block_ids[0]] * self.held[owner][block_ids[0]]
        with pytest.raises(BlockNotHeldError):
            self.views[owner].free_blocks(block_ids)

    @rule(data=st.data(), owner=st.integers(0, 1), bad=st.sampled_from([-1, 40, True, 1.0]))
    def unknown_id(self, data: st.DataObject, owner: int, bad: Any) -> None:
        block_ids = [*self.pick(data, range(self.num_blocks), max_size=5), bad]
        for call in (self.views[owner].touch_blocks, self.views[owner].free_blocks):
            with pytest.raises(UnknownBlockError):
                call(data.draw(st.permutations(block_ids)))

    @precondition(lambda self: len(self.walks) < 3)
    @rule()
    def walk(self) -> None:
        order = [(b, h) for b in self.engine.queue() for h in self.in_order(b)]
        walked = Walked(self.views[0].iter_free_block_ids_with_hash(), order)
        self.walks.append(walked)
        self.walk_on(walked)

    @precondition(lambda self: self.walks)
    @rule(data=st.data(), count=st.integers(1, 12))
    def walk_some(self, data: st.DataObject, count: int) -> None:
        walked = data.draw(st.sampled_from(self.walks))
        for _ in range(count):
            if walked in self.walks:
                self.walk_on(walked)

    def in_order(self, block_id: int) -> list[bytes]:
        first, *others = self.hashes.get(block_id) or [b""]
        return [first, *sorted(others)] if first else []

    def walk_on(self, walked: Walked) -> None:
        def is_due(item: tuple[int, bytes]) -> bool:
            block_id, block_hash = item
            return block_id not in walked.gone and block_hash in self.in_order(block_id)

        walked.to_come = [item for item in walked.to_come if is_due(item)]
        item = next(walked.walk, None)
        if item is None:
            assert not walked.to_come  # nothing that stayed was missed
            self.walks.remove(walked)
            return
        assert item not in walked.yielded
        assert self.is_free(item[0])
        assert item[1] in self.in_order(item[0])
        if not walked.engine_took:
            assert item == walked.to_come[0]
        walked.yielded.add(item)
        walked.to_come = [due for due in walked.to_come if due != item]

    @rule()
    def walk_ids(self) -> None:
        assert list(self.views[1].iter_free_block_ids()) == self.engine.queue()

    @invariant()
    def pool_is_as_the_oracle_says(self) -> None:
        if not hasattr(self, "engine"):
            return
        real, pool_view = self.engine.pool, self.views[0]
        free = [b for b in range(1, self.num_blocks) if self.is_free(b)]
        assert sorted(self.engine.queue()) == free
        assert pool_view.num_free_blocks() == len(free)
        assert real.null_block.ref_cnt == self.null_references
        for owner in (0, 1):
            assert self.views[owner].held_blocks() == +self.held[owner]
        for block_id in range(self.num_blocks):
            assert pool_view.is_free(block_id) == self.is_free(block_id)
            assert pool_view.block_keys([block_id])[0] == tuple(self.in_order(block_id))
            assert block_id == NULL or real.blocks[block_id].ref_cnt == self.references(block_id)
        for block_id, hashes in self.hashes.items():
            assert {pool_view.find_cached_block(OffloadKey(h)) for h in hashes} == {block_id}


PoolMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
test_any_sequence_of_moves = PoolMachine.TestCase
