"""The calls of a worker, with its KV caches and the model of all bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from typing_extensions import override

from kvview.errors import TransferSpecError
from kvview.testing.harness import Capability as C
from kvview.testing.search import Player, observable, operation
from kvview.testing.transfer.caches import draw_caches, layout_of
from kvview.testing.transfer.model import Part, Parts, TransferModel
from kvview.testing.watchdog import HookTimeout
from kvview.transfer import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult

_LARGE = 1 << 40  # an id that does not fit into 32 bits
_LATE_S = 3.0  # seconds: more than a call takes that does not wait


class TransferMoves(Player):
    """Submits jobs to one worker, and compares the reports and every byte."""

    contract = "transfer"
    subject_name = "worker"
    is_timed = True

    @override
    def start(self) -> None:
        import torch  # imported here, because only a check of a worker needs it

        self._torch = torch
        self._next_job = 3
        self._workers = [self.subject]
        self.is_own = True
        """Whether the worker is the harness's own, whose copies can be delayed and fail."""
        self.num_chunks, self.k = self.harness.num_cpu_blocks, self.harness.blocks_per_chunk
        self.caches = self.harness.kv_caches
        self._fill()

    def start_again(self) -> None:
        """Continue with a new harness, whose threads start at this point."""
        self.end()
        self.harness = self._factory()
        self.subject = self.harness.worker
        self._names |= {id(self.harness): "h", id(self.subject): "worker"}
        self.start()

    def make_worker(self) -> None:
        """Continue with a worker over KV caches of other shapes."""
        seed = self.rng.getrandbits(32)
        self.caches = draw_caches(seed)
        self.num_chunks, self.k = self.rng.choice((4, 12, 40)), 1
        line = f"kv_caches = draw_caches({seed})"
        place = "from kvview.testing.transfer.caches import draw_caches"
        self.give_name(self.caches, "kv_caches", f"{place}\n{line}")
        self.subject = self.call(self.harness, "with_caches", self.caches, self.num_chunks)
        self.name(self.subject, "worker")
        self.give_name(self.caches.compute_stream, "stream", "stream = kv_caches.compute_stream")
        self._workers.append(self.subject)
        self.is_own = False
        self._fill()

    def _fill(self) -> None:
        """Fill every storage with bytes, and make the model."""
        import numpy as np  # numpy is installed with torch

        self._flat: list[Any] = []
        gpu = []
        layouts, storages, groups = layout_of(self.caches)
        bits = np.random.default_rng(self.plan.seed)
        for storage in storages:
            device = storage.device
            flat = self._torch.empty(0, dtype=self._torch.uint8, device=device).set_(storage)
            data = bytearray(bits.bytes(len(flat)))
            flat.copy_(self._torch.frombuffer(data, dtype=self._torch.uint8))
            self._flat.append(flat)
            gpu.append(data)
        self.model = TransferModel(layouts, groups, self.k, self.num_chunks, gpu)
        self.kernels: list[tuple[tuple[int, int], bytes]] = []

    def bytes_now(self) -> list[memoryview]:
        """Return the bytes of every storage."""
        return [memoryview(flat.cpu().numpy()) for flat in self._flat]

    @override
    def end(self) -> None:
        """End the worker's threads; an error in this step does not replace an earlier failure."""
        with suppress(Exception):
            self.let_go()
        for worker in self._workers:
            with suppress(Exception, HookTimeout):
                worker.shutdown()

    # --- draws ---

    def draw_store(self, most: int) -> dict[int, Part]:
        """Draw blocks and pages for some groups; a GPU block may occur twice."""
        free = self.rng.sample(range(self.num_chunks), self.num_chunks)
        parts = {}
        for group in self.some_groups():
            index = self.rng.randrange(3 * self.k)
            slots = [(chunk, at) for chunk in free for at in range(self.k)][index % self.k :]
            blocks = range(self.model.num_blocks(group))
            number = min(self.rng.randint(1, min(most, len(blocks))), len(slots))
            draw = self.rng.choices if self.rng.random() < 0.2 else self.rng.sample
            chunks = list(dict.fromkeys(chunk for chunk, _ in slots[:number]))
            free = free[len(chunks) :]
            if number:
                parts[group] = Part(self._in_rows(draw(blocks, k=number)), chunks, index)
        return parts

    def _in_rows(self, named: list[int]) -> list[int]:
        """Return the blocks, sometimes in the order of their numbers."""
        return sorted(named) if self.rng.random() < 0.3 else named

    def some_groups(self) -> list[int]:
        """Draw at least one KV-cache group."""
        groups = list(range(len(self.model.groups)))
        return [group for group in groups if self.rng.random() < 0.6] or [self.rng.choice(groups)]

    def draw_load(self, most: int) -> dict[int, Part]:
        """Draw stored slots to load into any blocks; a page of the tier may occur twice."""
        parts = {}
        taken: set[tuple[int, int]] = set()
        for group in self.some_groups():
            held = self.model.loadable(group)
            if not held:
                continue
            tensors = self.model.groups[group]
            blocks = range(self.model.num_blocks(group))
            free = [b for b in blocks if taken.isdisjoint((number, b) for number in tensors)]
            chunk, sub = self.rng.choice(held)
            begins = [one for one, at in held if at == 0]
            chunks = [chunk, *self.rng.choices(begins or [chunk], k=most)]
            slots = [(one, at) for one in chunks for at in range(self.k)][sub:]
            slots = [*takewhile(set(held).__contains__, slots)][: min(most, len(free))]
            if slots:
                blocks_of_load = self._in_rows(self.rng.sample(free, len(slots)))
                chunks = chunks[: -(-(sub + len(slots)) // self.k)]
                index = sub + self.k * self.rng.randrange(3)
                parts[group] = Part(blocks_of_load, chunks, index)
                taken.update((one, block) for one in tensors for block in blocks_of_load)
        return parts

    def draw_kernels(self) -> list[tuple[tuple[int, int], bytes]]:
        """Draw GPU pages that no job in flight touches, and new bytes for them."""
        rows = []
        for group in self.some_groups():
            blocks = range(self.model.num_blocks(group))
            for block in self.rng.sample(blocks, min(len(blocks), self.rng.randint(1, self.most))):
                pages = {(number, block): w for number, w in self.model.groups[group].items()}
                if not any(self.model.touched[row] or row in self.model.pending for row in pages):
                    rows += [(row, self.rng.randbytes(width)) for row, width in pages.items()]
        return rows

    # --- jobs and kernels ---

    def tier(self, pages: Sequence[object]) -> LoadStoreSpec:
        """Return the spec that names pages of the tier."""
        if not self.can(C.TIER_SPEC):
            return CPULoadStoreSpec(pages)  # type: ignore[arg-type]
        spec: LoadStoreSpec = self.harness.tier_spec(list(pages))
        self._names[id(spec)] = f"h.tier_spec({list(pages)})"
        self._kept.append(spec)
        return spec

    def gpu_side(self, parts: Parts) -> GPULoadStoreSpec:
        """Return the GPU side of a job."""
        groups = [parts.get(group, Part([], [])) for group in range(len(self.model.groups))]
        return GPULoadStoreSpec(
            [block for part in groups for block in part.blocks],
            [len(part.blocks) for part in groups],
            [part.index for part in groups],
        )

    def tier_side(self, parts: Parts) -> LoadStoreSpec:
        """Return the tier side of a job."""
        return self.tier([chunk for _, part in sorted(parts.items()) for chunk in part.chunks])

    def spec(self, is_store: bool, parts: Parts) -> tuple[Any, Any]:
        """Return the source and the destination of a job."""
        gpu, tier = self.gpu_side(parts), self.tier_side(parts)
        return (gpu, tier) if is_store else (tier, gpu)

    def new_id(self) -> int:
        """Draw an id that no job in flight has; ids of reported jobs may be used again."""
        again: int = self.rng.choice((*range(-3, 4), _LARGE, -_LARGE))
        if again not in self.model.jobs and self.rng.random() < 0.3:
            return again
        self._next_job += 1
        return self._next_job

    def submit(self, is_store: bool, parts: Parts, spec: Any = None) -> int | None:
        """Submit a job; the model decides whether the worker must refuse the job."""
        spec = self.spec(is_store, parts) if spec is None else spec
        if self.model.must_be_refused(is_store, parts):
            self.refuse_spec(spec)
            return None
        job_id = self.new_id()
        late: list[bool] = []
        timer = None
        if self.model.held_by == "XFER-5":  # because a wait for earlier jobs would never end
            timer = threading.Timer(_LATE_S, self._resume_late, [late])
            timer.start()
        try:
            accepted = self.call(self.subject, "transfer_async", job_id, spec)
        finally:
            if timer is not None:
                timer.cancel()
        self.true(
            not late, "transfer_async does not wait for jobs", "it waited", "it returns", "XFER-5"
        )
        if accepted is False and self.model.jobs and not self.model.held_by:
            self.finish_all()  # a worker may be full
            accepted = self.call(self.subject, "transfer_async", job_id, spec)
        if accepted is False and self.model.held_by:
            return None
        self.equal(accepted, True, "an idle worker accepts a job", "XFER-5")
        self.model.submit(job_id, is_store, parts)
        return job_id

    def _resume_late(self, late: list[bool]) -> None:
        late.append(True)
        self.harness.resume()

    def refuse_spec(self, spec: Any, job_id: int | None = None) -> None:
        """Submit a job that must be refused."""
        job_id = 10**9 if job_id is None else job_id
        self.refused(TransferSpecError, self.subject, "transfer_async", job_id, spec)

    def write_row(self, row: tuple[int, int], data: bytes) -> None:
        """Write the first bytes of a GPU page, as a kernel does."""
        storage, span = self.model.span(row, len(data))
        buffer = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        self._flat[storage][span] = buffer.to(self._flat[storage].device)

    # --- reports, and delays of reports ---

    def take_reports(self) -> list[int]:
        """Take the available reports; returns the ids of the reported jobs."""
        results: list[TransferResult] = list(self.call(self.subject, "get_finished"))
        for result in results:
            self.judge(self.model.reported(result), result)
        return [result.job_id for result in results]

    def pass_a_moment(self) -> None:
        """Give the worker's threads some time, and more time in a script, which runs only once."""
        time.sleep(0.1 if self.is_recording else 0.001)

    def finish_all(self) -> None:
        """Wait for every job, and check that each job is reported."""
        self.resume_all()
        self.call(self.subject, "wait", list(self.model.jobs))
        self.take_reports()
        left = sorted(self.model.jobs)
        self.equal(left, [], "each accepted job is reported", "XFER-5")

    @operation("XFER-5", weight=2)
    def resume_all(self) -> None:
        """Let all delayed work end, sometimes after a comparison of the bytes."""
        if not self.model.held_by:
            return
        if self.rng.random() < 0.7:
            self.pass_a_moment()
            self.take_reports()
            self.gpu_bytes()
        self.let_go()

    def let_go(self) -> None:
        """Let delayed copies and compute end."""
        held_by = self.model.held_by
        for row, data in self.kernels:
            self.write_row(row, data)
        self.kernels = []
        self.model.release()
        if held_by == "XFER-5":
            self.call(self.harness, "resume")
        elif held_by and self.is_own:
            self.call(self.harness, "release_compute")
        elif held_by:
            self.call(self.caches.compute_stream, "release")

    @observable("XFER-2")
    def gpu_bytes(self) -> None:
        """Compare every byte of every storage."""
        wrong = self.model.difference(self.bytes_now())
        if wrong is not None:
            law, where = wrong
            self.fail("the named pages are moved, and no others", where, "other bytes", law)
