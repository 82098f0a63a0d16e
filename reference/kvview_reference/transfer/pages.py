"""The places of the pages of a transfer: KV-cache tensors on one side, host rows on the other.

The host tier is one array. A host block holds k rows, one for each GPU block of
its chunk, and a row holds the pages of that block, tensor after tensor, without
the padding that the KV-cache tensors may have:

    host block b, k = 2, a group that refers to tensors 0 and 3

    row 2b      | page of tensor 0 | page of tensor 3 |  unused  |
    row 2b + 1  | page of tensor 0 | page of tensor 3 |  unused  |

1. A row has the length of the longest group, so a group with separate tensors takes no host memory
   for the tensors of other groups.
2. So a host block belongs to one group at a time, and only the group that stored the block can load
   it. Offload keys contain the group index for the same reason.

"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvview import CanonicalKVCacheRef, CanonicalKVCacheTensor, ConfigError, TransferResult

Ids = npt.NDArray[np.int64]
Pages = npt.NDArray[np.void]
"""Pages of one width, one per item, at any distance."""

COALESCED_BYTES = 1 << 20
"""Consecutive pages are copied together up to this size.

Larger copies would leave some of the threads that share a job without work.
"""


HOST_ALIGNMENT = 4096
"""Bytes; the size of a memory page."""


@dataclass(frozen=True, eq=False)
class Group:
    """The places of the pages of one KV-cache group; each array has one entry for each tensor.

    Args:
        tensors: The tensors that the group refers to, each once.
        addresses: Address of the start of each tensor, in bytes.
        strides: Bytes from one block of a tensor to the next.
        columns: Offset of each tensor's page in a host row, in bytes.
        widths: Bytes moved a page.
        num_blocks: Number of blocks that every tensor of the group has or, if the group has no
            tensor, every tensor of the cache.
    """

    tensors: tuple[torch.Tensor, ...]
    addresses: Ids
    strides: Ids
    columns: Ids
    widths: Ids
    num_blocks: int

    @property
    def row_bytes(self) -> int:
        """Bytes that one GPU block of this group takes in a host row."""
        return int(self.widths.sum())

    def check_in_place(self) -> None:
        """Raise RuntimeError if the address of a tensor has changed."""
        if [tensor.data_ptr() for tensor in self.tensors] != self.addresses.tolist():
            raise RuntimeError("a KV-cache tensor was freed or moved after the worker was made")


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """One accepted transfer, in rows, without any reference to the caller's spec.

    Args:
        job_id: Id of the job, as given by the caller.
        to_host: True for a store.
        moves: For each group that moves pages: the group, its GPU blocks and its host rows.
        host: The host tier, shape ``(rows, row_bytes)``, uint8.
        num_bytes: Bytes to move.
    """

    job_id: int
    to_host: bool
    moves: Sequence[tuple[Group, Ids, Ids]]
    host: npt.NDArray[np.uint8]
    num_bytes: int

    @property
    def num_pages(self) -> int:
        """Pages to move."""
        return sum(len(group.widths) * len(blocks) for group, blocks, _ in self.moves)

    def copies(self) -> tuple[Ids, Ids, Ids]:
        """Return the copies of the job.

        Returns:
            Destination addresses, source addresses and sizes in bytes. The addresses are valid
            while the job and its tensors exist.

        Raises:
            RuntimeError: A tensor was freed or moved since the worker was made.
        """
        parts: tuple[list[Ids], list[Ids], list[Ids]] = ([], [], [])
        host_address, row_bytes = self.host.ctypes.data, self.host.strides[0]
        for group, gpu_blocks, host_rows in self.moves:
            group.check_in_place()
            gpu = gpu_blocks[:, None] * group.strides
            gpu += group.addresses
            host = (host_rows * row_bytes)[:, None] + (group.columns + host_address)
            sizes = np.empty_like(gpu)
            sizes[:] = group.widths
            for part, array in zip(parts, (gpu, host, sizes), strict=True):
                part.append(array.ravel())
        gpu, host, sizes = map(_join, parts)
        if all(len(group.widths) == 1 for group, _, _ in self.moves):
            gpu, host, sizes = _coalesce(gpu, host, sizes, [len(part) for part in parts[0]])
        return (host, gpu, sizes) if self.to_host else (gpu, host, sizes)

    def few_copies(self) -> tuple[list[int], list[int], list[int]]:
        """Return the copies of the job page by page, which is faster for a few pages."""
        parts: tuple[list[int], list[int], list[int]] = ([], [], [])
        on_gpu, on_host, sizes = parts
        host_address, row_bytes = self.host.ctypes.data, self.host.strides[0]
        for group, gpu_blocks, host_rows in self.moves:
            group.check_in_place()
            blocks, rows = gpu_blocks.tolist(), host_rows.tolist()
            layout = (group.addresses, group.strides, group.columns, group.widths)
            for address, stride, column, width in zip(*(a.tolist() for a in layout), strict=True):
                start = host_address + column
                on_gpu += [address + block * stride for block in blocks]
                on_host += [start + row * row_bytes for row in rows]
                sizes += [width] * len(blocks)
        return (on_host, on_gpu, sizes) if self.to_host else parts

    def pages(self) -> Iterator[tuple[Pages, Pages, Ids, Ids]]:
        """Yield the copies of a job in CPU memory, by group and tensor.

        Yields:
            Destination, source, and the indices of the copied pages in each of them.
        """
        host_address, row_bytes = self.host.ctypes.data, self.host.strides[0]
        for group, gpu_blocks, host_rows in self.moves:
            for number, tensor in enumerate(group.tensors):
                address, stride, column, width = (
                    int(numbers[number])
                    for numbers in (group.addresses, group.strides, group.columns, group.widths)
                )
                host = _as_pages(host_address + column, len(self.host), row_bytes, width)
                gpu = _as_pages(address, tensor.shape[0], stride, width)
                if self.to_host:
                    yield host, gpu, host_rows, gpu_blocks
                else:
                    yield gpu, host, gpu_blocks, host_rows


def _as_pages(address: int, num_pages: int, stride: int, width: int) -> Pages:
    # By address, because torch never frees or resizes memory that it has shared with numpy.
    memory: Any = (ctypes.c_uint8 * ((num_pages - 1) * stride + width)).from_address(address)
    page = np.dtype((np.void, width))
    return np.ndarray(num_pages, page, np.frombuffer(memory, np.uint8), strides=(stride,))


def _join(parts: Sequence[Ids]) -> Ids:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _coalesce(gpu: Ids, host: Ids, sizes: Ids, lengths: Sequence[int]) -> tuple[Ids, Ids, Ids]:
    """Join copies that are adjacent on both sides.

    Args:
        gpu: Addresses on the GPU side.
        host: Addresses.
        sizes: In bytes.
        lengths: Copies of each group, in order. No copy joins two groups, because memory that is
            adjacent by chance may still be two allocations of a GPU.
    """
    if len(sizes) < 2:
        return gpu, host, sizes
    breaks = np.ones(len(sizes), dtype=bool)
    breaks[1:] = (np.diff(gpu) != sizes[:-1]) | (np.diff(host) != sizes[:-1])
    if breaks.all():
        return gpu, host, sizes
    breaks[:: max(1, COALESCED_BYTES // int(sizes.max()))] = True
    breaks[np.cumsum(lengths[:-1], dtype=np.int64)] = True
    starts = np.flatnonzero(breaks)
    return gpu[starts], host[starts], np.add.reduceat(sizes, starts)


def failed(job: Job, error: Exception, moved: Sequence[bool] | None = None) -> TransferResult:
    """Make the result of a job that could not move all its bytes (XFER-4)."""
    return TransferResult(job.job_id, False, error=f"{type(error).__name__}: {error}", moved=moved)


def check_tensors(caches: Sequence[CanonicalKVCacheTensor[torch.Tensor]]) -> torch.device:
    """Check types, shapes, strides and devices of all KV-cache tensors.

    Returns:
        The device that all tensors share.

    Raises:
        ConfigError: A tensor does not have the expected form; the message names the tensor and the
            form.
    """
    if not caches:
        raise ConfigError("tensors is empty: a worker needs at least one KV-cache tensor")
    device = caches[0].tensor.device
    for index, cache in enumerate(caches):
        tensor, page = cache.tensor, cache.page_size_bytes
        shape = tuple(tensor.shape)
        if tensor.dtype != torch.int8 or len(shape) != 2 or 0 in shape or shape[1] != page:
            raise ConfigError(
                f"tensor {index} must be int8 of shape (num_blocks, {page}), got "
                f"{tensor.dtype} of shape {shape}"
            )
        if tensor.stride(1) != 1 or (shape[0] > 1 and tensor.stride(0) < page):
            raise ConfigError(
                f"tensor {index} must have contiguous rows that do not overlap, got strides "
                f"{tensor.stride()} for rows of {page} bytes"
            )
        if tensor.device != device or device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"tensor {index} is on {tensor.device}, and tensor 0 is on {device}; all tensors "
                "must be on one CUDA or CPU device"
            )
    return device


def make_group(
    index: int,
    refs: Sequence[CanonicalKVCacheRef],
    caches: Sequence[CanonicalKVCacheTensor[torch.Tensor]],
) -> Group:
    """Lay out one KV-cache group.

    Args:
        index: Index of the group, for messages.
        refs: The tensors that the group uses; a tensor that occurs twice counts once.
        caches: All tensors, already checked.

    Raises:
        ConfigError: A reference has the index of no tensor, or more bytes than a page of its
            tensor.
    """
    widths: dict[int, int] = {}
    for ref in refs:
        if not 0 <= ref.tensor_idx < len(caches):
            raise ConfigError(
                f"group {index} refers to tensor {ref.tensor_idx}, but there are only "
                f"{len(caches)} tensors"
            )
        page = caches[ref.tensor_idx].page_size_bytes
        if not 0 < ref.page_size_bytes <= page:
            raise ConfigError(
                f"group {index} uses {ref.page_size_bytes} bytes of a page of tensor "
                f"{ref.tensor_idx}, whose pages have {page} bytes"
            )
        # Pages start at the start of a row, so the wider of two references includes the other.
        widths[ref.tensor_idx] = max(ref.page_size_bytes, widths.get(ref.tensor_idx, 0))
    # A group without layers on this worker (pipeline parallelism) moves nothing.
    tensors = tuple(caches[number].tensor for number in widths)
    sizes = np.array(list(widths.values()), np.int64)
    return Group(
        tensors=tensors,
        addresses=np.array([tensor.data_ptr() for tensor in tensors], np.int64),
        strides=np.array([tensor.stride(0) for tensor in tensors], np.int64),
        columns=np.cumsum(sizes) - sizes,
        widths=sizes,
        num_blocks=min(tensor.shape[0] for tensor in tensors or [c.tensor for c in caches]),
    )


def check_host_bytes(asked: int, limit: int | None, what: str) -> None:
    """Refuse a host tier that does not fit.

    Args:
        asked: Bytes of the tier.
        limit: Limit in bytes that the user set, or None.
        what: Description of the tier, for the message.

    Raises:
        ConfigError: The tier does not fit; the message has the requested and the available bytes.
    """
    if limit is not None and asked > limit:
        raise ConfigError(f"{what} need {asked} bytes, more than max_host_bytes ({limit})")
    available = available_host_bytes()
    if available is not None and asked > available:
        raise ConfigError(
            f"{what} need {asked} bytes, but only {available} bytes of host memory are available"
        )


def allocate_host(num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Allocate zeroed memory for the host tier.

    Returns:
        An array of shape ``(num_rows, row_bytes)`` and type uint8. It starts at a memory page, so
        that no other memory shares its first page, because only whole pages can be pinned.
    """
    size = num_rows * row_bytes
    # Allocated by calloc, so that the system commits memory when it is first written.
    memory = np.zeros(size + HOST_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % HOST_ALIGNMENT
    return memory[start : start + size].reshape(num_rows, row_bytes)


def available_host_bytes() -> int | None:
    """Return the bytes that this process may still allocate; None if they are unknown.

    On Linux, this is the smaller of the memory that is available without swapping, and the room
    below the limit of the control group (v2, then v1) at a container's root.
    """
    rooms = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                rooms.append(int(line.split()[1]) * 1024)
    except OSError:
        return None
    root = Path("/sys/fs/cgroup")
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            # The group is charged for cached files, which the kernel drops at need.
            cached = dict(line.split() for line in (root / stat).read_text().splitlines())
            room = int((root / limit).read_text()) - int((root / used).read_text())
            rooms.append(room + int(cached.get("inactive_file", 0)))
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
    return max(0, min(rooms)) if rooms else None
