"""The model of a run: the KV in each page of the GPU and of the tier, in stream order.

The model consists of dictionaries and copies of bytes, without code of any implementation. Each
comparison raises :class:`InvariantBroken` with its law.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from kvview import (
    BlockIds,
    CacheGeometry,
    CanonicalKVCacheRef,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingEvent,
    OffloadKey,
    RequestInfo,
    full_blocks,
    make_offload_key,
)
from kvview.events.fold import FoldedEvents
from kvview.testing.connector.judge.invariants import InvariantBroken, short
from kvview.testing.connector.judge.jobs import PlannedJob

_JUNK = 0x5A
_REMEMBERED_STORES = 8  # stores that are kept per page, to explain wrong bytes


class GPUPages:
    """The bytes of the GPU blocks; a load may only write the blocks that it names.

    Args:
        tensors: The KV caches, without a gate.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._words = [tensor.view(torch.int64) for tensor in tensors]
        self._before = [words.clone() for words in self._words]  # reused: clones cost more

    def rows(self, blocks: Collection[int]) -> list[torch.Tensor]:
        """Return copies of the bytes of blocks, tensor by tensor; empty without blocks."""
        if not blocks:
            return []
        numbers = torch.tensor([*blocks], dtype=torch.int64)
        return [tensor.index_select(0, numbers) for tensor in self._tensors]

    def corrupt(self, blocks: Collection[int]) -> None:
        """Overwrite blocks with bytes that are not the KV of any key."""
        if not blocks:
            return
        numbers = torch.tensor([*blocks], dtype=torch.int64)
        for tensor in self._tensors:
            tensor.index_fill_(0, numbers, _JUNK)

    def restore(self, blocks: Collection[int], rows: Sequence[torch.Tensor]) -> None:
        """Write the bytes that :meth:`rows` returned back into the blocks."""
        if not blocks:
            return
        numbers = torch.tensor([*blocks], dtype=torch.int64)
        for tensor, before in zip(self._tensors, rows, strict=True):
            tensor.index_copy_(0, numbers, before)

    def note(self) -> None:
        """Copy all KV blocks, for :meth:`check_writes`."""
        for words, before in zip(self._words, self._before, strict=True):
            before.copy_(words)

    def check_writes(self, jobs: Sequence[PlannedJob], may_write: Callable[[], set[int]]) -> None:
        """Compare all KV blocks with those of the last call of :meth:`note`.

        Args:
            jobs: Jobs that have run since then, for the message.
            may_write: Returns the blocks that loads may write.

        Raises:
            InvariantBroken: A job wrote another block (XFER-2), or a load wrote while the engine
                computed (XFER-6).
        """
        changed: set[int] = set()
        for words, before in zip(self._words, self._before, strict=True):
            if not torch.equal(words, before):
                changed.update((words != before).any(dim=1).nonzero().flatten().tolist())
        if not changed:
            return
        if foreign := changed - may_write():
            raise InvariantBroken(
                "XFER-2",
                f"jobs {[job.job_id for job in jobs]} wrote GPU blocks {sorted(foreign)}, which no "
                f"job names",
            )
        early = [job for job in jobs if job.is_load and not job.is_computed]
        check_computed([job for job in early if not changed.isdisjoint(job.gpu_blocks)])

    def check_source(self, store: PlannedJob) -> None:
        """Compare the source blocks of a store with the bytes that were computed.

        Raises:
            InvariantBroken: The blocks were overwritten before the store read them (CONN-6).
        """
        blocks = store.gpu_blocks
        for now, rows in zip(self.rows(blocks), store.rows, strict=True):
            if not torch.equal(now, rows):
                changed = (now != rows).any(dim=1).nonzero().flatten().tolist()
                raise InvariantBroken(
                    "CONN-6",
                    f"blocks {[blocks[i] for i in changed]} were overwritten before store job "
                    f"{store.job_id} had read them",
                )

    def check_arrived(
        self,
        load: PlannedJob,
        group_refs: Sequence[Sequence[CanonicalKVCacheRef]],
        on_rank: str = "",
    ) -> None:
        """Find words that a load did not write although the load was reported as a success.

        Args:
            load: The load.
            group_refs: The tensors of each group.
            on_rank: Text with the rank, for the message; empty if there is one rank.

        Raises:
            InvariantBroken: A block was not written, or was written only in part (XFER-4).
        """
        spec = load.transfer.dst
        if not isinstance(spec, GPULoadStoreSpec):
            return
        groups = [group for group, size in enumerate(spec.group_sizes) for _ in range(size)]
        now = self.rows(load.gpu_blocks)
        has_equal = {  # for each row, whether a word of the page is as before
            ref: _have_equal_word(now[ref.tensor_idx], load.rows[ref.tensor_idx], ref)
            for group in set(groups)
            for ref in group_refs[group]
        }
        missing = {
            (block, ref.tensor_idx)
            for row, (block, group) in enumerate(zip(load.gpu_blocks, groups, strict=True))
            for ref in group_refs[group]
            if has_equal[ref][row]
        }
        if missing:
            blocks, tensors = (sorted(set(numbers)) for numbers in zip(*missing, strict=True))
            is_whole = all(
                torch.equal(
                    self._tensors[tensor][block], load.rows[tensor][load.gpu_blocks.index(block)]
                )
                for block, tensor in missing
            )
            raise InvariantBroken(
                "XFER-4",
                f"load job {load.job_id} is reported as a success, but "
                f"{'no byte' if is_whole else 'only a part'} of blocks {blocks} is written in "
                f"tensors {tensors}{on_rank}",
            )


def check_computed(jobs: Sequence[PlannedJob]) -> None:
    """Require that no job copied before the steps launched before it were computed.

    Args:
        jobs: Jobs that may have copied although the steps before them are not computed.

    Raises:
        InvariantBroken: A job copied too early (XFER-6).
    """
    if jobs:
        kind = "load" if all(job.is_load for job in jobs) else "store"
        kind = kind if len({job.is_load for job in jobs}) == 1 else "transfer"
        raise InvariantBroken(
            "XFER-6",
            f"a copy of {kind} jobs {[job.job_id for job in jobs]} ran while the engine still "
            "computed the steps that it had launched before; wait for an event of compute_stream",
        )


class TierPages:
    """The latest store into each page of a host tier."""

    def __init__(self) -> None:
        self._stores: defaultdict[int, deque[PlannedJob]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED_STORES)
        )
        # The last load into each GPU block, with the store whose page it reads.
        self._loads: dict[int, tuple[PlannedJob, PlannedJob | None]] = {}
        self._readers: dict[int, PlannedJob] = {}  # the last load from each page
        # By load and page: a store that was planned before the load had ended.
        self._overwrites: dict[tuple[int, int], PlannedJob] = {}

    def add_store(self, job: PlannedJob) -> None:
        """Add a planned store to its pages."""
        if isinstance(job.transfer.dst, CPULoadStoreSpec):
            for page in job.transfer.dst.block_ids:
                self._stores[page].append(job)
                reader = self._readers.get(page)
                if reader is not None and not reader.has_ended:
                    self._overwrites[reader.job_id, page] = job

    def check_load(self, job: PlannedJob) -> None:
        """Compare the pages that a load reads with the keys that its blocks need.

        Raises:
            InvariantBroken: The page holds no KV (CONN-2), or KV of a failed store (OFF-4), of
                another key (OFF-1), or of no key (CONN-6).
        """
        source = job.transfer.src
        self._loads.update(dict.fromkeys(job.gpu_blocks, (job, None)))
        if not isinstance(source, CPULoadStoreSpec) or not job.expected:
            return
        if len(source.block_ids) != len(job.gpu_blocks):
            return  # the offloaded block has several GPU blocks
        for page, block in zip(source.block_ids, job.gpu_blocks, strict=True):
            self._check_page(job.job_id, page, job.expected[block])
            self._loads[block] = job, self._stores[page][-1]
            self._readers[page] = job

    def history_of(self, block: int, key: OffloadKey) -> tuple[str, str | None]:
        """Describe the jobs that wrote a block whose bytes are not the KV of its key.

        Returns:
            The jobs; empty if they are not known. And the remedy; None for that of the law.
        """
        load, store = self._loads.get(block, (None, None))
        if load is not None and not load.expected:
            return "", None
        if load is None or load.expected.get(block) != key:
            return (
                f"no load job names block {block} for this key",
                "In on_blocks_allocated, plan the load of each block that was promised.",
            )
        source = load.transfer.src
        if store is None or not isinstance(source, CPULoadStoreSpec):
            return f"load job {load.job_id} wrote the block", None
        page = source.block_ids[load.gpu_blocks.index(block)]
        jobs = f"load job {load.job_id} wrote the block from host block {page}"
        if later := self._overwrites.get((load.job_id, page)):
            return (
                f"{jobs}, to which store job {later.job_id} wrote before the load had ended",
                "Do not reuse a page before the loads that read it are reported.",
            )
        return (
            f"{jobs}, which store job {store.job_id} wrote",
            "Both jobs pair the right blocks and pages, so look at the copies of the worker half: "
            "the order of the blocks, the size of a page, the tensors of a group, the order of "
            "the jobs, and failures that are reported as successes.",
        )

    def _check_page(self, job_id: int, page: int, key: OffloadKey) -> None:
        stores = self._stores[page]
        reads = f"load job {job_id} reads host block {page} for key {short(key)}"
        if not stores:
            raise InvariantBroken(
                "CONN-2", f"{reads}, but no key was ever stored in this host block"
            )
        last = stores[-1]
        if key in last.keys:
            if last.has_ended and key not in last.stored_keys:
                raise InvariantBroken(
                    "OFF-4", f"{reads}, but the store into this host block failed"
                )
            return
        if any(key in store.keys for store in stores):
            raise InvariantBroken(
                "OFF-1", f"{reads}, but another key has since been stored in this host block"
            )
        held = ", ".join(sorted(map(short, last.keys))) or "nothing computed"
        raise InvariantBroken(
            "CONN-6", f"{reads}, but the blocks that were copied into this host block held {held}"
        )


class TierKeys:
    """The keys that a connector stored, advertised and promised since the last reset.

    Args:
        geometry: Block sizes of the engine.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self.stored: set[OffloadKey] = set()
        """Keys of stores that were reported as a success."""
        self.failed: set[OffloadKey] = set()
        """Keys of stores that were reported as a failure."""
        self.offered: set[OffloadKey] = set()
        """Keys of the full blocks that requests had when they ended."""
        self.num_events = 0
        self.was_full = False
        """Whether a key was stored again, which shows that the tier had evicted it."""
        self._events: FoldedEvents[OffloadKey] = FoldedEvents()
        self._has_failed_loads = False
        self._stored_once: set[OffloadKey] = set()
        self._last_stores: dict[OffloadKey, PlannedJob] = {}  # also those before a reset
        self._current: set[PlannedJob] = set()  # stores that were planned since the last reset
        # By request: the promised keys, and the keys that were advertised then; None for a tier
        # without events.
        self._promises: dict[str, tuple[list[OffloadKey], set[OffloadKey] | None]] = {}

    @property
    def advertised(self) -> set[OffloadKey]:
        """Keys that any medium holds according to its events."""
        return self._events.advertised()

    @property
    def has_stored_all(self) -> bool:
        """Whether a store of each offered key was planned."""
        return self.offered <= self._last_stores.keys()

    def on_ended(self, request: RequestInfo, block_ids: BlockIds) -> None:
        """Add the keys of a request that has ended."""
        self.offered.update(one.key for one in full_blocks(self._geometry, request, block_ids))

    def on_planned(self, job: PlannedJob) -> None:
        """Add a planned store; after a later reset its keys are not held (OFF-8)."""
        if not job.is_load:
            self._current.add(job)
            self._last_stores.update(dict.fromkeys(job.keys, job))

    def on_reported(self, job: PlannedJob, success: bool) -> None:
        """Add the keys of a reported store."""
        if job.is_load:
            self._has_failed_loads |= not success
        elif job in self._current:
            self._current.discard(job)
            stored = job.stored_keys
            self.stored |= stored
            self.failed |= job.keys - stored
            # A connector correctly evicts a key whose load failed. It may also store a part of a
            # job, or a block with two keys, again.
            if success and not self._has_failed_loads:
                once = {keys[0] for keys in job.block_keys.values() if len(keys) == 1}
                self.was_full |= bool(once & self._stored_once)
                self._stored_once |= once

    def on_events(self, events: Iterable[OffloadingEvent]) -> None:
        """Fold events into the advertised keys.

        Raises:
            InvariantBroken: A missing key was removed, or a present key was stored (EVENT-1).
        """
        for event in events:
            self.num_events += 1
            for key in event.keys:
                if not self._events.change(event.medium, key, removed=event.removed):
                    done, why = ("removed", "not") if event.removed else ("stored", "already")
                    raise InvariantBroken(
                        "EVENT-1",
                        f"event {self.num_events}: key {short(key)} is {done}, with medium "
                        f"{event.medium!r} {why} holding it",
                    )

    def check_advertised(self) -> None:
        """Compare the advertised keys with the stored ones.

        Raises:
            InvariantBroken: Each store of an advertised key failed (EVENT-4), or no store of the
                key has ended (EVENT-2).
        """
        if all(map(self.stored.issuperset, self._events.held.values())):
            return
        for key in self.advertised - self.stored:
            if key in self.failed:
                raise InvariantBroken(
                    "EVENT-4", f"key {short(key)} is advertised, but each of its stores has failed"
                )
            raise InvariantBroken(
                "EVENT-2",
                f"key {short(key)} is advertised, but {self._why_not_stored(key)[0]}",
            )

    def on_promise(self, request: RequestInfo, num_computed: int, num_promised: int) -> None:
        """Check a promise of ``match_prefix``, and remember it until its blocks are allocated.

        Args:
            request: The request.
            num_computed: Number of tokens that hit on the GPU.
            num_promised: Number of tokens that were promised beyond the GPU hit.

        Raises:
            InvariantBroken: CONN-2.
        """
        num_tokens = num_computed + num_promised
        if num_tokens % self._geometry.scheduler_block_size or num_tokens >= request.num_tokens:
            return  # the engine refuses such a promise
        keys = self._keys_to_load(request, num_computed, num_tokens)
        self._check_promise(request.request_id, keys, None)
        self._promises[request.request_id] = keys, self.advertised

    def has_promise(self, request_id: str) -> bool:
        """Whether keys were promised to a request since its last allocation."""
        return bool(self._promises.get(request_id, ((), None))[0])

    def on_blocks_allocated(self, request_id: str) -> None:
        """End a promise, because its loads are planned now.

        Raises:
            InvariantBroken: CONN-2 or EVENT-2.
        """
        keys, advertised = self._promises.pop(request_id, ([], None))
        if self.num_events:
            self._check_promise(request_id, keys, advertised)

    def _check_promise(
        self,
        request_id: str,
        promised: Iterable[OffloadKey],
        advertised: Collection[OffloadKey] | None,
    ) -> None:
        for key in promised:
            promise = f"match_prefix promised key {short(key)} to request {request_id!r}"
            if key not in self.stored:
                why, hint = self._why_not_stored(key)
                raise InvariantBroken("CONN-2", f"{promise}, but {why}", hint=hint)
            if advertised is not None and key not in advertised:
                raise InvariantBroken("EVENT-2", f"{promise}, but the events do not advertise it")

    def _why_not_stored(self, key: OffloadKey) -> tuple[str, str]:
        """Return the reason why a key is not loadable, and the remedy."""
        job = self._last_stores.get(key)
        if job is None:
            return (
                "no job of this run stored this key",
                "Look up each block of a group by the key that its store has: the hash at the end "
                "of the block, and the group (CacheGeometry.block_key). Pages of an earlier run, "
                "in a global, a class attribute, a folder without '{tmp}', or on a server whose "
                "option weights has no '{tmp}', must not be found.",
            )
        store = f"store job {job.job_id} of this key"
        if key in self.failed or job in self._current:
            return (
                f"{store} {'is not reported yet' if job in self._current else 'failed'}",
                "Let match_prefix find a key only after on_transfers_finished has received the "
                "success of its store. Of a failed store, keep the blocks for which result.moved "
                "is true, or none.",
            )
        return (
            f"{store} was planned before the last reset",
            "In reset_cache, forget all keys, and those of the stores in flight; or return False.",
        )

    def on_reset(self) -> None:
        """Drop all keys after a reset that was not refused.

        Raises:
            InvariantBroken: Keys are still advertised after the reset (EVENT-5).
        """
        if advertised := self.advertised:
            keys = ", ".join(sorted(map(short, advertised))[:5])
            raise InvariantBroken(
                "EVENT-5", f"after a reset {len(advertised)} keys are still advertised: {keys}"
            )
        for forgotten in (self.stored, self.failed, self._stored_once, self._current):
            forgotten.clear()
        self._promises.clear()

    def _keys_to_load(
        self, request: RequestInfo, num_computed: int, num_tokens: int
    ) -> list[OffloadKey]:
        hashes, hash_index = request.block_hashes, self._geometry.block_hash_index
        return [
            make_offload_key(hashes[hash_index(index, block)], index)
            for index, group in enumerate(self._geometry.groups)
            for block in group.required_blocks(num_tokens)
            if block >= num_computed // group.block_size
        ]


def _have_equal_word(
    now: torch.Tensor, before: torch.Tensor, ref: CanonicalKVCacheRef
) -> Sequence[bool]:
    """Return for each row whether a word of its used bytes is the same in both tensors."""
    num_words = ref.page_size_bytes // 8
    equal = now.view(torch.int64)[:, :num_words] == before.view(torch.int64)[:, :num_words]
    found: list[bool] = equal.any(dim=1).tolist()
    return found
