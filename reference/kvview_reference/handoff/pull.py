"""A connector for handoffs between engines, in both roles, in which the consumer pulls the pages.

The consumer requests the pages of a handoff until they arrive or the producer refuses them, but not
for longer than a lease. The producer sends pages in CPU memory without copying them, so it holds
the blocks until the wire has read them. The consumer verifies sizes and checksum before it writes
any page, and then sends a confirmation.

Source: the pull mode of ``vllm/distributed/kv_transfer/kv_connector/v1/nixl`` (0.33.0), with
two-sided messages in place of remote reads.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, islice, pairwise
from typing import Any, ClassVar

import msgspec
import torch
from typing_extensions import override

from kvview import (
    BlockIds,
    CanonicalKVCaches,
    ComputeEvent,
    Connector,
    EngineFacts,
    FinishReason,
    GPUBlockPoolView,
    GPULoadStoreSpec,
    PinBudgetExceeded,
    RequestInfo,
    StepInfo,
    StepPlan,
    SupportsPoolSize,
    TransferJob,
    TransferResult,
)
from kvview.errors import HandoffError
from kvview.handoff import (
    Frame,
    Handoff,
    HandoffScheduler,
    HandoffWorker,
    Offers,
    Peer,
    Wire,
    layout_of,
)
from kvview_reference.transfer.host_pages import HostPages

_TRIES_PER_LEASE = 8


@dataclass(frozen=True)
class KeptKV:
    """KV that a producer keeps, which is the destination of an offer and the source of a fetch."""

    medium: ClassVar[str] = "HANDOFF"

    handoff: Handoff


@dataclass(frozen=True)
class HandoffPlan(StepPlan):
    """A step plan that also returns handoffs that are not needed."""

    returned: Sequence[Handoff] = ()


class Read(msgspec.Struct, tag=True, frozen=True):
    """A request for pages, with the first block and the number of blocks of each group."""

    handoff: Handoff
    reader: str
    reply_to: str
    first_blocks: list[int]
    num_blocks: list[int]


class PagesReply(msgspec.Struct, tag=True, frozen=True):
    """A message that precedes pages, one in each following frame."""

    handoff: Handoff
    reader: str
    checksum: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A reply of the producer: the requested KV does not exist."""

    handoff: Handoff
    reader: str
    reason: str


class Close(msgspec.Struct, tag=True, frozen=True):
    """A message of the consumer that the KV has arrived or is not needed."""

    handoff: Handoff
    reader: str


Message = Read | PagesReply | Refused | Close
_decoder = msgspec.msgpack.Decoder(Message)


class PullConnector(Connector):
    """Offers finished prompts to another engine, and loads prompts that other engines offer."""

    contract_version = "1.0"

    @override
    def make_scheduler(self) -> PullScheduler:
        return PullScheduler(self.config.geometry)

    @override
    def make_worker(self) -> PullWorker:
        return PullWorker()


class PullScheduler(HandoffScheduler):
    """The scheduler half, which offers and holds blocks, accepts handoffs and promises prefixes."""

    def __init__(self, geometry: Any) -> None:
        self.geometry = geometry
        self.view: GPUBlockPoolView | None = None
        self.null_block_id = 0
        self.me = Peer("", "", "")
        self.page_bytes: Sequence[int] = ()
        self.job_ids, self.handoff_ids = count(), count()
        self.held: dict[int, Sequence[int]] = {}  # blocks of the offers, by job
        self.accepted: dict[str, Handoff] = {}  # of requests that do not have blocks yet
        self.num_fetches = 0
        self.loads: list[TransferJob] = []
        self.offers: list[TransferJob] = []
        self.returned: list[Handoff] = []

    @override
    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        self.view = view
        if isinstance(view, SupportsPoolSize):
            self.null_block_id = view.null_block_id

    @override
    def on_engine_ready(self, facts: EngineFacts) -> None:
        self.page_bytes = facts.page_bytes

    @override
    def bind_peer(self, me: Peer, lease_seconds: float) -> None:
        self.me = me

    @cached_property
    def layout(self) -> str:
        """Layout of this engine, which is known after the two hooks above."""
        return layout_of(self.geometry, self.page_bytes, self.me.split)

    # --- producer ---

    @override
    def offer_blocks(self, request: RequestInfo, block_ids: BlockIds) -> Mapping[str, Any] | None:
        size = self.geometry.scheduler_block_size
        # The consumer computes at least one token.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1) // size * size
        spec = self.kept_blocks(block_ids, num_tokens)
        if self.view is None or not spec.block_ids or self.null_block_id in spec.block_ids:
            return None
        try:
            self.view.touch_blocks(spec.block_ids)
        except PinBudgetExceeded:
            return None
        last_hash = request.block_hashes[num_tokens // self.geometry.hash_block_size - 1]
        handoff = Handoff(
            self.me.engine_id,
            self.me.life,
            self.me.address,
            next(self.handoff_ids),
            num_tokens,
            last_hash.hex(),
            self.layout,
        )
        job = TransferJob(next(self.job_ids), spec, KeptKV(handoff))
        self.held[job.job_id] = spec.block_ids
        self.offers.append(job)
        return handoff.to_params()

    def kept_blocks(self, block_ids: BlockIds, num_tokens: int) -> GPULoadStoreSpec:
        """Return the blocks of every group that a prefix needs."""
        numbers = [group.required_blocks(num_tokens) for group in self.geometry.groups]
        return _blocks(block_ids, numbers)

    # --- consumer ---

    @override
    def accept_params(self, request: RequestInfo, params: Mapping[str, Any]) -> None:
        try:
            handoff = Handoff.from_params(params)
            handoff.require_for(request, self.geometry, self.layout)
        except HandoffError:
            return
        self.accepted[request.request_id] = handoff

    @override
    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        handoff = self.accepted.get(request.request_id)
        return max(0, handoff.num_tokens - num_computed_tokens) if handoff else 0

    @override
    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        handoff = self.accepted.pop(request.request_id, None)
        if handoff is None:
            return
        if not num_external_tokens:
            self.returned.append(handoff)
            return
        numbers = []
        for group in self.geometry.groups:
            required = group.required_blocks(num_computed_tokens + num_external_tokens)
            first = num_computed_tokens // group.block_size
            numbers.append(range(max(first, required.start), max(first, required.stop)))
        spec = _blocks(block_ids, numbers)
        job = TransferJob(next(self.job_ids), KeptKV(handoff), spec, request.request_id)
        self.num_fetches += 1
        self.loads.append(job)

    # --- both ---

    @override
    def plan_step(self, step: StepInfo) -> StepPlan:
        plan = HandoffPlan(self.loads, self.offers, self.returned)
        self.loads, self.offers, self.returned = [], [], []
        return plan

    @override
    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            blocks = self.held.pop(result.job_id, None)
            if blocks is None:
                self.num_fetches -= 1
            elif self.view is not None:
                self.view.free_blocks(blocks[::-1])  # the end of a prefix is evicted first

    @override
    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        handoff = self.accepted.pop(request.request_id, None)
        if handoff is not None:  # it ended in the queue
            self.returned.append(handoff)

    @override
    def has_pending_work(self) -> bool:
        return bool(self.held or self.num_fetches or self.returned)

    @override
    def shutdown(self) -> None:
        held, self.held = self.held, {}
        for blocks in held.values():
            if self.view is not None:
                self.view.free_blocks(blocks)
        self.view = None


@dataclass
class Fetch:
    """A load whose pages have not arrived yet."""

    job: TransferJob
    handoff: Handoff
    deadline: float
    next_try: float


class PullWorker(HandoffWorker):
    """The worker half, which sends pages, requests pages, and ends jobs at their deadlines."""

    me: Peer
    wire: Wire

    def __init__(self) -> None:
        self.sends: dict[int, Handoff] = {}  # reads that the wire has not finished, by ticket
        self.fetches: dict[str, Fetch] = {}  # by reader
        self.queued: list[tuple[ComputeEvent | None, TransferJob, bool]] = []
        self.results: list[TransferResult] = []

    @override
    def register_kv_caches(self, kv_caches: CanonicalKVCaches[torch.Tensor]) -> None:
        self.gpu, self.rank = HostPages(kv_caches, 0), kv_caches.rank
        self.kv_caches = kv_caches

    @override
    def bind_wire(self, me: Peer, wire: Wire, lease_seconds: float) -> None:
        self.me, self.wire, self.lease_seconds = me, wire, lease_seconds
        self.offers: Offers[TransferJob] = Offers(me)

    @override
    def start_plan(self, plan: StepPlan) -> None:
        for jobs, is_load in ((plan.loads, True), (plan.stores, False)):
            for job in jobs:  # it waits for the steps before it (XFER-6)
                self.queued.append((self.gpu.mark_compute(), job, is_load))
        for handoff in plan.returned if isinstance(plan, HandoffPlan) else ():
            self.close(handoff, self.me.life)
        self.advance()

    @override
    def shutdown(self) -> None:
        self.gpu.close()

    @override
    def get_finished(self) -> list[TransferResult]:
        self.advance()
        results, self.results = self.results, []
        return results

    def reader_of(self, job: TransferJob) -> str:
        """Make a name for a reader that no other load of any engine or rank has."""
        return f"{self.me.engine_id}/{self.me.life}/{self.rank}/{job.job_id}"

    def advance(self) -> None:
        """Start jobs, process messages, and end the jobs whose deadlines have passed."""
        self.start_jobs()
        for ticket in self.wire.sent():
            if (handoff := self.sends.pop(ticket, None)) is not None:
                self.offers.end_read(handoff)
        for frames in self.wire.receive():
            self.on_message(frames)
        now = self.wire.now()
        for reader, fetch in list(self.fetches.items()):
            if now >= fetch.deadline:
                self.end_fetch(reader, "the producer did not answer within the lease")
            elif now >= fetch.next_try:
                fetch.next_try = now + self.lease_seconds / _TRIES_PER_LEASE
                self.ask(reader, fetch)
        for job, is_closed in self.offers.take_ended(now):
            error = None if is_closed else "the lease has passed"
            self.results.append(TransferResult(job.job_id, is_closed, error=error))

    def start_jobs(self) -> None:
        """Start the queued jobs whose earlier steps have been computed."""
        now = self.wire.now()
        while self.queued and (self.queued[0][0] is None or self.queued[0][0].query()):
            _, job, is_load = self.queued.pop(0)
            if is_load:
                handoff = job.src.handoff  # type: ignore[attr-defined]
                fetch = Fetch(job, handoff, now + self.lease_seconds, now)
                self.fetches[self.reader_of(job)] = fetch
            else:
                handoff = job.dst.handoff  # type: ignore[attr-defined]
                self.offers.add(handoff, job, now + self.lease_seconds)

    # --- messages ---

    def send(self, address: str, message: Message, pages: Sequence[Frame] = ()) -> int:
        """Send a checksum, a message, and its pages."""
        header = msgspec.msgpack.encode(message)
        return self.wire.send(address, [_checksum([header]).to_bytes(4), header, *pages])

    def on_message(self, frames: Sequence[Frame]) -> None:
        """Handle one message; bytes that are not a complete message are dropped."""
        if len(frames) < 2 or bytes(frames[0]) != _checksum(frames[1:2]).to_bytes(4):
            return
        try:
            message = _decoder.decode(frames[1])
        except (msgspec.MsgspecError, ValueError):
            return
        match message:
            case Read():
                self.on_read(message)
            case PagesReply():
                self.on_pages(message, frames[2:])
            case Refused(reader=reader):
                if self.is_for(message):
                    self.end_fetch(reader, message.reason)
            case Close(handoff=handoff, reader=reader):
                self.offers.close(handoff, reader)

    def ask(self, reader: str, fetch: Fetch) -> None:
        """Request the pages of a fetch from the producer."""
        spec = fetch.job.dst
        assert isinstance(spec, GPULoadStoreSpec), "loads write GPU blocks"
        read = Read(
            fetch.handoff,
            reader,
            self.me.address,
            list(spec.block_indices),
            list(spec.group_sizes),
        )
        self.send(fetch.handoff.address, read)

    def close(self, handoff: Handoff, reader: str) -> None:
        """Notify the producer that its blocks are not needed any more."""
        self.send(handoff.address, Close(handoff, reader))

    def on_read(self, read: Read) -> None:
        """Producer: send the pages, or refuse to send them."""
        try:
            job = self.offers.begin_read(read.handoff, read.reader, self.wire.now())
        except HandoffError as error:
            self.send(read.reply_to, Refused(read.handoff, read.reader, str(error)))
            return
        if job is None:
            return  # the reader asks again
        pages = list(self.views(_part(job.src, read.first_blocks, read.num_blocks)))
        reply = PagesReply(read.handoff, read.reader, _checksum(pages))
        self.sends[self.send(read.reply_to, reply, pages)] = read.handoff

    def views(self, gpu: GPULoadStoreSpec) -> Iterator[Frame]:
        """Yield the bytes of blocks, tensor by tensor; views of the blocks in CPU memory."""
        caches, blocks = self.kv_caches, iter(gpu.block_ids)
        if any(cache.tensor.is_cuda for cache in caches.tensors):
            yield from map(bytes, self.gpu.read(gpu))
            return
        for refs, size in zip(caches.group_data_refs, gpu.group_sizes, strict=True):
            for block in islice(blocks, size):
                for ref in refs:
                    tensor = caches.tensors[ref.tensor_idx].tensor
                    address = tensor.data_ptr() + block * tensor.stride(0)
                    page = (ctypes.c_ubyte * ref.page_size_bytes).from_address(address)
                    yield memoryview(page).cast("B")

    def is_for(self, reply: PagesReply | Refused) -> bool:
        """Whether a reply is for a load that still waits (HAND-7, HAND-8)."""
        fetch = self.fetches.get(reply.reader)
        return fetch is not None and fetch.handoff == reply.handoff

    def on_pages(self, reply: PagesReply, frames: Sequence[Frame]) -> None:
        """Consumer: write the pages if all are complete; otherwise request them again later."""
        if not self.is_for(reply):
            return
        spec = self.fetches[reply.reader].job.dst
        assert isinstance(spec, GPULoadStoreSpec), "loads write GPU blocks"
        sizes = self.gpu.sizes(spec)
        pages = memoryview(b"".join(frames))
        if len(pages) != sum(sizes) or _checksum(frames) != reply.checksum:
            return
        ends = accumulate(sizes, initial=0)
        self.gpu.write(spec, (pages[first:end] for first, end in pairwise(ends)))
        self.end_fetch(reply.reader)

    def end_fetch(self, reader: str, error: str | None = None) -> None:
        """Report a load, and confirm or return the handoff."""
        fetch = self.fetches.pop(reader)
        self.results.append(TransferResult(fetch.job.job_id, error is None, error=error))
        self.close(fetch.handoff, reader)


def _blocks(block_ids: BlockIds, numbers: Sequence[range]) -> GPULoadStoreSpec:
    """Return the ids of blocks of a request by their numbers, per group."""
    ids = [table[n] for table, of_group in zip(block_ids, numbers, strict=True) for n in of_group]
    firsts = [of_group.start if of_group else 0 for of_group in numbers]
    return GPULoadStoreSpec(ids, [len(of_group) for of_group in numbers], firsts)


def _part(spec: Any, first_blocks: Sequence[int], num_blocks: Sequence[int]) -> GPULoadStoreSpec:
    """Return the blocks of an offer that a reader has requested."""
    kept, ids, sizes = iter(spec.block_ids), list[int](), list[int]()
    asked = zip(first_blocks, num_blocks, strict=False)
    for first_kept, num_kept, (first, size) in zip(
        spec.block_indices, spec.group_sizes, asked, strict=False
    ):
        of_group = {first_kept + place: next(kept) for place in range(num_kept)}
        found = [of_group[n] for n in range(first, first + size) if n in of_group]
        ids += found
        sizes.append(len(found))
    return GPULoadStoreSpec(ids, sizes, [0] * len(sizes))


def _checksum(frames: Sequence[Frame]) -> int:
    value = 0
    for frame in frames:
        value = zlib.crc32(frame, value)
    return value
