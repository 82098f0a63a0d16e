"""One real vLLM ``Scheduler`` under simulation: what happens to it, and what it is asked.

Requests, the bytes of computed blocks and the sampled tokens are made up; all else is
real. :class:`~kvview_vllm.simulation.VLLMEngines` builds one for each run.

- VSIM-1 What vLLM itself raised **must not** be laid at the connector's door under one
  of its laws: it is reported as ``ENGINE``, with the place.

Source: vllm/v1/core/sched/scheduler.py, 0.11.0 to 0.33.0; what an engine must answer is
said in ``kvview.testing.connector.harness``.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview import (
    CacheGroup,
    ConfigError,
    Connector,
    ConnectorConfig,
    KVViewError,
    OffloadKey,
    SchedulerConnector,
    WorkerConnector,
    make_offload_key,
)
from kvview.testing.connector.invariants import InvariantBroken
from kvview_vllm.binding import walk_connectors
from kvview_vllm.geometry import read_geometry
from kvview_vllm.pool import NULL_BLOCK_ID, view
from kvview_vllm.releases.calls import child_connectors
from kvview_vllm.simulation import scheduler as cpu_scheduler

if TYPE_CHECKING:
    from kvview.testing.connector.harness import ConnectorHarness
    from kvview.testing.connector.scenario import Add, Scenario

_PAGE_BYTES = 64
_NUM_LAYERS = 2
_TOKENS_OF_A_FAMILY = 1000
_FIRST_SAMPLED_TOKEN = 1_000_000


class HandedConnector(Connector):
    """Stands for a connector object that exists already; the option ``connector`` carries it.

    The way for objects into ``KVViewConnector``: both of its sides ask the same one.
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


class Configs:
    """vLLM's configuration for some KV-cache groups."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        transfer_config: dict[str, Any] | None = None,
        num_blocks: int = 8,
        **sizes: Any,
    ) -> None:
        self.kv_cache = cpu_scheduler.make_kv_cache_config(groups, num_blocks, _NUM_LAYERS)
        with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
            self.vllm = cpu_scheduler.make_vllm_config(
                Path(folder),
                transfer_config,
                block_size=math.gcd(*(group.block_size for group in groups)),
                num_groups=len(groups),
                num_blocks=num_blocks,
                **sizes,
            )
        self.geometry = read_geometry(self.vllm, self.kv_cache)


@dataclass
class _Stats:
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    steps: int = 0
    mismatches: int = 0


class VLLMConnectorHarness:
    """One scheduler, its workers' side, and the KV bytes.

    Args:
        scenario: Sizes, as fitted.
        connectors: With several, vLLM's ``MultiConnector`` runs them.
        clock: Seconds, by which leases expire.
    """

    def __init__(
        self, scenario: Scenario, connectors: Sequence[Connector], clock: Callable[[], float]
    ) -> None:
        from kvview.testing.connector.kv_bytes import KVBytes

        self.stats = _Stats()
        self._geometry = scenario.geometry
        target = f"{__name__}:{HandedConnector.__name__}"
        children = [cpu_scheduler.connector_config(target, connector=c) for c in connectors]
        configs = Configs(
            self._geometry.groups,
            children[0] if len(children) == 1 else cpu_scheduler.multi_config(*children),
            scenario.num_gpu_blocks,
            max_num_seqs=scenario.max_running,
            max_num_batched_tokens=scenario.max_tokens_per_step,
        )
        with _named("building the scheduler"):
            self._scheduler = cpu_scheduler.make_scheduler(
                configs.vllm, configs.kv_cache, self._geometry
            )
            self._worker = cpu_scheduler.make_worker_connector(configs.vllm, configs.kv_cache)
        for connector in self._connectors():
            connector.block_pool_view.now = clock
        self._bytes = KVBytes(
            scenario.num_gpu_blocks,
            _PAGE_BYTES,
            num_groups=len(self._geometry.groups),
            num_layers=_NUM_LAYERS,
        )
        pages = [cache.tensor for cache in self._bytes.caches.tensors]
        with _named("register_kv_caches"):
            self._worker.register_kv_caches(
                {
                    name: tensor
                    for group in configs.kv_cache.kv_cache_groups
                    for name, tensor in zip(group.layer_names, pages, strict=True)
                }
            )
        self._manager = self._scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._look = view(self._pool, owner="simulation")
        status: Any = importlib.import_module("vllm.v1.request").RequestStatus
        self._aborted = status.FINISHED_ABORTED
        self._status = {
            status.RUNNING: "running",
            status.WAITING_FOR_REMOTE_KVS: "loading",
        }
        self._preempted = status.PREEMPTED
        # None: aborted meanwhile. A load within a step is one of a running request.
        between_steps = cpu_scheduler.can_load_between_steps()
        self._while_loading = {"loading", None} if between_steps else {"running"}
        self._serials: dict[str, int] = {}
        self._added: dict[str, Any] = {}  # the last request of each id
        self._loading: set[str] = set()
        self._computed: dict[int, OffloadKey] = {}  # of blocks, whether vLLM caches them or not
        self._uncomputed: set[int] = set()  # blocks that the step has yet to fill
        self._squeezed: list[Any] = []

    # --- what happens to it ---

    def add(self, add: Add, serial: int) -> None:
        """Queue a request; one that asks for no output gets a token: vLLM serves none without."""
        num_output_tokens = max(1, add.num_output_tokens)
        prompt = self._prompt(add)
        num_tokens = len(prompt) + num_output_tokens
        needed = sum(-(-num_tokens // group.block_size) for group in self._geometry.groups)
        if needed >= self.num_blocks or num_tokens > cpu_scheduler.MAX_TOKENS:
            raise ConfigError(
                f"request {add.request_id!r} of {num_tokens} tokens may need {needed} blocks, the "
                f"pool has {self.num_blocks - 1}"
            )
        if add.request_id in self._scheduler.requests:
            raise ConfigError(f"request {add.request_id!r} was aborted and still loads")
        self.stats.requests += 1
        self._serials[add.request_id] = serial
        with _named("add_request"):
            request = cpu_scheduler.make_request(
                add.request_id,
                prompt,
                num_output_tokens,
                _block_hasher(self._geometry.hash_block_size),
            )
            self._scheduler.add_request(request)
        self._added[add.request_id] = request

    def _prompt(self, add: Add) -> list[int]:
        """Tokens of which those of all families begin alike, or those of the turn before."""
        from kvview.testing.connector.scenario import NUM_SHARED_BLOCKS

        before: list[int] = []
        if add.continues is not None:
            if add.continues not in self._added:
                raise ConfigError(f"request {add.continues!r} never came: nothing to continue")
            before = list(self._added[add.continues].all_token_ids)
        num_shared = NUM_SHARED_BLOCKS * self._geometry.hash_block_size
        return before + [
            position if position < num_shared else add.family * _TOKENS_OF_A_FAMILY + position
            for position in range(len(before), len(before) + add.num_prompt_tokens)
        ]

    def abort(self, request_id: str) -> None:
        """End a request as a client that went away does."""
        self.stats.aborted += 1
        with _named("finish_requests"):
            self._scheduler.finish_requests(request_id, self._aborted)

    def step(self) -> None:
        """Schedule, transfer, compute and take the output in, as an engine core does."""
        self.stats.steps += 1
        was_running = {request.request_id for request in self._scheduler.running}
        with _named("schedule"):
            output = self._scheduler.schedule()
        requests = self._scheduler.requests
        self.stats.preemptions += sum(
            requests[request_id].status is self._preempted for request_id in was_running
        )
        self._poison()
        starts = cpu_scheduler.computed_before(output)
        self._uncomputed = {
            block_id
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            for blocks, _ in self._full_blocks(
                request_id, starts[request_id], starts[request_id] + num_tokens
            )
            for block_id in blocks
        }
        with _named("the worker's side"):
            cpu_scheduler.start_transfers(self._worker, output, output.kv_connector_metadata)
        self._write(output, starts)
        self._uncomputed = set()
        with _named("the worker's side"):
            transfers = cpu_scheduler.take_transfers(self._worker, output)
            cpu_scheduler.end_transfers(self._worker)
        self._verify(output, starts, cpu_scheduler.invalid_blocks(transfers))
        num_unfinished = len(self.unfinished())
        with _named("update_from_output"):
            answer = cpu_scheduler.make_model_output(
                self._scheduler, output, transfers, self._sample
            )
            self._scheduler.update_from_output(output, answer)
        self.stats.finished += num_unfinished - len(self.unfinished())

    def squeeze(self, num_blocks: int) -> None:
        """Somebody else has this many blocks from now on, as far as they are free."""
        with _named("squeezing"):
            if self._squeezed:
                self._pool.free_blocks(self._squeezed)
            num_blocks = min(num_blocks, self._pool.get_num_free_blocks())
            self._squeezed = self._pool.get_new_blocks(num_blocks) if num_blocks else []
        self._forget([block.block_id for block in self._squeezed])

    def alias(self) -> bool:
        """Cache the first part of a block under a hash of its own, beside the whole."""
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

    def reset(self) -> bool:
        """Reset the prefix cache and the connectors: vLLM asks these even when it refuses."""
        with _named("reset_prefix_cache"):
            return cpu_scheduler.reset_caches(self._scheduler)

    def shutdown(self) -> Mapping[int, int]:
        """Stop both sides; what is left is what neither requests nor the scenario have."""
        with _named("shutdown"):
            self._scheduler.shutdown()
            self._worker.shutdown()
        refs = {block_id: self.ref_count(block_id) for block_id in range(1, self.num_blocks)}
        return dict(Counter(refs) - self.engine_refs())

    # --- what is asked ---

    def unfinished(self) -> Mapping[str, str]:
        """Requests by status, the oldest first."""
        return {
            request_id: self._status.get(request.status, "waiting")
            for request_id, request in self._scheduler.requests.items()
            if not request.is_finished()
        }

    def has_work(self) -> bool:
        """Whether requests are unfinished, or jobs in flight."""
        return bool(self._scheduler.has_unfinished_requests()) or any(
            connector.has_pending_push_work() for connector in self._connectors()
        )

    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        """What must come into the blocks of a request that loads."""
        request = self._scheduler.requests.get(request_id)
        if request is None or self._status.get(request.status) not in self._while_loading:
            return {}
        num_hashed = len(request.block_hashes) * self._geometry.hash_block_size
        return {
            block_id: self._key(request, index, number)
            for index, table in enumerate(self._manager.get_block_ids(request_id))
            for number, block_id in enumerate(table)
            if block_id != NULL_BLOCK_ID
            and (number + 1) * self._geometry.groups[index].block_size <= num_hashed
        }

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return len(self._pool.blocks)

    def ref_count(self, block_id: int) -> int:
        """References to a block, by vLLM's own count."""
        count: int = self._pool.blocks[block_id].ref_cnt
        return count

    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """What each holds.

        vLLM caches whole scheduler blocks, and more is computed; it caches when it
        schedules, and what a step computes is not there when its transfers start.
        """
        return [
            ()
            if block_id in self._uncomputed
            else tuple(dict.fromkeys([*cached, *filter(None, [self._computed.get(block_id)])]))
            for block_id, cached in zip(block_ids, self._look.block_keys(block_ids), strict=True)
        ]

    def free_block_ids(self) -> Sequence[int]:
        """The free queue, next victim first."""
        return [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]

    def engine_refs(self) -> Counter[int]:
        """References of block tables and of what is squeezed out."""
        refs = Counter(block.block_id for block in self._squeezed)
        for request_id in self._scheduler.requests:
            for table in self._manager.get_block_ids(request_id):
                refs.update(table)
        del refs[NULL_BLOCK_ID]
        return refs

    def held_blocks(self) -> Mapping[int, int]:
        """References of all views."""
        held: Counter[int] = Counter()
        for connector in self._connectors():
            held.update(connector.block_pool_view.held_blocks())
        return held

    def _connectors(self) -> Iterator[Any]:
        """The ``KVViewConnector`` of each child."""
        for connector in walk_connectors(self._scheduler.connector):
            if not child_connectors(connector):
                yield connector

    # --- bytes ---

    def _key(self, request: Any, group: int, number: int) -> OffloadKey:
        position = self._geometry.block_hash_index(group, number)
        return make_offload_key(request.block_hashes[position], group)

    def _poison(self) -> None:
        """Overwrite what was allocated to load into: only a load can bring bytes there."""
        loading = {name for name, status in self.unfinished().items() if status == "loading"}
        for request_id in loading - self._loading:
            for table in self._manager.get_block_ids(request_id):
                self._forget([b for b in table if b and not self._look.block_keys([b])[0]])
        self._loading = loading

    def _forget(self, block_ids: Sequence[int]) -> None:
        """These blocks are written into, and hold nothing whole yet."""
        self._bytes.poison(block_ids)
        for block_id in block_ids:
            self._computed.pop(block_id, None)

    def _write(self, output: Any, starts: Mapping[str, int]) -> None:
        """Compute: blocks that become full in this step get their bytes."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            start, end = starts[request_id], starts[request_id] + num_tokens
            tables = self._manager.get_block_ids(request_id)
            for group, table in zip(self._geometry.groups, tables, strict=True):
                if end % group.block_size:
                    self._forget([table[end // group.block_size]])
            for blocks, keys in self._full_blocks(request_id, start, end):
                self._bytes.write(blocks, keys)
                self._computed.update(zip(blocks, keys, strict=True))

    def _verify(self, output: Any, starts: Mapping[str, int], invalid: Collection[int]) -> None:
        """Compare what the computed tokens read; the scheduler knows of ``invalid`` itself."""
        for request_id in output.num_scheduled_tokens:
            start = starts[request_id]
            for blocks, keys in self._full_blocks(request_id, None, start):
                if not set(blocks) & set(invalid):
                    self.stats.mismatches += self._bytes.count_mismatches(blocks, keys)

    def _full_blocks(
        self, request_id: str, start: int | None, end: int
    ) -> Iterator[tuple[list[int], list[OffloadKey]]]:
        """Blocks that become full between two token counts, with their keys, per group.

        With ``None`` for a start: those that a token at the end reads.
        """
        request = self._scheduler.requests[request_id]
        tables = self._manager.get_block_ids(request_id)
        for index, (group, table) in enumerate(zip(self._geometry.groups, tables, strict=True)):
            first = group.num_skipped_tokens(end) if start is None else start
            numbers = [
                number
                for number in range(first // group.block_size, end // group.block_size)
                if start is None or table[number] != NULL_BLOCK_ID
            ]
            yield [table[n] for n in numbers], [self._key(request, index, n) for n in numbers]

    def _sample(self, request_id: str) -> int:
        """A token that no other request has."""
        return _FIRST_SAMPLED_TOKEN + self._serials[request_id]


def _block_hasher(hash_block_size: int) -> Callable[[Any], list[bytes]]:
    """Hashes that are the same in every process: vLLM's own have a random seed up to 0.28."""

    def hash_new_blocks(request: Any) -> list[bytes]:
        hashes: list[bytes] = []
        parent = request.block_hashes[-1] if request.block_hashes else b""
        tokens = list(request.all_token_ids)
        first = len(request.block_hashes) * hash_block_size
        for start in range(first, len(tokens) - hash_block_size + 1, hash_block_size):
            block = repr(tokens[start : start + hash_block_size]).encode()
            parent = hashlib.sha256(parent + block).digest()
            hashes.append(parent)
        return hashes

    return hash_new_blocks


@contextmanager
def _named(where: str) -> Iterator[None]:
    """What neither the connector nor kvview raised is vLLM's (VSIM-1)."""
    try:
        yield
    except (InvariantBroken, KVViewError):
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        assert trace is not None, "a caught error has one"
        place = f"{trace.tb_frame.f_globals.get('__name__')}, line {trace.tb_lineno}"
        raise InvariantBroken(
            "ENGINE", f"{where} raised {type(error).__name__} {error} ({place})"
        ) from error


if TYPE_CHECKING:
    _: type[ConnectorHarness] = VLLMConnectorHarness
