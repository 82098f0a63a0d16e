"""The readers of KV events, and the rules that each reader's source applies to events.

Each profile follows one named version of one public decoder. The rules of a profile also cover the
handling of decoded events, if it loses or changes a block. A profile examines one batch at a time
and keeps no state. ``consumers.toml`` is the table of the profiles, with their sources; this module
finds the problems of an event that the table names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kvview.errors import ConfigError
from kvview.events.formats import find_format
from kvview.events.wire import (
    AnyEvent,
    Batch,
    ClearedEvent,
    Hash,
    RemovedEvent,
    StoredEvent,
    UnreadableEvent,
)
from kvview.testing.events.stream_fold import FULL_KINDS


class Reception(IntEnum):
    """The outcome of an event for a reader, from best to worst."""

    ACCEPTED = 0
    PARTLY = 1
    REJECTED = 2
    BATCH_LOST = 3

    @property
    def text(self) -> str:
        """Text of the outcome in reports."""
        return ("accepted", "accepted, but", "rejected", "whole batch lost")[self]


@dataclass(frozen=True, slots=True)
class Treatment:
    """The outcome of an event for a reader, and the reason.

    Args:
        verdict: The outcome.
        why: The part that is lost, or the reason why the whole event is lost; empty for ACCEPTED.
        thread: The public report, ``owner/name#number``; empty if none is known.
    """

    verdict: Reception
    why: str = ""
    thread: str = ""


Problem = Callable[[AnyEvent, Batch], str]
"""Returns the problem that a reader has with an event; empty if it has no problem."""


@dataclass(frozen=True, slots=True)
class ReaderRule:
    """A problem of an event, and the resulting outcome.

    Args:
        verdict: The outcome of an event with this problem.
        problem: Finds the problem.
        thread: The public report; empty if none is known.
    """

    verdict: Reception
    problem: Problem
    thread: str = ""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A reader of KV events.

    Args:
        name: Name of the reader for ``--consumer``.
        rules: The rules of the reader; the worst outcome of all rules counts.
    """

    name: str
    rules: tuple[ReaderRule, ...]

    def treat(self, batch: Batch) -> list[Treatment]:
        """Return the outcome of each event; if one event loses the batch, all events are lost."""
        treated = [self._treat(event, batch) for event in batch.events]
        worst = max(treated, key=lambda one: one.verdict, default=None)
        if worst is not None and worst.verdict is Reception.BATCH_LOST:
            return [worst] * len(treated)
        return treated

    def _treat(self, event: AnyEvent, batch: Batch) -> Treatment:
        found = [(rule, why) for rule in self.rules if (why := rule.problem(event, batch))]
        if not found:
            return Treatment(Reception.ACCEPTED)
        worst = max(rule.verdict for rule, _ in found)
        found = [(rule, why) for rule, why in found if rule.verdict is worst]
        if worst is not Reception.PARTLY:
            del found[1:]
        threads = [rule.thread for rule, _ in found if rule.thread]
        return Treatment(worst, "; ".join(why for _, why in found), threads[0] if threads else "")


def find_consumer(name: str) -> Consumer:
    """Find a profile by its name.

    Raises:
        ConfigError: The name is unknown.
    """
    for consumer in CONSUMERS:
        if consumer.name == name:
            return consumer
    known = ", ".join(consumer.name for consumer in CONSUMERS)
    raise ConfigError(f"--consumer {name!r} is unknown; expected {known}")


def _hashes(event: AnyEvent) -> list[Hash]:
    if isinstance(event, ClearedEvent | UnreadableEvent):
        return []
    parent = event.parent_block_hash if isinstance(event, StoredEvent) else None
    return [*(event.block_hashes or ()), *([] if parent is None else [parent])]


# --- problems of several readers ---


def _unreadable(event: AnyEvent, batch: Batch) -> str:
    return f"the event cannot be read: {event.why}" if isinstance(event, UnreadableEvent) else ""


def _is_map(event: AnyEvent, batch: Batch) -> str:
    return "the reader expects arrays, but events are maps" if batch.wire_format.is_map else ""


def _is_array(event: AnyEvent, batch: Batch) -> str:
    return "" if batch.wire_format.is_map else "the reader expects maps, but events are arrays"


def _batch_is_array(event: AnyEvent, batch: Batch) -> str:
    return "the reader expects a map as a batch, but the batch is an array"


def _has_no_rank(event: AnyEvent, batch: Batch) -> str:
    return (
        ""
        if batch.wire_format.has_rank
        else "the reader expects a batch of three elements, not two"
    )


def _hash_is_bytes(event: AnyEvent, batch: Batch) -> str:
    is_bytes = any(isinstance(one, bytes) for one in _hashes(event))
    return "the reader expects hashes as integers, but they are bytes" if is_bytes else ""


def _has_metadata(event: AnyEvent, batch: Batch) -> str:
    has_metadata = isinstance(event, StoredEvent) and event.metadata is not None
    why = "the reader expects the adapter's name as the eighth field, which is a map"
    return why if has_metadata else ""


def _clears_all(event: AnyEvent, batch: Batch) -> str:
    is_clear = isinstance(event, ClearedEvent)
    return "the reader clears every medium, not only the GPU" if is_clear else ""


def _kind_is_not_full(event: AnyEvent, batch: Batch) -> str:
    kind = getattr(event, "kv_cache_spec_kind", None)
    return f"blocks of {kind} are skipped" if kind not in (None, *FULL_KINDS) else ""


def _ignores(*names: str) -> Problem:
    """Make the problem that a reader ignores fields whose values distinguish blocks."""

    def problem(event: AnyEvent, batch: Batch) -> str:
        ignored = [name for name in names if getattr(event, name, None)]
        if "medium" in ignored and getattr(event, "medium", None) == "GPU":
            ignored.remove("medium")
        return f"{', '.join(ignored)} not read" if ignored else ""

    return problem


def _lacks_fields_of(name: str) -> Problem:
    """Make the problem that the format lacks fields which a producer's own classes require."""
    classes = find_format(name)

    def problem(event: AnyEvent, batch: Batch) -> str:
        fields, written = classes.removed, batch.wire_format.removed
        if isinstance(event, StoredEvent):
            fields, written = classes.stored, batch.wire_format.stored
        elif not isinstance(event, RemovedEvent):
            return ""
        names = {field.name for field in written}
        missing = [f.name for f in fields if not f.is_omitted and f.name not in names]
        return f"{', '.join(missing)} missing" if missing else ""

    return problem


# --- Dynamo ---

_DYNAMO_MEDIA = ("GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL")


def _dynamo_group(event: AnyEvent, batch: Batch) -> str:
    is_unknown = isinstance(event, StoredEvent) and event.kv_cache_spec_kind is None
    group = getattr(event, "group_idx", None)
    return (
        f"group {group} is skipped, because its kind is not given" if is_unknown and group else ""
    )


def _dynamo_place(event: AnyEvent, batch: Batch) -> str:
    locality, medium, ownership = (
        getattr(event, name, None) for name in ("locality", "medium", "ownership")
    )
    if locality not in (None, "LOCAL"):
        return f"locality {locality} is skipped"
    if medium not in (None, *_DYNAMO_MEDIA):
        return f"medium {medium} is not one of {_DYNAMO_MEDIA}"
    return f"blocks owned by {ownership} are skipped" if ownership is not None else ""


def _dynamo_repeats(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent) or not event.block_hashes:
        return ""
    hashes = _hashes(event)
    return "the event names a hash twice" if len({*hashes}) < len(hashes) else ""


def _dynamo_tokens(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent) or not event.block_hashes:
        return ""
    size, tokens = event.block_size or 0, len(event.token_ids or ())
    if not size:
        return "block size 0 is not the reader's"
    return f"token_ids too short: need {size}, got {tokens}" if tokens < size else ""


def _dynamo_last_tokens(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent) or not event.block_size:
        return ""
    lost = len(event.block_hashes) - len(event.token_ids or ()) // event.block_size
    return f"token_ids too short: the last {lost} blocks are lost" if lost > 0 else ""


# --- AIBrix ---


def _aibrix_rank(event: AnyEvent, batch: Batch) -> str:
    is_nil = batch.wire_format.has_rank and batch.data_parallel_rank is None
    return "the reader expects a number as the rank, which is nil" if is_nil else ""


def _aibrix_division(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent) or not event.token_ids:
        return ""
    tokens, size = len(event.token_ids), event.block_size or 0
    is_wrong = size <= 0 or tokens % size
    return f"{tokens} tokens do not divide into blocks of {size}" if is_wrong else ""


def _aibrix_blocks(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent):
        return ""
    hashes, tokens, size = len(event.block_hashes), len(event.token_ids or ()), event.block_size
    blocks = tokens // size if tokens and size and size > 0 else 0
    return (
        f"length mismatch: {hashes} hashes, {blocks} blocks of tokens" if blocks != hashes else ""
    )


# --- llm-d ---


def _llmd_hash(event: AnyEvent, batch: Batch) -> str:
    for one in _hashes(event):
        if isinstance(one, int) and -(2**31) <= one < 2**32:
            return "a hash has fewer than 8 bytes, but only hashes of 8 bytes are read"
        if one == b"":
            return "a hash has no bytes"
    return ""


def _llmd_place(event: AnyEvent, batch: Batch) -> str:
    is_place = isinstance(event, StoredEvent) and not event.token_ids and event.block_hashes
    return "taken as a move of known blocks; unknown blocks are skipped" if is_place else ""


def _llmd_group(event: AnyEvent, batch: Batch) -> str:
    return "the group is negative" if (getattr(event, "group_idx", None) or 0) < 0 else ""


def _has_group(event: AnyEvent, *, kind: bool) -> bool:
    is_grouped = isinstance(event, StoredEvent) and event.group_idx is not None
    return is_grouped and bool(getattr(event, "kv_cache_spec_kind", None)) is kind


def _llmd_kind_is_lost(event: AnyEvent, batch: Batch) -> str:
    is_lost = _has_group(event, kind=False)
    return "the kind of its group is overwritten with an empty one" if is_lost else ""


def _llmd_format_has_no_kind(event: AnyEvent, batch: Batch) -> str:
    if not _has_group(event, kind=False):
        return ""
    has_kinds = any(field.name == "kv_cache_spec_kind" for field in batch.wire_format.stored)
    name = batch.wire_format.name
    return (
        ""
        if has_kinds
        else f"the event has a group, but no event of {name} gives the kind of the group"
    )


def _llmd_kind_of_earlier(event: AnyEvent, batch: Batch) -> str:
    is_open = _has_group(event, kind=False)
    why = "the kind of the group is taken from an earlier event; without one the event is skipped"
    return why if is_open else ""


def _llmd_kind(event: AnyEvent, batch: Batch) -> str:
    return _kind_is_not_full(event, batch) if _has_group(event, kind=True) else ""


def _llmd_tokens(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent) or not _has_group(event, kind=True):
        return ""
    tokens, size, blocks = (
        len(event.token_ids or ()),
        event.block_size or 0,
        len(event.block_hashes),
    )
    if not tokens or (size > 0 and tokens == size * blocks):
        return ""
    return f"{tokens} tokens do not fill {blocks} blocks of {size} exactly"


def _llmd_adapter(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent) or not event.lora_name:
        return ""
    is_named = any(event.lora_name in (keys or ()) for keys in event.extra_keys or ())
    return "the adapter's name in extra_keys is read as the name of an image" if is_named else ""


# --- SGLang's routers ---

_SGLANG_MEDIA = ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")


def _hash_is_large(event: AnyEvent, batch: Batch) -> str:
    is_large = any(isinstance(one, int) and one >= 2**63 for one in _hashes(event))
    why = "the reader expects signed hashes, but one is 2^63 or more, like half of vLLM's"
    return why if is_large else ""


def _sglang_stored(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent) or event.medium in (None, *_SGLANG_MEDIA):
        return ""
    return f"medium {event.medium} is not one of {_SGLANG_MEDIA}"


def _sglang_removed(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, RemovedEvent) or event.medium in (None, *_SGLANG_MEDIA):
        return ""
    return f"medium {event.medium} is unknown, so the blocks are removed from every medium"


def _smg_tokens(event: AnyEvent, batch: Batch) -> str:
    if not isinstance(event, StoredEvent) or not event.block_hashes:
        return ""
    size, tokens = max(event.block_size or 0, 0), len(event.token_ids or ())
    is_short = not size or tokens < size * len(event.block_hashes)
    return (
        "the reader finds blocks by their tokens, but some have no or too few tokens"
        if is_short
        else ""
    )


# --- the table ---


def _read_rule(verdict: Reception, text: str) -> ReaderRule:
    """Read a rule: the name of a problem, its arguments, and the public report."""
    name, *words = text.split()
    thread = next((word for word in words if "#" in word), "")
    arguments = [word for word in words if word != thread]
    problem = globals()[f"_{name}"]
    return ReaderRule(verdict, problem(*arguments) if arguments else problem, thread)


def _read_table() -> tuple[Consumer, ...]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    outcomes = {
        "lost": Reception.BATCH_LOST,
        "rejected": Reception.REJECTED,
        "partly": Reception.PARTLY,
    }
    return tuple(
        Consumer(
            name,
            tuple(
                _read_rule(verdict, text)
                for key, verdict in outcomes.items()
                for text in row.get(key, ())
            ),
        )
        for name, row in table.items()
    )


CONSUMERS = _read_table()
"""All profiles."""
