"""One real ``Scheduler`` of vLLM with its pool and its planned requests: what each harness owns.

- VSIM-1 An exception of vLLM itself, or an output that a sequential engine would not deliver,
  **must not** be reported under a law of the connector. It is reported as ``ENGINE``, with the
  line.
- VSIM-7 A vLLM that the simulation does not recognise **must** be refused in one line. The adapter
   may nevertheless work with this vLLM, because the simulation reads more of vLLM than the adapter.

Source: vllm/v1/core/sched/scheduler.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from traceback import walk_tb
from types import FunctionType
from typing import Any, TypeVar

from kvview import BlockIds, CacheGeometry, KVViewError, OffloadKey
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_vllm.pool import NULL_BLOCK_ID, view
from kvview_vllm.releases import reading
from kvview_vllm.releases.compat.calls import blocks_freed_later, num_preemptions
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.simulation.scheduler import cpu_scheduler, model_runner
from kvview_vllm.simulation.scheduler.requests import Chunk, PlannedRequest

_OURS = "kvview_vllm."
_Kind = TypeVar("_Kind")


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


class VLLMScheduler:
    """A scheduler, its pool, and the requests that it was given.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        geometry: Result of :func:`~kvview_vllm.geometry.read_geometry` for both configurations.
        is_v2: Whether Model Runner V2 runs the steps.
        plain: Whether to make vLLM's own class instead of the ``ViewScheduler`` derived from it.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        geometry: CacheGeometry,
        *,
        is_v2: bool,
        plain: bool = False,
    ) -> None:
        with named("building the scheduler"), model_runner.chosen(is_v2=is_v2):
            self.real = cpu_scheduler.make_scheduler(
                vllm_config, kv_cache_config, geometry, plain=plain
            )
        self.geometry = geometry
        self.manager = self.real.kv_cache_manager
        self.pool = self.manager.block_pool
        self.planned: dict[str, PlannedRequest] = {}  # the last request of each id
        self.num_preemptions = 0
        self._view = view(self.pool, owner="simulation")
        self._squeezed: list[Any] = []
        status = vllm("v1.request").RequestStatus
        self._aborted, self._preempted = status.FINISHED_ABORTED, status.PREEMPTED
        self._names = {status.RUNNING: "running", status.WAITING_FOR_REMOTE_KVS: "loading"}

    # --- calls ---

    def add(self, planned: PlannedRequest) -> None:
        """Queue a request."""
        self.real.add_request(planned.request)
        self.planned[planned.request.request_id] = planned

    def finish(self, request_ids: Sequence[str]) -> None:
        """End requests, as an engine core does for an abort."""
        with named("finish_requests"):
            self.real.finish_requests(request_ids, self._aborted)

    def schedule(self) -> Any:
        """Schedule a step, and count the requests that it preempts."""
        running = {request.request_id for request in self.real.running}
        with named("schedule"):
            output = self.real.schedule()
        requests = self.real.requests
        self.num_preemptions += sum(
            requests[name].status is self._preempted for name in running if name in requests
        )
        return output

    def update(self, output: Any, answer: Any) -> Mapping[int, Any]:
        """Process the output of a step, and return the outputs by client."""
        with named("update_from_output"):
            outputs: Mapping[int, Any] = self.real.update_from_output(output, answer)
        return outputs

    def propose_drafts(self, drafts: Mapping[str, list[int]]) -> None:
        """Set the draft tokens for the next step of requests, as a model runner does."""
        kind = vllm("v1.outputs").DraftTokenIds
        with named("update_draft_token_ids"):
            self.real.update_draft_token_ids(kind(list(drafts), list(drafts.values())))

    def squeeze(self, num_blocks: int) -> list[int]:
        """Hold up to this number of free blocks, as another owner, instead of those held before."""
        with named("squeezing"):
            if self._squeezed:
                self.pool.free_blocks(self._squeezed)
            num_blocks = min(num_blocks, self.pool.get_num_free_blocks())
            self._squeezed = self.pool.get_new_blocks(num_blocks) if num_blocks else []
        return self.squeezed

    def alias(self) -> bool:
        """Cache the first part of a block under its own hash, in addition to the whole block."""
        size = self.geometry.hash_block_size
        for request in self.real.running:
            tables = self.table(request.request_id)
            for index, (group, table) in enumerate(zip(self.geometry.groups, tables, strict=True)):
                for number, block_id in enumerate(table):
                    if group.block_size > size and len(self.cached_keys([block_id])[0]) == 1:
                        self.pool.cache_partial_block(
                            request=request,
                            block=self.pool.blocks[block_id],
                            num_tokens=number * group.block_size + size,
                            kv_cache_group_id=index,
                            block_size=group.block_size,
                        )
                        return True
        return False

    # --- a step ---

    def tables(self, output: Any) -> dict[str, BlockIds]:
        """Return the blocks of each request of a step, by group."""
        return {name: self.table(name) for name in output.num_scheduled_tokens}

    def chunks(self, output: Any, launched: Collection[Mapping[str, Chunk]]) -> dict[str, Chunk]:
        """Return the computed and the sampled tokens of a step, by request.

        Args:
            output: The scheduler's output for the step.
            launched: The chunks of the steps in flight.
        """
        starts, drafts = model_runner.computed_before(output), output.scheduled_spec_decode_tokens
        chunks: dict[str, Chunk] = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            planned = self.planned[request_id]
            life = num_preemptions(planned.request)
            # vLLM counts rejected drafts as computed until it gets the output.
            start = starts[request_id] - sum(
                chunk.num_rejected
                for of_step in launched
                if (chunk := of_step.get(request_id)) and chunk.life == life
            )
            num_drafts = len(drafts.get(request_id, ()))
            chunks[request_id] = planned.chunk(life, start, start + num_tokens, num_drafts)
        return chunks

    # --- queries ---

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool, the null block included."""
        return len(self.pool.blocks)

    @property
    def squeezed(self) -> list[int]:
        """The blocks that another owner holds."""
        return [block.block_id for block in self._squeezed]

    @property
    def loaded(self) -> set[str]:
        """Requests whose loads have ended, which vLLM lists as loading until they are scheduled."""
        return set(self.real.finished_recving_kv_req_ids)

    def status(self, request: Any) -> str:
        """Return the status of a request as the kit names it."""
        return self._names.get(request.status, "waiting")

    def unfinished(self) -> dict[str, str]:
        """Return the status of each request, the oldest request first."""
        return {
            request_id: self.status(request)
            for request_id, request in self.real.requests.items()
            if not request.is_finished()
        }

    def is_complete(self, request: Any) -> bool:
        """Whether a request ended without an abort."""
        return request.is_finished() and request.status is not self._aborted

    def table(self, request_id: str) -> BlockIds:
        """Return the blocks of a request, by group."""
        tables: BlockIds = self.manager.get_block_ids(request_id)
        return tables

    def cached_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        """Return the keys under which vLLM caches each block."""
        return [tuple(keys) for keys in self._view.block_keys(block_ids)]

    def ref_counts(self, block_ids: Sequence[int]) -> list[int]:
        """Return the number of references to each block, as vLLM counts them."""
        return [self.pool.blocks[block_id].ref_cnt for block_id in block_ids]

    def foreign_refs(self, own: Counter[int]) -> Mapping[int, int]:
        """Return the references that remain without those of the engine."""
        blocks = range(1, self.num_blocks)
        return +(Counter(dict(zip(blocks, self.ref_counts(blocks), strict=True))) - own)

    def engine_refs(self) -> Counter[int]:
        """Return the references of block tables, of squeezed blocks and of blocks to free later."""
        refs = Counter(self.squeezed)
        refs.update(block.block_id for block in blocks_freed_later(self.real))
        for request_id in self.real.requests:
            for table in self.table(request_id):
                refs.update(table)
        del refs[NULL_BLOCK_ID]
        return refs
