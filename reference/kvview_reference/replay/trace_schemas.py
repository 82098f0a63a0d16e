"""The schemas of a row of a request trace, and the requests in a row.

Lengths are in tokens. In Mooncake and Bailian the partial last block of a prompt has a hash id; in
cc-traces it has no id. Both are accepted.

Source: ``mooncake``: kvcache-ai/Mooncake, ``FAST25-release/traces``;
``bailian``: alibaba-edu/qwen-bailian-usagetraces-anon, ``README.md``;
``cc-traces``: callanjfox/kv-cache-tester, ``docs/trace_replay_tester.md``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

SchemaName = Literal["mooncake", "bailian", "cc-traces"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        request_id: Id of the request in the trace, or the line in a schema without ids.
        arrival_s: Seconds from the start of the trace (``cc-traces``: of the session); 0.0 in a
            trace without times.
        num_prompt_tokens: Prompt length in tokens, at least 1.
        num_output_tokens: Generated tokens, 0 or more.
        hash_ids: One id per prompt block, in order; equal ids of one scope mean reusable KV. The
            last block may be partial.
        scope: Namespace of ``hash_ids``; "" if the ids are valid for the whole trace.
        line: Line of the file, from 1.
        continues: ``request_id`` of the previous turn, if the trace has it.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: Sequence[int]
    scope: str
    line: int
    continues: str | None = None


class RowError(ValueError):
    """An error in a row, raised by code that does not know the file and the line.

    Args:
        problem: The error.
        field: The field with the error, if the error is in one field.
        ends_file: Whether the rest of the file, after the row, cannot be read.
    """

    def __init__(self, problem: str, field: str = "", *, ends_file: bool = False) -> None:
        super().__init__(f"field '{field}': {problem}" if field else problem)
        self.ends_file = ends_file


_Tokens = Annotated[int, Field(ge=0, lt=2**31)]
_PromptTokens = Annotated[int, Field(ge=1, lt=2**31)]
_Time = Annotated[float, Field(ge=0, le=2**42, allow_inf_nan=False)]  # 139 years in ms
_HashIds = tuple[Annotated[int, Field(ge=0, lt=2**64)], ...]


def _check_num_blocks(field: str, hash_ids: Sequence[int], tokens: int, block_size: int) -> None:
    full, rest = divmod(tokens, block_size)
    if not full <= len(hash_ids) <= full + bool(rest):
        expected = f"{full} or {full + 1}" if rest else f"{full}"
        raise RowError(
            f"{len(hash_ids)} ids for {tokens} prompt tokens in blocks of {block_size}, "
            f"expected {expected}",
            field,
        )


class _Model(BaseModel):
    # strict refuses a bool as an int and "1" as a number. Unknown fields are ignored.
    model_config = ConfigDict(strict=True)


class _FlatRow(_Model):
    """A row with one request."""

    tokens_per_block: ClassVar[int]

    timestamp: _Time | None = None
    input_length: _PromptTokens
    output_length: _Tokens
    hash_ids: _HashIds

    @property
    def num_block_tokens(self) -> int:
        return self.tokens_per_block

    @property
    def has_time(self) -> bool:
        return self.timestamp is not None

    def request(
        self, request_id: str, arrival_s: float, line: int, continues: str | None = None
    ) -> TraceRequest:
        ids, tokens = self.hash_ids, self.input_length
        _check_num_blocks("hash_ids", ids, tokens, self.tokens_per_block)
        return TraceRequest(
            request_id, arrival_s, tokens, self.output_length, ids, "", line, continues
        )


class _MooncakeRow(_FlatRow):
    tokens_per_block = 512

    # A Bailian row has every Mooncake field, but its timestamp counts seconds.
    chat_id: None = None
    parent_chat_id: None = None

    def requests(self, line: int) -> list[TraceRequest]:
        return [self.request(str(line), (self.timestamp or 0.0) / 1000, line)]


class _BailianRow(_FlatRow):
    tokens_per_block = 16

    chat_id: int
    parent_chat_id: int = -1
    type: str = "text"
    turn: int = 1

    def requests(self, line: int) -> list[TraceRequest]:
        continues = str(self.parent_chat_id) if self.parent_chat_id >= 0 else None
        return [self.request(str(self.chat_id), self.timestamp or 0.0, line, continues)]


class _CcRequest(_Model):
    t: _Time
    type: Literal["n", "s"]
    num_prompt_tokens: _PromptTokens = Field(alias="in")
    num_output_tokens: _Tokens = Field(alias="out")
    hash_ids: _HashIds


class _CcSubagent(_Model):
    t: _Time
    type: Literal["subagent"]
    requests: tuple[_CcEntry, ...]


_CcEntry = Annotated[_CcRequest | _CcSubagent, Field(discriminator="type")]


class _CcSession(_Model):
    id: str = Field(min_length=1)
    block_size: int = Field(ge=1, lt=2**31)
    hash_id_scope: Literal["local", "global"] = "local"
    requests_: tuple[_CcEntry, ...] = Field(alias="requests")
    has_time: ClassVar[bool] = True

    @property
    def num_block_tokens(self) -> int:
        return self.block_size

    def requests(self, line: int) -> list[TraceRequest]:
        """List the requests of the session and of its sub-agents by arrival."""
        scope = self.id if self.hash_id_scope == "local" else ""
        found: list[TraceRequest] = []
        last: dict[str, str] = {}  # of the session's and each sub-agent's requests
        for arrival_s, path, field, entry in _flatten(self.requests_, 0.0, "", "requests"):
            tokens, ids = entry.num_prompt_tokens, entry.hash_ids
            _check_num_blocks(f"{field}.hash_ids", ids, tokens, self.block_size)
            request_id, output = f"{self.id}/{path}", entry.num_output_tokens
            agent = path.rpartition(".")[0]
            continues = last.get(agent)
            last[agent] = request_id
            found.append(
                TraceRequest(request_id, arrival_s, tokens, output, ids, scope, line, continues)
            )
        return sorted(found, key=lambda request: request.arrival_s)


def _flatten(
    entries: Sequence[_CcEntry], start_s: float, path: str, field: str
) -> Iterator[tuple[float, str, str, _CcRequest]]:
    """Yield arrival, path ("3", or "1.0" in a sub-agent), field and request of each entry."""
    for index, entry in enumerate(entries):
        where = f"{field}[{index}]"
        if isinstance(entry, _CcRequest):
            yield start_s + entry.t, f"{path}{index}", where, entry
        else:
            # A sub-agent's clock starts at 0 in some releases and at the session's time in others.
            # If a request is earlier than its own spawn, the clock starts at 0.
            first = min((inner.t for inner in entry.requests), default=entry.t)
            inner_start_s = start_s + entry.t if first < entry.t else start_s
            yield from _flatten(
                entry.requests, inner_start_s, f"{path}{index}.", f"{where}.requests"
            )


_Row = _MooncakeRow | _BailianRow | _CcSession
_MODELS: dict[SchemaName, type[_Row]] = {
    "mooncake": _MooncakeRow,
    "bailian": _BailianRow,
    "cc-traces": _CcSession,
}
_FIELDS: dict[SchemaName, tuple[str, ...]] = {
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
    "bailian": tuple(_BailianRow.model_fields),
    "cc-traces": ("id", "block_size", "hash_id_scope", "requests"),
}


def _load(row: bytes) -> dict[str, Any]:
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


def _nearest_schema(fields: dict[str, Any]) -> SchemaName | None:
    """Find the schema with which a row shares the most fields, at least half of the schema's."""
    shared = {name: len(fields.keys() & known) for name, known in _FIELDS.items()}
    nearest = max(shared, key=lambda name: shared[name])
    return nearest if 2 * shared[nearest] >= len(_FIELDS[nearest]) else None


def _explain(error: ValidationError) -> RowError:
    first, *others = error.errors(include_url=False)
    # Numbers are indices of a list; "n", "s" and "subagent" name a kind, not a field.
    parts = (part for part in first["loc"] if part not in ("n", "s", "subagent"))
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    if first["type"].startswith("union_tag"):
        field += ".type"
    if first["type"] in ("missing", "union_tag_not_found"):
        problem = "missing"
    elif first["type"] == "union_tag_invalid":
        problem = f"should be one of {first['ctx']['expected_tags']}, got {first['ctx']['tag']!r}"
    else:
        problem = f"{first['msg'].removeprefix('Input ')}, got {reprlib.repr(first['input'])}"
    more = f" (and {len(others)} more in this row)" if others else ""
    return RowError(problem + more, field.removeprefix("."))


def recognise(row: bytes) -> SchemaName:
    """Recognise the schema of a row by its fields; the row may still be malformed.

    Raises:
        RowError: The row is not a JSON object, or has less than half of the fields of any schema.
    """
    fields = _load(row)
    schema = _nearest_schema(fields)
    if schema is None:
        known = "; ".join(f"{name} ({', '.join(names)})" for name, names in _FIELDS.items())
        found = reprlib.repr(list(fields))
        raise RowError(f"the fields {found} fit no known schema; known schemas: {known}")
    return schema


def parse(row: bytes, line: int, schema: SchemaName) -> tuple[int, list[TraceRequest], bool]:
    """Validate a row of a known schema.

    Args:
        row: One line of the file, as JSON.
        line: Its number, from 1.
        schema: The schema of the trace.

    Returns:
        Block size in tokens, the row's requests by arrival, and whether the row has arrival times.

    Raises:
        RowError: The row is malformed, or has another schema.
    """
    try:
        valid = _MODELS[schema].model_validate_json(row)
    except ValidationError as error:
        actual = _nearest_schema(_load(row))
        if actual not in (schema, None):
            raise RowError(
                f"mixed schemas: the trace is {schema}, but this row is {actual}"
            ) from None
        raise _explain(error) from None
    return valid.num_block_tokens, valid.requests(line), valid.has_time
