"""The JSON of ``kvview events validate`` and ``tail``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvview.testing.events.stream_fold import Finding


@dataclass(frozen=True)
class JudgedEvents:
    """The treatment of some events by a reader.

    Args:
        verdict: Whether it takes them.
        why: The part that is lost, or the reason why all of it is; empty if nothing is lost.
        thread: The public report, ``owner/name#number``; empty if none is known.
        events: How many.
    """

    verdict: str
    why: str
    thread: str
    events: int


@dataclass(frozen=True)
class StreamReport:
    """The report of ``kvview events validate --json FILE`` and ``kvview events tail``.

    Args:
        source: As it was given.
        exit_code: Exit code of the command.
        messages: Messages received or read, including replayed ones.
        replayed: Messages that the publisher sent again on request.
        events: By kind.
        formats: Messages by wire format.
        held: Blocks by medium, at the end.
        tokens: Keys and bytes by medium; sizes are joined from the GPU's events.
        unsized: Blocks of unknown size, by medium.
        copies_left: Removals that left another copy.
        sparse: Stores of windows that name fewer blocks than their tokens fill.
        knows_all: Whether ``held`` is the whole, because nothing was missed.
        missing: First sequence number of a gap, and the one after its last; the last 1,000 gaps.
        num_findings: Number of all findings.
        findings: The first 10,000 findings.
        trouble: What prevented hearing.
        connection: Changes of the connection: the last 20 lines.
        consumers: Treatment of events, by reader requested.
        schema_version: Grows when a field goes or means something else.
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
    consumers: dict[str, list[JudgedEvents]]
    schema_version: Literal[1] = 1
