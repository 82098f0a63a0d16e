"""One real vLLM ``Scheduler`` under simulation, with its events and its queries.

Requests, the bytes of computed blocks and the sampled tokens are simulated; everything else is
real. :class:`~kvview_vllm.simulation.VLLMEngines` builds one for each run.

- VSIM-1 An exception of vLLM itself, or an output that a sequential engine would not deliver,
  **must not** be reported under a law of the connector. It is reported as ``ENGINE``, with the
  line.
- VSIM-7 A vLLM that the simulation does not recognise **must** be refused in one line. The adapter
   may nevertheless work with this vLLM, because the simulation reads more of vLLM than the adapter.

Source: vllm/v1/core/sched/scheduler.py, and ``step_with_batch_queue`` of
vllm/v1/engine/core.py, 0.11.0 to 0.33.0; ``kvview.testing.connector.harness`` defines the
queries of an engine.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, islice
from pathlib import Path
from traceback import walk_tb
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from kvview import (
    CacheGroup,
    ConfigError,
    Connector,
    ConnectorConfig,
    KVViewError,
    Mamba,
    OffloadKey,
    SchedulerConnector,
    WorkerConnector,
)
from kvview.testing.connector.invariants import InvariantBroken
from kvview.testing.connector.scenario import NUM_LAYERS, PAGE_BYTES
from kvview_vllm.binding import walk_connectors
from kvview_vllm.geometry import read_geometry
from kvview_vllm.pool import NULL_BLOCK_ID, view
from kvview_vllm.releases import reading
from kvview_vllm.releases.calls import (
    blocks_freed_later,
    can_name_groups,
    child_connectors,
    num_preemptions,
)
from kvview_vllm.releases.versions import vllm
from kvview_vllm.simulation import scheduler as cpu_scheduler
from kvview_vllm.simulation.published import PublishedEvents
from kvview_vllm.simulation.requests import Chunk, PlannedRequest, make_prompt, salt_of
from kvview_vllm.simulation.stream_order import Compute, Forward

if TYPE_CHECKING:
    from kvview.testing.connector.harness import ConnectorHarness
    from kvview.testing.connector.scenario import Add, Scenario
    from kvview.testing.connector.stream import StepStream

_STEPS_OF_A_DEADLOCK = 8
_Kind = TypeVar("_Kind")
_OURS = "kvview_vllm."
_BARE = {"contain_faults": False, "leak_report_seconds": None}


class HandedConnector(Connector):
    """A connector whose halves are made by the object in the option ``connector``.

    Both sides of ``KVViewConnector`` therefore use the same object.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self._connector: Connector = config.options["connector"]

    @override
    def make_scheduler(self) -> SchedulerConnector:
        return self._connector.make_scheduler()

    @override
    def make_worker(self) -> WorkerConnector:
        return self._connector.make_worker()


def reads_vllm(kind: type[_Kind]) -> type[_Kind]:
    """Run each public method of a class under :func:`named`."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue  # called by the public methods
        if isinstance(member, property) and member.fget is not None:
            setattr(kind, name, property(_named(member.fget), doc=member.__doc__))
        elif isinstance(member, FunctionType):
            setattr(kind, name, _named(member))
    return kind


def _named(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:  # because some are called for every block, and a context manager costs more
            return method(*args, **kwargs)
        except Exception as error:
            with named(f"{method.__name__} of the simulated server"):
                raise error

    return call


class Configs:
    """vLLM's configuration for given KV-cache groups."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        transfer_config: dict[str, Any] | None = None,
        num_blocks: int = 8,
        hash_block_size: int | None = None,
        **sizes: Any,
    ) -> None:
        has_states = any(isinstance(group, Mamba) for group in groups)
        # vLLM copies states of Mamba blocks with several hashes, whose bytes the simulation does
        # not have.
        may_be_finer = len(groups) > 1 and not has_states
        self._groups, self._num_blocks = groups, num_blocks
        self.kv_cache = self.kv_cache_of(range(NUM_LAYERS))
        with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
            self.vllm = cpu_scheduler.make_vllm_config(
                Path(folder),
                transfer_config,
                block_size=math.gcd(*(group.block_size for group in groups)),
                num_groups=len(groups),
                num_blocks=num_blocks,
                has_states=has_states,
                prefix_match_unit=hash_block_size if may_be_finer else None,
                **sizes,
            )
        self.geometry = read_geometry(self.vllm, self.kv_cache)

    def kv_cache_of(self, stage: range) -> Any:
        """Make the ``KVCacheConfig`` of a rank that has some of the layers of each group."""
        return cpu_scheduler.make_kv_cache_config(self._groups, self._num_blocks, NUM_LAYERS, stage)


def _stages(ranks: Sequence[int]) -> list[range]:
    """Return each rank's layers of a group: all layers, or a part, as in pipeline parallelism."""
    if sum(ranks) != NUM_LAYERS:
        return [range(NUM_LAYERS)] * max(1, len(ranks))
    ends = [*accumulate(ranks)]
    return [range(end - number, end) for number, end in zip(ranks, ends, strict=True)]


@dataclass
class _Stats:
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    steps: int = 0
    mismatches: int = 0
    most_in_flight: int = 0
    running_resets: int = 0  # resets that preempt running requests


@dataclass(eq=False)
class LaunchedStep:
    """A step from its launch until its output is processed."""

    output: Any
    answer: Any
    forward: Forward
    invalid: Collection[int]
    chunks: Mapping[str, Chunk]


@reads_vllm
class VLLMConnectorHarness:
    """One scheduler, its workers' side, and the KV bytes.

    Args:
        scenario: Sizes, as fitted.
        connectors: The connectors; vLLM's ``MultiConnector`` runs several.
        clock: Clock in seconds, which decides when leases expire.
        stream: The compute stream; None unless compute lags.
    """

    _longest = cpu_scheduler.MAX_TOKENS
    _more_options: Mapping[str, Any] = {}

    def __init__(
        self,
        scenario: Scenario,
        connectors: Sequence[Connector],
        clock: Callable[[], float],
        stream: StepStream | None = None,
    ) -> None:
        self.stats = _Stats()
        self._geometry = scenario.geometry
        self._drafts = scenario.drafts
        self._num_extra_slots = (
            scenario.steps_in_flight * scenario.most_drafts + scenario.lookahead_tokens
        )
        self._published: PublishedEvents | None = None
        self._build(scenario, connectors, clock)
        self._manager = self._scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._look = view(self._pool, owner="simulation")
        status = vllm("v1.request").RequestStatus
        self._aborted = status.FINISHED_ABORTED
        self._status = {
            status.RUNNING: "running",
            status.WAITING_FOR_REMOTE_KVS: "loading",
        }
        self._preempted = status.PREEMPTED
        # None: aborted while loading. If loads happen within a step, the request is running.
        between_steps = cpu_scheduler.can_load_between_steps()
        self._while_loading = {"loading", None} if between_steps else {"running"}
        self._steps_in_flight = scenario.steps_in_flight
        self._stream = stream
        self._launched: deque[LaunchedStep] = deque()
        self._aborts: dict[str, None] = {}  # to be processed before the next output
        self._num_aborts = self._num_resets = 0
        self._added: dict[str, PlannedRequest] = {}  # the last request of each id
        self._loading: set[str] = set()
        self._uncomputed: set[int] = set()  # blocks that the step will fill
        self._squeezed: list[Any] = []
        self._can_block_itself = cpu_scheduler.can_block_itself()
        self._idle_steps = 0

    def _build(
        self, scenario: Scenario, connectors: Sequence[Connector], clock: Callable[[], float]
    ) -> None:
        """Build the scheduler, the worker's side and the bytes."""
        target = f"{__name__}:{HandedConnector.__name__}"
        children = [cpu_scheduler.connector_config(target, connector=c) for c in connectors]
        for child in children:  # because the kit looks for faults, and its clock counts steps
            extra = _BARE | {"pin_budget": scenario.pin_budget, **self._more_options}
            child["kv_connector_extra_config"] |= extra
        configs = Configs(
            self._geometry.groups,
            children[0] if len(children) == 1 else cpu_scheduler.multi_config(*children),
            hash_block_size=self._geometry.hash_block_size,
            publishes_events=can_name_groups(),
            **cpu_scheduler.sizes_of(scenario),
        )
        stages = _stages(scenario.ranks)
        parallel = configs.vllm.parallel_config
        parallel.world_size = len(stages)
        if len({*stages}) > 1:
            parallel.pipeline_parallel_size = len(stages)
        else:
            parallel.tensor_parallel_size = len(stages)
        caches = [configs.kv_cache_of(stage) for stage in stages]
        with named("building the scheduler"):
            self._scheduler = cpu_scheduler.make_scheduler(
                configs.vllm, configs.kv_cache, self._geometry
            )
            self._workers = [
                cpu_scheduler.make_worker_connector(configs.vllm, cache, rank)
                for rank, cache in enumerate(caches)
            ]
        self._aggregator = cpu_scheduler.make_aggregator(len(stages))
        for connector in self._connectors():
            connector.block_pool_view.now = clock
        if can_name_groups():
            halves = [connector._scheduler_side.half for connector in self._connectors()]
            self._published = PublishedEvents(self._scheduler, halves, self._geometry)
        self._compute = Compute(
            self._geometry,
            scenario.num_gpu_blocks,
            PAGE_BYTES,
            num_layers=sum(map(len, stages)),
        )
        pages = iter(self._compute.pages)
        with named("register_kv_caches"):
            for stage, cache, worker in zip(stages, caches, self._workers, strict=True):
                own = [*islice(pages, len(stage))]
                worker.register_kv_caches(
                    {
                        name: tensor
                        for group in cache.kv_cache_groups
                        for name, tensor in zip(group.layer_names, own, strict=True)
                    }
                )

    # --- events ---

    def add(self, add: Add, serial: int, transfer_params: Mapping[str, Any] | None = None) -> None:
        """Queue a request, which generates at least one token, because vLLM requires this."""
        num_output_tokens = max(1, add.num_output_tokens)
        before: Sequence[int] = ()
        if add.continues is not None:
            if add.continues not in self._added:
                raise ConfigError(
                    f"request {add.continues!r} was never added, so it cannot be continued"
                )
            before = self._added[add.continues].request.all_token_ids
        size = self._geometry.hash_block_size
        prompt = make_prompt(add, before, size)
        num_tokens = len(prompt) + num_output_tokens + self._num_extra_slots
        needed = sum(-(-num_tokens // group.block_size) for group in self._geometry.groups)
        if needed >= self.num_blocks or num_tokens > self._longest:
            raise ConfigError(
                f"request {add.request_id!r} of {num_tokens} tokens may need {needed} blocks, "
                f"but the pool has {self.num_blocks - 1}"
            )
        if add.request_id in self._scheduler.requests:
            raise ConfigError(
                f"request {add.request_id!r} was aborted but still loads, so its id cannot be "
                f"reused yet"
            )
        if any(add.request_id in step.chunks for step in self._launched):
            raise ConfigError(
                f"request {add.request_id!r} is in a step in flight, so its id cannot be reused yet"
            )
        self.stats.requests += 1
        with named("add_request"):
            planned = PlannedRequest(
                add.request_id,
                prompt,
                serial,
                num_output_tokens,
                add.stops_after,
                size,
                self._drafts,
                transfer_params or add.transfer_params,
                None if self._published is None else salt_of(prompt),
            )
            self._scheduler.add_request(planned.request)
        self._added[add.request_id] = planned

    def abort(self, request_id: str) -> None:
        """End a request, as if its client disconnected.

        An engine core receives an abort between steps, or while it waits for an output.
        """
        if request_id in self._aborts:
            return
        self.stats.aborted += 1
        self._num_aborts += 1
        if self._launched and self._num_aborts % 2:
            self._aborts[request_id] = None
        else:
            self._finish([request_id])

    def step(self) -> None:
        """Act like one call of an engine core: launch a step if allowed, or process an output."""
        self.stats.steps += 1
        if self._has_requests() or not self._launched:
            output = self._launch()
            is_full = len(self._launched) == self._steps_in_flight
            if not is_full and (output.total_num_scheduled_tokens or self._has_requests()):
                return
        self._take_in()
        if self._can_block_itself or self._scheduler.failed_recving_kv_req_ids:
            self._end_deadlock()

    def squeeze(self, num_blocks: int) -> None:
        """Let another owner hold up to this number of free blocks from now on."""
        with named("squeezing"):
            if self._squeezed:
                self._pool.free_blocks(self._squeezed)
            num_blocks = min(num_blocks, self._pool.get_num_free_blocks())
            self._squeezed = self._pool.get_new_blocks(num_blocks) if num_blocks else []
        self._overwrite([block.block_id for block in self._squeezed])

    def _overwrite(self, block_ids: Sequence[int]) -> None:
        """Overwrite squeezed blocks, like their new owner."""
        self._compute.overwrite(block_ids)

    def alias(self) -> bool:
        """Cache the first part of a block under its own hash, in addition to the whole block."""
        size = self._geometry.hash_block_size
        for request in self._scheduler.running:
            tables = self._manager.get_block_ids(request.request_id)
            for index, (group, table) in enumerate(zip(self._geometry.groups, tables, strict=True)):
                for number, block_id in enumerate(table):
                    if group.block_size > size and len(self._look.block_keys([block_id])[0]) == 1:
                        self._pool.cache_partial_block(
                            request=request,
                            block=self._pool.blocks[block_id],
                            num_tokens=number * group.block_size + size,
                            kv_cache_group_id=index,
                            block_size=group.block_size,
                        )
                        return True
        return False

    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the prefix cache and the connectors, which vLLM resets even when it refuses.

        With steps in flight every second reset preempts running requests, if the release supports
        this. If a block stays in use, vLLM raises an error, whatever the connector does; the error
        counts as a refusal.
        """
        self._num_resets += 1
        if self._steps_in_flight == 1 or self._num_resets % 2:
            with named("reset_prefix_cache"):
                return cpu_scheduler.reset_caches(self._scheduler)
        self.stats.running_resets += 1
        try:
            return cpu_scheduler.reset_caches(self._scheduler, running_too=True)
        except RuntimeError:
            return False

    def shutdown(self) -> Mapping[int, int]:
        """Stop both sides; return the references that neither requests nor the scenario own."""
        while self._launched:
            self._run(self._launched.popleft())
        with named("shutdown"):
            self._scheduler.shutdown()
            for worker in self._workers:
                worker.shutdown()
        blocks = range(1, self.num_blocks)
        refs = Counter(dict(zip(blocks, self.ref_counts(blocks), strict=True)))
        return dict(refs - self.engine_refs())

    # --- queries ---

    @property
    def mismatch(self) -> str:
        """Describe the latest block with wrong bytes: the first difference and the KV's key."""
        return self._compute.kv_bytes.mismatch

    @property
    def wrong_block(self) -> tuple[int, OffloadKey] | None:
        """The block that ``mismatch`` describes, and its key; None if it is not known."""
        return self._compute.kv_bytes.wrong_block

    def unfinished(self) -> Mapping[str, str]:
        """Return the status of each request, the oldest request first."""
        return {
            request_id: self._status.get(request.status, "waiting")
            for request_id, request in self._scheduler.requests.items()
            if not request.is_finished()
        }

    def has_work(self) -> bool:
        """Whether requests are unfinished, or steps or jobs in flight."""
        return (
            bool(self._launched)
            or bool(self._scheduler.has_unfinished_requests())
            or self._has_pending_work()
        )

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """Return the key whose KV a load must write into each block of a request."""
        request = self._scheduler.requests.get(request_id)
        if request is None or self._status.get(request.status) not in self._while_loading:
            return {}
        num_hashed = len(request.block_hashes) * self._geometry.hash_block_size
        return {
            block_id: self._compute.key(self._added[request_id], index, number)
            for index, table in enumerate(self._manager.get_block_ids(request_id))
            for number, block_id in enumerate(table)
            if block_id != NULL_BLOCK_ID
            and (number + 1) * self._geometry.groups[index].block_size <= num_hashed
        }

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the pool, the null block included."""
        return len(self._pool.blocks)

    def ref_counts(self, block_ids: Sequence[int]) -> list[int]:
        """Return the number of references to each block, as vLLM counts them."""
        return [self._pool.blocks[block_id].ref_cnt for block_id in block_ids]

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys that each block holds once every launched step has run.

        A computed block may be missing from vLLM's cache, because vLLM only caches whole scheduler
        blocks. vLLM caches a block when it schedules the step, but the bytes do not exist yet when
        the transfers of the step start.
        """
        computed = self._compute.computed
        return [
            ()
            if block_id in self._uncomputed
            else tuple(dict.fromkeys([*cached, *filter(None, [computed.get(block_id)])]))
            for block_id, cached in zip(block_ids, self._look.block_keys(block_ids), strict=True)
        ]

    def free_block_ids(self) -> Sequence[int]:
        """Return the free queue, next victim first."""
        return [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]

    def engine_refs(self) -> Counter[int]:
        """Return the references of block tables, of squeezed blocks and of blocks to free later."""
        refs = Counter(block.block_id for block in self._squeezed)
        refs.update(block.block_id for block in blocks_freed_later(self._scheduler))
        for request_id in self._scheduler.requests:
            for table in self._manager.get_block_ids(request_id):
                refs.update(table)
        del refs[NULL_BLOCK_ID]
        return refs

    def held_blocks(self) -> Mapping[int, int]:
        """Return the references of all views."""
        held: Counter[int] = Counter()
        for connector in self._connectors():
            held.update(connector.block_pool_view.held_blocks())
        return held

    def _connectors(self) -> Iterator[Any]:
        """Return the ``KVViewConnector`` of each child."""
        for connector in walk_connectors(self._scheduler.connector):
            if not child_connectors(connector):
                yield connector

    # --- one step ---

    def _has_pending_work(self) -> bool:
        """Whether a connector needs steps without requests."""
        return any(connector.has_pending_push_work() for connector in self._connectors())

    def _has_requests(self) -> bool:
        """Whether an engine core would schedule a step."""
        return bool(self._scheduler.has_requests()) or self._has_pending_work()

    def _finish(self, request_ids: Sequence[str]) -> None:
        with named("finish_requests"):
            self._scheduler.finish_requests(request_ids, self._aborted)

    def _launch(self) -> Any:
        """Schedule and launch a step; the worker's report becomes a part of the step's output."""
        output = self._schedule()
        chunks = self._chunks(output)
        forward = self._compute.plan(chunks, self._tables(output))
        self._uncomputed = forward.written
        runs_first = cpu_scheduler.loads_after_launch(output)
        with named("the worker's side"):
            for worker in self._workers:
                cpu_scheduler.bind_transfers(worker, output, output.kv_connector_metadata)
            self._poison()
            if not runs_first:
                self._start_transfers()
        self._compute.launch(forward)
        if self._stream is None:
            self._compute.run(forward)
        else:
            self._stream.launch()
        with named("the worker's side"):
            if runs_first:
                self._start_transfers()
            self._uncomputed = set()
            transfers = [cpu_scheduler.take_transfers(one, output) for one in self._workers]
            for worker in self._workers:
                cpu_scheduler.end_transfers(worker)
        sampled = {request_id: chunk.sampled for request_id, chunk in chunks.items()}
        answers = [cpu_scheduler.make_model_output(output, sampled, one) for one in transfers]
        answer, *others = answers
        if others:
            with named("merging the outputs of the ranks"):
                answer = self._aggregator.aggregate(answers)
        invalid = cpu_scheduler.invalid_blocks(answer.kv_connector_output)
        self._launched.append(LaunchedStep(output, answer, forward, invalid, chunks))
        self.stats.most_in_flight = max(self.stats.most_in_flight, len(self._launched))
        if self._stream is None:
            self.stats.mismatches += forward.mismatches(invalid)
        return output

    def _start_transfers(self) -> None:
        for worker in self._workers:
            cpu_scheduler.start_transfers(worker)

    def _schedule(self) -> Any:
        """Schedule a step, and count the requests that it preempts."""
        running = {request.request_id for request in self._scheduler.running}
        with named("schedule"):
            output = self._scheduler.schedule()
        requests = self._scheduler.requests
        self.stats.preemptions += sum(
            requests[name].status is self._preempted for name in running if name in requests
        )
        return output

    def _end_deadlock(self) -> None:
        """Abort a request that holds loaded blocks and waits behind a request that needs them.

        Up to 0.22 vLLM lets both requests wait forever, whatever the connector does; later releases
        do this only after failed loads (vLLM PR #57841, which is not in 0.33).
        """
        unfinished = self.unfinished()
        # vLLM lists a request whose loads have ended as loading until it is scheduled.
        busy = {name for name, status in unfinished.items() if status != "waiting"}
        busy -= set(self._scheduler.finished_recving_kv_req_ids)
        computes = any(step.output.total_num_scheduled_tokens for step in self._launched)
        is_idle = not (computes or self._squeezed or busy) and len(unfinished) > 1
        self._idle_steps = self._idle_steps + 1 if is_idle else 0
        if self._idle_steps < _STEPS_OF_A_DEADLOCK or self.held_blocks():
            return
        holds = [name for name in unfinished if any(self._manager.get_block_ids(name))]
        if holds:
            self.abort(holds[-1])

    def _tables(self, output: Any) -> dict[str, Sequence[Sequence[int]]]:
        """Return the blocks of each request of a step, by group."""
        return {name: self._manager.get_block_ids(name) for name in output.num_scheduled_tokens}

    def _chunks(self, output: Any) -> dict[str, Chunk]:
        """Return the computed and the sampled tokens of a step, by request."""
        starts, drafts = cpu_scheduler.computed_before(output), output.scheduled_spec_decode_tokens
        chunks: dict[str, Chunk] = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            planned = self._added[request_id]
            life = num_preemptions(planned.request)
            # vLLM counts rejected drafts as computed until it gets the output.
            start = starts[request_id] - sum(
                chunk.num_rejected
                for step in self._launched
                if (chunk := step.chunks.get(request_id)) and chunk.life == life
            )
            num_drafts = len(drafts.get(request_id, ()))
            chunks[request_id] = planned.chunk(life, start, start + num_tokens, num_drafts)
        return chunks

    def _take_in(self) -> None:
        """Process waiting aborts, and then the output of the oldest step."""
        step = self._launched.popleft()
        self._run(step)
        aborts, self._aborts = list(self._aborts), {}
        if aborts:
            self._finish(aborts)
        num_unfinished = len(self.unfinished())
        with named("update_from_output"):
            outputs = self._scheduler.update_from_output(step.output, step.answer)
        if self._published is not None:
            self._published.check()
        self._on_outputs(step, outputs)
        self.stats.finished += num_unfinished - len(self.unfinished())
        for chunk in step.chunks.values():
            request = chunk.planned.request
            chunk.planned.check(request.is_finished() and request.status is not self._aborted)
        self._propose_drafts(step)

    def _on_outputs(self, step: LaunchedStep, outputs: Mapping[int, Any]) -> None:
        """Receive the outputs of a step, by client."""

    def _propose_drafts(self, step: LaunchedStep) -> None:
        """Pass drafts for a step's requests to the scheduler; not with several steps in flight."""
        if not self._drafts or self._steps_in_flight > 1:
            return
        drafts = {
            name: one.planned.next_drafts() for name, one in step.chunks.items() if one.sampled
        }
        with named("update_draft_token_ids"):
            cpu_scheduler.propose_drafts(self._scheduler, drafts)

    def _run(self, step: LaunchedStep) -> None:
        """Compute a step, unless it is already computed."""
        if self._stream is not None:
            self._compute.run(step.forward)
            self._stream.take()
            self.stats.mismatches += step.forward.mismatches(step.invalid)

    def _poison(self) -> None:
        """Overwrite blocks that were allocated for a load, which must then write every byte."""
        loading = {name for name, status in self.unfinished().items() if status == "loading"}
        for request_id in loading - self._loading:
            for table in self._manager.get_block_ids(request_id):
                self._compute.overwrite(b for b in table if b and not self._look.block_keys([b])[0])
        self._loading = loading


@contextmanager
def named(where: str) -> Iterator[None]:
    """Report exceptions that neither the connector nor kvview raised (VSIM-1, VSIM-7)."""
    try:
        yield
    except (InvariantBroken, KVViewError):
        raise
    except Exception as error:
        *_, (frame, line) = walk_tb(error.__traceback__)
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_OURS):
            with reading("simulation", where):
                raise
        raise InvariantBroken(
            "ENGINE", f"{where} raised {type(error).__name__} {error} ({module}, line {line})"
        ) from error


if TYPE_CHECKING:
    _: type[ConnectorHarness] = VLLMConnectorHarness
