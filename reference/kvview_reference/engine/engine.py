"""A small engine: continuous batching in steps, with a connector beside it.

One step: hear of finished transfers; give running requests room, preempting the
youngest when the pool is full; start waiting ones (prefix match, connector
match, allocate); let the connector plan; start the plan; compute; cache what
is full; finish. The KV bytes of a full block follow from its hash, so that what
a request reads before it computes is checked byte for byte.

Source: the order of calls follows ``vllm/v1/core/sched/scheduler.py`` (0.33.0).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

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
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadKey,
    RequestStep,
    StepInfo,
    TransferResult,
    full_blocks,
)
from kvview.connector.job_book import EndedJob, JobBook, check_promise
from kvview.testing.connector.kv_bytes import KVBytes
from kvview.version import require_contract
from kvview_reference.engine.request import Request, Status
from kvview_reference.geometry.kv_cache_manager import KVCacheManager
from kvview_reference.guard import guard_pool
from kvview_reference.pool import NULL_BLOCK_ID
from kvview_reference.transfer.pages import check_host_bytes

_MAX_IDLE_STEPS = 1000
_POOL_BYTES_PER_BLOCK = 100  # what the block pool keeps beside each block


@dataclass
class EngineStats:
    """Counters since the engine was built.

    Hits are counted in hash blocks of the prefix, once for all groups; transfers
    in GPU blocks, of every group.

    Args:
        gpu_hit_blocks: Blocks that requests found in the GPU prefix cache at their first start.
        cpu_hit_blocks: Blocks that they got from the connector instead.
        loaded_blocks: Blocks that load jobs moved (windows move fewer than they hit).
        offloaded_blocks: Blocks that store jobs moved.
        bytes_verified: Bytes compared with what they must be.
        mismatches: Blocks among them that differed.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    steps: int = 0
    gpu_hit_blocks: int = 0
    cpu_hit_blocks: int = 0
    loaded_blocks: int = 0
    offloaded_blocks: int = 0
    failed_transfers: int = 0
    bytes_verified: int = 0
    mismatches: int = 0


@dataclass
class _Load:
    request: Request
    num_gpu_tokens: int
    num_external_tokens: int


class Engine:
    """Runs requests over a block pool and one connector.

    Args:
        geometry: Block sizes and KV-cache groups.
        connector: Both halves are built from it; None runs without.
        num_gpu_blocks: Blocks of the pool, the null block included.
        page_bytes: Bytes of one block in one layer, a multiple of 8.
        num_layers: Layers, a page of each block in every one.
        max_running: Requests computed at once.
        max_tokens_per_step: Token budget of one step.
        decode_tokens: Tokens that a decoding request generates in one step.
        verify_hits: Whether blocks hit on the GPU are compared too, not only loaded ones.
        enable_events: Whether the pool records GPU events.
        device: Where the KV cache is.
        group_pages: Layout of the pages, as :class:`KVBytes` takes it; instead of
            ``page_bytes`` and ``num_layers``.

    Raises:
        ConfigError: A size is impossible, or the blocks do not fit in memory.
        UnsupportedContractError: The connector was written to another contract.
    """

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
        verify_hits: bool = True,
        enable_events: bool = False,
        device: str = "cpu",
        group_pages: Sequence[Sequence[int]] = (),
    ) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running must be at least 1, got {max_running}")
        self.geometry = geometry
        self.stats = EngineStats()
        num_groups = len(geometry.groups)
        if type(num_gpu_blocks) is int:
            check_host_bytes(
                num_gpu_blocks * (page_bytes * num_layers + _POOL_BYTES_PER_BLOCK),
                None,
                f"{num_gpu_blocks} GPU blocks of {page_bytes * num_layers} bytes",
            )
        self.kv_bytes = KVBytes(
            num_gpu_blocks,
            page_bytes,
            num_groups=num_groups,
            num_layers=num_layers,
            device=device,
            group_pages=group_pages,
        )
        self.kv_cache = KVCacheManager(
            geometry.groups,
            num_gpu_blocks,
            scheduler_block_size=geometry.scheduler_block_size,
            hash_block_size=geometry.hash_block_size,
            enable_kv_cache_events=enable_events,
        )
        self.max_running = max_running
        self.max_tokens_per_step = max_tokens_per_step or 32 * geometry.scheduler_block_size
        self.decode_tokens = decode_tokens or geometry.scheduler_block_size
        self.verify_hits = verify_hits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._loads: dict[str, _Load] = {}
        self._jobs = JobBook()
        self._preempted: list[str] = []
        self._idle_steps = 0
        self._lone_preemptions = 0  # of a request that runs alone, since anything else happened

        connector = connector or Connector(ConnectorConfig(geometry))
        require_contract(connector.contract_version, type(connector).__qualname__)
        # The worker half first: it refuses a host tier that does not fit in memory.
        self.worker_connector = connector.make_worker()
        self.worker_connector.register_kv_caches(self.kv_bytes.caches)
        owner = type(connector).__name__
        self.view = guard_pool(self.kv_cache.pool, owner)
        self.scheduler_connector = connector.make_scheduler()
        self.scheduler_connector.bind_gpu_block_pool_view(self.view)
        self.scheduler_connector.on_engine_ready(
            EngineFacts(
                num_gpu_blocks=num_gpu_blocks,
                page_bytes=self.kv_bytes.group_bytes,
                max_blocks_per_step=sum(
                    self.max_tokens_per_step // group.block_size + max_running
                    for group in geometry.groups
                ),
            )
        )

    # --- requests in, events out ---

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: It can never fit in the pool; nothing was queued.
        """
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        needed = sum(self._most_blocks(group, num_tokens) for group in self.geometry.groups)
        available = self.kv_cache.pool.num_blocks - 1
        if needed > available:
            raise ConfigError(
                f"request {request.request_id!r} needs {needed} GPU blocks at once for "
                f"{num_tokens} tokens, the pool has {available}: use more GPU blocks"
            )
        self.stats.requests += 1
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request early, wherever it stands; False when it is not known."""
        load = self._loads.get(request_id)
        if load is not None and load.request.status is Status.LOADING:
            # The load still writes: its blocks are given back when it has ended.
            load.request.status = Status.ABORTED
            self._tell_ended(load.request, self.kv_cache.block_ids(request_id))
            return True
        for request in self.running:
            if request.request_id == request_id:
                self._end_running(request, Status.ABORTED)
                return True
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                request.status = Status.ABORTED
                # It has no blocks: those under its id are of a first life that still loads.
                self._tell_ended(request, ((),) * len(self.geometry.groups))
                return True
        return False

    def num_unfinished_requests(self) -> int:
        """Requests that wait, load or run."""
        return len(self.waiting) + len(self.running) + len(self._loads)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits, loads or runs."""
        return self.num_unfinished_requests() > 0

    def has_work(self) -> bool:
        """Whether ``step`` has anything to do, the connector's pending work included."""
        return self.has_unfinished_requests() or self.scheduler_connector.has_pending_work()

    def held_blocks(self) -> dict[int, int]:
        """References of the requests, ``{block_id: count}``, without the connector's."""
        held: Counter[int] = Counter()
        for request_id in (*self._loads, *(request.request_id for request in self.running)):
            for table in self.kv_cache.block_tables(request_id):
                held.update(table)
        del held[NULL_BLOCK_ID]
        return dict(held)

    def loading_request(self, request_id: str) -> Request | None:
        """The request that waits for loads under this id, an aborted one too."""
        load = self._loads.get(request_id)
        return load.request if load else None

    def take_offloading_events(self) -> list[OffloadingEvent]:
        """The connector's events since the last call."""
        return list(self.scheduler_connector.take_events())

    def reset_cache(self) -> bool:
        """Forget the GPU prefix cache and what the connector offloaded.

        Returns:
            False when refused because blocks are in use (POOL-9); nothing changed.
        """
        pool = self.kv_cache.pool
        if pool.num_free_blocks() != pool.num_blocks - 1:
            return False
        return self.scheduler_connector.reset_cache() and self.kv_cache.reset_prefix_cache()

    def shutdown(self) -> dict[int, int]:
        """Stop both halves and close the view.

        Returns:
            References that the connector never gave back, ``{block_id: count}``.
        """
        self.scheduler_connector.shutdown()
        self.worker_connector.shutdown()
        return dict(self.view.close())

    # --- one step ---

    def step(self) -> None:
        """Run one scheduler step."""
        self.stats.steps += 1
        self.view.release_expired()
        self._hear_of_transfers(self.worker_connector.get_finished())
        scheduled = self._schedule_running()
        if not self._preempted:
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
        preempted, self._preempted = self._preempted, []
        plan = self.scheduler_connector.plan_step(StepInfo(steps, preempted))
        self._jobs.check(plan)
        for spec in (*(job.dst for job in plan.loads), *(job.src for job in plan.stores)):
            _num_gpu_blocks(spec)
        self._jobs.begin(plan)
        if plan:
            self.worker_connector.start_plan(plan)
        self._compute(scheduled)
        if scheduled or plan.loads or plan.stores:
            self._idle_steps = 0
        else:
            self._idle_steps += 1
            if self._jobs:
                self.worker_connector.wait(list(self._jobs))  # nothing else to do
        if max(self._idle_steps, self._lone_preemptions) > _MAX_IDLE_STEPS:
            law, why = self._why_stuck()
            raise ConnectorError(f"{law}: {why}")

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
                f"{_MAX_IDLE_STEPS} steps that did nothing but wait for them"
            )
        if self.waiting:
            return "CONN-4", (
                f"{len(self.waiting)} requests wait, nothing runs and nothing is in flight for "
                f"{_MAX_IDLE_STEPS} steps: {holds}, or never answers match_prefix"
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
            end = request.num_computed_tokens + num_tokens
            while not self.kv_cache.allocate_slots(request.request_id, end):
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
            if request.request_id in self._loads:  # its first life still loads
                put_off.append(request)
                continue
            hit_blocks, num_hit = self.kv_cache.find_computed_blocks(
                request.block_hashes, request.num_tokens
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
            room = num_ready if num_external else num_ready + num_tokens
            if not self.kv_cache.allocate_slots(
                request.request_id, room, hit_blocks=hit_blocks, num_computed_tokens=num_ready
            ):
                self.waiting.appendleft(request)
                break
            request.num_computed_tokens = num_hit
            block_ids = self.kv_cache.block_ids(request.request_id)
            self.scheduler_connector.on_blocks_allocated(
                request.info(), block_ids, num_hit, num_external
            )
            if num_external:
                self.kv_bytes.poison(self._blocks_to_load(block_ids, num_hit, num_ready))
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
        uncomputed = request.num_tokens - request.num_computed_tokens
        if uncomputed > 1 or request.is_finished:
            return uncomputed
        left = request.num_output_tokens - request.num_generated_tokens
        return min(self.decode_tokens, left)

    def _preempt(self, request: Request) -> None:
        self.stats.preemptions += 1
        self.running.remove(request)
        block_ids = self.kv_cache.block_ids(request.request_id)
        self.scheduler_connector.on_request_preempted(request.info(), block_ids)
        self.kv_cache.free(request.request_id)
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        self.waiting.appendleft(request)
        self._preempted.append(request.request_id)

    def _compute(self, scheduled: dict[Request, int]) -> None:
        block_ids: list[int] = []
        keys: list[OffloadKey] = []
        for request, num_tokens in scheduled.items():
            start = request.num_computed_tokens
            end = start + num_tokens
            if end >= request.num_tokens and not request.is_finished:
                # The token behind the last computed one is known now: one after a
                # prompt, several after a decode step of several.
                left = request.num_output_tokens - request.num_generated_tokens
                request.generate(min(end + 1 - request.num_tokens, left))
            request.num_computed_tokens = end
            new_blocks, new_keys = self._full_blocks(request, start, end)
            block_ids += new_blocks
            keys += new_keys
        if block_ids:
            self.kv_bytes.write(block_ids, keys)
        for request in scheduled:
            self.kv_cache.cache_blocks(
                request.request_id, request.block_hashes, request.num_computed_tokens
            )
            if request.is_finished and request.num_computed_tokens >= request.num_prompt_tokens:
                self._end_running(request, Status.FINISHED)

    def _end_running(self, request: Request, status: Status) -> None:
        self.running.remove(request)
        request.status = status
        self._lone_preemptions = 0
        self._tell_ended(request, self.kv_cache.block_ids(request.request_id))
        self.kv_cache.free(request.request_id)

    def _tell_ended(self, request: Request, block_ids: BlockIds) -> None:
        is_finished = request.status is Status.FINISHED
        self.stats.finished += is_finished
        self.stats.aborted += not is_finished
        reason = FinishReason.FINISHED if is_finished else FinishReason.ABORTED
        self.scheduler_connector.on_request_finished(request.info(), block_ids, reason)

    # --- transfers ---

    def _hear_of_transfers(self, results: Sequence[TransferResult]) -> None:
        ended = [end for end in map(self._jobs.end, results) if end is not None]
        for end in ended:
            num_blocks = _num_gpu_blocks(end.job.dst if end.is_load else end.job.src)
            if not end.result.success:
                self.stats.failed_transfers += 1
            elif end.is_load:
                self.stats.loaded_blocks += num_blocks
            else:
                self.stats.offloaded_blocks += num_blocks
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
            # What was hit on the GPU may be skipped in a window of the longer
            # prefix: begin again, without the connector.
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

    def _most_blocks(self, group: CacheGroup, num_tokens: int) -> int:
        """Upper bound of the blocks that a request of ``num_tokens`` has at once."""
        # What is skipped is given back after compute: beside what the next token
        # reads, a whole step must fit. A chunk is longest just before it ends.
        skipped = group.num_skipped_tokens(num_tokens)
        last_of_chunk = max(0, skipped - 1)
        reads = max(num_tokens - skipped, last_of_chunk - group.num_skipped_tokens(last_of_chunk))
        step = max(self.max_tokens_per_step, self.decode_tokens)
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

    def _full_blocks(
        self, request: Request, start: int, end: int
    ) -> tuple[list[int], list[OffloadKey]]:
        """Blocks that become full between two token counts, and their keys."""
        tables = self.kv_cache.block_tables(request.request_id)
        found = list(full_blocks(self.geometry, request.info(end), tables, first_token=start))
        return [block.block_id for block in found], [block.key for block in found]

    def _verify(self, request: Request, start: int, end: int) -> None:
        block_ids, keys = self._full_blocks(request, start, end)
        if block_ids:
            self.stats.bytes_verified += len(block_ids) * self.kv_bytes.block_bytes
            self.stats.mismatches += self.kv_bytes.count_mismatches(block_ids, keys)


def _num_gpu_blocks(spec: LoadStoreSpec) -> int:
    if not isinstance(spec, GPULoadStoreSpec):
        raise ConnectorError(
            f"CONN-3: a load ends and a store begins at a GPULoadStoreSpec, got "
            f"{type(spec).__name__}"
        )
    return len(spec.block_ids)
