"""The calls of an engine for one scheduler half: their order, their counts and their blocks.

Each check raises :class:`InvariantBroken` with ``ENGINE``, because no connector can cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from kvview import (
    CacheGeometry,
    FullAttention,
    GPUBlockPoolView,
    RequestContent,
    RequestInfo,
    RequestStep,
    StepInfo,
    StepPlan,
    SupportsFindCachedBlock,
    TransferResult,
    ViewClosedError,
    full_blocks,
)
from kvview.testing.connector.judge.invariants import InvariantBroken

_STEPS_PER_UNREAD = 7  # one step in this many is like a step of a half that ignores `filling`


class EngineCalls:
    """The requests of an engine, as one scheduler half has seen them.

    Args:
        geometry: Block sizes of the engine.
        ref_counts: Returns the number of references to each block.
    """

    def __init__(
        self, geometry: CacheGeometry, ref_counts: Callable[[Sequence[int]], Sequence[int]]
    ) -> None:
        self._geometry = geometry
        self._ref_counts = ref_counts
        self.view: GPUBlockPoolView | None = None
        """The view of the half, once it is bound."""
        self._searchable: SupportsFindCachedBlock | None = None  # the view, if it finds blocks
        self._promise: tuple[str, int] | None = None  # request and tokens, until another hook
        self._loads: dict[int, str] = {}  # requests of the loads in flight, by job
        self._load_failed: set[str] = set()
        self._contents: dict[str, RequestContent] = {}
        self._num_full: dict[str, int] = {}  # tokens in full, hashed blocks after the last step
        self._num_steps = 0
        self._was_read = False

    def on_bound(self, view: GPUBlockPoolView) -> None:
        """Receive the view of the half."""
        self.view = view
        self._searchable = view if isinstance(view, SupportsFindCachedBlock) else None

    def on_hook(self) -> None:
        """End a promise, because the engine calls another hook."""
        self._promise = None

    def on_match(
        self, request: RequestInfo, num_computed_tokens: int, promised: int, *, is_repeated: bool
    ) -> None:
        """Check a request that the half may load.

        Args:
            request: The request.
            num_computed_tokens: Number of tokens that hit on the GPU.
            promised: Number of tokens that the half has promised.
            is_repeated: Whether the half has promised tokens to this request before.
        """
        if request.request_id in self._load_failed:
            raise InvariantBroken(
                "ENGINE",
                f"the engine calls match_prefix for request {request.request_id!r}, whose load "
                f"has failed; it must compute the prefix of this request",
            )
        self._check_content(request)
        if request.num_computed_tokens != num_computed_tokens:
            raise InvariantBroken(
                "ENGINE",
                f"request {request.request_id!r} has {request.num_computed_tokens} computed tokens "
                f"in match_prefix, which must be the {num_computed_tokens} tokens of its GPU hit",
            )
        if not is_repeated:
            self._check_gpu_hit(request, num_computed_tokens)
        self._promise = request.request_id, promised

    def _check_content(self, request: RequestInfo) -> None:
        """Require one content object for the whole life of a request."""
        content = self._contents.setdefault(request.request_id, request.content)
        if content is not request.content:
            raise InvariantBroken(
                "ENGINE",
                f"request {request.request_id!r} has another content than before; it must be the "
                f"same object until the request ends",
            )

    def _check_gpu_hit(self, request: RequestInfo, num_computed_tokens: int) -> None:
        """Require that a GPU hit is the longest cached prefix, for one full-attention group."""
        view, geometry = self._searchable, self._geometry
        is_one = len(geometry.groups) == 1 and isinstance(geometry.groups[0], FullAttention)
        if not is_one or view is None:
            return

        def is_cached(group: int, block: int) -> bool:
            key = geometry.block_key(request.block_hashes, group, block)
            return key is not None and view.find_cached_block(key) is not None

        longest = geometry.longest_prefix(request.num_tokens - 1, is_cached)
        if num_computed_tokens != longest:
            raise InvariantBroken(
                "ENGINE",
                f"the engine reports a GPU hit of {num_computed_tokens} tokens for request "
                f"{request.request_id!r}, but the pool holds {longest} of its "
                f"{request.num_tokens} tokens",
            )

    def on_blocks_allocated(self, request: RequestInfo, num_external_tokens: int) -> None:
        """Check a request, and require that a promise precedes the blocks of its tokens."""
        self._check_content(request)
        if num_external_tokens and self._promise != (request.request_id, num_external_tokens):
            raise InvariantBroken(
                "ENGINE",
                f"the engine allocated blocks for {num_external_tokens} tokens of request "
                f"{request.request_id!r} after other calls or another promise; it must call "
                f"match_prefix directly before, and use the whole promise (CONN-2)",
            )

    def on_step(self, step: StepInfo, plan: StepPlan) -> None:
        """Check the requests of a step, after the half has read them."""
        self._loads.update((job.job_id, job.request_id or "") for job in plan.loads)
        self._num_steps += 1
        was_read, self._was_read = self._was_read, self._num_steps % _STEPS_PER_UNREAD > 0
        filling = step.filling() if self._was_read else ()
        shown = {one.request.request_id for one in filling}
        for one in step.scheduled:
            self._check_content(one.request)
            self._check_table(one)
            is_missing = self._must_show(one) and one.request.request_id not in shown
            if is_missing and was_read and self._was_read:
                raise InvariantBroken(
                    "ENGINE",
                    f"StepInfo.filling does not return request {one.request.request_id!r}, whose "
                    f"blocks became full since the last step, or whose computed tokens fell to "
                    f"{one.num_computed_tokens}",
                )

    def _check_table(self, one: RequestStep) -> None:
        """Require that the block table names no block that its request has left behind."""
        blocks = [*filter(None, chain(*one.block_ids))]
        counts = self._ref_counts(blocks)
        if 0 in counts:
            named = sorted(block for block, count in zip(blocks, counts, strict=True) if not count)
            raise InvariantBroken(
                "ENGINE",
                f"the block table of request {one.request.request_id!r} names {named}, which "
                f"are free; blocks without KV must be the null block",
            )

    def _must_show(self, one: RequestStep) -> bool:
        """Whether a block of the request became full or is not full any more (CONN-7)."""
        request, start = one.request, one.num_computed_tokens
        end = start + one.num_scheduled_tokens
        num_hashed = len(request.block_hashes) * self._geometry.hash_block_size
        before = self._num_full.get(request.request_id, 0)
        self._num_full[request.request_id] = min(end, num_hashed)
        has_fewer = any(
            g.block_size * (before // g.block_size) > start for g in self._geometry.groups
        )
        full = full_blocks(
            self._geometry, request, one.block_ids, first_token=before, last_token=end
        )
        return has_fewer or next(full, None) is not None

    def on_results(self, results: Iterable[TransferResult]) -> None:
        """Note the requests whose loads failed."""
        for result in results:
            request_id = self._loads.pop(result.job_id, None)
            if request_id is not None and not result.success:
                self._load_failed.add(request_id)

    def on_finished(self, request_id: str) -> None:
        """Forget a request, because another request may reuse its id."""
        self._load_failed.discard(request_id)
        self._num_full.pop(request_id, None)
        self._contents.pop(request_id, None)
        self._loads = {job: name for job, name in self._loads.items() if name != request_id}

    def check_closed(self) -> None:
        """Require that the view refuses calls after the shutdown of the engine (POOL-10)."""
        if self.view is None:
            return
        try:
            self.view.free_blocks(())
        except ViewClosedError:
            return
        raise InvariantBroken(
            "ENGINE", "the engine has shut down the connector, but did not close its view (POOL-10)"
        )
