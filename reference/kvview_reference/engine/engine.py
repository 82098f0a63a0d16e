"""A small engine: continuous batching in steps, with a connector.

One step does the following, in this order: process the reports of transfers; allocate blocks to
running requests, and preempt the youngest request when the pool is full; start waiting requests
(prefix match, connector match, allocation); let the connector plan; start the plan; launch the
step; process its output; cache full blocks; end finished requests. The KV bytes of a full block are
derived from its hash, so that every block that a request reads can be compared byte for byte.

With several steps in flight, the output of a step is processed after the launch of later steps. In
the meantime more tokens are scheduled than the request has, because *computed* means launched
(CONN-7). With a stream, a step writes and reads KV when its output is processed, in the order of
the launches. It uses the blocks that its requests had at the launch, even if these blocks have
other owners by then.

Source: The order of calls is that of ``vllm/v1/core/sched/scheduler.py`` and, within a step,
``EngineCore.step_with_batch_queue`` in ``vllm/v1/engine/core.py`` (0.33.0).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from kvview import (
    BlockIds,
    CacheGeometry,
    CacheGroup,
    ConfigError,
    Connector,
    ConnectorConfig,
    ConnectorError,
    EngineFacts,
    FinishReason,
    FullBlock,
    OffloadKey,
    RequestInfo,
    RequestStep,
    StepInfo,
    TransferResult,
    full_blocks,
)
from kvview.connector.job_tracker import EndedJob, JobTracker, check_promise
from kvview.handoff import require_no_wire
from kvview.testing.connector.judge.kv_bytes import KVBytes
from kvview.testing.connector.run.compute_stream import StepStream
from kvview.version import require_contract
from kvview_reference.engine.request import Request, Status
from kvview_reference.engine.stats import EngineStats, num_gpu_blocks
from kvview_reference.free_queue import NULL_BLOCK_ID
from kvview_reference.geometry import KVCacheManager
from kvview_reference.guard import guard_pool
from kvview_reference.pool import BlockPool
from kvview_reference.transfer.pages import check_host_bytes

_MAX_IDLE_STEPS = 1000
_POOL_BYTES_PER_BLOCK = 100  # of the block pool, per block


@dataclass
class _Load:
    request: Request
    num_gpu_tokens: int
    num_external_tokens: int


@dataclass(frozen=True)
class _Chunk:
    """The tokens of one request that a step computes."""

    request: Request
    life: int  # of the request, which gets a new one when it is restarted
    start: int
    kept: int  # the end of its tokens without the rejected drafts
    end: int
    num_sampled: int


@dataclass(frozen=True)
class _Launched:
    """A launched step whose output has not been processed yet."""

    chunks: Sequence[_Chunk]
    kernels: list[Callable[[], None]] = field(default_factory=list)


class Engine:
    """An engine that runs requests over a block pool and one connector.

    Args:
        geometry: Block sizes and KV-cache groups.
        connector: Connector from which both halves are built; None for no connector.
        num_gpu_blocks: Number of blocks of the pool, including the null block.
        page_bytes: Bytes of one block in one layer, a multiple of 8.
        num_layers: Number of layers, each of which has a page of every block.
        max_running: Maximum number of requests that are computed at once.
        max_tokens_per_step: Token budget of one step.
        decode_tokens: Number of tokens that a decoding request generates in one step.
        drafts: Pairs of numbers for the decode steps of a request, in turn: the draft tokens that
            the step verifies besides its own token, and the accepted drafts.
        lookahead_tokens: Number of tokens for which a step has slots in addition to the tokens that
            it computes.
        steps_in_flight: Number of steps that may be launched before the output of the first step is
            processed.
        stream: Stream that is notified of launches and outputs. KV is written and read when an
            output is processed; without a stream, at the launch.
        verify_hits: Whether blocks that were hit on the GPU are compared too, and not only loaded
            blocks.
        device: Device of the KV cache.
        group_pages: Layout of the pages for :class:`KVBytes`, which replaces ``page_bytes`` and
            ``num_layers``.
        pin_budget: Share of the pool's blocks that the connector may hold; None for no limit.

    Raises:
        ConfigError: A size is invalid, the blocks do not fit in memory, or the connector hands KV
            over.
        UnsupportedContractError: The connector was written for another contract.
    """

    has_wire = False
    """Whether the engine can hand KV to other engines."""

    def __init__(
        self,
        geometry: CacheGeometry,
        connector: Connector | None,
        *,
        num_gpu_blocks: int,
        page_bytes: int = 1024,
        num_layers: int = 1,
        max_running: int = 16,
        max_tokens_per_step: int | None = None,
        decode_tokens: int | None = None,
        drafts: Sequence[tuple[int, int]] = (),
        lookahead_tokens: int = 0,
        steps_in_flight: int = 1,
        stream: StepStream | None = None,
        verify_hits: bool = True,
        device: str = "cpu",
        group_pages: Sequence[Sequence[int]] = (),
        pin_budget: float | None = None,
    ) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1, got {max_running}")
        if steps_in_flight < 1:
            raise ConfigError(f"steps_in_flight must be at least 1, got {steps_in_flight}")
        self.geometry = geometry
        self.stats = EngineStats()
        if type(num_gpu_blocks) is int:
            check_host_bytes(
                num_gpu_blocks * (page_bytes * num_layers + _POOL_BYTES_PER_BLOCK),
                None,
                f"{num_gpu_blocks} GPU blocks of {page_bytes * num_layers} bytes",
            )
        self.kv_bytes = KVBytes(
            num_gpu_blocks,
            group_pages or [[page_bytes] * num_layers] * len(geometry.groups),
            device,
        )
        self.kv_cache = KVCacheManager(geometry, BlockPool(num_gpu_blocks))
        self.max_running = max_running
        self.max_tokens_per_step = max_tokens_per_step or 32 * geometry.scheduler_block_size
        self.decode_tokens = decode_tokens or geometry.scheduler_block_size
        self.drafts = drafts
        self.lookahead_tokens = lookahead_tokens
        self.steps_in_flight = steps_in_flight
        self.verify_hits = verify_hits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._loads: dict[str, _Load] = {}
        self._launched: deque[_Launched] = deque()
        self._stream = stream
        self._jobs = JobTracker()
        self._has_preempted = False  # in this step
        self._idle_steps = 0
        self._lone_preemptions = 0  # of a request that runs alone, in a row

        connector = connector or Connector(ConnectorConfig(geometry))
        require_contract(connector.contract_version, type(connector).__qualname__)
        # The worker half is first, because it refuses a host tier that does not fit in memory.
        self.worker_connector = connector.make_worker()
        self.worker_connector.register_kv_caches(self.kv_bytes.caches)
        owner = type(connector).__name__
        self.view = guard_pool(self.kv_cache.pool, owner, pin_budget)
        self.scheduler_connector = connector.make_scheduler()
        if not self.has_wire:
            require_no_wire(self.scheduler_connector, owner)
        self.scheduler_connector.bind_gpu_block_pool_view(self.view)
        self.scheduler_connector.on_engine_ready(
            EngineFacts(
                num_gpu_blocks=num_gpu_blocks,
                page_bytes=self.kv_bytes.group_bytes,
                max_blocks_per_step=sum(
                    (self.max_tokens_per_step + max_running * lookahead_tokens) // group.block_size
                    + max_running
                    for group in geometry.groups
                ),
            )
        )

    # --- requests ---

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: The request can never fit in the pool, so it was not queued.
        """
        num_tokens = request.num_prompt_tokens + request.num_output_tokens + self._num_extra_slots
        needed = sum(self._most_blocks(group, num_tokens) for group in self.geometry.groups)
        available = self.kv_cache.pool.num_blocks - 1
        if needed > available:
            raise ConfigError(
                f"request {request.request_id!r} needs {needed} GPU blocks at once for "
                f"{num_tokens} tokens, but the pool has {available}; use more GPU blocks"
            )
        self.stats.requests += 1
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request early, in any state, and return whether the id was known."""
        load = self._loads.get(request_id)
        if load is not None and load.request.status is Status.LOADING:
            # The load still writes, so its blocks are released when it has ended.
            load.request.status = Status.ABORTED
            self._report_end(load.request, self.kv_cache.block_ids(request_id))
            return True
        for request in self.running:
            if request.request_id == request_id:
                self._end_running(request, Status.ABORTED)
                return True
        for request in self.waiting:
            if request.request_id == request_id:
                self._end_waiting(request, Status.ABORTED)
                return True
        return False

    def num_unfinished_requests(self) -> int:
        """Count the requests that wait, load or run."""
        return len(self.waiting) + len(self.running) + len(self._loads)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits, loads or runs."""
        return self.num_unfinished_requests() > 0

    def has_work(self) -> bool:
        """Whether ``step`` must be called, also because of pending work of the connector."""
        return (
            self.has_unfinished_requests()
            or any(step.chunks for step in self._launched)
            or self.scheduler_connector.has_pending_work()
        )

    def held_blocks(self) -> dict[int, int]:
        """Count the references of the requests, but not of the connector, ``{block_id: count}``."""
        names = (*self._loads, *(request.request_id for request in self.running))
        tables = (table for name in names for table in self.kv_cache.block_tables(name))
        held = Counter(chain.from_iterable(tables))
        del held[NULL_BLOCK_ID]
        return dict(held)

    def loading_request(self, request_id: str) -> Request | None:
        """Find the request with this id that waits for loads, even if it was aborted."""
        load = self._loads.get(request_id)
        return load.request if load else None

    def reset_cache(self) -> bool:
        """Reset the GPU prefix cache and the connector's cache, even during transfers.

        Returns:
            False if the pool (while blocks are in use, POOL-9) or the connector refused the reset;
            the other one was reset nevertheless.
        """
        was_reset = self.kv_cache.pool.reset_prefix_cache()
        return self.scheduler_connector.reset_cache() and was_reset

    def shutdown(self) -> dict[int, int]:
        """Stop both halves and close the view.

        Returns:
            References that the connector did not release, ``{block_id: count}``.
        """
        while self._launched:
            self._run_kernels(self._launched.popleft())
        self.scheduler_connector.shutdown()
        self.worker_connector.shutdown()
        return dict(self.view.close())

    # --- one step ---

    def step(self) -> None:
        """Schedule and launch a step; process the oldest output if no further launch is allowed."""
        self.stats.steps += 1
        step = self._launch()
        has_more = bool(step.chunks) or self.has_unfinished_requests()
        if not has_more:
            self._launched.pop()
        if self._launched and (len(self._launched) == self.steps_in_flight or not has_more):
            self._take_in(self._launched.popleft())
        if max(self._idle_steps, self._lone_preemptions) > _MAX_IDLE_STEPS:
            law, why = self._why_stuck()
            raise ConnectorError(f"{law}: {why}")

    def take_reports(self) -> None:
        """Process the reports of ended transfers; each step starts with this call."""
        self._take_results(self.worker_connector.get_finished())

    def _launch(self) -> _Launched:
        self.take_reports()
        scheduled = self._schedule_running()
        if not self._has_preempted:
            self._schedule_waiting(scheduled)
        steps = [
            RequestStep(
                request.info(),
                self.kv_cache.block_tables(request.request_id),
                request.num_computed_tokens,
                num_tokens,
            )
            for request, num_tokens in scheduled.items()
        ]
        self._has_preempted = False
        plan = self.scheduler_connector.plan_step(StepInfo(steps))
        self._jobs.check(plan)
        for spec in (*(job.dst for job in plan.loads), *(job.src for job in plan.stores)):
            num_gpu_blocks(spec)
        self._jobs.begin(plan)
        if plan:
            self.worker_connector.start_plan(plan)
        is_busy = bool(scheduled or plan.loads or plan.stores)
        if is_busy or any(step.chunks for step in self._launched):
            self._idle_steps = 0
        else:
            self._idle_steps += 1
            if self._jobs:
                self.worker_connector.wait(list(self._jobs))  # nothing else to do
        step = _Launched([self._begin(request, n) for request, n in scheduled.items()])
        self._launched.append(step)
        if self._stream is not None and step.chunks:
            self._stream.launch()
        if self.steps_in_flight > 1:  # otherwise the output is taken in at once
            self._compute(step)
            for request in scheduled:
                self._cache(request)
        return step

    def _why_stuck(self) -> tuple[str, str]:
        holds = (
            f"the connector holds {len(self.view.held_blocks())} of "
            f"{self.kv_cache.pool.num_blocks - 1} blocks"
        )
        if self._lone_preemptions > _MAX_IDLE_STEPS:
            times = f"preempted {_MAX_IDLE_STEPS} times"
            return "CONN-4", f"a request that runs alone was {times}: {holds}"
        if self._jobs:
            return "CONN-3", (
                f"jobs {sorted(self._jobs)[:10]} were never reported, in "
                f"{_MAX_IDLE_STEPS} steps that only waited for them"
            )
        if self.waiting:
            return "CONN-4", (
                f"{len(self.waiting)} requests wait, nothing runs and nothing is in flight for "
                f"{_MAX_IDLE_STEPS} steps: {holds}, or match_prefix always returns None"
            )
        return "CONN-3", (
            f"has_pending_work was true for {_MAX_IDLE_STEPS} steps in which nothing was planned"
        )

    def _schedule_running(self) -> dict[Request, int]:
        scheduled: dict[Request, int] = {}
        budget = self.max_tokens_per_step
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = min(self._num_wanted_tokens(request), budget)
            if not num_tokens:  # its end is in flight
                index += 1
                continue
            end = request.num_computed_tokens + num_tokens
            slots = end + self.lookahead_tokens
            while not self.kv_cache.allocate_slots(request.request_id, slots):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    self._lone_preemptions += not self.running
                    return scheduled
            scheduled[request] = num_tokens
            budget -= num_tokens
            index += 1
        return scheduled

    def _schedule_waiting(self, scheduled: dict[Request, int]) -> None:
        budget = self.max_tokens_per_step - sum(scheduled.values())
        put_off: list[Request] = []
        while self.waiting and budget > 0 and self._num_started() < self.max_running:
            request = self.waiting.popleft()
            if request.request_id in self._loads:  # an aborted request with this id still loads
                put_off.append(request)
                continue
            hit_blocks, num_hit = self.kv_cache.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
            num_external: int | None = 0
            if request.use_connector:
                num_external = self.scheduler_connector.match_prefix(request.info(num_hit), num_hit)
            if num_external is None:
                put_off.append(request)
                continue
            check_promise(self.geometry, request.info(), num_hit, num_external)
            num_ready = num_hit + num_external
            num_tokens = min(request.num_tokens - num_ready, budget)
            room = num_ready + self.lookahead_tokens
            if not num_external:
                room += num_tokens
            if not self.kv_cache.allocate_slots(
                request.request_id, room, hit_blocks=hit_blocks, num_computed_tokens=num_ready
            ):
                self.waiting.appendleft(request)
                break
            request.num_computed_tokens = num_hit
            request.life += 1
            block_ids = self.kv_cache.block_ids(request.request_id)
            self.scheduler_connector.on_blocks_allocated(
                request.info(), block_ids, num_hit, num_external
            )
            if num_external:
                to_load = self._blocks_to_load(block_ids, num_hit, num_ready)
                self._submit(partial(self.kv_bytes.poison, to_load))
                request.status = Status.LOADING
                self._loads[request.request_id] = _Load(request, num_hit, num_external)
                self._jobs.promise(request.request_id, num_external)
                continue
            self._start(request, num_hit, num_hit)
            scheduled[request] = num_tokens
            budget -= num_tokens
        self.waiting.extendleft(reversed(put_off))

    def _num_started(self) -> int:
        return len(self.running) + len(self._loads)

    def _start(self, request: Request, num_hit_tokens: int, num_computed_tokens: int) -> None:
        request.num_computed_tokens = num_computed_tokens
        request.status = Status.RUNNING
        if not request.was_started:
            self.stats.gpu_hit_blocks += num_hit_tokens // self.geometry.hash_block_size
            num_external = num_computed_tokens - num_hit_tokens
            self.stats.cpu_hit_blocks += num_external // self.geometry.hash_block_size
        request.was_started = True
        self.running.append(request)
        if self.verify_hits:
            self._verify(request, 0, num_hit_tokens)

    def _num_wanted_tokens(self, request: Request) -> int:
        """Count the tokens to compute next; 0 if outputs in flight complete the request."""
        uncomputed = request.num_tokens + request.num_pending_tokens - request.num_kept_tokens
        left = request.num_output_tokens - request.num_generated_tokens
        left -= request.num_pending_tokens
        if uncomputed > 1 or (left <= 0 and not request.num_pending_tokens):
            return uncomputed
        if self.drafts:
            return 1 + self._drafts_of(request)[0]
        return min(self.decode_tokens, left)

    def _drafts_of(self, request: Request) -> tuple[int, int]:
        """Return the numbers of drafts and of accepted drafts of the next decode step."""
        return self.drafts[request.num_decode_steps % len(self.drafts)]

    def _preempt(self, request: Request) -> None:
        self.stats.preemptions += 1
        self.running.remove(request)
        block_ids = self.kv_cache.block_ids(request.request_id)
        self.scheduler_connector.on_request_preempted(_last_info(request), block_ids)
        self.kv_cache.free(request.request_id)
        request.num_computed_tokens = request.num_pending_tokens = 0
        request.num_rejected_tokens = 0
        request.status = Status.WAITING
        self.waiting.appendleft(request)
        self._has_preempted = True

    # --- compute and outputs ---

    def _begin(self, request: Request, num_tokens: int) -> _Chunk:
        """Count launched tokens as computed (CONN-7), and rejected drafts until their output."""
        start = request.num_kept_tokens
        end = kept = start + num_tokens
        # The token after the last computed one is known then: one after a prompt, several after
        # a decode step of several.
        expected = request.num_tokens + request.num_pending_tokens
        if expected - start == 1 and self.drafts:
            kept = start + 1 + min(self._drafts_of(request)[1], num_tokens - 1)
            request.num_decode_steps += 1
        request.num_computed_tokens += num_tokens
        request.num_rejected_tokens += end - kept
        left = request.num_output_tokens - (expected - request.num_prompt_tokens)
        num_sampled = max(0, min(kept + 1 - expected, left))
        request.num_pending_tokens += num_sampled
        return _Chunk(request, request.life, start, kept, end, num_sampled)

    def _compute(self, step: _Launched) -> None:
        """Write the blocks that a step fills, immediately or in stream order."""
        block_ids: list[int] = []
        keys: list[OffloadKey] = []
        junk: list[int] = []  # blocks of rejected drafts, or after an unforeseen end
        for chunk in step.chunks:
            request = chunk.request
            if not (blocks := self._full_blocks(request, chunk.start, chunk.end)):
                continue
            last = min(request.num_prompt_tokens + request.num_tokens_to_come, chunk.kept)
            for block in blocks:
                if (block.number + 1) * self.geometry.groups[block.group_idx].block_size > last:
                    junk.append(block.block_id)
                else:
                    block_ids.append(block.block_id)
                    keys.append(block.key)
        if block_ids:
            self._submit(partial(self.kv_bytes.write, block_ids, keys))
        if junk:
            self._submit(partial(self.kv_bytes.poison, junk))

    def _submit(self, kernel: Callable[[], None]) -> None:
        """Run a call on the KV bytes after all launched steps, or immediately without a stream."""
        launched = [step for step in self._launched if step.chunks] if self._stream else []
        if launched:
            launched[-1].kernels.append(kernel)
        else:
            kernel()

    def _run_kernels(self, step: _Launched) -> None:
        for kernel in step.kernels:
            kernel()
        if self._stream is not None and step.chunks:
            self._stream.take()

    def _take_in(self, step: _Launched) -> None:
        """Process the output of a step: append tokens, hash blocks, end requests."""
        for chunk in step.chunks:
            self._take_tokens(chunk)
        if self.steps_in_flight == 1:
            self._compute(step)
        self._run_kernels(step)
        for chunk in step.chunks:
            request = chunk.request
            has_ended = request.is_finished and chunk.kept >= request.num_prompt_tokens
            if chunk.life != request.life:
                continue
            if request.status is Status.RUNNING:
                self._cache(request)
                if has_ended:
                    self._end_running(request, Status.FINISHED)
            elif request.status is Status.WAITING and has_ended:
                self._end_waiting(request, Status.FINISHED)

    def _take_tokens(self, chunk: _Chunk) -> None:
        """Append the tokens that a step sampled, unless their request has ended or restarted."""
        request = chunk.request
        if chunk.life != request.life:
            return
        if request.status is Status.RUNNING:
            request.num_pending_tokens -= chunk.num_sampled
            request.num_computed_tokens -= chunk.end - chunk.kept
            request.num_rejected_tokens -= chunk.end - chunk.kept
        elif request.status is not Status.WAITING:  # a preempted request keeps its tokens
            return
        request.generate(
            min(chunk.num_sampled, request.num_tokens_to_come - request.num_generated_tokens)
        )

    def _cache(self, request: Request) -> None:
        """Cache the computed blocks whose tokens are known."""
        settled = min(request.num_computed_tokens, request.num_tokens)
        self.kv_cache.cache_blocks(request.request_id, request.block_hashes, settled)

    def _end_running(self, request: Request, status: Status) -> None:
        self.running.remove(request)
        request.status = status
        self._lone_preemptions = 0
        self._report_end(request, self.kv_cache.block_ids(request.request_id))
        self.kv_cache.free(request.request_id)

    def _end_waiting(self, request: Request, status: Status) -> None:
        self.waiting.remove(request)
        request.status = status
        # It has no blocks: blocks under its id belong to an aborted request that still loads.
        self._report_end(request, ((),) * len(self.geometry.groups))

    def _report_end(self, request: Request, block_ids: BlockIds) -> None:
        is_finished = request.status is Status.FINISHED
        self.stats.finished += is_finished
        self.stats.aborted += not is_finished
        reason = FinishReason.FINISHED if is_finished else FinishReason.ABORTED
        self.scheduler_connector.on_request_finished(_last_info(request), block_ids, reason)

    # --- transfers ---

    def _take_results(self, results: Sequence[TransferResult]) -> None:
        ended = [end for end in map(self._jobs.end, results) if end is not None]
        for end in ended:
            self.stats.count(end)
        if results:
            self._idle_steps = self._lone_preemptions = 0
            self.scheduler_connector.on_transfers_finished(results)
        for end in ended:
            if end.is_last_load:
                self._end_load(end)

    def _end_load(self, end: EndedJob) -> None:
        load = self._loads.pop(end.job.request_id or "")
        request = load.request
        if request.status is Status.ABORTED:
            self.kv_cache.free(request.request_id)
            return
        if end.load_failed:
            # A block hit on the GPU may be outside the window of the longer prefix, so the
            # request restarts, without the connector.
            self.kv_cache.free(request.request_id)
            request.num_computed_tokens = 0
            request.status = Status.WAITING
            request.use_connector = False
            self.waiting.appendleft(request)
            return
        num_ready = load.num_gpu_tokens + load.num_external_tokens
        self._verify(request, load.num_gpu_tokens, num_ready)
        self.kv_cache.cache_blocks(request.request_id, request.block_hashes, num_ready)
        self._start(request, load.num_gpu_tokens, num_ready)

    # --- blocks and bytes ---

    @property
    def _num_extra_slots(self) -> int:
        """Return the maximum number of slots beyond a request's tokens (drafts and lookahead)."""
        most = max((proposed for proposed, _ in self.drafts), default=0)
        return self.steps_in_flight * most + self.lookahead_tokens

    def _most_blocks(self, group: CacheGroup, num_tokens: int) -> int:
        """Return the largest number of blocks that a request of ``num_tokens`` has at once."""
        # Skipped blocks are released after compute, so a whole step must fit besides the blocks
        # that the next token reads. A chunk has the most blocks just before it ends.
        skipped = group.num_skipped_tokens(num_tokens)
        last_of_chunk = max(0, skipped - 1)
        reads = max(num_tokens - skipped, last_of_chunk - group.num_skipped_tokens(last_of_chunk))
        step = max(self.max_tokens_per_step, self.steps_in_flight * self.decode_tokens)
        step += self._num_extra_slots
        at_once = -(-(reads + step) // group.block_size) + 1  # neither end is aligned
        return min(at_once, -(-num_tokens // group.block_size))

    def _blocks_to_load(
        self, block_ids: tuple[list[int], ...], num_hit: int, num_ready: int
    ) -> list[int]:
        return [
            table[number]
            for group, table in zip(self.geometry.groups, block_ids, strict=True)
            for number in group.required_blocks(num_ready)
            if number >= num_hit // group.block_size
        ]

    def _full_blocks(self, request: Request, start: int, end: int) -> Sequence[FullBlock]:
        """List the blocks that become full between two token counts, and their future keys."""
        size = self.geometry.hash_block_size
        if start // size == end // size:
            return ()  # the usual case
        tables = self.kv_cache.block_tables(request.request_id)
        info = RequestInfo(request.request_id, end, request.hashes_of(end), end)
        return list(full_blocks(self.geometry, info, tables, first_token=start))

    def _verify(self, request: Request, start: int, end: int) -> None:
        if blocks := self._full_blocks(request, start, end):
            self._submit(partial(self._compare, blocks))

    def _compare(self, blocks: Sequence[FullBlock]) -> None:
        block_ids, keys = [b.block_id for b in blocks], [b.key for b in blocks]
        self.stats.bytes_verified += len(block_ids) * self.kv_bytes.block_bytes
        self.stats.mismatches += self.kv_bytes.count_mismatches(block_ids, keys)


def _last_info(request: Request) -> RequestInfo:
    """Make the info of a request that loses its blocks, and count only tokens of known value."""
    last = request.num_tokens - (request.num_output_tokens > 0)
    return request.info(min(request.num_computed_tokens, last))
