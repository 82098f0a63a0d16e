"""The loop of an engine core under simulation: requests, launches, outputs, aborts and resets.

Requests, the bytes of computed blocks and the sampled tokens are simulated; everything else is
real. Two classes are derived from :class:`VLLMHarness`, one for each kind of worker's side:
:mod:`.kvview.kvview_engine` for connectors of kvview, :mod:`.raw.raw_engine` for those of vLLM.

Source: ``step_with_batch_queue`` of vllm/v1/engine/core.py, 0.11.0 to 0.33.0;
``kvview.testing.connector.run.engine`` defines the queries of an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvview import BlockIds, ConfigError, OffloadKey
from kvview_vllm.simulation.scheduler import capabilities, cpu_scheduler, model_runner
from kvview_vllm.simulation.scheduler.requests import Chunk, PlannedRequest, make_prompt
from kvview_vllm.simulation.scheduler.vllm_scheduler import VLLMScheduler, named, reads_vllm

if TYPE_CHECKING:
    from kvview.testing.connector.scenario.scenario import Add, Scenario

_STEPS_OF_A_DEADLOCK = 8


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
    chunks: Mapping[str, Chunk]
    answer: Any = None
    invalid: Collection[int] = ()


@reads_vllm
class VLLMHarness(ABC):
    """An engine whose worker's side is that of a derived class.

    Args:
        scenario: Sizes, as fitted.
        scheduler: The scheduler, which the engine owns.
        longest: Tokens of the longest request.
        plays_handoffs: Whether the engine hands KV to others, so that loads are compared when a
            worker reports them, and outputs are read for offers.
    """

    def __init__(
        self,
        scenario: Scenario,
        scheduler: VLLMScheduler,
        longest: int = cpu_scheduler.MAX_TOKENS,
        *,
        plays_handoffs: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.num_loaded_blocks = 0
        self.last_tables: Mapping[str, BlockIds] = {}
        """The blocks of the requests of the step that was processed last."""
        self._stats = _Stats()
        self._longest = longest
        self._drafts = scenario.drafts
        self._num_extra_slots = (
            scenario.steps_in_flight * scenario.most_drafts + scenario.lookahead_tokens
        )
        self._steps_in_flight = scenario.steps_in_flight
        self._launched: deque[LaunchedStep] = deque()
        self._aborts: dict[str, None] = {}  # to be processed before the next output
        self._num_aborts = self._num_resets = 0
        self._can_block_itself = capabilities.can_block_itself()
        self._idle_steps = 0
        self._plays_handoffs = plays_handoffs
        self._prefills: set[str] = set()
        self._offered: dict[str, tuple[Mapping[str, Any], BlockIds]] = {}

    # --- the worker's side ---

    @abstractmethod
    def _launch_step(self, output: Any, chunks: Mapping[str, Chunk]) -> LaunchedStep:
        """Launch a step that was scheduled, and add it to the steps in flight."""

    @abstractmethod
    def _run(self, step: LaunchedStep) -> None:
        """Compute a step, unless it is already computed."""

    @abstractmethod
    def _overwrite(self, block_ids: Sequence[int]) -> None:
        """Overwrite squeezed blocks, like their new owner."""

    @abstractmethod
    def _sleep(self) -> None:
        """Make the calls of a sleep and a waking, with other bytes in all blocks."""

    @abstractmethod
    def _has_pending_work(self) -> bool:
        """Whether a connector needs steps without requests."""

    @abstractmethod
    def held_blocks(self) -> Mapping[int, int]:
        """Return the references that connectors hold."""

    @abstractmethod
    def _take_load(self, request_id: str) -> tuple[Collection[int], Callable[[], int]]:
        """Return the blocks of a load that has ended, and a function that counts wrong ones."""

    def _salt_of(self, prompt: Sequence[int]) -> str | None:
        """Return the cache salt of a request."""
        return None

    # --- events ---

    def add(self, add: Add, serial: int, transfer_params: Mapping[str, Any] | None = None) -> None:
        """Queue a request, which generates at least one token, because vLLM requires this."""
        scheduler, geometry = self.scheduler, self.scheduler.geometry
        num_output_tokens = max(1, add.num_output_tokens)
        before: Sequence[int] = ()
        if add.continues is not None:
            if add.continues not in scheduler.planned:
                raise ConfigError(
                    f"request {add.continues!r} was never added, so it cannot be continued"
                )
            before = scheduler.planned[add.continues].request.all_token_ids
        size = geometry.hash_block_size
        prompt = make_prompt(add, before, size)
        num_tokens = len(prompt) + num_output_tokens + self._num_extra_slots
        needed = sum(-(-num_tokens // group.block_size) for group in geometry.groups)
        if needed >= self.num_blocks or num_tokens > self._longest:
            raise ConfigError(
                f"request {add.request_id!r} of {num_tokens} tokens may need {needed} blocks, "
                f"but the pool has {self.num_blocks - 1}"
            )
        if add.request_id in scheduler.real.requests:
            raise ConfigError(
                f"request {add.request_id!r} was aborted but still loads, so its id cannot be "
                f"reused yet"
            )
        if any(add.request_id in step.chunks for step in self._launched):
            raise ConfigError(
                f"request {add.request_id!r} is in a step in flight, so its id cannot be reused yet"
            )
        self._stats.requests += 1
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
                self._salt_of(prompt),
            )
            scheduler.add(planned)

    def add_prefill(self, add: Add, serial: int) -> None:
        """Queue a request whose KV is offered when it has finished."""
        from kvview_vllm.connector.handoffs import OFFER  # needs vLLM at import

        self.add(add, serial, {OFFER: True})
        self._prefills.add(add.request_id)

    def add_decode(self, add: Add, serial: int, params: Mapping[str, Any]) -> None:
        """Queue a request with the parameters of a handoff."""
        self.add(add, serial, params)

    def take_offered(self) -> Mapping[str, tuple[Mapping[str, Any], BlockIds]]:
        """Return the handoffs offered since the last call, by request id."""
        offered, self._offered = self._offered, {}
        return offered

    def abort(self, request_id: str) -> None:
        """End a request, as if its client disconnected.

        An engine core receives an abort between steps, or while it waits for an output.
        """
        if request_id in self._aborts:
            return
        self._stats.aborted += 1
        self._num_aborts += 1
        if self._launched and self._num_aborts % 2:
            self._aborts[request_id] = None
        else:
            self._finish([request_id])

    def step(self) -> None:
        """Act like one call of an engine core: launch a step if allowed, or process an output."""
        self._stats.steps += 1
        if self._has_requests() or not self._launched:
            output = self.scheduler.schedule()
            chunks = self.scheduler.chunks(output, [step.chunks for step in self._launched])
            self._launched.append(self._launch_step(output, chunks))
            num_launched = len(self._launched)
            self._stats.most_in_flight = max(self._stats.most_in_flight, num_launched)
            if num_launched < self._steps_in_flight and (
                output.total_num_scheduled_tokens or self._has_requests()
            ):
                return
        self._take_in()
        if self._can_block_itself or self.scheduler.real.failed_recving_kv_req_ids:
            self._end_deadlock()

    def squeeze(self, num_blocks: int) -> None:
        """Let another owner hold up to this number of free blocks from now on."""
        self._overwrite(self.scheduler.squeeze(num_blocks))

    def alias(self) -> bool:
        """Cache the first part of a block under its own hash, in addition to the whole block."""
        return self.scheduler.alias()

    def reset(self, *, after_reports: bool = False) -> bool:
        """Reset the caches; if nothing is left to do, the engine then sleeps and wakes up (0.33).

        The KV cache is lost in its sleep.
        """
        has_reset = self._reset()
        if has_reset and capabilities.can_sleep() and not self.has_work():
            self._sleep()
        return has_reset

    def _reset(self) -> bool:
        """Reset the prefix cache and the connectors, which vLLM resets even when it refuses.

        With steps in flight every second reset preempts running requests, if the release supports
        this. If a block stays in use, vLLM raises an error, whatever the connector does; the error
        counts as a refusal.
        """
        self._num_resets += 1
        if self._steps_in_flight == 1 or self._num_resets % 2:
            with named("reset_prefix_cache"):
                return cpu_scheduler.reset_caches(self.scheduler.real)
        self._stats.running_resets += 1
        try:
            return cpu_scheduler.reset_caches(self.scheduler.real, running_too=True)
        except RuntimeError:
            return False

    # --- queries ---

    @property
    def stats(self) -> _Stats:
        """Counters since the engine was built."""
        self._stats.preemptions = self.scheduler.num_preemptions
        return self._stats

    def unfinished(self) -> Mapping[str, str]:
        """Return the status of each request, the oldest request first.

        In a handoff, a request whose loads have ended counts as waiting.
        """
        unfinished = self.scheduler.unfinished()
        if self._plays_handoffs:
            unfinished |= dict.fromkeys(self.scheduler.loaded & unfinished.keys(), "waiting")
        return unfinished

    def has_work(self) -> bool:
        """Whether requests are unfinished, or steps or jobs in flight."""
        return (
            bool(self._launched)
            or bool(self.scheduler.real.has_unfinished_requests())
            or self._has_pending_work()
        )

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the pool, the null block included."""
        return self.scheduler.num_blocks

    def ref_counts(self, block_ids: Sequence[int]) -> list[int]:
        """Return the number of references to each block, as vLLM counts them."""
        return self.scheduler.ref_counts(block_ids)

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys under which vLLM caches each block."""
        return self.scheduler.cached_keys(block_ids)

    def engine_refs(self) -> Counter[int]:
        """Return the references of block tables, of squeezed blocks and of blocks to free later."""
        return self.scheduler.engine_refs()

    # --- one step ---

    def _has_requests(self) -> bool:
        """Whether an engine core would schedule a step."""
        return bool(self.scheduler.real.has_requests()) or self._has_pending_work()

    def _finish(self, request_ids: Sequence[str]) -> None:
        self.scheduler.finish(request_ids)

    def _end_deadlock(self) -> None:
        """Abort a request that holds loaded blocks and waits behind a request that needs them.

        Up to 0.22 vLLM lets both requests wait forever, whatever the connector does; later releases
        do this only after failed loads (vLLM PR #57841, which is not in 0.33).
        """
        unfinished = self.unfinished()
        busy = {name for name, status in unfinished.items() if status != "waiting"}
        busy -= self.scheduler.loaded
        computes = any(step.output.total_num_scheduled_tokens for step in self._launched)
        is_idle = not (computes or self.scheduler.squeezed or busy) and len(unfinished) > 1
        self._idle_steps = self._idle_steps + 1 if is_idle else 0
        if self._idle_steps < _STEPS_OF_A_DEADLOCK or self.held_blocks():
            return
        holds = [name for name in unfinished if any(self.scheduler.table(name))]
        if holds:
            self.abort(holds[-1])

    def _take_in(self) -> None:
        """Process waiting aborts, and then the output of the oldest step."""
        step = self._launched.popleft()
        self._run(step)
        if self._plays_handoffs:
            self._check_loads(step.answer.kv_connector_output)
        self.last_tables = self.scheduler.tables(step.output)
        aborts, self._aborts = list(self._aborts), {}
        if aborts:
            self._finish(aborts)
        num_unfinished = len(self.unfinished())
        self._on_outputs(self.scheduler.update(step.output, step.answer))
        self._stats.finished += num_unfinished - len(self.unfinished())
        for chunk in step.chunks.values():
            chunk.planned.check(self.scheduler.is_complete(chunk.planned.request))
        if self._drafts and self._steps_in_flight == 1:
            chunks = step.chunks.items()
            drafts = {name: one.planned.next_drafts() for name, one in chunks if one.sampled}
            self.scheduler.propose_drafts(drafts)

    def _check_loads(self, transfers: Any) -> None:
        """Compare the bytes of loads that a worker reports as complete."""
        invalid = {*model_runner.invalid_blocks(transfers)}
        failed = model_runner.failed_requests(transfers)
        for name in (transfers and transfers.finished_recving) or ():
            blocks, count_wrong = self._take_load(name)
            if name in failed or name not in self.unfinished() or not invalid.isdisjoint(blocks):
                continue
            self.num_loaded_blocks += len(blocks)
            self._stats.mismatches += count_wrong()

    def _on_outputs(self, outputs: Mapping[int, Any]) -> None:
        """Receive the outputs of a step, by client."""
        if not self._plays_handoffs:
            return
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.kv_transfer_params is not None:
                    table = self.last_tables[output.request_id]
                    self._offered[output.request_id] = output.kv_transfer_params, table
