"""The model of an incident file, and its reader.

``docs/incident.schema.json`` is the JSON Schema, which ``docs/make_commands.py`` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvview import ConfigError
from kvview.errors import line_of
from kvview.input_files import read_file
from kvview_vllm.recorder.export import SCHEMA

_MOST_TOKENS = 1 << 24

Tables = list[list[int]]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GroupModel(_Model):
    """A KV-cache group of the engine.

    Args:
        kind: Name of the class of vLLM's ``KVCacheSpec``.
        block_size: Tokens of a block.
        window: Tokens of the sliding window, if the group has one.
    """

    kind: str
    block_size: int = Field(ge=1)
    window: int | None = None


class EngineModel(_Model):
    """The engine, as the connector's constructor received it; empty if that was not recorded.

    Args:
        component: The side of the connector that was recorded.
        role: The ``kv_role`` of the connector.
        num_blocks: Blocks of the pool.
        hash_block_size: Tokens of a block hash.
        max_running: Maximum number of requests that are computed at the same time.
        max_tokens_per_step: Token budget of a step.
        num_ranks: Number of ranks of tensor parallelism.
        num_draft_tokens: Draft tokens of a step with speculative decoding.
    """

    connector: str = ""
    component: Literal["scheduler", "worker", ""] = ""
    role: str | None = None
    num_blocks: int | None = Field(None, ge=2)
    hash_block_size: int = Field(16, ge=1)
    groups: list[GroupModel] = Field(default_factory=list)
    max_running: int | None = Field(None, ge=1)
    max_tokens_per_step: int | None = Field(None, ge=1)
    has_async_scheduling: bool = False
    num_ranks: int = Field(1, ge=1)
    num_draft_tokens: int = Field(0, ge=0)


class WindowModel(_Model):
    """The part of the calls that the incident contains.

    Args:
        num_hooks: Calls since the start of the recorder.
        num_records: Records in the incident.
        is_whole: Whether no record was dropped, so that the incident starts with the server.
        limit_bytes: Limit of the recorder's memory.
        num_errors: Exceptions of the recorder itself.
    """

    num_hooks: int
    num_records: int
    is_whole: bool
    limit_bytes: int
    num_errors: int


class RequestModel(_Model):
    """A request, without its tokens.

    Args:
        request: Number of the request, in the order of appearance.
        num_tokens: Tokens at the last description, generated tokens included.
        max_tokens: Maximum number of generated tokens.
        num_hashes: Number of full hash blocks.
        positions: Positions of the listed hashes; hashes far from the start are listed sparsely.
        hashes: Numbers of the block hashes; equal numbers mean equal prefixes.
    """

    request: int = Field(ge=1)
    num_prompt_tokens: int = Field(ge=0, le=_MOST_TOKENS)
    num_tokens: int = Field(ge=0, le=_MOST_TOKENS)
    max_tokens: int | None = None
    num_hashes: int = Field(ge=0)
    positions: list[int]
    hashes: list[int]


class ScheduledModel(_Model):
    """A request in a step, with its first new blocks by group.

    Args:
        num_scheduled_tokens: Tokens that the step computes, if the request is new.
        num_computed_tokens: Tokens whose KV existed before the step, if the request is new.
    """

    request: int
    num_scheduled_tokens: int | None = None
    num_computed_tokens: int | None = None
    blocks: Tables = Field(default_factory=list)


class RecordModel(_Model):
    """A call of a hook; the fields depend on the hook, and empty fields are missing.

    Args:
        monotonic_ns: Time of the end of the call.
        hook: Name of the hook.
        event: The event of the proposed schema that the call shows.
        request: Number of the request.
        num_tokens: Tokens of the request at its end.
        block_count: Blocks of the request, also those whose ids are not listed.
        blocks: The first blocks of each group.
        new: Requests that a step schedules for the first time.
        extended: Other requests of a step that have new blocks.
        plan: Numbers of entries in the attributes of the connector's metadata.
        sent: Requests whose blocks were stored or sent.
        received: Requests whose blocks were loaded.
        failed: Requests whose loads failed.
    """

    monotonic_ns: int
    hook: str
    event: str | None = None
    request: int | None = None
    num_tokens: int = 0
    num_computed_tokens: int | None = None
    num_promised_tokens: int | None = None
    is_async: bool = False
    num_external_tokens: int = 0
    block_count: int = 0
    blocks: Tables = Field(default_factory=list)
    num_requests: int = 0
    num_scheduled_tokens: int = 0
    new: list[ScheduledModel] = Field(default_factory=list)
    extended: list[ScheduledModel] = Field(default_factory=list)
    preempted: list[int] = Field(default_factory=list)
    resumed: list[int] = Field(default_factory=list)
    finished: list[int] = Field(default_factory=list)
    plan: dict[str, int] = Field(default_factory=dict)
    status: str = ""
    is_delayed: bool = False
    sent: list[int] = Field(default_factory=list)
    received: list[int] = Field(default_factory=list)
    failed: list[int] = Field(default_factory=list)
    invalid_blocks: list[int] = Field(default_factory=list)
    has_reset: bool = False
    num_layers_saved: int = 0


class IncidentModel(_Model):
    """An incident that a recorder wrote.

    Args:
        schema: The proposed schema whose names of events and fields the records use.
        wall_ns: Time of the incident.
        reason: Why the incident was written.
        details: More about the reason, such as the broken ``law``.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_version: Literal[1]
    schema_: Literal["vllm-kv-connector-v1"] = Field(SCHEMA, alias="schema")
    wall_ns: int
    reason: str
    details: dict[str, int | float | bool | str | list[int | None] | None]
    engine: EngineModel
    window: WindowModel
    requests: list[RequestModel]
    records: list[RecordModel]


def read_incident(path: str | Path) -> IncidentModel:
    """Read an incident file.

    Raises:
        ConfigError: The file cannot be read, or it is not an incident.
    """
    try:
        return IncidentModel.model_validate_json(read_file(path))
    except OSError as error:
        raise ConfigError(f"incident {str(path)!r} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{str(path)!r} is not an incident of the recorder: {place}: {line_of(first['msg'])}; "
            f"expected a file that Recorder.write made"
        ) from error
