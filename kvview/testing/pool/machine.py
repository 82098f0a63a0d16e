"""Random moves of an engine and of a view, against the oracle of the driver."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvview.errors import BlockNotHeldError, UnknownBlockError
from kvview.testing.harness import Capability, Factory
from kvview.testing.machines import run_machine
from kvview.testing.pool.driver import PoolDriver

_MAX_HASHES = 3

picks = st.lists(st.integers(0, 15), min_size=1, max_size=6)
"""Chosen blocks; taken modulo however many there are to choose from."""


def pool_machine(factory: Factory) -> type[RuleBasedStateMachine]:
    """The machine over the pools that ``factory`` makes."""
    capabilities = frozenset(factory().capabilities)

    def has(*wanted: Capability) -> bool:
        return capabilities.issuperset(wanted)

    class PoolMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.pool = PoolDriver(factory, "POOL-*", has_order=True)
            self.walks: list[Any] = []

        # Half of the rules are off in a run (swarm testing), and without this most runs
        # would never see a free block with a hash.
        @initialize(num_used=st.integers(0, 4), num_free=st.integers(0, 8))
        def begin(self, num_used: int, num_free: int) -> None:
            pool = self.pool
            blocks = pool.allocate(num_used + num_free)
            if has(Capability.CACHE) and blocks:
                pool.cache(blocks)
            if num_free:
                pool.release(blocks[num_used:])

        @rule(num_blocks=st.integers(1, 8))
        def allocate(self, num_blocks: int) -> None:
            pool = self.pool
            pool.allocate(min(num_blocks, len(pool.free_blocks)))

        @precondition(lambda self: self.pool.engine)
        @rule(picks=picks)
        def release(self, picks: list[int]) -> None:
            used = sorted(self.pool.engine)
            self.pool.release(list(dict.fromkeys(used[i % len(used)] for i in picks)))

        @precondition(lambda self: has(Capability.CACHE) and self.pool.engine)
        @rule(picks=picks, group_idx=st.integers(0, 2))
        def cache(self, picks: list[int], group_idx: int) -> None:
            used = sorted(self.pool.engine)
            most = _MAX_HASHES if has(Capability.MANY_HASHES) else 1
            chosen = dict.fromkeys(used[i % len(used)] for i in picks)
            blocks = [b for b in chosen if len(self.pool.hashes.get(b, ())) < most]
            if blocks:
                self.pool.cache(blocks, group_idx)

        @precondition(lambda self: has(Capability.CACHE) and self.pool.engine and self.pool.hashes)
        @rule(picks=picks)
        def cache_what_another_block_holds(self, picks: list[int]) -> None:
            pool = self.pool
            used = sorted(pool.engine)
            keys = sorted({key for keys in pool.hashes.values() for key in keys})
            most = _MAX_HASHES if has(Capability.MANY_HASHES) else 1
            for block, i in {used[i % len(used)]: i for i in picks}.items():
                key, held = keys[i % len(keys)], pool.hashes.get(block, [])
                # A block's further keys are sorted by some engines.
                in_order = len(held) < 2 or key > held[-1]
                if key not in held and len(held) < most and in_order:
                    pool.cache_as([block], [key])

        @rule(picks=picks)
        def touch(self, picks: list[int]) -> None:
            blocks = range(self.pool.num_blocks)
            self.pool.touch([blocks[i % len(blocks)] for i in picks])

        @precondition(lambda self: has(Capability.CACHE) and self.pool.hashed_free)
        @rule(picks=picks)
        def touch_what_may_be_evicted(self, picks: list[int]) -> None:
            blocks = list(self.pool.hashed_free)
            self.pool.touch([blocks[i % len(blocks)] for i in picks])

        @precondition(lambda self: self.pool.held)
        @rule(picks=picks)
        def free(self, picks: list[int]) -> None:
            held = sorted(self.pool.held.elements())
            chosen = [held[i] for i in dict.fromkeys(i % len(held) for i in picks)]
            self.pool.free(chosen)

        @precondition(lambda self: has(Capability.GIVE_BACK) and self.pool.held)
        @rule(picks=picks)
        def give_back(self, picks: list[int]) -> None:
            held = sorted(self.pool.held.elements())
            self.pool.give_back([held[i] for i in dict.fromkeys(i % len(held) for i in picks)])

        @precondition(lambda self: has(Capability.REUSE_NOTICE) and self.pool.held)
        @rule(picks=picks)
        def free_with_notice(self, picks: list[int]) -> None:
            held = sorted(self.pool.held.elements())
            chosen = [held[i] for i in dict.fromkeys(i % len(held) for i in picks)]
            self.pool.free_with_notice(chosen)

        @precondition(lambda self: has(Capability.RESUMABLE_WALK, Capability.CACHE))
        @rule(picks=picks, is_touched=st.booleans())
        def walk_on(self, picks: list[int], is_touched: bool) -> None:
            pool = self.pool
            if len(self.walks) < 2:
                self.walks.append(pool.open_walk())
            taken = pool.take(self.walks[picks[0] % len(self.walks)], picks[-1])
            if is_touched and taken:
                pool.touch([taken[i % len(taken)] for i in picks])

        @precondition(lambda self: self.walks)
        @rule(is_closed=st.booleans())
        def restart_walk(self, is_closed: bool) -> None:
            if is_closed:
                self.pool.call(self.walks.pop(0), "close")
            else:
                self.pool.restart(self.walks[0])

        @rule(picks=picks)
        def free_too_much(self, picks: list[int]) -> None:
            pool = self.pool
            blocks = [pool.blocks[i % len(pool.blocks)] for i in picks]
            if Counter(blocks) - pool.held:
                pool.refuse(BlockNotHeldError, "free_blocks", blocks)

        @rule(picks=picks, wrong=st.sampled_from([-1, 10**9, True, "1", 1.0]))
        def name_what_is_no_block(self, picks: list[int], wrong: object) -> None:
            pool = self.pool
            blocks = [pool.blocks[i % len(pool.blocks)] for i in picks]
            pool.refuse(UnknownBlockError, "touch_blocks", [*blocks, wrong])
            pool.refuse(UnknownBlockError, "free_blocks", [wrong])

        @precondition(lambda self: has(Capability.EVICT))
        @rule(picks=picks)
        def evict(self, picks: list[int]) -> None:
            pool = self.pool
            pool.evict(list(dict.fromkeys(pool.blocks[i % len(pool.blocks)] for i in picks)))

        @precondition(lambda self: has(Capability.RESET))
        @rule(is_rare=st.sampled_from([False, False, False, True]))
        def reset(self, is_rare: bool) -> None:
            pool = self.pool
            if not is_rare:
                return
            is_idle = not pool.held and not pool.engine
            done = pool.reset()
            pool.equal(done, is_idle, "a reset is done exactly when nothing is held", "POOL-9")

        @precondition(lambda self: has(Capability.CACHE) and self.pool.hashed_free)
        @rule(picks=picks)
        def touch_while_walking(self, picks: list[int]) -> None:
            pool = self.pool
            walk = pool.start_walk()
            for expected in list(pool.expected_walk())[: max(picks)]:
                if expected[0] in pool.held or expected[0] in pool.engine:
                    continue
                item = pool.step(walk)
                pool.equal(item, expected, "a walk goes on while blocks are touched", "POOL-7")
                if item[0] % 2 == picks[0] % 2:
                    pool.touch([item[0]])

        @rule()
        def run_full(self) -> None:
            self.pool.check_free()

        @invariant()
        def queries_agree(self) -> None:
            self.pool.check_queries()

    return PoolMachine


def run_pool_machine(factory: Factory) -> None:
    """Search for calls that break a law of the pool.

    Raises:
        LawBroken: With the shortest script found.
    """
    run_machine(lambda: pool_machine(factory))
