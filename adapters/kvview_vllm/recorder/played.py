"""Scenarios of the simulated engine that repeat an incident.

An incident has the order of arrivals, steps, aborts, preemptions and resets, but neither tokens nor
bytes. The simulated engine schedules by itself, so a scenario repeats the causes: lengths, shared
prefixes, blocks that were evicted before a prompt was reused, scarce blocks at a preemption, and
the delays and failures of transfers. Large pools and prompts are scaled down by one factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.connector.scenario.scenario import (
    NUM_LAYERS,
    PAGE_BYTES,
    Abort,
    Add,
    Event,
    Fate,
    HoldBlocks,
    Outcome,
    Reset,
    Scenario,
    Step,
)
from kvview.testing.repetition import Replay
from kvview_vllm.recorder.incident import (
    EngineModel,
    GroupModel,
    IncidentModel,
    RecordModel,
    RequestModel,
)
from kvview_vllm.recorder.prompts import Prompts, num_shared

_BLOCK_SIZE = 16  # of the simulation of raw connectors
_MOST_BLOCKS = 300
_MOST_BLOCKS_OF_A_REQUEST = 40
_MOST_STEPS = 6  # in a row in which no event happened
_LATEST = 8  # steps
_MOST_RUNNING = 64
_MOST_TOKENS_TO_COME = 64  # of a request that had not ended


def make_replay(incident: IncidentModel) -> Replay:
    """Make the scenarios of an incident."""
    story = _Story(incident)
    return Replay(incident.law, [*story.scenarios()], [*story.notes()])


class _Story:
    def __init__(self, incident: IncidentModel) -> None:
        self._incident = incident
        self._records = incident.records
        described = {one.request: one for one in incident.requests}
        order = dict.fromkeys(n for record in self._records for n in _requests_of(record))
        self.requests = {n: described[n] for n in order if n in described}
        self._num_missing = len(order) - len(self.requests)
        self._hits: dict[int, int] = {}  # tokens on the GPU at the first lookup of a request
        self._ends: dict[int, int] = {}
        for record in self._records:
            if record.hook == "get_num_new_matched_tokens" and record.request is not None:
                self._hits.setdefault(record.request, record.num_computed_tokens)
            if record.hook == "request_finished" and record.request is not None:
                self._ends[record.request] = record.num_tokens
        self._prompts = Prompts(self.requests.values())
        self._size = incident.engine.hash_block_size
        lengths = [one.num_prompt_tokens for one in self.requests.values()]
        longest = max([*lengths, *self._ends.values()], default=1)
        self._factor = -(-longest // (_MOST_BLOCKS_OF_A_REQUEST * self._size))

    def notes(self) -> Iterator[str]:
        """Yield the lines for the reader."""
        if number := self._incident.num_dropped:
            yield f"the incident is a window: {number} earlier calls are not played"
        if self._num_missing:
            yield f"{self._num_missing} requests began before the window and are not played"
        if self._factor > 1:
            yield f"prompts and the pool are played at 1:{self._factor}"
        if self._prompts.num_approximated:
            yield (
                f"{self._prompts.num_approximated} pairs of prompts share other prefixes than "
                f"recorded, because a scenario has one tree of shared prefixes"
            )

    def scenarios(self) -> Iterator[Scenario]:
        """Yield the scenarios: with forced evictions first, each in three kinds of engines."""
        engine = self._incident.engine
        groups = tuple(map(_group, engine.groups)) or (FullAttention(_BLOCK_SIZE),)
        lengths = (self._num_tokens(one) + self._num_output(one) for one in self.requests.values())
        needed = len(groups) * (-(-max(lengths, default=1) // _BLOCK_SIZE) + 1)
        most = max((record.num_scheduled_tokens for record in self._records), default=1)
        budget = min(engine.max_tokens_per_step, 4 * most)
        pool = min(engine.num_blocks // self._factor, _MOST_BLOCKS)
        drafts, ranks = engine.num_draft_tokens, _ranks(engine)
        plain = Scenario(
            CacheGeometry(_BLOCK_SIZE, _BLOCK_SIZE, groups),
            num_gpu_blocks=max(needed + 3, pool),
            events=tuple(self._events(is_forced=True)),
            fates=tuple(self._fates()),
            max_running=min(engine.max_running, _MOST_RUNNING),
            max_tokens_per_step=max(_BLOCK_SIZE, self._scaled(budget)),
            decode_tokens=1,
            drafts=((drafts, drafts), (drafts, 0)) if drafts else (),
            group_pages=((PAGE_BYTES,) * sum(ranks),) * len(groups) if ranks else (),
            ranks=ranks,
        )
        apart = replace(plain, steps_in_flight=2, worker_half="in_a_process", compute_lags=True)
        kinds = [plain, apart] if not engine.has_async_scheduling else [apart, plain]
        kinds.append(replace(kinds[0], other_runner=True))
        yield from kinds
        unforced = tuple(self._events(is_forced=False))
        yield from (replace(one, events=unforced) for one in kinds)

    # --- events ---

    def _events(self, *, is_forced: bool) -> Iterator[Event]:
        """Yield the events; steps in which nothing happened are shortened."""
        for is_idle, steps in groupby(self._all_events(is_forced), lambda event: event == Step()):
            events = list(steps)
            if is_idle:
                yield Step(min(len(events), _MOST_STEPS) if self._factor > 1 else len(events))
            else:
                yield from events

    def _all_events(self, is_forced: bool) -> Iterator[Event]:
        added: set[int] = set()
        cached: list[int] = []  # requests since the last reset
        scarce: set[int] = set()
        for record in self._records:
            for number in _requests_of(record):
                if number in self.requests and number not in added:
                    if is_forced and self._was_evicted(number, cached):
                        yield from (HoldBlocks(self._incident.engine.num_blocks), HoldBlocks(0))
                    yield self._add(self.requests[number])
                    added.add(number)
                    cached.append(number)
            match record.hook:
                case "build_connector_meta":
                    if is_forced and record.preempted and not scarce:
                        yield HoldBlocks(self._incident.engine.num_blocks)
                    if scarce and not scarce - {*record.resumed, *record.finished}:
                        yield HoldBlocks(0)
                    scarce |= set(record.preempted) if is_forced else set()
                    scarce -= {*record.resumed, *record.finished}
                    yield Step()
                case "request_finished" if "ABORT" in record.status and record.request in added:
                    yield Abort(f"r{record.request}")
                    scarce.discard(record.request)
                case "reset_cache":
                    yield Reset()
                    cached.clear()
        if scarce:
            yield HoldBlocks(0)

    def _was_evicted(self, number: int, cached: Sequence[int]) -> bool:
        """Whether the first lookup had fewer hits on the GPU than earlier requests had blocks."""
        if number not in self._hits:
            return False
        request = self.requests[number]
        most = (request.num_prompt_tokens - 1) // self._size
        known = max((num_shared(self.requests[one], request) for one in cached), default=0)
        return self._hits[number] < min(known, most) * self._size

    def _add(self, request: RequestModel) -> Add:
        family, num_shared_blocks = self._prompts.places[request.request]
        return Add(
            f"r{request.request}",
            family,
            self._num_tokens(request),
            self._num_output(request),
            num_shared_blocks=-(-num_shared_blocks // self._factor),
        )

    def _num_tokens(self, request: RequestModel) -> int:
        return max(1, self._scaled(request.num_prompt_tokens))

    def _num_output(self, request: RequestModel) -> int:
        num_tokens = self._ends.get(request.request)
        generated = min(request.max_tokens or 1, _MOST_TOKENS_TO_COME)
        if num_tokens is not None:
            generated = num_tokens - request.num_prompt_tokens
        return max(1, -(-generated // self._factor))

    def _scaled(self, num_tokens: int) -> int:
        """Return the number of tokens in the simulation, with the same rest in the last block."""
        blocks, rest = divmod(num_tokens, self._size)
        return -(-blocks // self._factor) * _BLOCK_SIZE + min(rest, _BLOCK_SIZE - 1)

    # --- transfers ---

    def _fates(self) -> Iterator[Fate]:
        """Yield the delays and outcomes of the loads and stores, in the order of their starts."""
        started: list[tuple[int, int, bool]] = []  # step, request, whether it is a load
        ended: dict[tuple[int, bool], int] = {}
        failed: set[int] = set()
        step = 0
        for record in self._records:
            step += record.hook == "build_connector_meta"
            if record.request is not None and record.num_external_tokens:
                started.append((step, record.request, True))
            if record.request is not None and record.is_delayed:
                started.append((step, record.request, False))
            if record.hook == "update_connector_output":
                ended |= {(one, True): step for one in record.received}
                ended |= {(one, False): step for one in record.sent}
                failed |= {*(record.received if record.num_invalid_blocks else record.failed)}
        for start, request, is_load in started:
            delay = min(ended.get((request, is_load), start + 1) - start, _LATEST)
            outcome: Outcome = "none" if is_load and request in failed else "ok"
            yield Fate(max(0, delay - 1), max(0, delay - 1), outcome)


def _requests_of(record: RecordModel) -> Iterator[int]:
    """Yield the requests that a call of the scheduler's side is about."""
    if record.request is not None:
        yield record.request
    yield from record.new


def _ranks(engine: EngineModel) -> tuple[int, ...]:
    """Return the tensors of each rank: every rank has all layers, or two stages share them."""
    if engine.num_stages > 1:
        return (1, NUM_LAYERS - 1) if engine.num_ranks == 1 else (1, NUM_LAYERS)
    return (NUM_LAYERS,) * engine.num_ranks if engine.num_ranks > 1 else ()


def _group(group: GroupModel) -> CacheGroup:
    """Return the group of the simulation, in blocks of its size."""
    if "Mamba" in group.kind:
        return Mamba(_BLOCK_SIZE)
    if "Chunked" in group.kind:
        return ChunkedLocalAttention(_BLOCK_SIZE, 2 * _BLOCK_SIZE)
    if group.window:
        return SlidingWindow(_BLOCK_SIZE, max(2, group.window * _BLOCK_SIZE // group.block_size))
    return FullAttention(_BLOCK_SIZE)
