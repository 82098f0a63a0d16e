"""The same operations on the reference pool and on vLLM 0.33's own ``BlockPool``.

Compared after every step: the free queue in order, reference counts, the hashes of
each block, which block a hash finds, events. Not compared, because it differs by
design:

- vLLM trusts its caller. Ids that name no block, frees beyond the references and
  registrations on a free block raise in the reference and corrupt vLLM's pool:
  only moves that an engine may make are drawn. ``test_pool.py`` has the others.
- vLLM keeps the further hashes of a block in a set. So they are compared without
  their order, and so are the removals that follow each other in the event stream.
- For a registration where every block is null vLLM reports an event without
  hashes; the reference reports none.
- A stored event also carries tokens and LoRA; the reference has neither.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvview import (
    BlockRemoved,
    BlockStored,
    GPUEvent,
    NoFreeBlocksError,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
)
from kvview_reference.pool import BlockPool

with warnings.catch_warnings():  # importing vLLM warns; those warnings are not ours
    warnings.simplefilter("ignore")
    try:
        block_pool: Any = import_module("vllm.v1.core.block_pool")
        kv_cache_utils: Any = import_module("vllm.v1.core.kv_cache_utils")
        request: Any = import_module("vllm.v1.request")
        sampling_params: Any = import_module("vllm.sampling_params")
        version: str = import_module("importlib.metadata").version("vllm")
    except ImportError as error:
        pytest.skip(
            f"vLLM cannot be imported ({error}); tests/vllm/sources.py fetches its sources",
            allow_module_level=True,
        )
if not version.startswith("0.33."):
    pytest.skip(f"compares with vLLM 0.33, found {version}", allow_module_level=True)

NUM_BLOCKS = 9
NAMES = [bytes([65 + i]) * 32 for i in range(5)]
GROUPS = [0, 1]
ID = st.integers(0, NUM_BLOCKS - 1)


def make_request(block_hashes: list[bytes]) -> Any:
    """A real request, with one token a block and the hashes wanted."""
    return request.Request(
        "request",
        [0] * len(block_hashes),
        sampling_params.SamplingParams(max_tokens=1),
        None,
        block_hasher=lambda _: list(block_hashes),
    )


def seen_in_vllm(events: list[Any]) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []
    for event in events:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            seen.append((kind,))
        elif kind == "BlockRemoved" or event.block_hashes:
            seen.append((kind, event.group_idx, *event.block_hashes))
    return seen


def seen_in_reference(events: list[GPUEvent]) -> list[tuple[Any, ...]]:
    return [
        (type(event).__name__, event.group_idx, *map(external, event.block_hashes))
        if isinstance(event, (BlockStored, BlockRemoved))
        else (type(event).__name__,)
        for event in events
    ]


def external(block_hash: bytes) -> Any:
    return kv_cache_utils.maybe_convert_block_hash(block_hash)


def with_removals_sorted(events: list[tuple[Any, ...]]) -> list[list[tuple[Any, ...]]]:
    return [
        sorted(run) if kind == "BlockRemoved" else list(run)
        for kind, run in groupby(events, key=lambda event: event[0])
    ]


class DifferentialMachine(RuleBasedStateMachine):
    """Drives both pools through one engine's life."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = BlockPool(NUM_BLOCKS, enable_events=True)
        self.vllms = block_pool.BlockPool(
            NUM_BLOCKS, enable_caching=True, hash_block_size=1, enable_kv_cache_events=True
        )
        self.held: list[int] = []

    def blocks(self, block_ids: list[int]) -> list[Any]:
        return [self.vllms.blocks[block_id] for block_id in block_ids]

    @initialize(num_hashed=ID, num_freed=ID, data=st.data())
    def begin_in_the_middle(self, num_hashed: int, num_freed: int, data: st.DataObject) -> None:
        self.allocate(NUM_BLOCKS - 1)
        self.cache(data, num_hashed, 0)
        self.held = data.draw(st.permutations(self.held))
        self.free_part(num_freed)

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > self.vllms.get_num_free_blocks():
            with pytest.raises(ValueError, match="free blocks"):
                self.vllms.get_new_blocks(num_blocks)
            with pytest.raises(NoFreeBlocksError):
                self.ours.allocate_blocks(num_blocks)
            return
        block_ids = [block.block_id for block in self.vllms.get_new_blocks(num_blocks)]
        assert self.ours.allocate_blocks(num_blocks) == block_ids
        self.held += block_ids

    @rule(block_ids=st.lists(ID, max_size=5))
    def touch(self, block_ids: list[int]) -> None:
        self.vllms.touch(self.blocks(block_ids))
        self.ours.touch_blocks(block_ids)
        self.held += [block_id for block_id in block_ids if block_id]

    @rule(data=st.data(), num_blocks=st.integers(1, 8))
    def free(self, data: st.DataObject, num_blocks: int) -> None:
        self.held = data.draw(st.permutations([*self.held, 0]))
        self.free_part(num_blocks)

    def free_part(self, num_blocks: int) -> None:
        block_ids, self.held = self.held[:num_blocks], self.held[num_blocks:]
        self.vllms.free_blocks(self.blocks(block_ids))
        self.ours.free_blocks(block_ids)
        self.held = [block_id for block_id in self.held if block_id]

    @rule(data=st.data(), num_blocks=st.integers(1, 4), group_idx=st.sampled_from(GROUPS))
    def cache(self, data: st.DataObject, num_blocks: int, group_idx: int) -> None:
        """As a group's manager does: full blocks that have no hash yet."""
        unhashed = [b for b in dict.fromkeys(self.held) if not self.ours.block_keys([b])[0]]
        block_ids = [0, *unhashed][:num_blocks]
        names = [data.draw(st.sampled_from(NAMES)) for _ in block_ids]
        self.vllms.cache_full_blocks(
            make_request(names), self.blocks(block_ids), 0, len(block_ids), 1, group_idx
        )
        self.ours.cache_blocks(block_ids, names, block_size=1, group_idx=group_idx)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from(NAMES), group_idx=st.sampled_from(GROUPS))
    def cache_again(self, data: st.DataObject, name: bytes, group_idx: int) -> None:
        """A further hash, as vLLM gives one to a block that also ends a shorter prefix."""
        block_id = data.draw(st.sampled_from(self.held))
        self.vllms.cache_partial_block(
            make_request([name]), self.vllms.blocks[block_id], 1, group_idx, 1
        )
        self.ours.cache_blocks([block_id], [name], block_size=1, group_idx=group_idx)

    @rule(block_ids=st.sets(ID, max_size=3))
    def evict(self, block_ids: set[int]) -> None:
        self.vllms.evict_blocks(block_ids)
        self.ours.evict_blocks(block_ids)

    @rule()
    def reset(self) -> None:
        assert self.ours.reset_prefix_cache() == self.vllms.reset_prefix_cache()

    @rule()
    def free_everything_and_reset(self) -> None:
        self.free_part(len(self.held))
        self.reset()
        assert not self.ours.find_cached_block(OffloadKey(NAMES[0] + bytes(4)))

    @invariant()
    def both_are_the_same(self) -> None:
        free = self.vllms.free_block_queue.get_all_free_blocks()
        assert list(self.ours.iter_free_block_ids()) == [block.block_id for block in free]
        assert self.ours.num_free_blocks() == self.vllms.get_num_free_blocks()
        for block in self.vllms.blocks:
            assert self.ours.ref_cnt(block.block_id) == block.ref_cnt
            primary, *others = self.ours.block_keys([block.block_id])[0] or (None,)
            assert primary == block.block_hash
            assert set(others) == self.vllms.cached_block_hashes_by_block.get(block.block_id, set())
        walk = list(self.ours.iter_free_block_ids_with_hash())
        assert [key for block_id, key in walk if key == self.ours.block_keys([block_id])[0][0]] == [
            block.block_hash for block in free if block.block_hash
        ]
        for name in NAMES:
            for group_idx in GROUPS:
                key = kv_cache_utils.make_block_hash_with_group_id(name, group_idx)
                assert get_offload_block_hash(key) == name
                assert get_offload_group_idx(key) == group_idx
                found = self.vllms.get_cached_block(name, [group_idx])
                assert self.ours.find_cached_block(key) == (found[0].block_id if found else None)
        assert with_removals_sorted(seen_in_reference(self.ours.take_events())) == (
            with_removals_sorted(seen_in_vllm(self.vllms.take_events()))
        )


TestDifferentialPool = DifferentialMachine.TestCase
TestDifferentialPool.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("num_blocks", [2, 3, 64])
def test_a_new_pool_without_caching_frees_in_the_same_order(num_blocks: int) -> None:
    ours = BlockPool(num_blocks, enable_caching=False)
    vllms = block_pool.BlockPool(num_blocks, enable_caching=False, hash_block_size=16)
    for how_many in (1, num_blocks // 2, num_blocks - 1):
        block_ids = ours.allocate_blocks(how_many)
        blocks = vllms.get_new_blocks(how_many)
        assert block_ids == [block.block_id for block in blocks]
        ours.free_blocks(block_ids[::2])
        vllms.free_blocks(blocks[::2])
        ours.free_blocks(block_ids[1::2])
        vllms.free_blocks(blocks[1::2])
    free = vllms.free_block_queue.get_all_free_blocks()
    assert list(ours.iter_free_block_ids()) == [block.block_id for block in free]
