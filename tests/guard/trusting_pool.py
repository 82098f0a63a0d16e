"""A pool that checks nothing, and a clock that is set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvview import OffloadKey, make_offload_key


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
