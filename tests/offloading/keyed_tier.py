"""A tier that is addressed by key and is not host memory: a manager, and its worker.

Nothing names a page by number: the manager hands out keys, and the worker keeps bytes by key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

from kvview import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferResult,
    TransferSpec,
    TransferSpecError,
)
from kvview_reference.offloading import CPUOffloadingManager

if TYPE_CHECKING:
    from kvview import ComputeEvent, SupportsMedia, TransferWorker

DISK = "DISK"
Keys = Collection[OffloadKey]


@dataclass(frozen=True)
class KeySpec:
    """Keys of a tier that has no pages."""

    medium: ClassVar[str] = DISK

    keys: Sequence[bytes]


class KeyedManager(CPUOffloadingManager):
    """Names keys, in a medium of its own."""

    media = (DISK,)

    def prepare_load(self, keys: Keys, ctx: ReqContext | None = None, /) -> Any:
        keys = list(keys)
        super().prepare_load(keys, ctx)
        return KeySpec(keys)

    def prepare_store(
        self, keys: Keys, ctx: ReqContext | None = None, /
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, ctx)
        return output and replace(output, store_spec=KeySpec(output.keys_to_store))

    def take_events(self) -> list[OffloadingEvent]:
        return [replace(event, medium=DISK) for event in super().take_events()]


Move = tuple[int, int, bytes, int]
"""Group, GPU block, key, and which of the key's blocks it is."""


class KeyedWorker:
    """Keeps bytes by key; all jobs run on one thread, in order.

    Args:
        kv_caches: KV caches whose pages it moves.
        num_blocks: Capacity of the manager; a dict has no size.
        blocks_per_chunk: GPU blocks of one key.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches[Any], num_blocks: int = 0, *, blocks_per_chunk: int = 1
    ) -> None:
        self.fails: Callable[[int], bool] = lambda number: False  # of the next job, by block
        self.lane = ThreadPoolExecutor(1)
        self._stream = kv_caches.compute_stream
        self._k = blocks_per_chunk
        self.num_cpu_blocks, self.blocks_per_chunk = num_blocks, blocks_per_chunk
        self._groups = [
            [(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._named: set[bytes] = set()  # by stores, run or not
        self._held: dict[bytes, dict[int, list[Any]]] = {}
        self._jobs: dict[int, Future[None]] = {}
        self._finished: deque[TransferResult] = deque()
        self._is_shut = False

    def transfer_async(self, job_id: int, spec: TransferSpec, /) -> bool:
        if self._is_shut:
            return False
        if job_id in self._jobs:
            raise TransferSpecError(f"XFER-5: job {job_id} is in flight")
        src, dst = spec
        is_store = isinstance(src, GPULoadStoreSpec)
        gpu, tier = (src, dst) if is_store else (dst, src)
        # By its attribute: a file that is loaded twice has two classes.
        if not isinstance(gpu, GPULoadStoreSpec) or not hasattr(tier, "keys"):
            raise TransferSpecError(f"XFER-1: one side is GPU blocks, the other keys: {spec}")
        try:
            moves = list(self._pair(gpu, list(tier.keys)))
        except TypeError as error:
            raise TransferSpecError(f"XFER-1: blocks are ints: {spec}") from error
        # Groups may share a tensor, and a key has one page for all of them.
        pages = [(id(t), block) for group, block, *_ in moves for t, _ in self._groups[group]]
        written: Sequence[object] = tier.keys if is_store else pages
        if len(set(written)) < len(written):
            raise TransferSpecError(f"XFER-1: a destination is named twice: {spec}")
        if not is_store and not self._named.issuperset(tier.keys):
            raise TransferSpecError(f"XFER-1: a key was never stored: {tier.keys}")
        self._named.update(tier.keys)
        fails, self.fails = self.fails, lambda number: False
        try:
            mark = self._stream.record_event() if self._stream else None
        except RuntimeError as error:
            said = TransferResult(job_id, False, error=str(error))
            self._jobs[job_id] = self.lane.submit(self._finished.append, said)
            return True
        self._jobs[job_id] = self.lane.submit(self._run, job_id, is_store, moves, fails, mark)
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        while self._finished:
            results.append(self._finished.popleft())
            del self._jobs[results[-1].job_id]
        return results

    def wait(self, job_ids: Collection[int], /) -> None:
        for job_id in job_ids:
            if job_id in self._jobs:
                self._jobs[job_id].result()

    def shutdown(self) -> None:
        self._is_shut = True
        self.lane.shutdown()

    def _pair(self, gpu: GPULoadStoreSpec, keys: list[bytes]) -> Iterator[Move]:
        # As numpy has them they would wrap around.
        blocks, sizes, indices = (
            list(map(index, numbers))
            for numbers in (gpu.block_ids, gpu.group_sizes, gpu.block_indices)
        )
        if len(sizes) != len(self._groups):
            raise TransferSpecError(f"XFER-1: {len(self._groups)} groups, got {sizes}")
        for group, (size, first) in enumerate(zip(sizes, indices, strict=True)):
            skip = first % self._k
            num_keys = -(-(skip + size) // self._k) if size else 0
            mine, keys = keys[:num_keys], keys[num_keys:]
            num_blocks = min(len(tensor) for tensor, _ in self._groups[group])
            if len(mine) < num_keys:
                raise TransferSpecError(f"XFER-1: group {group} needs {num_keys} keys")
            for number in range(skip, skip + size):
                block = blocks.pop(0)
                if not 0 <= block < num_blocks:
                    raise TransferSpecError(f"XFER-1: GPU block {block} is not one of {num_blocks}")
                yield group, block, mine[number // self._k], number % self._k
        if keys:
            raise TransferSpecError(f"XFER-1: {len(keys)} keys too many")

    def _run(
        self,
        job_id: int,
        is_store: bool,
        moves: Sequence[Move],
        fails: Callable[[int], bool],
        mark: ComputeEvent | None,
    ) -> None:
        try:
            if mark is not None:
                mark.synchronize()
        except RuntimeError as error:
            self._finished.append(TransferResult(job_id, False, error=str(error)))
            return
        moved: list[bool] = []
        for number, (group, block, key, sub) in enumerate(moves):
            pages = [tensor[block, :width] for tensor, width in self._groups[group]]
            moved.append(not fails(number))
            if not moved[-1]:
                continue
            if is_store:
                self._held.setdefault(key, {})[sub] = [page.clone() for page in pages]
                continue
            for page, data in zip(pages, self._held[key][sub], strict=True):
                page.copy_(data)
        if all(moved):
            self._finished.append(TransferResult(job_id, True))
        else:
            said = moved if is_store else None
            self._finished.append(TransferResult(job_id, False, error="disk full", moved=said))


if TYPE_CHECKING:

    def _fits(worker: KeyedWorker, manager: KeyedManager) -> tuple[TransferWorker, SupportsMedia]:
        return worker, manager
