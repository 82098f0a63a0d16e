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

_MOST_TOKENS = 1 << 24


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
    """The engine, as the connector's constructor received it.

    Args:
        num_blocks: Blocks of the pool.
        hash_block_size: Tokens of a block hash.
        max_running: Maximum number of requests that are computed at the same time.
        max_tokens_per_step: Token budget of a step.
        num_ranks: Number of ranks of tensor parallelism.
        num_stages: Number of stages of pipeline parallelism.
        num_draft_tokens: Draft tokens of a step with speculative decoding.
    """

    connector: str
    num_blocks: int = Field(ge=2)
    hash_block_size: int = Field(ge=1)
    groups: list[GroupModel]
    max_running: int = Field(ge=1)
    max_tokens_per_step: int = Field(ge=1)
    has_async_scheduling: bool
    num_ranks: int = Field(ge=1)
    num_stages: int = Field(ge=1)
    num_draft_tokens: int = Field(ge=0)


class RequestModel(_Model):
    """A request, without its tokens.

    Args:
        request: Number of the request, in the order of appearance.
        max_tokens: Maximum number of generated tokens.
        positions: Positions of the listed hashes; hashes far from the start are listed sparsely.
        hashes: Numbers of the block hashes; equal numbers mean equal prefixes.
    """

    request: int = Field(ge=1)
    num_prompt_tokens: int = Field(ge=0, le=_MOST_TOKENS)
    max_tokens: int | None = None
    positions: list[int]
    hashes: list[int]


class RecordModel(_Model):
    """A call of a hook; the fields depend on the hook, and empty fields are missing.

    Args:
        monotonic_ns: Time of the end of the call.
        hook: Name of the hook.
        request: Number of the request.
        num_tokens: Tokens of the request at its end.
        new: Requests that a step schedules for the first time.
        sent: Requests whose blocks were stored or sent.
        received: Requests whose blocks were loaded.
        failed: Requests whose loads failed.
    """

    monotonic_ns: int
    hook: str
    request: int | None = None
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_promised_tokens: int = 0
    is_async: bool = False
    num_external_tokens: int = 0
    num_scheduled_tokens: int = 0
    new: list[int] = Field(default_factory=list)
    preempted: list[int] = Field(default_factory=list)
    resumed: list[int] = Field(default_factory=list)
    finished: list[int] = Field(default_factory=list)
    status: str = ""
    is_delayed: bool = False
    sent: list[int] = Field(default_factory=list)
    received: list[int] = Field(default_factory=list)
    failed: list[int] = Field(default_factory=list)
    num_invalid_blocks: int = 0


class IncidentModel(_Model):
    """An incident that a recorder wrote.

    Args:
        law: The broken law; empty if a signal requested the file.
        num_dropped: Earlier records, which the memory of the recorder could not keep.
    """

    schema_version: Literal[1]
    law: str
    num_dropped: int
    engine: EngineModel
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
            f"expected a file recorded-*.json of the canary"
        ) from error
