"""The JSON report of ``kvview events validate`` and ``kvview events tail``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvview.testing.events.stream_fold import Finding


@dataclass(frozen=True)
class StreamReport:
    """The report of ``kvview events validate --json FILE`` and ``kvview events tail``.

    Args:
        source: The endpoint or file, as given.
        exit_code: Exit code of the command.
        messages: Messages received or read, including replayed ones.
        replayed: Messages that the publisher sent again on request.
        events: Number of events, by kind.
        formats: Messages by wire format.
        held: Number of blocks at the end, by medium.
        tokens: Number of tokens by medium, with block sizes joined from the GPU's events.
        unsized: Number of blocks of unknown size, by medium.
        copies_left: Number of removals after which another block still had the key.
        sparse: Number of store events of sliding windows that name fewer blocks than their tokens
            fill.
        knows_all: Whether ``held`` is complete, because no message was missed.
        missing: The last 1,000 gaps, each as its first sequence number and the first number after
            the gap.
        num_findings: Number of all findings.
        findings: The first 10,000 findings.
        trouble: Problems of the connection.
        connection: Changes of the connection: the last 20 lines.
        schema_version: Version of the JSON; increased when a field is removed or changes its
            meaning.
    """

    source: str
    exit_code: int
    messages: int
    replayed: int
    events: dict[str, int]
    formats: dict[str, int]
    held: dict[str, int]
    tokens: dict[str, int]
    unsized: dict[str, int]
    copies_left: int
    sparse: int
    knows_all: bool
    missing: list[tuple[int, int]]
    num_findings: int
    findings: list[Finding]
    trouble: list[str]
    connection: list[str]
    schema_version: Literal[1] = 1
