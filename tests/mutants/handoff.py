"""Wrong connectors of handoffs.

The list was written before the checks and the reference connector, from public threads; the first
version of this file in the history has it. Three of its 48 faults are not here, because they break
no law in a connector of messages:

- ``NeverRetries``: a lost request fails its load, and the prompt is computed.
- ``SecondReaderIsServed``: two consumers read at once, and each read holds the blocks, so both get
  the right KV.
- ``ConfirmsBeforePages``: the read has started when the receipt comes, and a read holds the blocks.
  If the pages are lost, the consumer is refused and computes the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvview import (
    BlockIds,
    FinishReason,
    GPULoadStoreSpec,
    RequestInfo,
    StepInfo,
    StepPlan,
    TransferJob,
    TransferResult,
)
from kvview.errors import HandoffError
from kvview.handoff import Handoff, Offers, Peer, Wire
from kvview.testing.handoff.harness import PDFactory
from kvview_reference.handoff import pull
from kvview_reference.handoff.pull import (
    Fetch,
    KeptKV,
    Message,
    PagesReply,
    PullConnector,
    PullScheduler,
    PullWorker,
    Read,
    Refused,
)

from .edits import Base, read_variants
from .mutant import Mutant

MUTANTS: list[Mutant] = []
Half = type[PullScheduler] | type[PullWorker]


def wrong(law: str, incident: str | None = None) -> Any:
    """Register a connector with a wrong half, whose docstring names the fault."""

    def add(half: Half) -> Half:
        class Wrong(PullConnector):
            def make_scheduler(self) -> PullScheduler:
                if issubclass(half, PullScheduler):
                    return half(self.config.geometry)
                return super().make_scheduler()

            def make_worker(self) -> PullWorker:
                return half() if issubclass(half, PullWorker) else super().make_worker()

        Wrong.__name__ = half.__name__
        Wrong.__qualname__ = f"{half.__name__}Connector"  # its name in this module
        fault = (half.__doc__ or "").strip().partition("\n")[0]
        globals()[Wrong.__qualname__] = Wrong
        MUTANTS.append(Mutant(PDFactory(Wrong), law, fault, incident))
        return half

    return add


class WithOffers(PullWorker):
    """A worker with other offers."""

    offers_class: type[Offers[TransferJob]] = Offers

    def bind_wire(self, me: Peer, wire: Wire, lease_seconds: float) -> None:
        super().bind_wire(me, wire, lease_seconds)
        self.offers = self.offers_class(me)


def write(worker: PullWorker, spec: Any, frames: Sequence[Any]) -> None:
    """Write frames into blocks, as far as both reach."""
    rows, data = list(map(bytearray, worker.gpu.read(spec))), b"".join(frames)
    for row in rows:
        part, data = data[: len(row)], data[len(row) :]
        row[: len(part)] = part
    worker.gpu.write(spec, map(memoryview, rows))


# --- producers ---


@wrong("HAND-2", "vllm#46951")
class OffersWithoutHolding(PullScheduler):
    """The blocks of an offer are free at once."""

    def offer_blocks(self, request: RequestInfo, block_ids: BlockIds) -> Mapping[str, Any] | None:
        params = super().offer_blocks(request, block_ids)
        if params is not None and self.view is not None:
            job_id = self.offers[-1].job_id
            self.view.free_blocks(self.held[job_id])
            self.held[job_id] = ()
        return params


@wrong("HAND-4", "sglang#24527")
class ReleasesAtTheFirstRead(PullWorker):
    """An offer ends when its pages are sent, whether or not they were read."""

    def on_read(self, read: Read) -> None:
        super().on_read(read)
        if read.handoff in self.sends.values():
            self.offers.end_read(read.handoff)
            self.offers.close(read.handoff, read.reader)
            self.sends.clear()


@wrong("HAND-4", "vllm#47021")
class ReleasesAtTheDeadline(WithOffers):
    """The lease ends an offer that is being read."""

    class offers_class(Offers[TransferJob]):
        def take_ended(self, now: float) -> list[tuple[TransferJob, bool]]:
            for offer in self._offers.values():
                if now >= offer.deadline:
                    offer.num_reads = 0
            return super().take_ended(now)

        def end_read(self, handoff: Handoff) -> None:
            if handoff.handoff_id in self._offers:
                super().end_read(handoff)


@wrong("HAND-3", "vllm#58222")
class ReaperStopsAtALiveOffer(WithOffers):
    """Offers end in the order of their numbers: one that lives keeps those behind it."""

    class offers_class(Offers[TransferJob]):
        def take_ended(self, now: float) -> list[tuple[TransferJob, bool]]:
            ended = []
            for number, offer in list(self._offers.items()):
                if offer.num_reads or not (offer.is_closed or now >= offer.deadline):
                    break
                ended.append((self._offers.pop(number).item, offer.is_closed))
            return ended


@wrong("HAND-3", "vllm#29906")
class HoldsAborted(PullScheduler):
    """An aborted prefill is held like an offer, and no consumer ever comes."""

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        super().on_request_finished(request, block_ids, reason)
        if reason is FinishReason.ABORTED and any(block_ids):
            self.offer_blocks(request, block_ids)


@wrong("HAND-2", "vllm#51637")
class NamesOffersByRequest(PullScheduler):
    """A request id that is used again replaces the blocks of the older offer."""

    def __init__(self, geometry: Any) -> None:
        super().__init__(geometry)
        self.by_request: dict[str, Sequence[int]] = {}
        self.request_of: dict[int, str] = {}

    def offer_blocks(self, request: RequestInfo, block_ids: BlockIds) -> Mapping[str, Any] | None:
        params = super().offer_blocks(request, block_ids)
        if params is not None:
            job_id = self.offers[-1].job_id
            self.by_request[request.request_id] = self.held[job_id]
            self.request_of[job_id] = request.request_id
        return params

    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        for result in results:
            if (name := self.request_of.pop(result.job_id, None)) is not None:
                self.held[result.job_id] = self.by_request.pop(name, ())
        super().on_transfers_finished(results)


class PastOffers(Offers[TransferJob]):
    """Serves offers that have ended, as ``number_of`` finds them."""

    serves_consumed = True

    def __init__(self, me: Peer) -> None:
        super().__init__(me)
        self.past: dict[int, TransferJob] = {}

    def take_ended(self, now: float) -> list[tuple[TransferJob, bool]]:
        ended = super().take_ended(now)
        for job, is_closed in ended:
            if isinstance(job.dst, KeptKV) and is_closed == self.serves_consumed:
                self.past[job.dst.handoff.handoff_id] = job
        return ended

    def begin_read(self, handoff: Handoff, reader: str, now: float) -> TransferJob | None:
        try:
            return super().begin_read(handoff, reader, now)
        except HandoffError:
            if self.number_of(handoff) in self.past:
                return self.past[self.number_of(handoff)]
            raise

    def number_of(self, handoff: Handoff) -> int:
        is_mine = (handoff.engine_id, handoff.life) == (self._me.engine_id, self._me.life)
        return handoff.handoff_id if is_mine else -1

    def end_read(self, handoff: Handoff) -> None:
        if handoff.handoff_id in self._offers:
            super().end_read(handoff)


@wrong("HAND-5", "vllm#52234")
class ServesConsumed(WithOffers):
    """The blocks of a handoff are read at any time, consumed or not."""

    offers_class = PastOffers


@wrong("HAND-5", "aws-samples/aws-do-eks#84")
class ServesExpired(WithOffers):
    """A read after the lease is answered with what the blocks hold by then."""

    class offers_class(PastOffers):
        serves_consumed = False


@wrong("HAND-5", "vllm#52234")
class ServesTheLatest(WithOffers):
    """A handoff that does not exist gets the pages of the latest one."""

    class offers_class(PastOffers):
        def number_of(self, handoff: Handoff) -> int:
            return max(self.past, default=-1)


@wrong("HAND-10", "smg-project/smg#2491")
class IgnoresTheLife(WithOffers):
    """Numbers start again after a restart, and the life is not compared."""

    class offers_class(Offers[TransferJob]):
        def _find(self, handoff: Handoff) -> Any:
            return self._offers.get(handoff.handoff_id)


@wrong("HAND-3", "vllm#42571")
class FreesTwice(WithOffers):
    """A repeated receipt reports the offer once more."""

    class offers_class(Offers[TransferJob]):
        def __init__(self, me: Peer) -> None:
            super().__init__(me)
            self.past: dict[Handoff, TransferJob] = {}
            self.again: list[tuple[TransferJob, bool]] = []

        def add(self, handoff: Handoff, item: TransferJob, deadline: float) -> None:
            super().add(handoff, item, deadline)
            self.past[handoff] = item

        def close(self, handoff: Handoff, reader: str) -> None:
            super().close(handoff, reader)
            if handoff.handoff_id not in self._offers and handoff in self.past:
                self.again.append((self.past[handoff], True))

        def take_ended(self, now: float) -> list[tuple[TransferJob, bool]]:
            again, self.again = self.again, []
            return super().take_ended(now) + again


@wrong("HAND-2", "vllm#51637")
class ReceiptByPrefix(WithOffers):
    """A receipt ends every offer of the same prompt."""

    class offers_class(Offers[TransferJob]):
        def close(self, handoff: Handoff, reader: str) -> None:
            for offer in self._offers.values():
                if offer.handoff.prefix == handoff.prefix:
                    offer.is_closed = True


@wrong("HAND-2", "sglang#37077")
class AnyReceiptEnds(WithOffers):
    """A receipt of another consumer, even of another prompt, ends the latest offer."""

    class offers_class(Offers[TransferJob]):
        def close(self, handoff: Handoff, reader: str) -> None:
            for offer in self._offers.values():
                offer.is_closed = True


@wrong("HAND-4", "sglang#24580")
class FreesUnderASend(WithOffers):
    """A receipt ends the offer although the wire still reads its pages."""

    class offers_class(Offers[TransferJob]):
        def close(self, handoff: Handoff, reader: str) -> None:
            super().close(handoff, reader)
            offer = self._offers.get(handoff.handoff_id)
            if offer is not None and offer.is_closed:
                offer.num_reads = 0

        def end_read(self, handoff: Handoff) -> None:
            offer = self._offers.get(handoff.handoff_id)
            if offer is not None and offer.num_reads:
                offer.num_reads -= 1


@wrong("HAND-3", "vllm#43742")
class ForgetsABlock(PullScheduler):
    """All blocks of an offer but the last are freed."""

    def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
        self.held = {job_id: blocks[:-1] for job_id, blocks in self.held.items()}
        super().on_transfers_finished(results)


@wrong("HAND-2")
class HoldsOneGroup(PullScheduler):
    """The blocks of the groups after the first are not held."""

    def offer_blocks(self, request: RequestInfo, block_ids: BlockIds) -> Mapping[str, Any] | None:
        params = super().offer_blocks(request, block_ids)
        if params is not None and self.view is not None:
            job = self.offers[-1]
            spec: Any = job.src
            first = spec.group_sizes[0]
            self.view.free_blocks(spec.block_ids[first:])
            self.held[job.job_id] = spec.block_ids[:first]
        return params


@wrong("HAND-2", "vllm#42571")
class OffersTheNullBlock(PullScheduler):
    """Blocks that a window has freed are offered as the null block."""

    def bind_gpu_block_pool_view(self, view: Any) -> None:
        super().bind_gpu_block_pool_view(view)
        self.null_block_id = -1


@wrong("HAND-2")
class OffersUncomputed(PullScheduler):
    """The next block, which is not full yet, is offered too."""

    def offer_blocks(self, request: RequestInfo, block_ids: BlockIds) -> Mapping[str, Any] | None:
        params = super().offer_blocks(request, block_ids)
        if params is None:
            return None
        size = self.geometry.scheduler_block_size
        last = request.block_hashes[-1].hex()
        return {**params, "num_tokens": params["num_tokens"] + size, "prefix": last}


@wrong("HAND-7")
class ReversesBlocks(PullScheduler):
    """Pages are sent in the order in which their blocks are freed."""

    def kept_blocks(self, block_ids: BlockIds, num_tokens: int) -> GPULoadStoreSpec:
        spec = super().kept_blocks(block_ids, num_tokens)
        return replace(spec, block_ids=spec.block_ids[::-1])


@wrong("HAND-3")
class KeepsAtShutdown(PullScheduler):
    """Offers are not released at shutdown."""

    def shutdown(self) -> None:
        self.held = {}
        super().shutdown()


@wrong("HAND-2", "vllm#46951")
class ResetFreesOffers(PullScheduler):
    """A cache reset frees offered blocks."""

    def reset_cache(self) -> bool:
        for job_id, blocks in self.held.items():
            if self.view is not None:
                self.view.free_blocks(blocks)
            self.held[job_id] = ()
        return True


class OtherParams(PullScheduler):
    """Passes other parameters to the router."""

    def offer_blocks(self, request: RequestInfo, block_ids: BlockIds) -> Mapping[str, Any] | None:
        params = super().offer_blocks(request, block_ids)
        return None if params is None else self.change(dict(params))

    def change(self, params: dict[str, Any]) -> dict[str, Any]:
        return params


@wrong("HAND-1")
class BytesInParameters(OtherParams):
    """The hash of the prefix is passed on as bytes, which no JSON has."""

    def change(self, params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "prefix": bytes.fromhex(params["prefix"])}


@wrong("HAND-1", "smg-project/smg#2491")
class ForgetsTheLife(OtherParams):
    """Parameters name the engine, but no life of it."""

    def change(self, params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "life": ""}


@wrong("HAND-3", "LMCache#4998")
class SleepsWithOffers(PullScheduler):
    """No work is pending while blocks are offered, so an idle engine never ends a lease."""

    def has_pending_work(self) -> bool:
        return bool(self.num_fetches or self.returned or self.offers)


@wrong("HAND-10", "vllm#50754")
class SendsOneShort(PullWorker):
    """The last page is not sent."""

    def send(self, address: str, message: Message, pages: Sequence[Any] = ()) -> int:
        return super().send(address, message, pages[:-1])


@wrong("HAND-10")
class NeverOffers(PullScheduler):
    """Nothing is offered, so nothing can be wrong."""

    def offer_blocks(self, request: RequestInfo, block_ids: BlockIds) -> Mapping[str, Any] | None:
        return None


# --- consumers ---


@wrong("HAND-7", "vllm#52234")
class SuccessOfFailed(PullWorker):
    """A failed transfer is reported as a success."""

    def end_fetch(self, reader: str, error: str | None = None) -> None:
        super().end_fetch(reader)


@wrong("HAND-7", "vllm#40364")
class SuccessOfCut(PullWorker):
    """The pages that arrived are written, and the others are ignored."""

    def on_pages(self, reply: PagesReply, frames: Sequence[Any]) -> None:
        if self.is_for(reply):
            write(self, self.fetches[reply.reader].job.dst, frames)
            self.end_fetch(reply.reader)


@wrong("HAND-7", "sglang#22716")
class AnyReplyCounts(PullWorker):
    """Pages are written into the oldest load that waits, whatever they reply to."""

    def on_pages(self, reply: PagesReply, frames: Sequence[Any]) -> None:
        if self.fetches:
            reader, fetch = next(iter(self.fetches.items()))
            super().on_pages(PagesReply(fetch.handoff, reader, reply.checksum), frames)


@wrong("HAND-8", "sglang#24527")
class WritesLatePages(PullWorker):
    """Pages are written after the load was reported."""

    def __init__(self) -> None:
        super().__init__()
        self.past: dict[str, Fetch] = {}

    def end_fetch(self, reader: str, error: str | None = None) -> None:
        self.past[reader] = self.fetches[reader]
        super().end_fetch(reader, error)

    def on_pages(self, reply: PagesReply, frames: Sequence[Any]) -> None:
        if reply.reader in self.past:
            write(self, self.past[reply.reader].job.dst, frames)
        super().on_pages(reply, frames)


@wrong("HAND-3", "vllm#53095")
class NeverConfirms(PullWorker):
    """The producer always waits for its lease."""

    def close(self, handoff: Handoff, reader: str) -> None:
        pass


@wrong("HAND-3", "vllm#19223")
class KeepsWhenAborted(PullScheduler):
    """An abort in the queue does not return the handoff."""

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.accepted.pop(request.request_id, None)


@wrong("HAND-3", "vllm#19223")
class KeepsOnHit(PullScheduler):
    """A full hit on the GPU does not return the handoff."""

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        if not num_external_tokens:
            self.accepted.pop(request.request_id, None)
        super().on_blocks_allocated(request, block_ids, num_computed_tokens, num_external_tokens)


@wrong("HAND-9", "vllm-ascend#16662")
class DropsFailedLoads(PullWorker):
    """A load that fails is dropped without a report."""

    def end_fetch(self, reader: str, error: str | None = None) -> None:
        super().end_fetch(reader, error)
        if error is not None:
            self.results.pop()


@wrong("HAND-6", "vllm#52234")
class PromisesForeignTokens(PullScheduler):
    """The prefix is not compared with the request."""

    def accept_params(self, request: RequestInfo, params: Mapping[str, Any]) -> None:
        num_tokens, prefix = params.get("num_tokens"), params.get("prefix")
        if isinstance(num_tokens, int) and isinstance(prefix, str):
            last = request.block_hashes[: num_tokens // 4][-1:]
            super().accept_params(request, {**params, "prefix": last[0].hex() if last else ""})
            if (handoff := self.accepted.get(request.request_id)) is not None:
                self.accepted[request.request_id] = replace(handoff, prefix=prefix)


@wrong("HAND-6", "sglang#19353")
class IgnoresTheLayout(PullScheduler):
    """Pages of another layout are copied like those of its own."""

    def accept_params(self, request: RequestInfo, params: Mapping[str, Any]) -> None:
        mine = self.layout
        if isinstance(params.get("layout"), str):
            self.layout = params["layout"]
        super().accept_params(request, params)
        self.layout = mine


@wrong("HAND-7", "vllm#32204")
class StartsAtTheFirstPage(PullWorker):
    """A hit on the GPU is not skipped: the pages start at the first of the prompt."""

    def ask(self, reader: str, fetch: Fetch) -> None:
        spec: Any = fetch.job.dst
        sizes = list(spec.group_sizes)
        read = Read(fetch.handoff, reader, self.me.address, [0] * len(sizes), sizes)
        self.send(fetch.handoff.address, read)


@wrong("HAND-7", "vllm#51637")
class RepliesByRequest(PullWorker):
    """Replies are matched by the request id, which may be in use again."""

    def is_for(self, reply: PagesReply | Refused) -> bool:
        return reply.reader in self.fetches

    def reader_of(self, job: TransferJob) -> str:
        return f"{self.me.engine_id}/{job.request_id}"


@wrong("HAND-6", "vllm#13214")
class RaisesOnBadParameters(PullScheduler):
    """A missing entry of the parameters ends the engine."""

    def accept_params(self, request: RequestInfo, params: Mapping[str, Any]) -> None:
        Handoff.from_params(params)
        super().accept_params(request, params)


@wrong("HAND-10", "smg-project/smg#2491")
class CachesLives(PullScheduler):
    """The first life of an engine that a consumer meets is used for all later handoffs."""

    def __init__(self, geometry: Any) -> None:
        super().__init__(geometry)
        self.lives: dict[str, str] = {}

    def accept_params(self, request: RequestInfo, params: Mapping[str, Any]) -> None:
        super().accept_params(request, params)
        handoff = self.accepted.get(request.request_id)
        if handoff is not None:
            life = self.lives.setdefault(handoff.engine_id, handoff.life)
            self.accepted[request.request_id] = replace(handoff, life=life)


@wrong("HAND-3")
class ReportsTwice(PullWorker):
    """A repeated reply reports the load again."""

    def __init__(self) -> None:
        super().__init__()
        self.past: dict[str, int] = {}

    def end_fetch(self, reader: str, error: str | None = None) -> None:
        self.past[reader] = self.fetches[reader].job.job_id
        super().end_fetch(reader, error)

    def on_pages(self, reply: PagesReply, frames: Sequence[Any]) -> None:
        if reply.reader in self.past:
            self.results.append(TransferResult(self.past[reply.reader], True))
        super().on_pages(reply, frames)


@wrong("HAND-7", "vllm#52234")
class OneGroupIsEnough(PullWorker):
    """Only the pages of the first group are written: the load is a success."""

    def on_pages(self, reply: PagesReply, frames: Sequence[Any]) -> None:
        if self.is_for(reply):
            spec: Any = self.fetches[reply.reader].job.dst
            first, *others = spec.group_sizes
            sizes = [first, *(0 for _ in others)]
            write(self, replace(spec, block_ids=spec.block_ids[:first], group_sizes=sizes), frames)
            self.end_fetch(reply.reader)


@wrong("HAND-7")
class WritesToTheNextBlock(PullWorker):
    """Pages are written to the block after the right one."""

    def on_pages(self, reply: PagesReply, frames: Sequence[Any]) -> None:
        if self.is_for(reply):
            fetch = self.fetches[reply.reader]
            spec: Any = fetch.job.dst
            blocks = [min(block + 1, self.gpu.num_blocks - 1) for block in spec.block_ids]
            fetch.job = replace(fetch.job, dst=replace(spec, block_ids=blocks))
        super().on_pages(reply, frames)


@wrong("HAND-7", "sglang#23020")
class TrustsBytes(PullWorker):
    """The checksum of the pages is not compared."""

    def on_pages(self, reply: PagesReply, frames: Sequence[Any]) -> None:
        if self.is_for(reply):
            spec: Any = self.fetches[reply.reader].job.dst
            if sum(self.gpu.sizes(spec)) == sum(map(len, frames)):
                write(self, spec, frames)
                self.end_fetch(reply.reader)


@wrong("HAND-3")
class DefersForever(PullScheduler):
    """The request is deferred while its producer has more than one offer for this engine."""

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        if len(self.accepted) > 1 and request.request_id in self.accepted:
            return None
        return super().match_prefix(request, num_computed_tokens)


@wrong("HAND-3")
class NeverRests(PullScheduler):
    """Loads are counted twice, so an engine has pending work for all time."""

    def plan_step(self, step: StepInfo) -> StepPlan:
        plan = super().plan_step(step)
        self.num_fetches += len(plan.loads)
        return plan


# --- edits ---


for _variant in read_variants(
    Path(__file__).with_suffix(".txt"), Base("PullConnector", (Path(pull.__file__),))
):
    _wrong = globals()[f"{_variant.name}Connector"] = _variant.load()
    _fault = f"{_variant.what}."
    MUTANTS.append(Mutant(PDFactory(_wrong), _variant.law, _fault, _variant.incident))
