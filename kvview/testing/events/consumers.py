"""The readers of KV events, and the rules in their sources for each event.

Each profile follows one version of one public decoder, which it names. Its rules also cover the
treatment of decoded events, if a block is lost or changed there. A profile looks at one batch at
a time and keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from kvview.errors import ConfigError
from kvview.events.formats import find_format
from kvview.events.wire import (
    AnyEvent,
    Batch,
    ClearedEvent,
    RemovedEvent,
    StoredEvent,
    UnreadableEvent,
)
from kvview.testing.events.stream_fold import FULL_KINDS


class Reception(Enum):
    """The outcome of an event for a reader, the best first."""

    ACCEPTED = "accepted"
    PARTLY = "accepted, but"
    REJECTED = "rejected"
    BATCH_LOST = "whole batch lost"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason.

    Args:
        verdict: On the event.
        why: The part that is lost, or the reason why all of it is; empty for ACCEPTED.
        thread: The public report, ``owner/name#number``; empty if none is known.
    """

    verdict: Reception
    why: str = ""
    thread: str = ""


Rule = Callable[[AnyEvent, Batch], Judgement | None]
"""What one rule says of an event, None when it has nothing against it."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A reader of KV events.

    Args:
        name: As ``--consumer`` has it.
        what: Who it is.
        source: Source of the rules: repository, file, commit.
        read_on: Date of that state, or of the look where it has none.
        rules: Of each event the worst judgement counts.
    """

    name: str
    what: str
    source: str
    read_on: str
    rules: tuple[Rule, ...]

    def judge(self, batch: Batch) -> list[Judgement]:
        """A judgement for each event; where one costs the batch, all events are lost."""
        judged = [self._judge(event, batch) for event in batch.events]
        costly = next((one for one in judged if one.verdict is Reception.BATCH_LOST), None)
        return judged if costly is None else [costly] * len(judged)

    def _judge(self, event: AnyEvent, batch: Batch) -> Judgement:
        found = [one for rule in self.rules if (one := rule(event, batch)) is not None]
        order = [*Reception]
        worst = max(found, key=lambda one: order.index(one.verdict), default=None)
        if worst is None or worst.verdict is not Reception.PARTLY:
            return worst or Judgement(Reception.ACCEPTED)
        partly = [one for one in found if one.verdict is Reception.PARTLY]
        threads = [one.thread for one in partly if one.thread]
        return Judgement(
            Reception.PARTLY, "; ".join(one.why for one in partly), threads[0] if threads else ""
        )


def find_consumer(name: str) -> Consumer:
    """A profile by its name.

    Raises:
        ConfigError: There is none.
    """
    for consumer in CONSUMERS:
        if consumer.name == name:
            return consumer
    known = ", ".join(consumer.name for consumer in CONSUMERS)
    raise ConfigError(f"--consumer {name!r}: not known, known are {known}")


def _hashes(event: AnyEvent) -> Iterable[int | bytes]:
    if isinstance(event, StoredEvent | RemovedEvent):
        yield from event.block_hashes or ()
    if isinstance(event, StoredEvent) and event.parent_block_hash is not None:
        yield event.parent_block_hash


# --- rules that several readers share ---


def _unreadable(event: AnyEvent, batch: Batch) -> Judgement | None:
    if isinstance(event, UnreadableEvent):
        return Judgement(Reception.BATCH_LOST, f"it cannot be read: {event.why}")
    return None


def _arrays_only(thread: str) -> Rule:
    def rule(event: AnyEvent, batch: Batch) -> Judgement | None:
        if batch.wire_format.is_map:
            return Judgement(
                Reception.BATCH_LOST, "events are read as arrays, and are maps", thread
            )
        return None

    return rule


def _maps_only(event: AnyEvent, batch: Batch) -> Judgement | None:
    if not batch.wire_format.is_map:
        return Judgement(Reception.BATCH_LOST, "events are read as maps, and are arrays")
    return None


def _integer_hashes_only(event: AnyEvent, batch: Batch) -> Judgement | None:
    if any(isinstance(block_hash, bytes) for block_hash in _hashes(event)):
        return Judgement(Reception.BATCH_LOST, "hashes are read as integers, and are bytes")
    return None


def _ignores(*names: str, thread: str = "") -> Rule:
    """Return ignored fields whose values distinguish blocks."""

    def rule(event: AnyEvent, batch: Batch) -> Judgement | None:
        said = [name for name in names if getattr(event, name, None)]
        if "medium" in said and event.medium == "GPU":  # type: ignore[union-attr]
            said.remove("medium")
        return Judgement(Reception.PARTLY, f"{', '.join(said)} not read", thread) if said else None

    return rule


def _rank_is_read(event: AnyEvent, batch: Batch) -> Judgement | None:
    if not batch.wire_format.has_rank:
        return Judgement(Reception.BATCH_LOST, "a batch is read as three elements, and has two")
    return None


def _metadata_is_no_name(thread: str) -> Rule:
    def rule(event: AnyEvent, batch: Batch) -> Judgement | None:
        if isinstance(event, StoredEvent) and event.metadata is not None:
            why = "the eighth field is read as the adapter's name, and is a map"
            return Judgement(Reception.BATCH_LOST, why, thread)
        return None

    return rule


def _clears_all(event: AnyEvent, batch: Batch) -> Judgement | None:
    if isinstance(event, ClearedEvent):
        return Judgement(Reception.PARTLY, "it clears every medium, not the GPU alone")
    return None


# --- Dynamo ---

_DYNAMO_MEDIA = ("GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL")
_DYNAMO_EMPTY = "vllm-project/vllm#43468"


def _dynamo_groups(event: AnyEvent, batch: Batch) -> Judgement | None:
    kind = getattr(event, "kv_cache_spec_kind", None)
    if kind is not None and kind not in FULL_KINDS:
        return Judgement(Reception.REJECTED, f"blocks of {kind} are left out")
    group = getattr(event, "group_idx", None)
    if isinstance(event, StoredEvent) and kind is None and group:
        why = f"group {group} is left out, for its kind is not said"
        return Judgement(Reception.REJECTED, why)
    return None


def _dynamo_place(event: AnyEvent, batch: Batch) -> Judgement | None:
    locality = getattr(event, "locality", None)
    if locality not in (None, "LOCAL"):
        return Judgement(Reception.REJECTED, f"locality {locality} is left out")
    medium = getattr(event, "medium", None)
    if medium not in (None, *_DYNAMO_MEDIA):
        return Judgement(Reception.REJECTED, f"medium {medium} is none of {_DYNAMO_MEDIA}")
    ownership = getattr(event, "ownership", None)
    if ownership is not None:
        return Judgement(Reception.REJECTED, f"blocks owned by {ownership} are left out")
    return None


def _dynamo_tokens(event: AnyEvent, batch: Batch) -> Judgement | None:
    if not isinstance(event, StoredEvent) or not event.block_hashes:
        return None
    hashes = [*_hashes(event)]
    if len({*hashes}) < len(hashes):
        return Judgement(Reception.REJECTED, "a hash comes twice in it")
    size, tokens = event.block_size or 0, len(event.token_ids or ())
    if not size:
        return Judgement(Reception.REJECTED, "block size 0 is not the reader's", _DYNAMO_EMPTY)
    whole = min(tokens // size, len(event.block_hashes))
    if not whole:
        why = f"token_ids too short: need {size}, got {tokens}"
        return Judgement(Reception.REJECTED, why, _DYNAMO_EMPTY)
    if whole < len(event.block_hashes):
        lost = len(event.block_hashes) - whole
        return Judgement(Reception.PARTLY, f"token_ids too short: the last {lost} blocks are lost")
    return None


_DYNAMO = (
    _unreadable,
    _rank_is_read,
    _integer_hashes_only,
    _dynamo_groups,
    _dynamo_place,
    _dynamo_tokens,
)

# --- AIBrix ---

_AIBRIX_FIELDS = "vllm-project/aibrix#2285"


def _aibrix_rank(event: AnyEvent, batch: Batch) -> Judgement | None:
    if batch.wire_format.has_rank and batch.data_parallel_rank is None:
        return Judgement(Reception.BATCH_LOST, "the rank is read as a number, and is nil")
    return None


def _aibrix_tokens(event: AnyEvent, batch: Batch) -> Judgement | None:
    if not isinstance(event, StoredEvent):
        return None
    tokens, size = len(event.token_ids or ()), event.block_size or 0
    if tokens and (size <= 0 or tokens % size):
        why = f"{tokens} tokens do not divide into blocks of {size}"
        return Judgement(Reception.BATCH_LOST, why)
    blocks = tokens // size if tokens else 0
    if blocks != len(event.block_hashes):
        why = f"length mismatch: {len(event.block_hashes)} hashes, {blocks} blocks of tokens"
        return Judgement(Reception.REJECTED, why)
    return None


# --- llm-d ---


def _llmd_hashes(event: AnyEvent, batch: Batch) -> Judgement | None:
    for one in _hashes(event):
        if isinstance(one, int) and -(2**31) <= one < 2**32:
            why = "a hash is written in fewer than 8 bytes, and only those of 8 are read"
            return Judgement(Reception.BATCH_LOST, why)
        if one == b"":
            return Judgement(Reception.BATCH_LOST, "a hash has no bytes")
    return None


def _llmd_tokens(event: AnyEvent, batch: Batch) -> Judgement | None:
    if isinstance(event, StoredEvent) and not event.token_ids and event.block_hashes:
        why = "taken as a move of blocks that are known already; others are passed over"
        return Judgement(Reception.PARTLY, why, "llm-d/llm-d-kv-cache#561")
    return None


def _llmd_group(event: AnyEvent, batch: Batch) -> Judgement | None:
    if (getattr(event, "group_idx", None) or 0) < 0:
        return Judgement(Reception.BATCH_LOST, "its group is negative")
    return None


def _llmd_kind_forgotten(event: AnyEvent, batch: Batch) -> Judgement | None:
    if not isinstance(event, StoredEvent) or event.group_idx is None or event.kv_cache_spec_kind:
        return None
    return Judgement(Reception.PARTLY, "the kind of its group is overwritten with an empty one")


def _llmd_dense(event: AnyEvent, batch: Batch) -> Judgement | None:
    if not isinstance(event, StoredEvent) or event.group_idx is None:
        return None
    kind, size, tokens = event.kv_cache_spec_kind, event.block_size, len(event.token_ids or ())
    if not kind:
        if all(field.name != "kv_cache_spec_kind" for field in batch.wire_format.stored):
            why = f"it has a group, and no event of {batch.wire_format.name} says its kind"
            return Judgement(Reception.REJECTED, why)
        why = "its group's kind is that of an earlier event; without one it is left out"
        return Judgement(Reception.PARTLY, why)
    if kind not in FULL_KINDS:
        return Judgement(Reception.REJECTED, f"blocks of {kind} are left out")
    if tokens and (size <= 0 or tokens != size * len(event.block_hashes)):
        why = f"{tokens} tokens are not those of {len(event.block_hashes)} blocks of {size}"
        return Judgement(Reception.REJECTED, why)
    return None


def _llmd_adapter(event: AnyEvent, batch: Batch) -> Judgement | None:
    if not isinstance(event, StoredEvent) or not event.lora_name:
        return None
    if not any(event.lora_name in (keys or ()) for keys in event.extra_keys or ()):
        return None
    why = "the adapter's name in extra_keys is read as that of an image"
    return Judgement(Reception.PARTLY, why)


_LLMD = (
    _unreadable,
    _rank_is_read,
    _llmd_hashes,
    _metadata_is_no_name("ai-dynamo/dynamo#14530"),
    _llmd_tokens,
    _llmd_group,
    _clears_all,
    _llmd_adapter,
)
_LLMD_FILE = "pkg/kvevents/engineadapter/vllm_adapter.go and pkg/kvevents/pool.go"

# --- SGLang's routers ---

_SGLANG_MEDIA = ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")


def _signed_hashes_only(event: AnyEvent, batch: Batch) -> Judgement | None:
    if any(isinstance(one, int) and one >= 2**63 for one in _hashes(event)):
        why = "hashes are read as signed, and one is 2^63 or more, as half of vLLM's are"
        return Judgement(Reception.BATCH_LOST, why)
    return None


def _sglang_media(event: AnyEvent, batch: Batch) -> Judgement | None:
    medium = getattr(event, "medium", None)
    if medium is None or medium in _SGLANG_MEDIA:
        return None
    if isinstance(event, StoredEvent):
        return Judgement(Reception.REJECTED, f"medium {medium} is none of {_SGLANG_MEDIA}")
    return Judgement(Reception.PARTLY, f"medium {medium} is not known: removed from every medium")


def _smg_tokens(event: AnyEvent, batch: Batch) -> Judgement | None:
    if not isinstance(event, StoredEvent) or not event.block_hashes:
        return None
    size, tokens = max(event.block_size or 0, 0), len(event.token_ids or ())
    if tokens < size * len(event.block_hashes) or not size:
        why = "blocks are found by their tokens, and some have none or too few"
        return Judgement(Reception.PARTLY, why)
    return None


# --- classes of a producer, read unmodified ---


def _classes_of(name: str) -> Rule:
    fields = find_format(name)

    def rule(event: AnyEvent, batch: Batch) -> Judgement | None:
        is_stored = isinstance(event, StoredEvent)
        if not is_stored and not isinstance(event, RemovedEvent):
            return None
        written = batch.wire_format.stored if is_stored else batch.wire_format.removed
        names = {field.name for field in written}
        missing = [
            field.name
            for field in (fields.stored if is_stored else fields.removed)
            if not field.is_omitted and field.name not in names
        ]
        if missing:
            return Judgement(Reception.BATCH_LOST, f"{', '.join(missing)} missing")
        return None

    return rule


def _never(thread: str) -> Rule:
    def rule(event: AnyEvent, batch: Batch) -> Judgement | None:
        return Judgement(Reception.BATCH_LOST, "a batch is read as a map, and is an array", thread)

    return rule


_MAPS = "vllm-project/vllm#42892"

CONSUMERS: tuple[Consumer, ...] = (
    Consumer(
        "dynamo",
        "NVIDIA Dynamo's router, 1.6; block size as the events have it",
        "ai-dynamo-runtime 1.6.1 as it runs: tests/events/test_dynamo_indexer.py",
        "2026-11-22",
        _DYNAMO,
    ),
    Consumer(
        "dynamo-1.5",
        "NVIDIA Dynamo's router before its pull request 14530",
        "ai-dynamo-runtime 1.5.1 as it runs: tests/events/test_dynamo_indexer.py",
        "2026-11-22",
        (*_DYNAMO, _metadata_is_no_name("ai-dynamo/dynamo#14530")),
    ),
    Consumer(
        "llm-d-arrays",
        "llm-d's index before its pull request 661",
        f"llm-d/llm-d-kv-cache {_LLMD_FILE} at 7be76e1",
        "2026-06-12",
        (_arrays_only(_MAPS), *_LLMD, _llmd_kind_forgotten),
    ),
    Consumer(
        "llm-d",
        "llm-d's index, arrays and maps",
        f"llm-d/llm-d-router {_LLMD_FILE} at ebab68792",
        "2026-08-22",
        (*_LLMD, _llmd_dense),
    ),
    Consumer(
        "aibrix",
        "AIBrix's gateway",
        "vllm-project/aibrix pkg/cache/kvcache/msgpack_decoder.go at e3e10f9e",
        "2026-08-23",
        (
            _unreadable,
            _arrays_only("vllm-project/aibrix#2285"),
            _metadata_is_no_name("ai-dynamo/dynamo#14530"),
            _aibrix_rank,
            _aibrix_tokens,
            _ignores("medium", "group_idx", "extra_keys", "lora_name", thread=_AIBRIX_FIELDS),
        ),
    ),
    Consumer(
        "aibrix-0.4",
        "AIBrix's gateway before its pull request 1848",
        "vllm-project/aibrix issue 1720: the error it reports",
        "2025-10-31",
        (_never("vllm-project/aibrix#1720"),),
    ),
    Consumer(
        "kthena",
        "kthena's runtime",
        "volcano-sh/kthena python/kthena/runtime/zmq_subscriber.py at 3cc05728",
        "2026-08-21",
        (
            _unreadable,
            _arrays_only("volcano-sh/kthena#1535"),
            _integer_hashes_only,
            _ignores("medium", "group_idx", "extra_keys", "lora_name"),
        ),
    ),
    Consumer(
        "vllm",
        "vLLM's own classes, 0.24 and later",
        "vllm/distributed/kv_events.py of 0.33.0",
        "2026-11-21",
        (_unreadable, _maps_only, _classes_of("vllm-0.33")),
    ),
    Consumer(
        "vllm-0.23",
        "vLLM's own classes, 0.14 to 0.23",
        "vllm/distributed/kv_events.py of 0.23.0",
        "2026-11-21",
        (_unreadable, _arrays_only(_MAPS), _classes_of("vllm-0.22")),
    ),
    Consumer(
        "sglang-router",
        "SGLang's experimental router, which reads ZMQ itself",
        "sgl-project/sglang experimental/sgl-router/src/policies/kv_events/wire.rs at 4660d2a47, "
        "index.rs and tree.rs beside it",
        "2026-11-22",
        (
            _unreadable,
            _integer_hashes_only,
            _signed_hashes_only,
            _sglang_media,
            _clears_all,
            _ignores("group_idx", "extra_keys", "lora_name"),
        ),
    ),
    Consumer(
        "smg",
        "SMG, SGLang's model gateway until 2026: beside an engine, whose classes decode",
        "smg-project/smg grpc_servicer/smg_grpc_servicer/kv_events.py and "
        "model_gateway/src/worker/kv_event_monitor.rs at f8daa8835",
        "2026-08-22",
        (
            _unreadable,
            _smg_tokens,
            _clears_all,
            _ignores("medium", "group_idx", "extra_keys", "lora_name"),
        ),
    ),
    Consumer(
        "sglang",
        "SGLang's own classes since its pull request 37482",
        "sglang/srt/disaggregation/kv_events.py, as its tests copy it",
        "2026-11-22",
        (_unreadable, _maps_only, _integer_hashes_only, _classes_of("sglang-maps")),
    ),
)
"""Every profile that there is."""
