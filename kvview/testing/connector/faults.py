"""Faults between an engine and the worker half of a connector.

Mocks that complete at once hide most bugs (vLLM #46014). Here a job is late
unless its fate says otherwise: it lies between the engine and the real worker
half, moves its bytes some steps later, is reported some steps after that, out of
order, as a failure, or when nothing else is left. The real worker half is waited
for when it moves bytes, so that no thread's timing decides anything.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat, takewhile
from typing import Any, Protocol

import torch
from typing_extensions import override

from kvview import (
    CanonicalKVCaches,
    ComputeEvent,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadKey,
    StepPlan,
    TransferJob,
    TransferResult,
    WorkerConnector,
)
from kvview.testing.connector.hook_calls import calling, hook, require_type
from kvview.testing.connector.invariants import InvariantBroken, short
from kvview.testing.connector.scenario import Fate
from kvview.testing.connector.stream import StepStream

_JUNK = 0x5A
_MUCH_LATER = 1_000  # steps
_REMEMBERED_STORES = 8  # of a page, to tell what became of its bytes
_Page = tuple[str, int | None]  # of a medium; None for all of it


class Pool(Protocol):
    """What the wrapper may ask the engine about blocks."""

    def is_free(self, block_id: int) -> bool:
        """Whether nobody refers to a block."""

    def is_held(self, block_id: int) -> bool:
        """Whether a connector holds a block."""

    def hashes(self, block_id: int) -> tuple[OffloadKey, ...]:
        """What a block holds: the keys of the KV that is computed in it, and whole."""

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Per block of a request that waits for loads, what must come into it."""

    def blocks_to_load(self) -> set[int]:
        """What loads in flight write, whichever connector's they are."""


class JobWatch(Protocol):
    """Who hears of jobs."""

    def on_started(self, flight: Flight) -> None:
        """A job begins."""

    def on_reported(self, flight: Flight, success: bool) -> None:
        """A job is reported; the engine hears of it afterwards."""


@dataclass(eq=False)
class Flight:
    """A job between its start and its report."""

    job: TransferJob
    is_load: bool
    fate: Fate
    gpu_blocks: list[int]
    keys: set[OffloadKey]  # what the source blocks of a store hold
    source: list[torch.Tensor]  # and their bytes, tensor by tensor; of a load, what it overwrites
    reads: set[_Page]
    writes: set[_Page]
    mark: ComputeEvent | None = None  # in the compute stream, before the job (XFER-6)
    age: int = 0
    result: TransferResult | None = None
    keys_of: dict[int, tuple[OffloadKey, ...]] = field(default_factory=dict)  # by source block
    num_moved: int = 0  # blocks, the first ones, of a store that is to fail

    @property
    def is_ready(self) -> bool:
        """Whether what was launched before it has been computed."""
        return self.mark is None or self.mark.query()

    @property
    def stored_keys(self) -> set[OffloadKey]:
        """What a store that is over has brought: all, nothing, or what it says was moved."""
        if self.result is None or self.result.success:
            return self.keys if self.result else set()
        moved = zip(self.gpu_blocks, self.result.moved or (), strict=False)
        return {key for block, is_moved in moved if is_moved for key in self.keys_of[block]}

    @property
    def spoilt(self) -> list[int]:
        """The GPU blocks that do not arrive, or are not what arrives."""
        moved = {"ok": len(self.gpu_blocks), "half": len(self.gpu_blocks) // 2, "none": 0}
        return self.gpu_blocks[moved[self.fate.outcome] :]


@dataclass(eq=False)
class Unit:
    """Jobs whose bytes move together."""

    plan: StepPlan
    flights: list[Flight]
    has_moved: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is jobs and nothing else."""
        return _is_plain(self.plan)

    @property
    def is_due(self) -> bool:
        """Whether it is time."""
        if self.has_moved or not self.flights:
            return not self.has_moved
        first = self.flights[0]
        return first.is_ready and first.age >= first.fate.move_after

    @property
    def goes_well(self) -> bool:
        """Whether it is one job, and nothing of it is to fail."""
        return [flight.fate.outcome for flight in self.flights] == ["ok"]


class FaultyWorker(WorkerConnector):
    """A worker half whose jobs go as their fates say.

    1. A job moves when what was launched before it is computed (XFER-6), so the real worker
       half needs no stream. Those that touch the same page move their bytes in the order in
       which they were planned; all others may overtake each other. A load and a store of
       one page of the tier may be started both before either is waited for, and the real
       worker half keeps their order (XFER-3).
    2. A plan of a class of its own may carry more than its jobs: all of it starts
       at once, as late as its first job and after the plans before it, whatever becomes of
       the jobs, and only the reports go separate ways.
    3. ``wait`` does nothing: a job is as late as its fate says, and the engine has
       to live with it. The last ones come after :meth:`release_lost`.

    Args:
        inner: The real worker half.
        fates: Of the jobs by the order of their start; several workers may draw from one.
        fate_of_load: What a fate is when it falls to a load.
        pool: For questions about blocks.
        watch: Hears of each job.
        stream: The engine's compute, when it lags.
    """

    def __init__(
        self,
        inner: WorkerConnector,
        fates: Iterator[Fate],
        fate_of_load: Callable[[Fate], Fate],
        pool: Pool,
        watch: JobWatch,
        stream: StepStream | None = None,
    ) -> None:
        self._inner = inner
        self._fates = fates
        self._fate_of_load = fate_of_load
        self._pool = pool
        self._watch = watch
        self._stream = stream
        self._flights: dict[int, Flight] = {}
        self._units: list[Unit] = []
        self._tensors: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []  # memory that is used again: a clone costs more
        self._is_lost_over = False
        self._stored: defaultdict[int, deque[Flight]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED_STORES)
        )
        self.num_reported = 0
        self.not_waited_for: list[int] = []  # jobs that go on though ``wait`` has returned

    @property
    def num_in_flight(self) -> int:
        """Jobs that are not reported yet."""
        return len(self._flights)

    def unreported(self) -> list[int]:
        """Jobs that the real worker half started and does not report."""
        flights = [flight for unit in self._units if unit.has_moved for flight in unit.flights]
        return [flight.job.job_id for flight in flights if not flight.result]

    def stores_in_flight(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Stores that are not reported yet, each with the blocks that it reads."""
        for flight in self._flights.values():
            if not flight.is_load:
                yield flight.job.job_id, flight.gpu_blocks

    def blocks_to_load(self) -> set[int]:
        """What loads that are not reported yet write."""
        return _blocks_of_loads(self._flights.values())

    def release_lost(self) -> None:
        """Report lost jobs from now on, and forget what is left of the fates."""
        self._is_lost_over = True
        self._fates = iter(())

    def hold(self) -> None:
        """Move what begins from now on so late that the engine ends before."""
        self._fates = repeat(Fate(_MUCH_LATER, _MUCH_LATER))

    # --- the worker half ---

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        self._look_at([cache.tensor for cache in kv_caches.tensors])
        self._call("register_kv_caches", kv_caches)

    def _look_at(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = [tensor.clone() for tensor in tensors]

    @override
    def start_plan(self, plan: StepPlan) -> None:
        with hook("pickling the plan", "CONN-3"):
            plan = pickle.loads(pickle.dumps(plan))
        self._note_sources()
        flights = [self._begin(job, True, plan) for job in plan.loads]
        flights += [self._begin(job, False, plan) for job in plan.stores]
        for flight in flights:
            self._flights[flight.job.job_id] = flight
            self._watch.on_started(flight)
        self._submit(plan, flights)

    def _submit(self, plan: StepPlan, flights: list[Flight]) -> None:
        """Have a plan run."""
        if _is_plain(plan):
            for flight in flights:
                jobs = [flight.job]
                own = StepPlan(jobs, []) if flight.is_load else StepPlan([], jobs)
                self._units.append(Unit(own, [flight]))
        else:  # with or without jobs, after what was planned before
            self._units.append(Unit(plan, flights))
        self._move_due()

    @override
    def get_finished(self) -> list[TransferResult]:
        for flight in self._flights.values():
            flight.age += 1
        self._note_sources()
        self._check_held()
        self._move_due()
        self._poll()
        results = []
        for flight in list(self._flights.values())[::-1]:  # the last started first
            is_due = flight.age >= flight.fate.report_after
            is_due &= not flight.fate.is_lost or self._is_lost_over
            if is_due and flight.result is not None and self._is_over(flight):
                del self._flights[flight.job.job_id]
                self.num_reported += 1
                flight.source = []
                self._watch.on_reported(flight, flight.result.success)
                results.append(flight.result)
        flying = self._flights.values()
        self._units = [
            unit
            for unit in self._units
            if not unit.has_moved or any(flight in flying for flight in unit.flights)
        ]
        return results

    def _is_over(self, flight: Flight) -> bool:
        """Whether a job that has a result may be reported."""
        return True

    @override
    def wait(self, job_ids: Sequence[int]) -> None:
        pass

    @override
    def shutdown(self) -> None:
        self._call("shutdown")

    def _call(self, name: str, *args: Any) -> Any:
        with calling(name):
            return getattr(self._inner, name)(*args)

    # --- one job ---

    def _begin(self, job: TransferJob, is_load: bool, plan: StepPlan) -> Flight:
        fate = next(self._fates, None) or Fate()
        if is_load:
            fate = self._fate_of_load(fate)
        keys: set[OffloadKey] = set()
        keys_of: dict[int, tuple[OffloadKey, ...]] = {}
        blocks = self._gpu_blocks(job.dst if is_load else job.src)
        if not is_load:
            if free := [block for block in blocks if self._pool.is_free(block)]:
                raise InvariantBroken(
                    "CONN-6",
                    f"store job {job.job_id} reads blocks {free}, which are free: anyone may "
                    f"overwrite them",
                )
            keys_of.update((block, self._pool.hashes(block)) for block in blocks)
            if nameless := [block for block in blocks if not keys_of[block]]:
                self._refuse_nameless(job, nameless)
            keys = {key for keys in keys_of.values() for key in keys}
        flight = Flight(job, is_load, fate, blocks, keys, [], _pages(job.src), _pages(job.dst))
        if self._stream is not None:
            flight.mark = self._stream.record_event()
        flight.keys_of = keys_of
        self._note_source(flight)
        if is_load:
            # Children of one plan may have a host each, with pages of the same numbers.
            self._check_load(flight, is_tracked=_is_plain(plan))
        elif isinstance(job.dst, CPULoadStoreSpec):
            for page in job.dst.block_ids:
                self._stored[page].append(flight)
        return flight

    def _check_held(self) -> None:
        """What a store reads is somebody's until the store is reported."""
        for flight in self._flights.values():
            blocks = [] if flight.is_load else flight.gpu_blocks
            if free := [block for block in blocks if self._pool.is_free(block)]:
                raise InvariantBroken(
                    "CONN-6",
                    f"blocks {free} are free, and store job {flight.job.job_id}, which reads "
                    f"them, is not reported yet: hold what you store until then, whoever else "
                    f"lets go of it",
                )

    def _note_sources(self) -> None:
        """An engine may take a step's output in before any hook: what was late is ready now."""
        for flight in self._flights.values():
            self._note_source(flight)

    def _note_source(self, flight: Flight) -> None:
        """Copy what a store is to read, once it is computed."""
        if not flight.is_load and not flight.source and flight.is_ready:
            flight.source = [tensor[flight.gpu_blocks] for tensor in self._tensors]

    def _refuse_nameless(self, job: TransferJob, blocks: list[int]) -> None:
        """Whatever the key of a store is: these blocks do not hold its KV."""
        what = f"store job {job.job_id} reads blocks {blocks}, in which no KV is computed whole"
        if all(map(self._pool.is_held, blocks)):
            raise InvariantBroken(
                "CONN-8",
                f"{what}: store what num_computed_tokens covers (kvview.full_blocks); the last "
                f"token that a request sampled is not computed, nor is what a step schedules",
            )
        raise InvariantBroken(
            "CONN-6", f"{what} any more: nobody held them when they were given to somebody else"
        )

    def _check_load(self, flight: Flight, is_tracked: bool) -> None:
        job, blocks = flight.job, flight.gpu_blocks
        expected = self._pool.expected_keys(job.request_id or "")
        if foreign := [block for block in blocks if block not in expected]:
            raise InvariantBroken(
                "XFER-2",
                f"load job {job.job_id} writes blocks {foreign}, which are none of those that "
                f"request {job.request_id!r} waits for",
            )
        if not isinstance(job.src, CPULoadStoreSpec) or len(job.src.block_ids) != len(blocks):
            return
        for page, block in zip(job.src.block_ids, blocks, strict=True):
            if is_tracked:
                self._check_page(job.job_id, page, expected[block])

    def _check_page(self, job_id: int, page: int, key: OffloadKey) -> None:
        """That the page holds the key, as far as the stores so far tell."""
        stores = self._stored[page]
        what = f"load job {job_id} reads host block {page} for key {short(key)}"
        if not stores:
            raise InvariantBroken("CONN-2", f"{what}: nothing was ever stored there")
        if key in stores[-1].keys:
            if stores[-1].result is not None and key not in stores[-1].stored_keys:
                raise InvariantBroken("OFF-4", f"{what}: the store into it failed")
            return
        if any(key in store.keys for store in stores):
            raise InvariantBroken("OFF-1", f"{what}: another key was stored over it since")
        held = ", ".join(sorted(map(short, stores[-1].keys))) or "nothing computed"
        raise InvariantBroken(
            "CONN-6", f"{what}: the blocks held {held} when they were to be copied there"
        )

    def _move_due(self) -> None:
        if self._fate_of_load(Fate()) == Fate(0, 0):  # loads end in their step
            loads = [
                i for i, unit in enumerate(self._units) if any(f.is_load for f in unit.flights)
            ]
            for unit in self._units[: loads[-1] + 1 if loads else 0]:
                if not unit.has_moved:
                    self._move(unit)
        for position, unit in enumerate(self._units):
            waits_for = [other for other in self._units[:position] if not other.has_moved]
            if unit.is_due and not any(_conflict(other, unit) for other in waits_for):
                self._move(unit, *self._close_behind(unit))

    def _close_behind(self, first: Unit) -> list[Unit]:
        """What waits for nothing but this one, with which it shares a page of the tier.

        The real worker half gets both at once, and has to keep their order itself (XFER-3).
        """
        unmoved = [unit for unit in self._units if not unit.has_moved]
        place = unmoved.index(first)
        for number, unit in enumerate(unmoved[place + 1 :], place + 1):
            if (
                unit.is_due
                and first.goes_well
                and unit.goes_well
                and _meet_in_tier(first.flights[0], unit.flights[0])
                and not any(_conflict(o, unit) for o in unmoved[:number] if o is not first)
            ):
                return [unit]
        return []

    def _move(self, *units: Unit) -> None:
        flights = [flight for unit in units for flight in unit.flights]
        for unit in units:
            unit.has_moved = True
        nothing_moves = all(flight.fate.outcome == "none" for flight in flights)
        if nothing_moves and all(unit.is_plain for unit in units):
            for flight in flights:
                flight.result = failed(flight)
            return
        stores = [flight for flight in flights if not flight.is_load]
        for flight in stores:
            self._check_source(flight)
        spoilt = {block for flight in stores for block in flight.spoilt}
        for flight in stores:
            if flight.fate.outcome == "ok":
                spoilt.difference_update(flight.gpu_blocks)
        for flight in stores:
            arriving = takewhile(lambda block: block not in spoilt, flight.gpu_blocks)
            flight.num_moved = len(list(arriving))
        self._note_writes()
        self._spoil(spoilt)
        for unit in units:
            self._call("start_plan", unit.plan)
        for unit in units[::-1]:
            self._call("wait", [flight.job.job_id for flight in unit.flights])
        self._poll()
        going_on = [flight.job.job_id for flight in flights if flight.result is None]
        self.not_waited_for += going_on
        for tensor, rows in zip(self._tensors, self._before, strict=True):
            tensor[list(spoilt)] = rows[list(spoilt)]
        self._check_writes(flights, _blocks_of_loads(flights))
        for flight in flights:
            if flight.is_load:
                self._spoil(flight.spoilt)

    def _poll(self) -> None:
        self._take_in(self._call("get_finished"))

    def _take_in(self, results: Any) -> None:
        require_type("get_finished", results, "CONN-3")
        with hook("pickling the results", "CONN-3"):
            results = pickle.loads(pickle.dumps(results))
        started = {
            flight.job.job_id for unit in self._units if unit.has_moved for flight in unit.flights
        }
        for result in results:
            flight = self._flights.get(result.job_id)
            if flight is None or result.job_id not in started or flight.result is not None:
                raise InvariantBroken(
                    "CONN-3",
                    f"the worker half reports job {result.job_id}, which it was not given or has "
                    f"reported before",
                )
            flight.result = self._judge(flight, result)

    def _judge(self, flight: Flight, result: TransferResult) -> TransferResult:
        """What becomes of a result of the real worker half."""
        if flight.fate.outcome == "ok":
            return result
        if not flight.num_moved or not result.success:
            return failed(flight)
        num_blocks = len(flight.gpu_blocks)
        moved = [number < flight.num_moved for number in range(num_blocks)]
        return replace(failed(flight), moved=moved)

    def _check_source(self, flight: Flight) -> None:
        blocks = flight.gpu_blocks
        for tensor, rows in zip(self._tensors, flight.source, strict=True):
            changed = (tensor[blocks] != rows).any(dim=1).nonzero().flatten().tolist()
            if changed:
                raise InvariantBroken(
                    "CONN-6",
                    f"blocks {[blocks[i] for i in changed]} were overwritten while store job "
                    f"{flight.job.job_id} had yet to read them",
                )

    def _note_writes(self) -> None:
        """Note what is written from now on, to be compared."""
        for tensor, rows in zip(self._tensors, self._before, strict=True):
            rows.copy_(tensor)

    def _check_writes(self, flights: Sequence[Flight], named: set[int]) -> None:
        """Compare with what was noted; the named blocks may be written even now."""
        left_out = sorted(named)
        for tensor, rows in zip(self._tensors, self._before, strict=True):
            rows[left_out] = tensor[left_out]
            words, before = tensor.view(torch.int64), rows.view(torch.int64)
            if torch.equal(words, before):
                continue
            changed = (words != before).any(dim=1).nonzero().flatten().tolist()
            if foreign := [block for block in changed if block not in named]:
                raise InvariantBroken(
                    "XFER-2",
                    f"jobs {[flight.job.job_id for flight in flights]} wrote GPU blocks "
                    f"{foreign}, which none of them names",
                )

    def _spoil(self, blocks: Iterable[int]) -> None:
        for tensor in self._tensors:
            tensor[list(blocks)] = _JUNK

    def _gpu_blocks(self, spec: LoadStoreSpec) -> list[int]:
        if not isinstance(spec, GPULoadStoreSpec):
            return []  # the engine says so
        num_blocks = self._tensors[0].shape[0]
        for block in spec.block_ids:
            if type(block) is not int or not 0 < block < num_blocks:
                raise InvariantBroken(
                    "XFER-1", f"a plan names GPU block {block!r}: blocks are 1 to {num_blocks - 1}"
                )
        return list(spec.block_ids)


def _blocks_of_loads(flights: Iterable[Flight]) -> set[int]:
    return {block for flight in flights if flight.is_load for block in flight.gpu_blocks}


def _is_plain(plan: StepPlan) -> bool:
    return type(plan) is StepPlan


def _pages(spec: LoadStoreSpec) -> set[_Page]:
    ids = getattr(spec, "block_ids", None)
    return {(spec.medium, i) for i in ids} if ids is not None else {(spec.medium, None)}


def failed(flight: Flight) -> TransferResult:
    """The result of a job whose fate is to fail."""
    return TransferResult(flight.job.job_id, False, error=f"simulated: {flight.fate}")


def _meet_in_tier(one: Flight, other: Flight) -> bool:
    """Whether a load and a store touch a page of the tier, and no block of the GPU."""
    if one.is_load == other.is_load or {*one.gpu_blocks} & {*other.gpu_blocks}:
        return False
    load, store = (one, other) if one.is_load else (other, one)
    return bool(load.reads & store.writes)


def _conflict(one: Unit, other: Unit) -> bool:
    """Whether two units touch a page that one of them writes."""
    if not (one.is_plain and other.is_plain):
        return True  # nobody knows what else it is about

    def meet(pages: set[_Page], others: set[_Page]) -> bool:
        if pages & others:
            return True
        media = {medium for medium, _ in others}
        return any(
            (page is None and medium in media) or (medium, None) in others for medium, page in pages
        )

    return any(
        meet(a.writes, b.writes | b.reads) or meet(a.reads, b.writes)
        for a in one.flights
        for b in other.flights
    )
