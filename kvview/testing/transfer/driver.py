"""The oracle of the transfer checks: every byte of every storage, as plain bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvview.testing.checks import checks_driving
from kvview.testing.harness import Capability, Factory
from kvview.testing.recorder import Recorder
from kvview.transfer import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult


@dataclass(frozen=True)
class Part:
    """What one KV-cache group moves in one job.

    Args:
        blocks: GPU blocks.
        chunks: Pages of the tier.
        index: Number of the first GPU block in its request.
    """

    blocks: Sequence[int]
    chunks: Sequence[int]
    index: int = 0


@dataclass(frozen=True)
class JobInFlight:
    """What the result of a job is compared with.

    Args:
        num_stored: GPU blocks that it stores, None for a load.
        num_bytes: What it moves, None when that is not judged.
    """

    num_stored: int | None
    num_bytes: int | None = None


Parts = Mapping[int, Part]
"""Per group that moves anything, what it moves."""


class TransferDriver(Recorder):
    """Submits jobs, and does to plain bytes what each of them must do.

    Args:
        factory: Makes the harness; its tensors are filled with random bytes.
        law: The law that is checked.
    """

    is_timed = True

    def __init__(self, factory: Factory, law: str) -> None:
        import torch  # only who checks a worker needs it

        super().__init__(factory, law, "worker")
        self._torch = torch
        caches = self.harness.kv_caches
        self.k: int = self.harness.blocks_per_chunk
        self.num_cpu_blocks: int = self.harness.num_cpu_blocks
        self.tensors = [cache.tensor for cache in caches.tensors]
        self.groups: list[list[tuple[int, int]]] = []
        for refs in caches.group_data_refs:
            widths: dict[int, int] = {}
            for ref in refs:
                widths[ref.tensor_idx] = max(ref.page_size_bytes, widths.get(ref.tensor_idx, 0))
            self.groups.append(list(widths.items()))
        self.num_blocks = min(tensor.shape[0] for tensor in self.tensors)
        self._random = torch.Generator().manual_seed(7)
        self._flat: dict[int, Any] = {}
        self._expected: dict[int, bytearray] = {}
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.int8, device=tensor.device).set_(storage)
            flat.copy_(self._bytes(len(flat)))
            self._flat[storage.data_ptr()] = flat
            self._expected[storage.data_ptr()] = bytearray(_to_bytes(flat))
        self._header.append("for cache in h.kv_caches.tensors: cache.tensor.random_(-128, 128)")
        self._host: dict[int, tuple[int, dict[int, list[bytes]]]] = {}
        self._in_flight: dict[int, JobInFlight] = {}
        self._next_job = 0
        self._is_paused = False
        self._launched: list[tuple[int, int, int, Any]] | None = None  # while compute is held

    def _bytes(self, number: int) -> Any:
        return self._torch.randint(
            -128, 128, (number,), dtype=self._torch.int8, generator=self._random
        )

    @property
    def worker(self) -> Any:
        """The worker under test."""
        return self.subject

    def can(self, capability: Capability) -> bool:
        """Whether the harness declares a capability."""
        return capability in self.harness.capabilities

    def blocks_of(self, group: int) -> list[int]:
        """GPU blocks that are used for one group only, in no special order."""
        share = self.num_blocks // len(self.groups)
        return list(reversed(range(group * share, (group + 1) * share)))

    def chunks_of(self, group: int) -> list[int]:
        """Pages of the tier that are used for one group only."""
        share = self.num_cpu_blocks // len(self.groups)
        return list(reversed(range(group * share, (group + 1) * share)))

    # --- jobs ---

    def tier(self, pages: Sequence[int]) -> LoadStoreSpec:
        """The spec that names pages of the tier."""
        if not self.can(Capability.TIER_SPEC):
            return CPULoadStoreSpec(list(pages))
        spec: LoadStoreSpec = self.harness.tier_spec(list(pages))
        self._names[id(spec)] = f"h.tier_spec({list(pages)})"
        self._kept.append(spec)
        return spec

    def sides(self, parts: Parts) -> tuple[GPULoadStoreSpec, LoadStoreSpec]:
        """The two specs of a job."""
        groups = [parts.get(group, Part([], [])) for group in range(len(self.groups))]
        return (
            GPULoadStoreSpec(
                [block for part in groups for block in part.blocks],
                [len(part.blocks) for part in groups],
                [part.index for part in groups],
            ),
            self.tier([chunk for part in groups for chunk in part.chunks]),
        )

    def store(self, parts: Parts) -> int:
        """Submit a job from the GPU to the tier; returns its id."""
        gpu, tier = self.sides(parts)
        job_id = self.submit((gpu, tier))
        for group, block, chunk, sub in self._pairs(parts):
            owner, held = self._host.get(chunk, (group, {}))
            held = held if owner == group else {}
            held[sub] = [
                bytes(self._expected[storage][span]) for storage, span in self._pages(group, block)
            ]
            self._host[chunk] = (group, held)
        self._in_flight[job_id] = JobInFlight(len(gpu.block_ids), self._size(parts))
        return job_id

    def load(self, parts: Parts) -> int:
        """Submit a job from the tier to the GPU; returns its id."""
        gpu, tier = self.sides(parts)
        job_id = self.submit((tier, gpu))
        self.expect_loaded(parts)
        self._in_flight[job_id] = JobInFlight(None, self._size(parts))
        return job_id

    def expect_loaded(self, parts: Parts) -> None:
        """Do to the plain bytes what a load does."""
        for group, block, chunk, sub in self._pairs(parts):
            pages = zip(self._pages(group, block), self._host[chunk][1][sub], strict=True)
            for (storage, span), data in pages:
                self._expected[storage][span] = data

    def submit(self, spec: tuple[object, object], job_id: int | None = None) -> int:
        """Submit any job that must be accepted; a full worker is waited for once."""
        if job_id is None:
            self._next_job += 1
            job_id = self._next_job
        accepted = self.call(self.worker, "transfer_async", job_id, spec)
        if accepted is False and self._in_flight and not self._is_paused:
            self.finish()
            accepted = self.call(self.worker, "transfer_async", job_id, spec)
        self.equal(accepted, True, "an idle worker accepts a job")
        gpu = spec[0]
        num_stored = len(gpu.block_ids) if isinstance(gpu, GPULoadStoreSpec) else None
        self._in_flight[job_id] = JobInFlight(num_stored)
        return job_id

    def finish(self) -> list[TransferResult]:
        """Wait for every job; each must be reported now, once, as a success."""
        results = self.results()
        for result in results:
            self.equal(result.success, True, f"job {result.job_id} succeeds ({result.error})")
        return results

    def results(self) -> list[TransferResult]:
        """Wait for every job; each must be reported now, and once."""
        wanted = sorted(self._in_flight)
        self.call(self.worker, "wait", wanted)
        results: list[TransferResult] = list(self.call(self.worker, "get_finished"))
        got = sorted(result.job_id for result in results)
        self.equal(got, wanted, "each accepted job is reported exactly once", "XFER-5")
        for result in results:
            job = self._in_flight[result.job_id]
            if None not in (result.transfer_size, job.num_bytes) and result.success:
                size = result.transfer_size
                self.equal(size, job.num_bytes, "transfer_size is the bytes moved")
            if result.moved is not None:
                is_failed_store = job.num_stored is not None and not result.success
                what = "only of a failed store it is said what was moved"
                self.true(is_failed_store, what, result, "moved=None", "XFER-4")
                what = "moved has an entry for each GPU block of the job"
                self.equal(len(result.moved), job.num_stored, what, "XFER-4")
        self._in_flight.clear()
        return results

    def pause(self) -> None:
        """Hold copies back, where the harness can."""
        if self.can(Capability.PAUSE):
            self.call(self.harness, "pause")
            self._is_paused = True

    def resume(self) -> None:
        """Let copies start."""
        if self._is_paused:
            self._is_paused = False
            self.call(self.harness, "resume")

    def hold_compute(self, launched: Parts) -> None:
        """Have kernels under way that write blocks; for the jobs to come they have done so."""
        self.call(self.harness, "hold_compute")
        self._launched = []
        for group, part in launched.items():
            for block in part.blocks:
                for number, width in self.groups[group]:
                    self._launched.append((number, block, width, self._bytes(width)))
                new = (data for _, _, _, data in self._launched[-len(self.groups[group]) :])
                for (storage, span), data in zip(self._pages(group, block), new, strict=True):
                    self._expected[storage][span] = _to_bytes(data)

    def release_compute(self) -> None:
        """Let the kernels write, and end."""
        for number, block, width, data in self._launched or ():
            self._write(number, block, width, data)
        self._launched = None
        self.call(self.harness, "release_compute")

    def nothing_ends(self, what: str) -> None:
        """No job is reported, though a worker that would has some time to run it."""
        for _ in range(20):
            with self.unrecorded():
                self.equal(list(self.call(self.worker, "get_finished")), [], what)
            time.sleep(0.001)

    def end(self) -> None:
        """Give back threads, also after a failure, which nothing here may hide."""
        with suppress(Exception):
            if self._is_paused:
                self.harness.resume()
            if self._launched is not None:
                self.harness.release_compute()
            self.worker.shutdown()

    # --- bytes ---

    def scramble(self, group: int, blocks: Sequence[int]) -> None:
        """Overwrite pages of GPU blocks, as an engine that computes new KV."""
        for block in blocks:
            for number, width in self.groups[group]:
                self._write(number, block, width, self._bytes(width))
            for storage, span in self._pages(group, block):
                self._expected[storage][span] = _to_bytes(self._flat[storage][span])

    def _write(self, number: int, block: int, width: int, data: Any) -> None:
        tensor = self.tensors[number]
        tensor[block, :width] = data.to(tensor.device)
        self.line(f"h.kv_caches.tensors[{number}].tensor[{block}, :{width}].random_()")

    def forget(self, group: int, blocks: Sequence[int]) -> None:
        """Take whatever is in pages for expected: a failed job may have left anything."""
        for block in blocks:
            for storage, span in self._pages(group, block):
                self._expected[storage][span] = _to_bytes(self._flat[storage][span])

    def check_bytes(self, what: str, law: str | None = None) -> None:
        """Every byte of every storage is what it must be."""
        for storage, expected in self._expected.items():
            actual = _to_bytes(self._flat[storage])
            if actual == expected:
                continue
            wrong = [i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b]
            self.fail(
                what,
                f"{len(wrong)} wrong bytes, the first {self._where(storage, wrong[0])}",
                "the bytes of the named pages moved, and no others",
                law,
            )

    def _where(self, storage: int, offset: int) -> str:
        for number, tensor in enumerate(self.tensors):
            at = offset - tensor.storage_offset()
            if tensor.untyped_storage().data_ptr() == storage and at >= 0:
                block, byte = divmod(at, tensor.stride(0))
                return f"in tensor {number}, block {block}, byte {byte} of its row"
        return f"at byte {offset} of a storage"

    def _pages(self, group: int, block: int) -> Iterator[tuple[int, slice]]:
        for number, width in self.groups[group]:
            tensor = self.tensors[number]
            start = tensor.storage_offset() + block * tensor.stride(0)
            yield tensor.untyped_storage().data_ptr(), slice(start, start + width)

    def _pairs(self, parts: Parts) -> Iterator[tuple[int, int, int, int]]:
        for group, part in sorted(parts.items()):
            skip = part.index % self.k
            for number, block in enumerate(part.blocks, skip):
                yield group, block, part.chunks[number // self.k], number % self.k

    def _size(self, parts: Parts) -> int:
        return sum(
            len(part.blocks) * sum(width for _, width in self.groups[group])
            for group, part in parts.items()
        )


def _to_bytes(flat: Any) -> bytes:
    data: bytes = flat.cpu().numpy().tobytes()
    return data


transfer_check = checks_driving(TransferDriver, contract="transfer")
"""Register a check that drives the harness through :class:`TransferDriver`."""
