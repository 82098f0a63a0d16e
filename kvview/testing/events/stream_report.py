"""The JSON report of ``kvview events``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvview.testing.events.stream_fold import Finding


@dataclass(frozen=True)
class StreamReport:
    """The report of ``kvview events SOURCE --json FILE``.

    Args:
        source: The endpoint or file, as given.
        exit_code: Exit code of the command.
        messages: Messages received or read, including replayed ones.
        replayed: Messages that the publisher sent again on request.
        events: Number of events, by kind.
        formats: Messages by wire format.
        held: Number of blocks at the end, by medium.
        knows_all: Whether ``held`` is complete, because no message was missed.
        missing: The last 1,000 gaps, each as its first sequence number and the first number after
            the gap.
        num_findings: Number of all findings.
        findings: The first 10,000 findings.
        trouble: The first 20 problems of the connection.
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
    knows_all: bool
    missing: list[tuple[int, int]]
    num_findings: int
    findings: list[Finding]
    trouble: list[str]
    schema_version: Literal[1] = 1
