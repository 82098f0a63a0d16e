"""The transfer contract: pages of KV bytes moved between the GPU and a medium.

Laws: XFER-1 to XFER-7 in ``kvview/laws.toml``.

Pages: a KV cache is a list of tensors, each ``(num_blocks, page_size_bytes)`` of
int8; a group refers to one or more tensors, and a transfer of one block of a group moves one page
of each of these tensors. An offloaded block may hold k GPU blocks of its group; ``block_indices``
gives the position of the first of these GPU blocks in the offloaded block. An offloaded block
belongs to the group that stored it, and no other group loads it.

Source: vLLM PR #38453; ``vllm/v1/kv_offload/base.py`` (0.33.0).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from kvview.errors import TransferSpecError
from kvview.events import MEDIUM_CPU, MEDIUM_GPU

TensorT = TypeVar("TensorT")


@runtime_checkable
class LoadStoreSpec(Protocol):
    """Names pages of one medium, in a form that the medium defines.

    Any string is a medium. A spec may list block ids, keys, offsets or any other objects that can
    be pickled; only the two halves of one connector, or a manager and its worker, read a spec.

    Examples:
        Name pages by their offsets in a file:

        >>> @dataclass
        ... class FileSpec:
        ...     medium: ClassVar[str] = "DISK"
        ...     offsets: Sequence[int]
        >>> isinstance(FileSpec([0, 4096]), LoadStoreSpec)
        True
    """

    medium: ClassVar[str]


@dataclass(slots=True)
class GPULoadStoreSpec:
    """GPU blocks to read or write, group after group.

    1. ``sum(group_sizes) == len(block_ids)``, with one block index per group.
    2. If an offloaded block holds several GPU blocks, the blocks of one group are consecutive
       blocks of one request.

    Args:
        block_ids: GPU block ids, those of group 0 first.
        group_sizes: Number of blocks of each KV-cache group; 0 for a group that is not moved.
        block_indices: Number of each group's first block in its request, in blocks of that group.
            This number modulo k is the number of GPU blocks that are skipped in the first offloaded
            block.

    Raises:
        TransferSpecError: The lengths do not agree.
    """

    medium: ClassVar[str] = MEDIUM_GPU

    block_ids: Sequence[int]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.group_sizes):
            raise TransferSpecError(
                f"XFER-1: group_sizes has a negative size: {list(self.group_sizes)}"
            )
        if sum(self.group_sizes) != len(self.block_ids):
            raise TransferSpecError(
                f"XFER-1: sum(group_sizes) must be len(block_ids): {list(self.group_sizes)} "
                f"sums to {sum(self.group_sizes)}, block_ids has {len(self.block_ids)}"
            )
        if len(self.block_indices) != len(self.group_sizes):
            raise TransferSpecError(
                f"XFER-1: each group needs one block index, got {len(self.block_indices)} "
                f"block_indices for {len(self.group_sizes)} group_sizes"
            )
        if any(index < 0 for index in self.block_indices):
            raise TransferSpecError(
                f"XFER-1: block_indices has a negative number: {list(self.block_indices)}"
            )


@dataclass(slots=True)
class CPULoadStoreSpec:
    """Host blocks to read or write, in the order of the GPU blocks that they pair with.

    Equal ids are the same host block, so the check compares them (OFF-1). If your ids mean anything
    else, such as numbers inside a shard, use a class of your own.

    Args:
        block_ids: Host block ids, each for k GPU blocks; those of group 0 first.
    """

    medium: ClassVar[str] = MEDIUM_CPU

    block_ids: Sequence[int]


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""``(source, destination)``; the media of both specs show the direction."""


@dataclass(frozen=True)
class CanonicalKVCacheTensor(Generic[TensorT]):
    """One KV-cache tensor as rows of pages.

    Args:
        tensor: Shape ``(num_blocks, page_size_bytes)``, int8, rows contiguous.
        page_size_bytes: Bytes of one row, padding included.
    """

    tensor: TensorT
    page_size_bytes: int


@dataclass(frozen=True)
class CanonicalKVCacheRef:
    """A tensor in which a group keeps KV.

    Args:
        tensor_idx: Index into :attr:`CanonicalKVCaches.tensors`.
        page_size_bytes: Bytes of the page that the group uses, without padding.
    """

    tensor_idx: int
    page_size_bytes: int


class ComputeEvent(Protocol):
    """A mark in a compute stream, such as ``torch.cuda.Event``.

    Examples:
        Copy pages only when the kernels that write them have ended:

        >>> event = stream.record_event()
        >>> event.query()  # so try again at the next call of get_finished
        False
        >>> stream.release()  # the kernels end
        >>> event.query()
        True
    """

    def query(self) -> bool:
        """Whether all work before the mark is done."""
        ...

    def synchronize(self) -> None:
        """Block until the work before the mark is done; not called on the model's thread."""
        ...


class ComputeStream(Protocol):
    """The stream in which the model's kernels run, such as ``torch.cuda.Stream``.

    Examples:
        Start a plan behind the kernels of earlier steps, without waiting for them:

        >>> compute = kv_caches.compute_stream
        >>> waiting = [(compute.record_event(), job)]  # in start_plan
        >>> stream.release()  # the kernels end
        >>> [job.job_id for event, job in waiting if event.query()]  # in get_finished
        [7]
    """

    def record_event(self) -> ComputeEvent:
        """Record an event after all work submitted so far (XFER-6)."""
        ...


@dataclass(frozen=True)
class CanonicalKVCaches(Generic[TensorT]):
    """All KV-cache tensors of one worker, and the tensors that each group uses.

    Args:
        tensors: Unique tensors. Groups that share a tensor use different blocks of it.
        group_data_refs: For each KV-cache group, the tensors that it uses.
        compute_stream: Stream of the model; a job runs after the work that was in this stream
            (XFER-6). With None, jobs on a GPU run after the current stream of the submitting
            thread; without a GPU, compute has ended when a plan is started.
        rank: Rank of this worker in its engine; the ranks have different bytes under the same key.
    """

    tensors: Sequence[CanonicalKVCacheTensor[TensorT]]
    group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]
    compute_stream: ComputeStream | None = None
    rank: int = 0


@dataclass(frozen=True)
class TransferResult:
    """The end of one job.

    Args:
        job_id: Id of the job, as passed to ``transfer_async``.
        success: Whether every byte was moved.
        transfer_size: Number of bytes moved; None if unknown, or if the job failed.
        transfer_time: Seconds that the copy took; None if unknown, or if the job failed.
        error: Text of the error; None if the job succeeded.
        moved: For each GPU block of a failed store, in order, whether all its bytes were moved.
            None for a load and for a job that succeeded. For a failed store, None means that any
            block may be incomplete.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    error: str | None = None
    moved: Sequence[bool] | None = None


@runtime_checkable
class TransferWorker(Protocol):
    """Moves pages between the GPU and one medium, job by job, without blocking.

    Examples:
        Store GPU block 3 in host block 0:

        >>> source = GPULoadStoreSpec([3], group_sizes=[1], block_indices=[2])
        >>> worker.transfer_async(8, (source, CPULoadStoreSpec([0])))
        True
        >>> worker.wait([8])  # or call get_finished in each step, until it reports the job
        >>> [(result.job_id, result.success) for result in worker.get_finished()]
        [(8, True)]
    """

    def transfer_async(self, job_id: int, spec: TransferSpec, /) -> bool:
        """Start one job.

        Args:
            job_id: Id of the job: any int that no job in flight has. A job is in flight until it is
                reported.
            spec: ``(source, destination)``, one of them a :class:`GPULoadStoreSpec`.

        Returns:
            True if the worker accepts the job, which ``get_finished`` then reports once. False if
            the worker cannot accept the job, after ``shutdown`` for example; such a job is not
            reported.

        Raises:
            TransferSpecError: The spec names pages that do not exist or do not
                pair up, or the job id is in flight; nothing was started.
        """
        ...

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call, in order of ending; never blocks."""
        ...

    def wait(self, job_ids: Collection[int], /) -> None:
        """Block until each named job has ended; unknown ids are ignored.

        The next ``get_finished`` still reports their results.
        """
        ...

    def shutdown(self) -> None:
        """Finish or drop the jobs in flight and release memory; may be called twice.

        Dropped jobs need not be reported, and ``wait`` does not wait for them.
        """
        ...
