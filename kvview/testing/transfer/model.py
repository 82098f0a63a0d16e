"""The transfer contract as an executable model: bytes, jobs in order, and the laws.

The model calls no worker. The model runs every job when the job is submitted, page by page, on
plain bytes. So ``gpu`` and ``tier`` have the bytes that are required once every job has ended. If
several jobs access a page, the order of submission determines its bytes (XFER-3).

The worker chooses the moment of a copy. So a GPU page that a job in flight writes may have any
bytes (:class:`Pending`). While copies or compute are delayed, such a page has its old bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvview.testing.conformance import Promises
from kvview.transfer import TransferResult

_PIECE = 1 << 14

Row = tuple[int, int]
"""A GPU page with its padding, given as a tensor and a block."""
Slot = tuple[int, int]
"""The place of one GPU block in the tier, given as a page and a position in the page."""
KERNELS = -(10**9)
"""Pseudo job id of engine kernels that write a page."""


def first_difference(one: memoryview, other: bytearray) -> int:
    """Return the first index at which two buffers of equal length differ."""
    pieces = range(0, len(other), _PIECE)
    start = next(at for at in pieces if other[at : at + _PIECE] != one[at : at + _PIECE])
    return next(at for at in range(start, start + _PIECE) if one[at] != other[at])


@dataclass(frozen=True)
class TensorLayout:
    """The byte positions of the pages of one KV-cache tensor.

    Args:
        storage: Index of the storage that contains the tensor.
        start: First byte of block 0 in the storage.
        stride: Bytes from one block to the next.
        page_bytes: Number of bytes of one row, including padding.
        num_blocks: Blocks of the tensor.
    """

    storage: int
    start: int
    stride: int
    page_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class Part:
    """The blocks of one KV-cache group in one job.

    Args:
        blocks: GPU blocks.
        chunks: Pages of the tier.
        index: Number of the first GPU block in its request.
    """

    blocks: Sequence[int]
    chunks: Sequence[int]
    index: int = 0


Parts = Mapping[int, Part]
"""The part of each group that a job moves."""


@dataclass
class JobInFlight:
    """A job in flight.

    Args:
        is_store: Whether the job moves bytes to the tier.
        num_bytes: Number of bytes that the job moves.
        slots: The slots of the tier, one for each GPU block of the job, in order.
        touched: The GPU pages and the pages of the tier that the job reads or writes.
        stored: For each GPU block of a store, its group and its bytes.
        is_held: Whether the job must not end yet, because the job moves bytes and was submitted
            while copies or compute were delayed.
    """

    is_store: bool
    num_bytes: int
    slots: Sequence[Slot]
    touched: set[Row | int]
    stored: Sequence[tuple[int, list[bytes]]]
    is_held: bool


@dataclass
class Pending:
    """A GPU page that jobs in flight write.

    Args:
        before: The row before the first job.
        law: The law that a wrong byte breaks.
        is_held: Whether the page must still have its old bytes.
        width: Number of bytes of the row that the jobs may write.
        writers: Ids of the jobs.
    """

    before: bytes
    law: str
    is_held: bool
    width: int = 0
    writers: set[int] = field(default_factory=set)


class TransferModel:
    """The bytes of every GPU storage and of every page of the tier, as the contract defines them.

    Args:
        tensors: The KV-cache tensors.
        groups: For each KV-cache group, the bytes of a page in each tensor that it uses.
        blocks_per_chunk: GPU blocks that one page of the tier holds.
        num_chunks: Pages of the tier.
        gpu: The bytes of each storage.
    """

    def __init__(
        self,
        tensors: Sequence[TensorLayout],
        groups: Sequence[Mapping[int, int]],
        blocks_per_chunk: int,
        num_chunks: int,
        gpu: list[bytearray],
    ) -> None:
        self.tensors, self.groups = tensors, groups
        self.k, self.num_chunks = blocks_per_chunk, num_chunks
        self.gpu = gpu
        self.tier: dict[Slot, tuple[int, list[bytes], str]] = {}
        """For each used slot: the group, the bytes, and the law that wrong bytes break."""
        self.jobs: dict[int, JobInFlight] = {}
        """The jobs in flight, which were accepted and are not reported yet."""
        self.touched: Counter[Row | int] = Counter()
        """Number of jobs in flight that touch each page."""
        self.pending: dict[Row, Pending] = {}
        self.written: dict[Row, tuple[int, str]] = {}
        """The pages whose jobs ended since the last comparison: bytes written, and the law."""
        self.held_by = ""
        """The law that is broken if a job ends now; empty while no work is delayed."""

    # --- pages ---

    def num_blocks(self, group: int) -> int:
        """Return the number of blocks that a group can name, which all its tensors have."""
        used = self.groups[group] or range(len(self.tensors))
        return min(self.tensors[number].num_blocks for number in used)

    def span(self, row: Row, width: int) -> tuple[int, slice]:
        """Return the storage of a GPU page, and the slice of its first ``width`` bytes."""
        tensor = self.tensors[row[0]]
        start = tensor.start + row[1] * tensor.stride
        return tensor.storage, slice(start, start + width)

    def read(self, row: Row, width: int) -> bytes:
        """Return the bytes of a GPU page after every job in flight has ended."""
        storage, span = self.span(row, width)
        return bytes(self.gpu[storage][span])

    def moves(self, parts: Parts) -> Iterator[tuple[int, int, Slot]]:
        """Pair GPU blocks with slots; a group's first block is number ``index % k`` of its page."""
        for group, part in sorted(parts.items()):
            for at, block in enumerate(part.blocks, part.index % self.k):
                yield group, block, (part.chunks[at // self.k], at % self.k)

    def must_be_refused(self, is_store: bool, parts: Parts) -> bool:
        """Whether a job names a missing page, equal destinations, or a page without a partner."""
        for group, part in parts.items():
            needed = -(-(part.index % self.k + len(part.blocks)) // self.k) if part.blocks else 0
            if needed != len(part.chunks):
                return True
            if any(not 0 <= block < self.num_blocks(group) for block in part.blocks):
                return True
        chunks = [chunk for part in parts.values() for chunk in part.chunks]
        if any(not 0 <= chunk < self.num_chunks for chunk in chunks):
            return True
        moves = self.moves(parts)
        rows = [(number, block) for group, block, _ in moves for number in self.groups[group]]
        into: Sequence[object] = chunks if is_store else rows
        return len(set(into)) < len(into)

    def loadable(self, group: int) -> list[Slot]:
        """Return the slots that a group has stored; no other group may load these slots."""
        return [slot for slot, (owner, *_) in self.tier.items() if owner == group]

    # --- jobs ---

    def submit(self, job_id: int, is_store: bool, parts: Parts) -> None:
        """Run an accepted job, after all jobs that were accepted before it."""
        moves = list(self.moves(parts))
        slots = [slot for *_, slot in moves]
        touched: set[Row | int] = {(t, block) for g, block, _ in moves for t in self.groups[g]}
        touched.update(chunk for chunk, _ in slots)
        law = self._law(touched)
        stored = []
        for group, block, slot in moves:
            if is_store:
                data = [self.read((t, block), w) for t, w in self.groups[group].items()]
                stored.append((group, data))
                self._put(slot, group, data, law)
                continue
            _, data, law_of_store = self.tier[slot]
            for number, page in zip(self.groups[group], data, strict=True):
                self.write(job_id, (number, block), page, max(law, law_of_store))
        num_bytes = sum(sum(self.groups[group].values()) for group, *_ in moves)
        self.touched.update(touched)
        is_held = bool(self.held_by) and num_bytes > 0
        self.jobs[job_id] = JobInFlight(is_store, num_bytes, slots, touched, stored, is_held)

    def _law(self, pages: Collection[Row | int]) -> str:
        """Return the law that wrong bytes of a job break, on compute, on order, or on bytes."""
        if self.held_by == "XFER-6":
            return "XFER-6"
        return "XFER-3" if any(self.touched[page] for page in pages) else "XFER-1"

    def _put(self, slot: Slot, group: int, data: list[bytes], law: str) -> None:
        """Store one GPU block; its page of the tier then belongs to this group."""
        for other in [one for one in self.tier if one[0] == slot[0]]:
            if self.tier[other][0] != group:
                del self.tier[other]
        self.tier[slot] = group, data, law

    def write(self, job_id: int, row: Row, data: bytes, law: str) -> None:
        """Write the first bytes of a GPU page, by a job or by kernels that have not ended."""
        if row not in self.pending:
            before = self.read(row, self.tensors[row[0]].page_bytes)
            self.pending[row] = Pending(before, law, bool(self.held_by))
        pending = self.pending[row]
        pending.is_held = pending.is_held and bool(self.held_by)
        pending.law = max(pending.law, law)
        pending.width = max(pending.width, len(data))
        pending.writers.add(job_id)
        self.compute(row, data)

    def compute(self, row: Row, data: bytes) -> None:
        """Write a GPU page at once, like engine kernels that have ended."""
        storage, span = self.span(row, len(data))
        self.gpu[storage][span] = data

    def release(self) -> None:
        """Let all delayed work end."""
        self.held_by = ""
        for pending in self.pending.values():
            pending.is_held = False
        for job in self.jobs.values():
            job.is_held = False
        self._settle(KERNELS)

    def _settle(self, job_id: int) -> None:
        for row, pending in list(self.pending.items()):
            pending.writers.discard(job_id)
            if not pending.writers:
                self.written[row] = pending.width, pending.law
                del self.pending[row]

    # --- results ---

    def reported(self, result: TransferResult) -> Promises:
        """End a job that succeeded; yields a law, a promise, and whether the promise was kept."""
        yield "XFER-5", "a report has the int that was submitted", type(result.job_id) is int
        job = self.jobs.get(result.job_id)
        yield "XFER-5", "only a job in flight is reported, and only once", job is not None
        assert job is not None, "the run ends at the first broken promise"
        law = self.held_by or "XFER-5"
        yield law, "a job does not end before delayed copies or compute", not job.is_held
        yield "XFER-4", "a job without an injected fault succeeds", result.success
        sizes = (None, job.num_bytes)
        yield "XFER-4", "transfer_size is the number of bytes moved", result.transfer_size in sizes
        yield "XFER-4", "moved is of a failed store only", result.moved is None
        self._end(result.job_id)

    def _end(self, job_id: int) -> JobInFlight:
        job = self.jobs.pop(job_id)
        self.touched.subtract(job.touched)
        self._settle(job_id)
        return job

    def failed(
        self, result: TransferResult, lost: Sequence[int], actual: Sequence[memoryview]
    ) -> Promises:
        """End a failed job; ``lost`` has the indices of the GPU blocks that could not be moved.

        A failed load may have left any bytes in its GPU pages, and a failed store in its slots
        except for those that ``moved`` names. All other bytes must be correct.
        """
        yield "XFER-5", "a report has the int that was submitted", type(result.job_id) is int
        rows = [row for row, one in self.pending.items() if result.job_id in one.writers]
        job = self._end(result.job_id)
        yield "XFER-4", "a job that did not move all its bytes has failed", not result.success
        yield "XFER-4", "a failed job has an error", bool(result.error)
        yield "XFER-4", "moved is of a failed store only", job.is_store or result.moved is None
        moved = result.moved if result.moved is not None else [False] * len(job.slots)
        yield "XFER-4", "moved has one entry for each GPU block", len(moved) == len(job.slots)
        named = [number for number in lost if moved[number]]
        yield "XFER-4", "moved is False for each block that was not moved", not named
        if job.is_store:
            for slot in job.slots:
                self.tier.pop(slot, None)
            for slot, (group, data), is_moved in zip(job.slots, job.stored, moved, strict=True):
                if is_moved:
                    self._put(slot, group, data, "XFER-4")
        for row in rows:
            storage, span = self.span(row, self.written[row][0])
            self.compute(row, bytes(actual[storage][span]))

    def dropped(self) -> None:
        """Drop the jobs in flight after a shutdown; their pages may have any bytes."""
        for pending in self.pending.values():
            pending.is_held = False
        self.jobs.clear()

    # --- bytes ---

    def difference(self, actual: Sequence[memoryview]) -> tuple[str, str] | None:
        """Return the law that the GPU bytes break, and the position of the first wrong byte."""
        expected = list(self.gpu)
        free: list[list[slice]] = [[] for _ in self.gpu]
        """Bytes that a worker may be writing, so that they may change during the comparison."""
        for row, pending in self.pending.items():
            storage, span = self.span(row, pending.width)
            if not pending.is_held:
                free[storage].append(span)
                continue
            if expected[storage] is self.gpu[storage]:
                expected[storage] = bytearray(self.gpu[storage])
            expected[storage][span] = pending.before[: pending.width]
        for number, spans in enumerate(free):
            end = len(expected[number])
            start = 0
            for span in [*sorted(spans, key=lambda one: one.start), slice(end, end)]:
                here = slice(start, span.start)
                is_now, must_be = actual[number][here], expected[number][here]
                if must_be != is_now:
                    at = first_difference(is_now, must_be)
                    return self._place(number, start + at)
                start = max(start, span.stop)
        self.written.clear()
        return None

    def _place(self, storage: int, at: int) -> tuple[str, str]:
        """Return the law of a wrong byte; XFER-2 for a byte in a page that no job named."""
        for number, tensor in enumerate(self.tensors):
            block, byte = divmod(at - tensor.start, tensor.stride)
            inside = 0 <= block < tensor.num_blocks and byte < tensor.page_bytes
            if tensor.storage != storage or not inside:
                continue
            where = f"tensor {number}, block {block}, byte {byte}"
            pending = self.pending.get((number, block))
            if pending is not None and byte < pending.width:
                return self.held_by or pending.law, where
            width, law = self.written.get((number, block), (0, "XFER-2"))
            return law if byte < width else "XFER-2", where
        return "XFER-2", f"byte {at} of a storage, between rows"
