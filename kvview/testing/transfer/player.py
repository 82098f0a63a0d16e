"""The operations of the transfer contract, which run on a worker and on its model."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import ConfigError, TransferSpecError
from kvview.testing.harness import Capability as C
from kvview.testing.search import Label, check_by_search, observable, operation
from kvview.testing.transfer.caches import wrong_caches
from kvview.testing.transfer.model import KERNELS, Part, Parts
from kvview.testing.transfer.moves import TransferMoves
from kvview.transfer import GPULoadStoreSpec

_NOT_IDS = (-1, "1", None, [1], 1 << 70)
_MANY = 1500  # jobs


@check_by_search
class TransferPlayer(TransferMoves):
    """Plays jobs, compute, failures and the end of one worker, and compares every byte."""

    first_moves = ("store", "load")
    labels: ClassVar[Mapping[str, Label]] = {
        "XFER-1": Label("Bytes are exact; a spec that does not fit is refused and moves no bytes."),
        "XFER-2": Label("No byte outside the named pages is written."),
        "XFER-3": Label("Jobs that touch the same page run in the order of submission."),
        "XFER-4": Label("A failed job is reported as failed, with the blocks that were moved."),
        "XFER-5": Label(
            "Submission does not wait; a job is reported once; shutdown ends all jobs."
        ),
        "XFER-6": Label("Jobs run after the compute that was launched before them.", (C.COMPUTE,)),
        "XFER-7": Label(
            "KV caches that cannot be moved exactly are refused at once.", (C.WORKERS,)
        ),
    }

    # --- jobs ---

    @override
    def play(self, moves: Sequence[tuple[str, int]]) -> None:
        if self.can(C.WORKERS) and not self.plan.is_small and self.rng.random() < 0.4:
            self.make_worker()
        super().play(moves)
        if not self.is_over:  # because only loads show the content of the tier
            self.read_back()
            self.compare()

    @operation("XFER-1", weight=5)
    def store(self) -> None:
        """Store blocks of some groups."""
        self.submit(True, self.draw_store(self.most))

    @operation("XFER-1", weight=5)
    def load(self) -> None:
        """Load blocks of some groups."""
        self.submit(False, self.draw_load(self.most))

    @operation("XFER-1", weight=2)
    def name_twice(self) -> None:
        """Name a page twice, which is allowed for a source and refused for a destination."""
        is_store = self.rng.random() < 0.5
        parts = self.draw_store(self.most) if is_store else self.draw_load(self.most)
        if not parts:
            return
        group, other = self.rng.choices(list(parts), k=2)
        part, source = parts[group], parts[other]
        named = list(part.chunks if is_store else part.blocks)
        twice = self.rng.choice(source.chunks if is_store else source.blocks)
        named[self.rng.randrange(len(named))] = twice
        changed = replace(part, chunks=named) if is_store else replace(part, blocks=named)
        self.submit(is_store, {**parts, group: changed})

    @operation("XFER-3", weight=2)
    def burst(self) -> None:
        """Submit many jobs over a few pages, between large jobs, without a wait."""
        group = self.rng.randrange(len(self.model.groups))
        blocks = self.rng.choices(range(self.model.num_blocks(group)), k=2)
        chunks = self.rng.sample(range(self.num_chunks), 2)
        if self.rng.random() < 0.5:
            self.submit(True, self.draw_store(40))
        for _ in range(self.rng.choice((3, 8, 30))):
            chunk, block = self.rng.choice(chunks), self.rng.choice(blocks)
            can_load = (chunk, 0) in self.model.loadable(group)
            is_store = not can_load or self.rng.random() < 0.5
            self.submit(is_store, {group: Part([block], [chunk])})

    @operation("XFER-1")
    def name_by_numpy(self) -> None:
        """Pass block ids as arrays, which must be accepted, or refused before any byte is moved."""
        import numpy as np

        parts = self.draw_load(self.most)
        tier, gpu = self.spec(False, parts)
        dtype = self.rng.choice((np.int64, np.int32, np.uint16))
        self.give_name(np, "np", "import numpy as np")
        blocks = np.array(gpu.block_ids, dtype)
        gpu = replace(gpu, block_ids=self.rng.choice((blocks, list(blocks))))
        if self.rng.random() < 0.5:
            sides = ("group_sizes", "block_indices")
            gpu = replace(
                gpu, **{name: list(np.array(getattr(gpu, name), dtype)) for name in sides}
            )
        job_id = self.new_id()
        try:
            is_accepted = self.subject.transfer_async(job_id, (tier, gpu))
        except TransferSpecError:
            return
        except Exception as error:
            self.fail(
                "arrays are accepted as ids, or refused", repr(error), "TransferSpecError at most"
            )
        self.line(f"worker.transfer_async({job_id}, {(tier, gpu)})")
        if is_accepted:
            self.model.submit(job_id, False, parts)

    @operation("XFER-1", weight=2)
    def compute(self) -> None:
        """Let the engine write blocks that no job in flight touches."""
        for row, data in self.draw_kernels():
            self.write_row(row, data)
            self.model.compute(row, data)

    @operation("XFER-5", weight=3)
    def poll(self) -> None:
        """Take the available reports."""
        self.take_reports()

    @operation("XFER-5", weight=3)
    def wait(self) -> None:
        """Wait for some jobs and unknown ids; the reports of the jobs must then be available."""
        if self.model.held_by:
            self.resume_all()
        jobs = [job_id for job_id in self.model.jobs if self.rng.random() < 0.6]
        unknown = self.rng.sample((10**9, -(10**6), 77777), self.rng.randint(0, 2))
        ids = [*jobs, *unknown]
        self.rng.shuffle(ids)
        self.call(self.subject, "wait", ids)
        found = self.take_reports()
        missing = sorted(set(jobs) - set(found))
        self.equal(missing, [], "a job that was waited for is reported", "XFER-5")

    @operation("XFER-1", weight=1)
    def read_back(self) -> None:
        """Load all blocks that the tier holds, and compare them."""
        self.finish_all()
        for group in range(len(self.model.groups)):
            slots = sorted(self.model.loadable(group))
            size = self.model.num_blocks(group)
            for at in range(0, len(slots), size):
                for block, (chunk, sub) in enumerate(slots[at : at + size]):
                    self.submit(False, {group: Part([block], [chunk], sub)})
                self.finish_all()
                self.gpu_bytes()

    @operation("XFER-5", weight=0.1)
    def flood(self) -> None:
        """Submit more jobs than a worker may accept before it reports; it may refuse at once."""
        self.finish_all()
        parts = self.draw_load(1)
        spec = self.spec(False, parts)
        if self.is_own and self.can(C.PAUSE) and self.rng.random() < 0.5:
            self.pause()
        with self.unrecorded():
            for job_id in range(10**6, 10**6 + _MANY):
                if not self.call(self.subject, "transfer_async", job_id, spec):
                    break
                self.model.submit(job_id, False, parts)
        self.finish_all()

    # --- delays of jobs ---

    @operation("XFER-5", C.PAUSE, weight=2)
    def pause(self) -> None:
        """Delay copies."""
        if self.is_own and not self.model.held_by:
            self.finish_all()
            self.call(self.harness, "pause")
            self.model.held_by = "XFER-5"

    @operation("XFER-6", C.COMPUTE, weight=3)
    def launch(self) -> None:
        """Start kernels that write blocks, and submit a job after them."""
        if self.model.held_by:
            return
        self.finish_all()
        if self.is_own:
            self.call(self.harness, "hold_compute")
        else:
            self.call(self.caches.compute_stream, "hold")
        self.model.held_by = "XFER-6"
        self.kernels = self.draw_kernels()
        for row, data in self.kernels:
            self.model.write(KERNELS, row, data, "XFER-6")
        self.blame("XFER-6")
        is_store, parts = self._draw_any()
        for group, part in parts.items():  # the job reads or writes blocks that kernels write
            written = [b for number, b in dict(self.kernels) if number in self.model.groups[group]]
            if len(written) >= len(part.blocks):
                blocks = list(dict.fromkeys(written))[: len(part.blocks)]
                parts[group] = replace(part, blocks=blocks)
        self.submit(is_store, parts)
        self.pass_a_moment()
        self.take_reports()

    # --- failures and refusals ---

    def _fail(self, is_store: bool, parts: Parts, lost: Sequence[int] | None = None) -> None:
        job_id = self.submit(is_store, parts)
        assert job_id is not None, "it was drawn to be accepted"
        self.call(self.subject, "wait", [job_id])
        results = list(self.call(self.subject, "get_finished"))
        ids = [result.job_id for result in results]
        self.equal(ids, [job_id], "a failed job is reported", "XFER-4")
        lost = range(len(self.model.jobs[job_id].slots)) if lost is None else lost
        self.judge(self.model.failed(results[0], lost, self.bytes_now()), results[0])

    def _draw_any(self) -> tuple[bool, dict[int, Part]]:
        """Draw a load or a store."""
        load = self.draw_load(self.most)
        if load and self.rng.random() < 0.5:
            return False, load
        return True, self.draw_store(self.most)

    @operation("XFER-4", C.FAIL)
    def fail_copy(self) -> None:
        """Let the copy of a job fail."""
        if self.is_own:
            self.finish_all()
            is_store, parts = self._draw_any()
            self.call(self.harness, "fail_next")
            self._fail(is_store, parts)

    @operation("XFER-4", C.FAIL_BLOCK)
    def fail_one(self) -> None:
        """Let the copy of one GPU block of a store fail."""
        if self.is_own:
            self.finish_all()
            parts = self.draw_store(self.most)
            lost = self.rng.randrange(sum(len(part.blocks) for part in parts.values()))
            self.call(self.harness, "fail_block", lost)
            self._fail(True, parts, [lost])

    @operation("XFER-4", C.COMPUTE_FAILS)
    def fail_stream(self) -> None:
        """Let compute fail, after which no block may be moved, because its bytes are unknown."""
        self.finish_all()
        is_store, parts = self._draw_any()
        when = self.rng.choice(("mark", "wait"))
        if self.is_own:
            self.call(self.harness, "fail_compute", when)
        else:
            self.call(self.caches.compute_stream, "fail", when)
        self._fail(is_store, parts)

    @operation("XFER-1", weight=2)
    def refuse(self) -> None:
        """Submit a wrong spec: a missing page, two sides that do not match, or an id in flight."""
        self.blame("XFER-1")
        parts = self.draw_store(self.most)
        gpu, tier = self.gpu_side(parts), self.tier_side(parts)
        chunks = [chunk for part in parts.values() for chunk in part.chunks]
        no_block = max(tensor.num_blocks for tensor in self.model.tensors)
        one_more = [*gpu.group_sizes, 0], [*gpu.block_indices, 0]
        wrong_specs: list[tuple[Any, Any]] = [
            (gpu, self.tier(chunks[1:])),
            (gpu, self.tier([*chunks, self.rng.randrange(self.num_chunks)])),
            (GPULoadStoreSpec(gpu.block_ids, *one_more), tier),
            (gpu, gpu),
            (tier, tier),
        ]
        for wrong in (*_NOT_IDS, no_block, gpu.block_ids[0] + 0.5):
            wrong_specs.append((replace(gpu, block_ids=self._with(gpu.block_ids, wrong)), tier))
        if not self.can(C.TIER_SPEC):  # without this check, any page may exist
            for wrong in (*_NOT_IDS, self.num_chunks, chunks[0] + 0.5):
                wrong_specs.append((gpu, self.tier(self._with(chunks, wrong))))
        for src, dst in wrong_specs:
            self.refuse_spec((src, dst) if self.rng.random() < 0.5 else (dst, src))
        if self.model.jobs:
            self.blame("XFER-5")
            self.refuse_spec((gpu, tier), self.rng.choice(list(self.model.jobs)))

    def _with(self, ids: Sequence[int], wrong: object) -> list[Any]:
        """Return the ids, with one id replaced by ``wrong``."""
        at = self.rng.randrange(len(ids))
        return [*ids[:at], wrong, *ids[at + 1 :]]

    @operation("XFER-7", C.WORKERS, weight=0.5)
    def refuse_caches(self) -> None:
        """Make a worker with KV caches or a tier size that it must refuse."""
        for what, caches, num_chunks in wrong_caches(self.rng, self.caches):
            code = f"h.with_caches(kv_caches, {num_chunks})  # {what}"
            self.refuses(ConfigError, code, partial(self.harness.with_caches, caches, num_chunks))

    # --- the end ---

    @operation("XFER-5", weight=0.3)
    def shutdown(self) -> None:
        """Shut the worker down with jobs in flight; afterwards no byte may be written."""
        if self.can(C.PAUSE) and self.rng.random() < 0.7:
            self.pause()
            self.load()
        self.blame("XFER-5")
        is_held = self.model.held_by == "XFER-5"
        if not is_held:
            self.let_go()
        resumed = threading.Timer(0.05, self.harness.resume if is_held else bool)
        resumed.start()  # because shutdown may wait for the jobs
        self.call(self.subject, "shutdown")
        before = [bytearray(one) for one in self.bytes_now()]
        self._nothing_is_written(before, 5)
        resumed.join()
        self.model.release()
        self._nothing_is_written(before, 20 if self.model.jobs else 1)
        self.take_reports()
        dropped = list(self.model.jobs)
        self.model.dropped()
        self.gpu_bytes()
        accepted = self.call(self.subject, "transfer_async", 10**9, self.spec(True, {}))
        self.equal(accepted, False, "no job is accepted after shutdown")
        self.call(self.subject, "wait", [*dropped, 10**9])
        self.call(self.subject, "shutdown")
        self.equal(list(self.call(self.subject, "get_finished")), [], "no report comes again")
        if self.can(C.HOST_BYTES):
            self.equal(self.read(self.subject, "host_bytes"), 0, "shutdown frees the tier")
        self.is_over = True

    def _nothing_is_written(self, before: list[bytearray], times: int) -> None:
        for _ in range(times):
            time.sleep(0.001)
            same = all(one == now for one, now in zip(before, self.bytes_now(), strict=True))
            self.true(same, "no byte is written after shutdown", "new bytes", "none", "XFER-5")

    # --- observables ---

    @observable("XFER-5", C.HOST_BYTES)
    def host_bytes(self) -> None:
        """Compare the host memory of the tier."""
        number = self.read(self.subject, "host_bytes")
        self.true(number > 0, "the tier takes host memory", number, "more than 0")
