"""The connector of the canary, which compares each call with the calls of every tested release."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from typing_extensions import override

from kvview import (
    BlockIds,
    Connector,
    CPULoadStoreSpec,
    FinishReason,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    GuardedView,
    OffloadKey,
    RequestInfo,
    SchedulerConnector,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
    make_offload_key,
)
from kvview_vllm.releases import ConnectorSeam, expect, installed
from kvview_vllm.releases.calls import event_extra_keys
from kvview_vllm.releases.samples import BLOCK_SIZE, WINDOW

CANARY_TARGET = f"{__name__}:CanaryConnector"
"""Target of this connector, which the canary does not check again."""

NUM_BLOCKS = 32
SALT = "salt"
LORA = ("lora", 1)
PROMPTS = {
    "a": range(100, 148),  # three full blocks
    "b": [*range(100, 132), *range(300, 331)],  # the first two of these blocks, and more
    "c": range(400, 463),  # is loaded, then preempted, and finally aborted
    "d": range(500, 739),  # is computed in two steps, in blocks that were used before
}
LENGTHS = {"a": 2, "b": 1, "c": 9, "d": 1}

_SEAM = ConnectorSeam.seam
_NULL_BLOCK_ID = 0


class CanaryConnector(Connector):
    """A connector whose scheduler half is passed in its options."""

    @override
    def make_scheduler(self) -> SchedulerConnector:
        half: SchedulerConnector = self.config.options["half"]
        return half


class CanaryHalf(SchedulerConnector):
    """Compares each call with the calls that every tested release makes.

    The name of a block consists of the request for which it was allocated, its group and its
    number: ``b1.2`` is the third block of request ``b`` in the second group. The null block is
    ``-``.
    """

    view: GuardedView

    def __init__(self, num_groups: int) -> None:
        release = installed().connector
        alone = num_groups == 1
        # SCHED-5: releases that handle other loads wrongly get no such loads.
        after_hits = alone or release.hits_come_first or not release.null_window_blocks
        self._promises = {
            "b": BLOCK_SIZE if after_hits else 0,
            "c": 3 * BLOCK_SIZE if alone or release.null_window_blocks else 2 * BLOCK_SIZE,
        }
        self._num_groups = num_groups
        self.failing = {"c"} if release.failed_requests else set()
        self._expected = self._story(self._promises["b"], self._promises["c"])
        self._num_jobs = 0
        self._num_loads = sum(map(bool, self._promises.values())) - len(self.failing)
        self._names: dict[int, str] = {_NULL_BLOCK_ID: "-"}
        self._jobs: list[TransferJob] = []
        self._held: list[int] = []

    def _story(self, loaded_b: int, loaded_c: int) -> dict[str, list[str]]:
        """Return the expected calls of each request, as text."""
        start_b, start_c = 32 + loaded_b, 0 if self.failing else loaded_c
        table = self._table
        return {
            "a": [
                _match(48, 0),
                _allocated(table("aaa", 0), 0, 0),
                _scheduled(table("aaa", 0), 0, 48),
                _scheduled(table("aaaa", 48), 48, 1),
                _finished(table("aaaa", 49), 49, FinishReason.FINISHED),
            ],
            "b": [
                _match(63, 32),
                _allocated(table("aab" if loaded_b else "aabb", 32 + loaded_b), 32, loaded_b),
                _scheduled(table("aabb", start_b), start_b, 63 - start_b),
                _finished(table("aabb", 63), 63, FinishReason.FINISHED),
            ],
            "c": [
                _match(63, 0),
                _allocated(table("c" * (loaded_c // BLOCK_SIZE), loaded_c), 0, loaded_c),
                *([_allocated(table("cccc", 0), 0, 0)] if self.failing else []),
                _scheduled(table("cccc", start_c), start_c, 63 - start_c),
                _scheduled(table("cccc", 63), 63, 1),
                f"preempted with {table('cccc', 64)}",
                *([] if self.failing else [_match(65, 64)]),  # SCHED-2
                _allocated(table("ccccc", 64), 64, 0),
                _scheduled(table("ccccc", 64), 64, 1),
                _finished(table("ccccc", 65), 65, FinishReason.ABORTED),
            ],
            "d": [
                _match(239, 0),
                _allocated(table("d" * 8, 0), 0, 0),
                _scheduled(table("d" * 8, 0), 0, 128),
                _scheduled(table("d" * 15, 128), 128, 111),
                _finished(table("d" * 15, 239), 239, FinishReason.FINISHED),
            ],
        }

    def _table(self, owners: str, num_computed_tokens: int) -> str:
        names = [
            [f"{owner}{group}.{number}" for number, owner in enumerate(owners)]
            for group in range(self._num_groups)
        ]
        return _text(names, num_computed_tokens)

    # --- between steps ---

    def take_jobs(self) -> list[TransferJob]:
        """Return the loads of the last plan, and free the blocks of loads that are to fail."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            if job.request_id in self.failing and isinstance(job.dst, GPULoadStoreSpec):
                for block in {*job.dst.block_ids} - {_NULL_BLOCK_ID}:
                    del self._names[block]
        return jobs

    def is_ready_to_end(self, name: str) -> bool:
        """Whether the connector has received every call for a request but the one at its end."""
        return len(self._expected[name]) <= 1

    def expect_ended(self, *names: str) -> None:
        """Check that the requests received every call, and that their loads were reported."""
        missing = {name: calls for name in names if (calls := self._expected[name])}
        expect(_SEAM, "calls that did not come", missing, {})
        if names[-1] != "a":
            expect(_SEAM, "loads that ended and were not reported", self._num_loads, 0)

    def expect_all_free(self) -> None:
        """Check that neither requests nor the canary hold any block."""
        self.release_held()
        free = self.view.num_free_blocks()
        expect(_SEAM, "free blocks after all requests", free, NUM_BLOCKS - 1)

    def release_held(self) -> None:
        """Free the held blocks, and check that none of them was free before."""
        held, self._held = self._held, []
        self._names = {_NULL_BLOCK_ID: "-"}  # the other blocks are now free for any request
        stayed = not any(map(self.view.is_free, held))
        self.view.free_blocks(held)
        is_free = stayed, all(map(self.view.is_free, held))
        expect(_SEAM, "whether held blocks stay, and freed ones go", is_free, (True, True))
        # A block that was held twice may end at the place of either release.
        once = [block for block in held if held.count(block) == 1]
        hashed = [b for b, keys in zip(once, self.view.block_keys(once), strict=True) if keys]
        queue = [block for block in self.view.iter_free_block_ids() if block in hashed]
        expect(_SEAM, "hashed blocks in the order in which they were freed", queue, hashed)

    def _hold(self, blocks: list[int]) -> None:
        self.view.touch_blocks(blocks)
        self._held += blocks

    # --- hooks ---

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        assert isinstance(view, GuardedView)
        self.view = view

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
        kinds = "/".join({type(each).__name__ for each in request.block_hashes})
        num_hashes = len(request.block_hashes)
        self._compare(request, _match(request.num_tokens, num_computed_tokens, num_hashes, kinds))
        return self._promises.pop(request.request_id, 0)

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        content, name = request.content, request.request_id
        assert content is not None
        keys = [repr(each) for each in event_extra_keys(list(content.extra_keys))]
        made_of = (content.token_ids[0], content.cache_salt, content.lora_name, content.lora_id)
        lora = LORA if name == "c" else (None, None)
        expect(_SEAM, f"content of request {name}", made_of, (PROMPTS[name][0], SALT, *lora))
        if name != "c":  # older releases name a LoRA differently
            expect(_SEAM, f"extra keys of request {name}", keys[:2], [repr((SALT,)), "None"])
        end = num_computed_tokens + num_external_tokens
        if num_external_tokens:  # blocks to compute come now or in a later step
            block_ids = tuple(group[: end // BLOCK_SIZE] for group in block_ids)
        table = self._named(name, block_ids, end)
        self._compare(request, _allocated(table, num_computed_tokens, num_external_tokens))
        if num_external_tokens:
            first = num_computed_tokens // BLOCK_SIZE
            spans = [group[first:] for group in block_ids]
            sizes, blocks = [*map(len, spans)], [*chain.from_iterable(spans)]
            self._num_jobs += 1
            source = CPULoadStoreSpec(range(len(blocks)))
            target = GPULoadStoreSpec(blocks, sizes, [first] * len(spans))
            self._jobs.append(TransferJob(self._num_jobs, source, target, name))

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        for one in step.scheduled:
            start, num_tokens = one.num_computed_tokens, one.num_scheduled_tokens
            table = self._named(one.request.request_id, one.block_ids, start)
            self._compare(one.request, _scheduled(table, start, num_tokens))
            self._expect_keys(one.request, one.block_ids, start + num_tokens)
        if self._expected["c"] and self._expected["c"][0].startswith("preempted"):
            self._hold([*self.view.iter_free_block_ids()])  # the next step then has no loads
        return StepPlan(loads=list(self._jobs))

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        self._num_loads -= sum(result.success for result in results)

    @override
    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        num_tokens = request.num_computed_tokens
        table = self._named(request.request_id, block_ids, num_tokens)
        self._compare(request, f"preempted with {table}")
        free = dict(self.view.iter_free_block_ids_with_hash())
        expected = self._keys(request, block_ids, num_tokens)
        found = {block: key for block, key in free.items() if block in expected}
        expect(_SEAM, "keys of the blocks of a preempted request", _hex(found), _hex(expected))
        self.release_held()

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        blocks = [block for block in chain.from_iterable(block_ids) if block]
        freed = "freed already" if any(map(self.view.is_free, blocks)) else "not freed yet"
        num_tokens = request.num_computed_tokens
        table = self._named(request.request_id, block_ids, num_tokens)
        self._compare(request, _finished(table, num_tokens, reason, freed))
        self._hold(blocks)

    # --- comparing ---

    def _compare(self, request: RequestInfo, found: str) -> None:
        calls = self._expected[request.request_id]
        expected = calls.pop(0) if calls else "no further call"
        expect(_SEAM, f"request {request.request_id}", found, expected)

    def _named(self, name: str, block_ids: BlockIds, num_computed_tokens: int) -> str:
        names = [
            [
                self._names.setdefault(block, f"{name}{group}.{number}")
                for number, block in enumerate(blocks)
            ]
            for group, blocks in enumerate(block_ids)
        ]
        return _text(names, num_computed_tokens)

    def _keys(
        self, request: RequestInfo, block_ids: BlockIds, num_computed_tokens: int
    ) -> dict[int, OffloadKey]:
        """Return the keys that the blocks of computed tokens must have."""
        return {
            block: make_offload_key(request.block_hashes[number], group)
            for group, blocks in enumerate(block_ids)
            for number, block in enumerate(blocks[: num_computed_tokens // BLOCK_SIZE])
            if block != _NULL_BLOCK_ID
        }

    def _expect_keys(self, request: RequestInfo, block_ids: BlockIds, num_tokens: int) -> None:
        expected = self._keys(request, block_ids, num_tokens)
        found = zip(expected, self.view.block_keys([*expected]), strict=True)
        shown = {block: "+".join(map(bytes.hex, keys)) for block, keys in found}
        expect(_SEAM, "keys of cached blocks", shown, _hex(expected))
        ids = {self.view.find_cached_block(key): key for key in expected.values()}
        expect(_SEAM, "blocks found by their keys", ids, expected)


def _hex(keys: dict[int, OffloadKey]) -> dict[int, str]:
    return {block: key.hex() for block, key in keys.items()}


# --- the calls as text ---


def _text(names: list[list[str]], num_computed_tokens: int) -> str:
    """Format a block table; blocks behind the window are null, because releases differ."""
    left = max(0, num_computed_tokens - WINDOW + 1) // BLOCK_SIZE
    for group in names[1:]:
        group[:left] = ["-"] * left
    return " | ".join(map(" ".join, names))


def _match(
    num_tokens: int, num_computed: int, num_hashes: int | None = None, kinds: str = "bytes"
) -> str:
    num_hashes = num_tokens // BLOCK_SIZE if num_hashes is None else num_hashes
    computed = f"{num_computed} of {num_tokens} tokens computed"
    return f"asked with {computed} and {num_hashes} hashes of {kinds}"


def _allocated(table: str, num_computed: int, num_external: int) -> str:
    return f"allocated {table} for {num_computed} computed tokens and {num_external} to load"


def _scheduled(table: str, num_computed: int, num_tokens: int) -> str:
    return f"scheduled {num_tokens} after {num_computed} in {table}"


def _finished(
    table: str, num_computed: int, reason: FinishReason, freed: str = "not freed yet"
) -> str:
    return f"{reason.name} after {num_computed} with {table}, {freed}"
