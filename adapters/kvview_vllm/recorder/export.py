"""The content of an incident file, made from the records of a recorder."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from kvview_vllm.recorder.facts import FIELDS, MOST_BLOCK_IDS, SAME_AS, Facts

SCHEMA: Literal["vllm-kv-connector-v1"] = "vllm-kv-connector-v1"
"""The schema that vllm#52859 proposes, whose names of events and fields an incident uses."""

_DESCRIPTION = (
    "num_prompt_tokens",
    "num_tokens",
    "max_tokens",
    "num_hashes",
    "positions",
    "hashes",
)
_REQUESTS = frozenset({"preempted", "resumed", "finished", "sent", "received", "failed"})
_OF_REQUESTS = frozenset({"request", "request_id", "requests", "request_ids"})
_WORD = re.compile(r"[^\s'\"(),;\[\]{}]+")
_LONGEST_WORD = 15  # a longer word with a digit may be an id


class Numbers:
    """Numbers for keys, from 1, in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __getitem__(self, key: int) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def known(self, key: int) -> int | None:
        """Return the number of a key that was used before, or None."""
        return self._numbers.get(key)


def export(
    reason: str,
    details: Mapping[str, Any],
    setup: Mapping[str, Any],
    window: Mapping[str, Any],
    requests: Mapping[int, Facts],
    records: Iterable[Facts],
) -> dict[str, Any]:
    """Make the JSON of an incident, in which numbers replace the keys of requests and hashes.

    Args:
        reason: Why the incident is written.
        details: More about the reason.
        setup: Sizes of the engine.
        window: The part of the calls that was kept.
        requests: Descriptions by the key of the request.
        records: The records, the oldest first.
    """
    numbers, hashes = Numbers(), Numbers()
    listed = [_record(record, numbers) for record in records]
    described = []
    for key, description in requests.items():
        fields = dict(zip(_DESCRIPTION, description, strict=True))
        fields["hashes"] = [hashes[one] for one in fields["hashes"]]
        described.append({"request": numbers[key], **fields})
    described.sort(key=lambda one: int(one["request"]))
    return {
        "schema_version": 1,
        "schema": SCHEMA,
        "wall_ns": time.time_ns(),
        "reason": _without_ids(reason, numbers),
        "details": {name: _safe(name, value, numbers) for name, value in details.items()},
        "engine": dict(setup),
        "window": dict(window),
        "requests": described,
        "records": listed,
    }


def _record(record: Facts, numbers: Numbers) -> dict[str, Any]:
    monotonic_ns, hook, *values = record
    hook = SAME_AS.get(str(hook), str(hook))
    fields: dict[str, Any] = {"monotonic_ns": monotonic_ns, "hook": hook}
    for name, value in zip(FIELDS.get(hook, ()), values, strict=False):
        if name == "request":
            value = numbers[value]
        elif name in _REQUESTS:
            value = [numbers[one] for one in value]
        elif name == "new":
            value = [
                {
                    "request": numbers[request],
                    "num_computed_tokens": computed,
                    "num_scheduled_tokens": scheduled,
                    "blocks": _first(blocks),
                }
                for request, computed, scheduled, blocks in value
            ]
        elif name == "extended":
            value = [
                {"request": numbers[request], "blocks": _first(blocks)} for request, blocks in value
            ]
        elif name == "plan":
            value = dict(value)
        if value not in (None, (), []):
            fields[name] = value
    if event := _event(fields):
        fields["event"] = event
    return fields


def _first(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*table[:MOST_BLOCK_IDS]] for table in tables]


def _event(fields: Mapping[str, Any]) -> str | None:
    """Return the event of the proposed schema that a record shows, if there is one."""
    match fields["hook"]:
        case "get_num_new_matched_tokens" if fields.get("num_promised_tokens"):
            return "blocks_matched"
        case "update_state_after_alloc" if fields["num_external_tokens"]:
            return "transfer_staged"
        case "request_finished" if fields["is_delayed"]:
            return "transfer_staged"
        case "start_load_kv":
            return "transfer_started"
        case "update_connector_output" | "get_finished" | "get_block_ids_with_load_errors":
            is_failed = "failed" in fields or "invalid_blocks" in fields
            return "transfer_failed" if is_failed else "transfer_completed"
    return None


def _safe(name: str, value: Any, numbers: Numbers) -> Any:
    """Return a detail without ids and hashes."""
    if name in _OF_REQUESTS:
        ids: Sequence[Any] = [value] if isinstance(value, str | int) else list(value or ())
        found = [numbers.known(hash(one)) for one in ids]
        return found[0] if isinstance(value, str | int) and found else found
    if isinstance(value, str):
        return _without_ids(value, numbers)
    if value is None or isinstance(value, bool | int | float):
        return value
    return type(value).__name__


def _without_ids(text: str, numbers: Numbers) -> str:
    def replaced(match: re.Match[str]) -> str:
        word = match[0]
        number = numbers.known(hash(word.rstrip(".:")))
        if number is not None:
            return f"request {number}"
        may_be_id = len(word) > _LONGEST_WORD and any(map(str.isdigit, word)) and ".py" not in word
        return "..." if may_be_id else word

    return _WORD.sub(replaced, text)
