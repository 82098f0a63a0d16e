"""The calls of a transfer worker, compared with the model of all bytes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize
from typing_extensions import override

from kvview.errors import TransferSpecError
from kvview.testing.suites.capability import Capability as C
from kvview.testing.suites.conformance import (
    ContractMachine,
    Needs,
    observable,
    of_state,
    operation,
)
from kvview.testing.supervision import watchdog
from kvview.testing.transfer.compute import GatedComputeStream
from kvview.testing.transfer.drawn_caches import Layout, layouts, make_caches, pages_of, tensors_of
from kvview.testing.transfer.drawn_jobs import (
    Jobs,
    bursts,
    jobs,
    jobs_that_name_twice,
    kernels,
    loads,
    new_ids,
    stores,
)
from kvview.testing.transfer.model import KERNELS, Part, Parts, Row, Slot, TransferModel
from kvview.transfer import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult

_FIRST_ID = 10
_OTHER_ID = 10**9  # never in flight
_UNKNOWN_IDS = (_OTHER_ID, -(10**6), 77777)
_NOT_IDS = (-1, "1", None, [1], 1 << 70)
_LATE_S = 3.0  # seconds: more than a call takes that does not wait

_NEW_ID = of_state(lambda self: new_ids(self.submitted))
_STORE = of_state(lambda self: stores(self.model))
_LOAD = of_state(lambda self: loads(self.model))
_JOB = of_state(lambda self: jobs(self.model))
_KERNELS = of_state(lambda self: kernels(self.model))


class TransferMachine(ContractMachine):
    """Submits jobs to one worker, lets compute and copies wait and fail, and shuts it down."""

    laws = tuple(f"XFER-{number}" for number in range(1, 7))
    needs: ClassVar[Needs] = {"XFER-6": (C.COMPUTE,)}

    def __init__(self) -> None:
        super().__init__()
        self._suite: Any = self.suite
        self.worker: Any = None

    @initialize(
        layout=layouts(),
        num_cpu_blocks=st.sampled_from((12, 48, 4)),
        blocks_per_chunk=st.sampled_from((1, 3)),
    )
    def start(self, layout: Layout, num_cpu_blocks: int = 12, blocks_per_chunk: int = 1) -> None:
        """Make KV caches with random bytes, and a worker."""
        import numpy as np  # numpy is installed with torch
        import torch

        self._end()
        self._sizes = layout, num_cpu_blocks, blocks_per_chunk
        self._stream = GatedComputeStream()
        stream = self._stream if self.can(C.COMPUTE) else None
        self.caches, self._storages = make_caches(layout, self._suite.device, stream)
        self.worker = self.call(self.suite, "make", self.caches, num_cpu_blocks, blocks_per_chunk)
        self._suite.worker = self.worker
        self._random = np.random.default_rng(0)
        gpu = [bytearray(self._random.bytes(len(storage))) for storage in self._storages]
        for storage, data in zip(self._storages, gpu, strict=True):
            storage.copy_(torch.frombuffer(data, dtype=torch.uint8))
        sizes = blocks_per_chunk, num_cpu_blocks
        self.model = TransferModel(tensors_of(layout), pages_of(layout), *sizes, gpu)
        self.last_id = _FIRST_ID
        self.submitted: list[int] = []
        """The jobs that may be in flight; those of the model are, which depends on threads."""
        self._kernels: list[tuple[Row, bytes]] = []

    @override
    def teardown(self) -> None:
        """Read the tier, which only loads show, unless the run has failed; end the worker."""
        try:
            if self.worker is not None and self.only_law is None and sys.exc_info()[0] is None:
                self.read_back()
                self.compare()
        finally:
            self._end()

    def _end(self) -> None:
        """End the worker's threads; an error in this step does not replace an earlier failure."""
        worker, self.worker = self.worker, None
        if worker is not None:
            with suppress(Exception):
                self.let_go()
            with suppress(Exception, watchdog.HookTimeout), watchdog.calling():
                worker.shutdown()

    # --- jobs ---

    @operation("XFER-1", job_id=_NEW_ID, parts=_STORE)
    def store(self, job_id: int | None, parts: Jobs) -> None:
        """Store blocks of some groups."""
        self.submit(True, _parts(parts), job_id)

    @operation("XFER-1", when=lambda m: m.model.tier, job_id=_NEW_ID, parts=_LOAD)
    def load(self, job_id: int | None, parts: Jobs) -> None:
        """Load blocks of some groups."""
        self.submit(False, _parts(parts), job_id)

    @operation("XFER-3", parts=_STORE, shift=st.integers(0, 69))
    def store_and_load(self, parts: Jobs, shift: int) -> None:
        """Store blocks, and load their pages into other blocks, without a wait."""
        stored = _parts(parts)
        is_accepted = self.submit(True, stored) is not None
        for group, part in stored.items() if is_accepted else ():
            size = self.model.num_blocks(group)
            into = [(block + shift) % size for block in part.blocks]
            self.submit(False, {group: replace(part, blocks=into)})

    @operation("XFER-1", job=of_state(lambda self: jobs_that_name_twice(self.model)))
    def name_twice(self, job: tuple[bool, Jobs]) -> None:
        """Name a destination twice, which is refused if both pages are in the same tensor."""
        is_store, parts = job
        self.submit(is_store, _parts(parts))

    @operation("XFER-3", first=_STORE, moves=of_state(lambda self: bursts(self.model)))
    def burst(self, first: Jobs, moves: Sequence[tuple[bool, int, int, int]]) -> None:
        """Submit many jobs over a few pages, after a larger job, without a wait."""
        self.submit(True, _parts(first))
        for is_store, group, block, chunk in moves:
            is_stored = (chunk, 0) in self.model.loadable(group)
            self.submit(is_store or not is_stored, {group: Part([block], [chunk])})

    @operation("XFER-1", blocks=_KERNELS)
    def compute(self, blocks: Mapping[int, Sequence[int]]) -> None:
        """Let the engine write blocks, except those that a job in flight touches."""
        for row, data in self._written(blocks):
            self._write_row(row, data)
            self.model.compute(row, data)

    @operation("XFER-5")
    def poll(self) -> None:
        """Take the available reports."""
        self.take_reports()

    @operation(
        "XFER-5",
        ids=of_state(
            lambda self: (
                st.just(list(self.submitted))
                | st.lists(st.sampled_from([*_UNKNOWN_IDS, *self.submitted]), unique=True)
            )
        ),
    )
    def wait(self, ids: Sequence[int]) -> None:
        """Wait for some jobs and unknown ids; the reports of the jobs must then be available."""
        self._resume()
        in_flight = self.model.jobs.keys() & set(ids)
        self.call(self.worker, "wait", list(ids))
        missing = sorted(in_flight.difference(self.take_reports()))
        self.equal(missing, [], "a job that was waited for is reported", "XFER-5")
        self.submitted = [one for one in self.submitted if one not in ids]

    @operation("XFER-1", when=lambda m: m.model.tier)
    def read_back(self) -> None:
        """Load all blocks that the tier holds, and compare them."""
        self.finish_all()
        for group in range(len(self.model.groups)):
            self._read_slots(group, sorted(self.model.loadable(group)))

    def _read_slots(self, group: int, slots: Sequence[Slot]) -> None:
        size = self.model.num_blocks(group)
        for at in range(0, len(slots), size):
            for block, (chunk, sub) in enumerate(slots[at : at + size]):
                self.submit(False, {group: Part([block], [chunk], sub)})
            self.finish_all()
            self.gpu_bytes()

    # --- delays of jobs ---

    @operation("XFER-5", C.PAUSE, when=lambda m: not m.model.held_by)
    def pause(self) -> None:
        """Delay copies."""
        self.finish_all()
        self.call(self.suite, "pause")
        self.model.held_by = "XFER-5"

    @operation("XFER-6", C.COMPUTE, when=lambda m: not m.model.held_by, blocks=_KERNELS, job=_JOB)
    def launch(self, blocks: Mapping[int, Sequence[int]], job: tuple[bool, Jobs]) -> None:
        """Start kernels that write blocks, and submit a job after them, with these blocks."""
        self.finish_all()
        self._stream.hold()
        self.model.held_by = "XFER-6"
        self._kernels = self._written(blocks)
        for row, data in self._kernels:
            self.model.write(KERNELS, row, data, "XFER-6")
        self.blame("XFER-6")
        is_store, drawn = job
        parts = _parts(drawn)
        for group, part in parts.items():
            written = [b for number, b in dict(self._kernels) if number in self.model.groups[group]]
            named = list(dict.fromkeys(written))[: len(part.blocks)]
            if len(named) == len(part.blocks):
                parts[group] = replace(part, blocks=named)
        self.submit(is_store, parts)
        self._pass_a_moment()
        self.take_reports()

    @operation("XFER-5", when=lambda m: m.model.held_by)
    def resume(self) -> None:
        """Let all delayed work end, after a comparison of the bytes."""
        self._resume()

    def _resume(self) -> None:
        if self.model.held_by:
            self._pass_a_moment()
            self.take_reports()
            self.gpu_bytes()
            self.let_go()

    # --- failures and refusals ---

    @operation("XFER-4", C.FAIL, job=_JOB)
    def fail_job(self, job: tuple[bool, Jobs]) -> None:
        """Let the copy of a job fail."""
        self._fail(*job)

    @operation("XFER-4", C.FAIL_BLOCK, parts=_STORE, at=st.integers(0, 39))
    def fail_block(self, parts: Jobs, at: int) -> None:
        """Let the copy of one GPU block of a store fail."""
        self._fail(True, parts, at)

    def _fail(self, is_store: bool, parts: Jobs, at: int | None = None) -> None:
        """Let the copy of a job fail, or that of one GPU block."""
        self.finish_all()
        owners = [group for group, (blocks, *_) in sorted(parts.items()) for _ in blocks]
        lost = [number for number, group in enumerate(owners) if self.model.groups[group]]
        if not lost:  # because a job without bytes cannot fail
            return
        if at is None:
            self.call(self.suite, "fail_next")
        else:
            lost = [lost[at % len(lost)]]
            self.call(self.suite, "fail_block", *lost)
        job_id = self.submit(is_store, _parts(parts))
        assert job_id is not None, "the job was drawn to be accepted"
        self.call(self.worker, "wait", [job_id])
        results = list(self.call(self.worker, "get_finished"))
        ids = [result.job_id for result in results]
        self.equal(ids, [job_id], "a failed job is reported", "XFER-4")
        slots = self.model.jobs[job_id].slots
        self.judge(self.model.failed(results[0], lost, self.bytes_now()), results[0])
        # The moved blocks may depend on threads, so they are read now, and no later job loads them.
        for group in parts:
            self._read_slots(group, [one for one in slots if one in self.model.loadable(group)])
        for slot in slots if is_store else ():
            self.model.tier.pop(slot, None)
        self.submitted.clear()

    @operation("XFER-1", parts=_STORE, at=st.integers(0, 39))
    def refuse(self, parts: Jobs, at: int) -> None:
        """Submit a wrong spec: a missing page, two sides that do not match, or an id in flight."""
        self.blame("XFER-1")
        gpu, tier = self.spec(True, _parts(parts))
        for spec in self._wrong_specs(gpu, _chunks(_parts(parts)), at):
            self._refuse(spec)
            self._refuse(spec[::-1])
        if self.model.jobs:
            self.blame("XFER-5")
            self._refuse((gpu, tier), next(iter(self.model.jobs)))

    def _wrong_specs(
        self, gpu: GPULoadStoreSpec, chunks: Sequence[int], at: int
    ) -> Iterator[tuple[Any, Any]]:
        tier = self.tier(chunks)
        no_block = max(tensor.num_blocks for tensor in self.model.tensors)
        yield gpu, self.tier(chunks[1:])
        yield gpu, self.tier([*chunks, at % self.model.num_chunks])
        one_more = [*gpu.group_sizes, 0], [*gpu.block_indices, 0]
        yield GPULoadStoreSpec(gpu.block_ids, *one_more), tier
        yield gpu, gpu
        yield tier, tier
        for wrong in (*_NOT_IDS, no_block, gpu.block_ids[0] + 0.5):
            yield replace(gpu, block_ids=_with(gpu.block_ids, at, wrong)), tier
        if not self.can(C.TIER_SPEC):  # with this capability, any page may exist
            for wrong in (*_NOT_IDS, self.model.num_chunks, chunks[0] + 0.5):
                yield gpu, self.tier(_with(chunks, at, wrong))

    # --- the end ---

    @operation("XFER-5", has_jobs=st.booleans(), parts=_STORE)
    def shutdown(self, has_jobs: bool, parts: Jobs) -> None:
        """Shut the worker down, perhaps with delayed jobs; afterwards no byte may be written."""
        if has_jobs and self.can(C.PAUSE) and not self.model.held_by:
            self.pause()
            self.submit(True, _parts(parts))
        self.blame("XFER-5")
        is_held = self.model.held_by == "XFER-5"
        if not is_held:
            self.let_go()
        resumed = threading.Timer(0.05, self._suite.resume if is_held else bool)
        resumed.start()  # because shutdown may wait for the jobs
        self.call(self.worker, "shutdown")
        before = [bytearray(one) for one in self.bytes_now()]
        self._nothing_is_written(before, 5)
        resumed.join()
        self.model.release()
        self._nothing_is_written(before, 20 if self.model.jobs else 1)
        self.take_reports()
        dropped = list(self.model.jobs)
        self.model.dropped()
        self.gpu_bytes()
        accepted = self.call(self.worker, "transfer_async", _OTHER_ID, self.spec(True, {}))
        self.equal(accepted, False, "no job is accepted after shutdown")
        self.call(self.worker, "wait", [*dropped, _OTHER_ID])
        self.call(self.worker, "shutdown")
        self.equal(list(self.call(self.worker, "get_finished")), [], "no report comes again")
        self.start(*self._sizes)

    def _nothing_is_written(self, before: list[bytearray], times: int) -> None:
        for _ in range(times):
            time.sleep(0.001)
            same = all(one == now for one, now in zip(before, self.bytes_now(), strict=True))
            self.true(same, "no byte is written after shutdown", "new bytes", "none", "XFER-5")

    # --- observables ---

    @observable("XFER-2")
    def gpu_bytes(self) -> None:
        """Compare every byte of every storage."""
        wrong = self.model.difference(self.bytes_now())
        if wrong is not None:
            law, where = wrong
            self.fail("the named pages are moved, and no others", where, "other bytes", law)

    # --- calls of several operations ---

    def bytes_now(self) -> list[memoryview]:
        """Return the bytes of every storage."""
        return [memoryview(storage.cpu().numpy()) for storage in self._storages]

    def tier(self, pages: Sequence[object]) -> LoadStoreSpec:
        """Return the spec that names pages of the tier."""
        if self.can(C.TIER_SPEC):
            return self.call(self.suite, "tier_spec", list(pages))  # type: ignore[no-any-return]
        return CPULoadStoreSpec(pages)  # type: ignore[arg-type]

    def spec(self, is_store: bool, parts: Parts) -> tuple[Any, Any]:
        """Return the source and the destination of a job."""
        groups = [parts.get(group, Part([], [])) for group in range(len(self.model.groups))]
        gpu = GPULoadStoreSpec(
            [block for part in groups for block in part.blocks],
            [len(part.blocks) for part in groups],
            [part.index for part in groups],
        )
        tier = self.tier(_chunks(parts))
        return (gpu, tier) if is_store else (tier, gpu)

    def submit(self, is_store: bool, parts: Parts, job_id: int | None = None) -> int | None:
        """Submit a job; the model decides whether the worker must refuse the job."""
        spec = self.spec(is_store, parts)
        if self.model.must_be_refused(is_store, parts):
            self._refuse(spec)
            return None
        job_id = self._new_id() if job_id is None else job_id
        late: list[bool] = []
        timer = None
        if self.model.held_by == "XFER-5":  # because a wait for earlier jobs would never end
            timer = threading.Timer(_LATE_S, self._resume_late, [late])
            timer.start()
        try:
            accepted = self.call(self.worker, "transfer_async", job_id, spec)
        finally:
            if timer is not None:
                timer.cancel()
        self.true(
            not late, "transfer_async does not wait for jobs", "it waited", "it returns", "XFER-5"
        )
        if accepted is False and self.model.jobs and not self.model.held_by:
            self.finish_all()  # a worker may be full
            accepted = self.call(self.worker, "transfer_async", job_id, spec)
        if accepted is False and self.model.held_by:
            return None
        self.equal(accepted, True, "an idle worker accepts a job", "XFER-5")
        self.model.submit(job_id, is_store, parts)
        self.submitted.append(job_id)
        return job_id

    def _new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def _resume_late(self, late: list[bool]) -> None:
        late.append(True)
        self._suite.resume()

    def _refuse(self, spec: Any, job_id: int = _OTHER_ID) -> None:
        self.refused(TransferSpecError, self.worker, "transfer_async", job_id, spec)

    def _written(self, blocks: Mapping[int, Sequence[int]]) -> list[tuple[Row, bytes]]:
        """Return the pages of blocks that no job in flight touches, with new bytes."""
        rows: list[tuple[Row, bytes]] = []
        for group, named in blocks.items():
            for block in named:
                pages = {(number, block): w for number, w in self.model.groups[group].items()}
                if not any(self.model.touched[row] or row in self.model.pending for row in pages):
                    rows += [(row, self._random.bytes(width)) for row, width in pages.items()]
        return rows

    def _write_row(self, row: Row, data: bytes) -> None:
        """Write the first bytes of a GPU page, as a kernel does."""
        import torch

        storage, span = self.model.span(row, len(data))
        self._storages[storage][span] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def take_reports(self) -> list[int]:
        """Take the available reports; returns the ids of the reported jobs."""
        results: list[TransferResult] = list(self.call(self.worker, "get_finished"))
        for result in results:
            self.judge(self.model.reported(result), result)
        return [result.job_id for result in results]

    def _pass_a_moment(self) -> None:
        """Give the worker's threads some time, and more time to repeat a failure."""
        time.sleep(0.01 if self.found else 0.001)

    def finish_all(self) -> None:
        """Wait for every job, and check that each job is reported."""
        self._resume()
        self.call(self.worker, "wait", list(self.model.jobs))
        self.take_reports()
        left = sorted(self.model.jobs)
        self.equal(left, [], "each accepted job is reported", "XFER-5")
        self.submitted.clear()

    def let_go(self) -> None:
        """Let delayed copies and compute end."""
        held_by = self.model.held_by
        for row, data in self._kernels:
            self._write_row(row, data)
        self._kernels = []
        self.model.release()
        if held_by == "XFER-5":
            self.call(self.suite, "resume")
        elif held_by:
            self._stream.release()


def _parts(jobs: Jobs) -> dict[int, Part]:
    return {group: Part(*part) for group, part in jobs.items()}


def _chunks(parts: Parts) -> list[int]:
    return [chunk for _, part in sorted(parts.items()) for chunk in part.chunks]


def _with(ids: Sequence[int], at: int, wrong: object) -> list[Any]:
    """Return the ids, with one id replaced by ``wrong``."""
    at %= len(ids)
    return [*ids[:at], wrong, *ids[at + 1 :]]
