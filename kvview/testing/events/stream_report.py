"""The JSON of ``kvview events validate`` and ``tail``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvview.testing.events.stream_fold import Finding


@dataclass(frozen=True)
class JudgedEvents:
    """What a reader does with some of the events.

    Args:
        verdict: Whether it takes them.
        why: What is lost, or why all of it; empty where nothing is.
        thread: Where it was reported, ``owner/name#number``; empty when nowhere known.
        events: How many.
    """

    verdict: str
    why: str
    thread: str
    events: int


@dataclass(frozen=True)
class StreamReport:
    """What ``kvview events validate --json FILE`` and ``kvview events tail`` write.

    Args:
        source: As it was given.
        exit_code: That of the command.
        messages: That were heard or read, the replayed ones among them.
        replayed: That the publisher sent again because they were asked for.
        events: By kind.
        formats: Messages by wire format.
        held: Blocks by medium, at the end.
        tokens: What they hold, by medium; sizes are joined from the GPU's events.
        unsized: Blocks whose size no event said, by medium.
        copies_left: Removals that left another copy.
        sparse: Stores of windows that name fewer blocks than their tokens fill.
        knows_all: Whether ``held`` is the whole, because nothing was missed.
        missing: First sequence number of a gap, and the one after its last; the last 1,000 gaps.
        num_findings: What is wrong, all of it.
        findings: What is wrong: the first 10,000.
        trouble: What prevented hearing.
        connection: What became of the connection: the last 20 lines.
        consumers: By reader that was asked for.
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
