"""The formats of a row of a trace, and the requests in a row.

A prompt has an id for each full block, and may have an id for its partial last block.

Source: ``mooncake``: kvcache-ai/Mooncake, ``FAST25-release/traces``;
its sessions: ai-dynamo/dynamo, ``docs/benchmarks/mocker-trace-replay.md``, and ai-dynamo/aiperf,
``docs/benchmark-modes/trace-replay.md``;
``bailian``: alibaba-edu/qwen-bailian-usagetraces-anon, ``README.md``;
``weka``: callanjfox/kv-cache-tester, ``docs/trace_replay_tester.md``.
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

FormatName = Literal["mooncake", "bailian", "weka"]

DEFAULT_BLOCK_SIZES: dict[FormatName, int] = {"mooncake": 512, "bailian": 16}
"""Tokens of a block in the published traces of formats whose rows do not state it."""


@dataclass(slots=True)
class Row:
    """One request, with the fields of its row.

    Args:
        place: File and line, for errors.
        field: Name of the field with the ids, for errors.
        line: Line of the file, from 1.
        name: Id of the request.
        num_prompt_tokens: Tokens of the prompt; of an incremental turn, of its new part.
        num_output_tokens: Generated tokens.
        hash_ids: Ids of these prompt tokens.
        scope: Namespace of the ids; "" for the whole trace.
        at_s: Time of arrival; None if the row has none.
        delay_s: Time after the previous turn of the session; None if the row has none.
        session: Id of the session, if its turns must be put together.
        continues: Name of the previous turn, if the row states it.
    """

    place: str
    field: str
    line: int
    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: Sequence[int]
    scope: str = ""
    at_s: float | None = None
    delay_s: float | None = None
    session: str | None = None
    continues: str | None = None


class RowError(ValueError):
    """An error in a row, raised by code that does not know the file and the line.

    Args:
        problem: The error.
        field: The field with the error, if the error is in one field.
        num_requests: Requests in the row.
    """

    def __init__(self, problem: str, field: str = "", num_requests: int = 1) -> None:
        super().__init__(f"field '{field}': {problem}" if field else problem)
        self.num_requests = num_requests


_Tokens = Annotated[int, Field(ge=0, lt=2**31)]
_PromptTokens = Annotated[int, Field(ge=1, lt=2**31)]
_BlockSize = Annotated[int, Field(ge=1, lt=2**31)]
_Time = Annotated[float, Field(ge=0, le=2**42, allow_inf_nan=False)]  # 139 years in ms
_HashIds = list[Annotated[int, Field(ge=0, lt=2**64)]]


class _Model(BaseModel):
    # strict refuses a bool as an int and "1" as a number. Unknown fields are ignored.
    model_config = ConfigDict(strict=True)


class _MooncakeRow(_Model):
    num_block_tokens: ClassVar[int | None] = None

    timestamp: _Time | None = Field(
        None, validation_alias=AliasChoices("timestamp", "created_time")
    )
    delay: _Time | None = Field(None, validation_alias=AliasChoices("delay", "delay_ms"))
    session_id: str | int | None = None
    input_length: _PromptTokens = Field(
        validation_alias=AliasChoices("input_length", "input_tokens")
    )
    output_length: _Tokens = Field(validation_alias=AliasChoices("output_length", "output_tokens"))
    hash_ids: _HashIds

    def rows(self, place: str, line: int) -> Iterator[Row | RowError]:
        in_session = self.session_id is not None
        if self.delay is not None and not in_session:
            yield RowError("is present, but the row has no session_id", "delay")
            return
        yield Row(
            *(place, "hash_ids", line, place, self.input_length, self.output_length),
            hash_ids=array("Q", self.hash_ids),
            at_s=None if self.timestamp is None else self.timestamp / 1000,
            delay_s=None if self.delay is None else self.delay / 1000,
            session=repr(self.session_id) if in_session else None,
        )


class _BailianRow(_Model):
    num_block_tokens: ClassVar[int | None] = None

    chat_id: int
    parent_chat_id: int = -1
    timestamp: _Time | None = None
    input_length: _PromptTokens
    output_length: _Tokens
    hash_ids: _HashIds

    def rows(self, place: str, line: int) -> Iterator[Row | RowError]:
        yield Row(
            *(place, "hash_ids", line, f"chat {self.chat_id}"),
            *(self.input_length, self.output_length),
            hash_ids=array("Q", self.hash_ids),
            at_s=self.timestamp,
            continues=f"chat {self.parent_chat_id}" if self.parent_chat_id >= 0 else None,
        )


class _WekaRequest(_Model):
    t: _Time
    type: Literal["n", "s"]
    num_prompt_tokens: _PromptTokens = Field(alias="in")
    num_output_tokens: _Tokens = Field(alias="out")
    hash_ids: _HashIds


class _WekaSubagent(_Model):
    t: _Time
    type: Literal["subagent"]
    requests: list[Any]


_WEKA_ENTRY: TypeAdapter[_WekaRequest | _WekaSubagent] = TypeAdapter(
    Annotated[_WekaRequest | _WekaSubagent, Field(discriminator="type")]
)


class _WekaSession(_Model):
    id: str = Field(min_length=1)
    block_size: _BlockSize
    hash_id_scope: Literal["local", "global"] = "local"
    requests: list[Any]

    @property
    def num_block_tokens(self) -> int | None:
        return self.block_size

    def rows(self, place: str, line: int) -> Iterator[Row | RowError]:
        """Yield the requests of the session and of its sub-agents, in the order of the row."""
        scope = place if self.hash_id_scope == "local" else ""
        last: dict[str, str] = {}  # of the session's and each sub-agent's requests
        for start_s, path, field, entry in _flatten(self.requests, 0.0, "", "requests"):
            if isinstance(entry, RowError):
                yield entry
                continue
            name, agent = f"{place}/{path}", path.rpartition(".")[0]
            yield Row(
                *(place, f"{field}.hash_ids", line, name),
                *(entry.num_prompt_tokens, entry.num_output_tokens),
                hash_ids=array("Q", entry.hash_ids),
                scope=scope,
                at_s=start_s + entry.t,
                continues=last.get(agent),
            )
            last[agent] = name


def _flatten(
    entries: Sequence[Any], start_s: float, path: str, field: str
) -> Iterator[tuple[float, str, str, _WekaRequest | RowError]]:
    """Yield the clock's start, path ("3", or "1.0" in a sub-agent), field and entry of requests."""
    for index, raw in enumerate(entries):
        where = f"{field}[{index}]"
        try:
            entry = _WEKA_ENTRY.validate_python(raw)
        except ValidationError as error:
            yield start_s, "", where, _explain(error, where, _num_requests(raw))
            continue
        if isinstance(entry, _WekaRequest):
            yield start_s, f"{path}{index}", where, entry
        else:
            # A sub-agent's clock starts at 0 in some releases and at the session's time in others.
            # If a request is earlier than its own spawn, the clock starts at 0.
            times = [_time_of(inner) for inner in entry.requests]
            is_own = min(times, default=entry.t) < entry.t
            yield from _flatten(
                entry.requests,
                start_s + entry.t if is_own else start_s,
                f"{path}{index}.",
                f"{where}.requests",
            )


def _time_of(entry: Any) -> float:
    at = entry.get("t") if isinstance(entry, dict) else None
    return at if isinstance(at, int | float) else float("inf")


def _num_requests(entry: Any) -> int:
    """Count the requests in an entry that may be malformed, at least one."""
    inner = entry.get("requests") if isinstance(entry, dict) else None
    return max(1, sum(map(_num_requests, inner))) if isinstance(inner, list) else 1


_MODELS: dict[FormatName, type[_MooncakeRow] | type[_BailianRow] | type[_WekaSession]] = {
    "mooncake": _MooncakeRow,
    "bailian": _BailianRow,
    "weka": _WekaSession,
}
_FIELDS = {
    "mooncake": "input_length, output_length, hash_ids; timestamp?, session_id?, delay?",
    "bailian": "chat_id, input_length, output_length, hash_ids; parent_chat_id?, timestamp?",
    "weka": "id, block_size, requests; hash_id_scope?",
}
_OF_FLAT_ROWS = {"input_length", "input_tokens", "output_length", "output_tokens", "hash_ids"}
_OF_EVENTS = {"event", "events", "event_type", "block_hashes", "action", "data"}


def load(row: bytes) -> dict[str, Any]:
    """Parse a row.

    Raises:
        RowError: The row is not a JSON object.
    """
    if row.startswith(b"version https://git-lfs"):
        raise RowError("this is a Git LFS pointer, not the trace; run 'git lfs pull'")
    try:
        fields = from_json(row)
    except ValueError as error:
        # The reader adds the line of the file in front of this message.
        raise RowError(f"not JSON: {error}".replace("line 1 column", "column")) from None
    if not isinstance(fields, dict):
        raise RowError(f"not a JSON object, got {reprlib.repr(fields)}")
    return fields


def recognise(fields: dict[str, Any]) -> FormatName:
    """Recognise the format of a row by its fields; the row may still be malformed.

    Raises:
        RowError: The fields belong to no known format.
    """
    if "requests" in fields:
        return "weka"
    if fields.keys() & {"chat_id", "parent_chat_id"}:
        return "bailian"
    if len(fields.keys() & _OF_FLAT_ROWS) > 1:
        return "mooncake"
    found = reprlib.repr(list(fields))
    if fields.keys() & _OF_EVENTS:
        raise RowError(
            f"the fields {found} are those of an event log, which lacks the hash_ids of each "
            "request's prompt; record KV events with 'kvview events --record'"
        )
    known = ", ".join(f"{name} ({names})" for name, names in _FIELDS.items())
    raise RowError(f"the fields {found} fit no known format; known formats: {known}")


def parse(
    fields: dict[str, Any], name: FormatName, place: str, line: int
) -> tuple[int | None, list[Row | RowError]]:
    """Validate a row.

    Args:
        fields: The row.
        name: Format of the trace.
        place: File and line.
        line: Line of the file, from 1.

    Returns:
        Block size in tokens, if the row states it; and each request of the row, or its error.

    Raises:
        RowError: The row is malformed, or has another format.
    """
    try:
        if recognise(fields) != name:
            raise RowError(f"the trace is {name}, but this row is {recognise(fields)}")
        valid = _MODELS[name].model_validate(fields)
    except RowError as error:
        error.num_requests = _num_requests(fields)
        raise
    except ValidationError as error:
        raise _explain(error, "", _num_requests(fields)) from None
    return valid.num_block_tokens, list(valid.rows(place, line))


_PYDANTIC_OBJECT = "dictionary or object to extract fields from"


def _explain(error: ValidationError, where: str, num_requests: int) -> RowError:
    first, *others = error.errors(include_url=False)
    # Numbers are indices of a list; "n", "s" and "subagent" name a kind, not a field.
    parts = [part for part in first["loc"] if part not in ("n", "s", "subagent", "str", "int")]
    field = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    if first["type"].startswith("union_tag"):
        field += ".type"
    if first["type"] in ("missing", "union_tag_not_found"):
        problem = "missing"
        if field.endswith("hash_ids"):
            problem += ", but hits need the ids of the prompt's blocks"
    elif first["type"] == "union_tag_invalid":
        problem = f"should be one of {first['ctx']['expected_tags']}, got {first['ctx']['tag']!r}"
    else:
        text = first["msg"].removeprefix("Input ").replace(_PYDANTIC_OBJECT, "object")
        problem = f"{text}, got {reprlib.repr(first['input'])}"
    more = f" (and {len(others)} more in this row)" if others else ""
    return RowError(problem + more, field.removeprefix("."), num_requests)
