"""A random engine over a block pool, real or reference, for clients of the pool.

Requests share prefixes, hit, compute, cache and grow, and free their blocks in reverse order, as
vLLM's KV-cache manager does. Two pools with the same order allocate the same block ids, so the
decisions of their clients can be compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Protocol

from kvview import BlockHash, make_offload_key
from kvview_reference.pool import BlockPool

BLOCK_SIZE = 16
FEWEST_BLOCKS, MOST_BLOCKS = 4, 40  # of a prompt


class EnginePool(Protocol):
    """The calls of the engine."""

    def num_free(self) -> int: ...
    def allocate(self, num_blocks: int) -> list[int]: ...
    def hit(self, block_ids: Sequence[int]) -> None: ...
    def free(self, block_ids: Sequence[int]) -> None: ...
    def cache(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None: ...
    def find(self, block_hash: bytes) -> int | None: ...


class ReferenceEnginePool:
    """The reference pool, as an engine uses it."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_free = self.pool.num_free_blocks
        self.allocate = self.pool.allocate_blocks
        self.hit = self.pool.touch_blocks
        self.free = self.pool.free_blocks

    def cache(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        self.pool.cache_blocks(block_ids, hashes, block_size=BLOCK_SIZE)

    def find(self, block_hash: bytes) -> int | None:
        return self.pool.find_cached_block(make_offload_key(block_hash, 0))


class VLLMEnginePool:
    """A real vLLM pool of 0.14 or later, as an engine uses it."""

    def __init__(self, num_blocks: int) -> None:
        block_pool: Any = import_module("vllm.v1.core.block_pool")
        self.pool: Any = block_pool.BlockPool(num_blocks, True, BLOCK_SIZE)
        self.num_free = self.pool.get_num_free_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(num_blocks)]

    def hit(self, block_ids: Sequence[int]) -> None:
        self.pool.touch([self.pool.blocks[block_id] for block_id in block_ids])

    def free(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in block_ids])

    def cache(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        request = SimpleNamespace(block_hashes=list(hashes))
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]
        self.pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, 0)

    def find(self, block_hash: bytes) -> int | None:
        found = self.pool.get_cached_block(block_hash, [0])
        return found[0].block_id if found else None


@dataclass
class Request:
    """A running request and its blocks."""

    request_id: str
    block_hashes: list[BlockHash]
    block_ids: list[int]
    num_hit: int
    steps_left: int
    num_offered: int = 0


@dataclass
class Step:
    """The requests that one step started, extended and finished."""

    arrived: list[Request] = field(default_factory=list)
    grown: dict[str, list[int]] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)


class Serving:
    """Random requests over one pool; the same seed makes the same ones.

    Args:
        pool: The engine's pool.
        seed: Of the requests.
    """

    def __init__(self, pool: EnginePool, seed: int) -> None:
        self.pool = pool
        self.random = random.Random(seed)
        self.running: dict[str, Request] = {}
        self.num_requests = 0
        # Prompts start with one of these documents, most often with the first ones.
        self.documents = [self.hashes(f"document {i}", MOST_BLOCKS) for i in range(40)]

    def hashes(self, name: str, num_blocks: int) -> list[BlockHash]:
        return [BlockHash(f"{name}:{i}".encode().rjust(32, b".")[-32:]) for i in range(num_blocks)]

    def step(self) -> Step:
        """End, extend and start some requests."""
        step = Step()
        for request in list(self.running.values()):
            request.steps_left -= 1
            if request.steps_left <= 0:
                self.finish(request)
                step.finished.append(request)
            elif self.random.random() < 0.1 and self.pool.num_free():
                step.grown[request.request_id] = self.grow(request)
        for _ in range(self.random.randint(1, 4)):
            request_or_none = self.start()
            if request_or_none is not None:
                step.arrived.append(request_or_none)
        return step

    def start(self) -> Request | None:
        rng = self.random
        document = self.documents[min(int(rng.expovariate(0.1)), len(self.documents) - 1)]
        shared = document[: rng.randint(0, MOST_BLOCKS)]
        name = f"request {self.num_requests}"
        self.num_requests += 1
        hashes = shared + self.hashes(name, rng.randint(FEWEST_BLOCKS, MOST_BLOCKS))
        steps_left = rng.randint(1, 12)
        hit: list[int] = []
        for block_hash in hashes[:-1]:
            found = self.pool.find(block_hash)
            if found is None:
                break
            hit.append(found)
        self.pool.hit(hit)
        if self.pool.num_free() < len(hashes) - len(hit):
            self.pool.free(hit[::-1])
            return None
        new = self.pool.allocate(len(hashes) - len(hit))
        self.pool.cache(new, hashes[len(hit) :])
        request = Request(name, hashes, hit + new, len(hit), steps_left)
        self.running[name] = request
        return request

    def grow(self, request: Request) -> list[int]:
        new = self.pool.allocate(1)
        hashes = self.hashes(f"{request.request_id} answer {len(request.block_ids)}", 1)
        self.pool.cache(new, hashes)
        request.block_ids += new
        request.block_hashes += hashes
        return new

    def finish(self, request: Request) -> None:
        self.pool.free(request.block_ids[::-1])
        del self.running[request.request_id]
