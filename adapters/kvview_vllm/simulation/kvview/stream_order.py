"""The simulated compute of a step: the KV bytes that it writes and reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvview import CacheGeometry, OffloadKey, make_offload_key
from kvview.testing.connector.judge.kv_bytes import KVBytes
from kvview_vllm.pool import NULL_BLOCK_ID
from kvview_vllm.simulation.scheduler.requests import Chunk, PlannedRequest

_Blocks = tuple[list[int], list[OffloadKey]]


@dataclass(eq=False)
class Forward:
    """The effect of one step on the KV cache, for the block tables at the step's launch."""

    begun: list[int] = field(default_factory=list)  # blocks that it does not fill with known tokens
    writes: list[_Blocks] = field(default_factory=list)
    reads: list[_Blocks] = field(default_factory=list)
    # Blocks that other owners overwrite after its end.
    overwritten: list[int] = field(default_factory=list)
    wrong: list[tuple[set[int], int]] = field(default_factory=list)

    @property
    def written(self) -> set[int]:
        """Blocks that become full in the step."""
        return {block_id for blocks, _ in self.writes for block_id in blocks}

    def mismatches(self, invalid: Collection[int]) -> int:
        """Count the wrong blocks that the step read, except those that the scheduler excludes."""
        return sum(count for blocks, count in self.wrong if not blocks & set(invalid))


class Compute:
    """The KV of every block of a GPU, in the order of the compute stream.

    1. A block that a step computes receives its key when the step is launched, in stream order.
    2. The bytes of the block exist once the step has run, immediately or when its output is
       processed.

    Args:
        geometry: Groups and block sizes.
        num_blocks: Blocks of the pool.
        page_bytes: Bytes of one block in one layer.
        num_layers: Number of tensors.
    """

    def __init__(
        self, geometry: CacheGeometry, num_blocks: int, page_bytes: int, num_layers: int
    ) -> None:
        self._geometry = geometry
        self.kv_bytes = KVBytes(num_blocks, [[page_bytes] * num_layers] * len(geometry.groups))
        self.pages = [cache.tensor for cache in self.kv_bytes.caches.tensors]
        self.computed: dict[int, OffloadKey] = {}  # of blocks, whether vLLM caches them or not
        self._launched: list[Forward] = []  # and not run

    def key(self, planned: PlannedRequest, group: int, number: int) -> OffloadKey:
        """Return the key of a block of a request."""
        position = self._geometry.block_hash_index(group, number)
        return make_offload_key(planned.block_hash(position), group)

    def plan(
        self,
        chunks: Mapping[str, Chunk],
        tables: Mapping[str, Sequence[Sequence[int]]],
    ) -> Forward:
        """Plan a step.

        Args:
            chunks: Tokens that the step computes, by request.
            tables: Blocks of the requests, by group.
        """
        forward = Forward()
        for request_id, chunk in chunks.items():
            blocks = tables[request_id]
            for group, table in zip(self._geometry.groups, blocks, strict=True):
                size = group.block_size
                begun = table[chunk.kept // size : -(-chunk.end // size)]
                forward.begun += [block for block in begun if block != NULL_BLOCK_ID]
            forward.writes += self._full_blocks(chunk.planned, blocks, chunk.start, chunk.kept)
            forward.reads += self._full_blocks(chunk.planned, blocks, None, chunk.start)
        return forward

    def launch(self, forward: Forward) -> None:
        """Give the blocks of a step their keys."""
        self._launched.append(forward)
        for block_id in forward.begun:
            self.computed.pop(block_id, None)
        for blocks, keys in forward.writes:
            self.computed.update(zip(blocks, keys, strict=True))

    def run(self, forward: Forward) -> None:
        """Write the bytes of a step, and compare the bytes that it reads."""
        assert forward is self._launched.pop(0), "steps run in the order of their launch"
        self.kv_bytes.poison(forward.begun)
        for blocks, keys in forward.writes:
            self.kv_bytes.write(blocks, keys)
        for blocks, keys in forward.reads:
            if count := self.kv_bytes.count_mismatches(blocks, keys):
                forward.wrong.append((set(blocks), count))
        self.kv_bytes.poison(forward.overwritten)

    def overwrite(self, block_ids: Iterable[int]) -> None:
        """Overwrite blocks after the last launched step, as another owner would."""
        overwritten = list(block_ids)
        for block_id in overwritten:
            self.computed.pop(block_id, None)
        if self._launched:
            self._launched[-1].overwritten += overwritten
        else:
            self.kv_bytes.poison(overwritten)

    def _full_blocks(
        self,
        planned: PlannedRequest,
        tables: Sequence[Sequence[int]],
        start: int | None,
        end: int,
    ) -> Iterator[_Blocks]:
        """Yield the blocks that become full between two token counts, with their keys, by group.

        If ``start`` is None, yield the blocks that a token at the end reads.
        """
        for index, (group, table) in enumerate(zip(self._geometry.groups, tables, strict=True)):
            first = group.num_skipped_tokens(end) if start is None else start
            numbers = [
                number
                for number in range(first // group.block_size, end // group.block_size)
                if table[number] != NULL_BLOCK_ID
            ]
            if numbers:
                yield [table[n] for n in numbers], [self.key(planned, index, n) for n in numbers]
