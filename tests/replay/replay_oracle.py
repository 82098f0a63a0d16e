"""The expected hits of a replay in time, from a model that shares no code with the engine.

It has a heap of events instead of steps, names instead of hashes, and dictionaries instead of
pools. One server computes prompts, first come first served; running requests generate a token in
each decode step; there are two LRU caches, and a link with two directions. The trace's ids name
generated blocks too, if a later turn has them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvview_reference.replay.time_model import TimeModel
from kvview_reference.replay.trace_schemas import TraceRequest


@dataclass
class _Job:
    row: TraceRequest
    names: list[int]  # of the blocks with KV at its end
    num_full: int  # of its prompt
    hits: int = 0
    is_ready: bool = False
    successors: list[_Job] = field(default_factory=list)
    may_start: bool = True


class Oracle:
    """Two tiers and a clock.

    Args:
        rows: Rows by arrival.
        block_size: Tokens of an id.
        gpu_blocks: Usable GPU blocks.
        host_blocks: Blocks of the host.
        model: The durations.
    """

    def __init__(
        self,
        rows: Sequence[TraceRequest],
        block_size: int,
        gpu_blocks: int,
        host_blocks: int,
        model: TimeModel,
    ) -> None:
        self._size, self._model = block_size, model
        self._gpu: OrderedDict[int, int] = OrderedDict()  # name -> users; unused in LRU order
        self._gpu_blocks, self._host_blocks = gpu_blocks, host_blocks
        self._num_used = 0
        self._host: OrderedDict[int, float] = OrderedDict()  # name -> when its store has ended
        self._now = 0.0
        self._link_free = {"load": 0.0, "store": 0.0}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._queue: deque[_Job] = deque()
        self._loaded: deque[_Job] = deque()
        self._is_computing = False
        self.blocks = self.gpu_hits = self.host_hits = self.loads = 0
        self._plan(rows)

    def run(self) -> tuple[float, float]:
        """Run; returns the hits of the GPU and of the host, as shares of the prompts' ids."""
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
            self._compute_next()
        assert not self._queue
        return self.gpu_hits / self.blocks, self.host_hits / self.blocks

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    # --- the trace ---

    def _plan(self, rows: Iterable[TraceRequest]) -> None:
        names: dict[tuple[object, int], int] = {}
        jobs: dict[str, _Job] = {}
        start_s = None
        for row in rows:
            start_s = row.arrival_s if start_s is None else start_s
            parent: object = row.scope
            prompt = []
            for block in row.hash_ids[: row.num_prompt_tokens // self._size]:
                parent = names.setdefault((parent, block), len(names))
                prompt.append(parent)
            job = _Job(row, prompt, len(prompt))
            before = jobs.get(row.continues) if row.continues else None
            if before is not None:
                before.successors.append(job)
                job.may_start = False
            jobs[row.request_id] = job
            when = (row.arrival_s - start_s) / self._model.speed
            self._at(when, lambda job=job: self._arrive(job))  # type: ignore[misc]
        for job in jobs.values():
            self._name_output(job, len(names))

    def _name_output(self, job: _Job, unknown: int) -> None:
        """Name the generated blocks as the next turn does; otherwise uniquely."""
        row = job.row
        num_kept = (row.num_prompt_tokens + row.num_output_tokens - 1) // self._size
        total = row.num_prompt_tokens + row.num_output_tokens
        for later in job.successors:
            same = later.names[: job.num_full] == job.names[: job.num_full]
            if same and later.row.num_prompt_tokens >= total:
                job.names = later.names[:num_kept]
                break
        missing = range(len(job.names), max(num_kept, job.num_full))
        job.names = job.names + [-1 - unknown - next(self._numbers) for _ in missing]

    def _arrive(self, job: _Job) -> None:
        if job.may_start:
            self._queue.append(job)
        else:
            job.may_start = True  # at the end of the previous turn

    # --- compute ---

    def _compute_next(self) -> None:
        while not self._is_computing:
            if self._loaded:
                job = self._loaded.popleft()
            elif self._queue and self._match(self._queue[0]):
                job = self._queue.popleft()
                if not job.is_ready:
                    continue  # it loads
            else:
                return
            self._is_computing = True
            tokens = job.row.num_prompt_tokens - job.hits * self._size
            when = self._now + tokens / self._model.prefill_tokens_per_s
            self._at(when, lambda job=job: self._computed(job))  # type: ignore[misc]

    def _match(self, job: _Job) -> bool:
        """Find the prefix of a job and space for the rest; False if it must wait."""
        most = (job.row.num_prompt_tokens - 1) // self._size
        on_gpu = 0
        while on_gpu < most and job.names[on_gpu] in self._gpu:
            on_gpu += 1
        end = on_gpu
        while end < most and self._host.get(job.names[end], float("inf")) <= self._now:
            end += 1
        unused = [name for name in job.names[:on_gpu] if not self._gpu[name]]
        total = -(-(job.row.num_prompt_tokens + job.row.num_output_tokens) // self._size)
        if self._num_used + len(unused) + total - on_gpu > self._gpu_blocks:
            return False
        for name in job.names[:on_gpu]:
            self._use(name)
        self._num_used += total - on_gpu  # until its end
        self._shrink()
        for name in reversed(job.names[:end]):
            if name in self._host:
                self._host.move_to_end(name)
        job.hits = end
        self.blocks += len(job.row.hash_ids)
        self.gpu_hits += on_gpu
        self.host_hits += end - on_gpu
        job.is_ready = end == on_gpu
        if not job.is_ready:
            self.loads += 1
            when = self._move("load", end - on_gpu)
            self._at(when, lambda: self._keep(job, on_gpu, end) or self._loaded.append(job))  # type: ignore[func-returns-value]
        job.on_gpu = on_gpu  # type: ignore[attr-defined]
        return True

    def _computed(self, job: _Job) -> None:
        self._is_computing = False
        self._keep(job, job.hits, job.num_full)
        self._store(job.names[job.hits : job.num_full])
        when = self._now + job.row.num_output_tokens * self._model.decode_step_s
        self._at(when, lambda: self._end(job))

    def _end(self, job: _Job) -> None:
        self._keep(job, max(job.hits, job.num_full), len(job.names))
        self._store(job.names[max(job.hits, job.num_full) :])
        total = -(-(job.row.num_prompt_tokens + job.row.num_output_tokens) // self._size)
        self._num_used -= total - len(job.names)  # the last one is not full
        for name in reversed(job.names):
            self._gpu[name] -= 1
            if not self._gpu[name]:
                self._num_used -= 1
                self._gpu.move_to_end(name)
        for later in job.successors:
            if later.may_start:
                self._queue.append(later)
            later.may_start = True

    # --- the tiers ---

    def _use(self, name: int) -> None:
        self._num_used += not self._gpu[name]
        self._gpu[name] += 1

    def _keep(self, job: _Job, first: int, last: int) -> None:
        """Name blocks of a request; a known name needs one block less."""
        for name in job.names[first:last]:
            if name in self._gpu:
                self._num_used -= 1
                self._use(name)
            else:
                self._gpu[name] = 1

    def _shrink(self) -> None:
        free = self._gpu_blocks - self._num_used
        kept = [name for name, users in self._gpu.items() if not users]
        for name in kept[: max(0, len(kept) - free)]:
            del self._gpu[name]

    def _store(self, names: Sequence[int]) -> None:
        new = [name for name in names if name not in self._host][: self._host_blocks]
        if not new:
            return
        when = self._move("store", len(new))
        for name in reversed(new):
            self._host[name] = when
        while len(self._host) > self._host_blocks:
            self._host.popitem(last=False)

    def _move(self, link: str, num_blocks: int) -> float:
        rate = self._model.load_gb_per_s if link == "load" else self._model.store_gb_per_s
        seconds = num_blocks * self._size * self._model.token_bytes / rate / 1e9
        self._link_free[link] = max(self._now, self._link_free[link]) + seconds
        return self._link_free[link]
