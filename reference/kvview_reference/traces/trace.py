"""The requests of a trace, and the rows that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvview.errors import TraceError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        request_id: Id of the request, unique in the trace unless the trace repeats an id.
        arrival_s: Seconds from the start of the trace; 0.0 in a trace without times.
        num_prompt_tokens: Prompt length in tokens, at least 1.
        num_output_tokens: Generated tokens, 0 or more.
        hash_ids: One id per prompt block, in order. Equal ids have equal tokens from the start of
            the prompt to the end of the block. The last block may be partial.
        line: Line of the file, from 1.
        continues: ``request_id`` of the previous turn, if the trace has it.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: Sequence[int]
    line: int
    continues: str | None = None


@dataclass(frozen=True)
class Trace:
    """A trace that was read to its end.

    Args:
        title: Name of the file.
        requests: The requests by arrival; in a trace without times, in the order of the file.
        block_size: Number of tokens of a hash id.
        skipped: The rows that could not be read.
    """

    title: str
    requests: Sequence[TraceRequest]
    block_size: int
    skipped: SkippedRows

    @property
    def headline(self) -> str:
        """The title, followed by the number of requests that were read if it is not all."""
        if not self.skipped.num_requests:
            return self.title
        num_all = len(self.requests) + self.skipped.num_requests
        least = "at least " if self.skipped.is_open_ended else ""
        return f"{self.title}: {len(self.requests):,} of {least}{num_all:,} requests read"


@dataclass
class SkippedRows:
    """The requests that could not be read.

    Args:
        is_allowed: Whether a bad row is skipped; otherwise it raises its error.
        report: Called with each of the first errors.
        reasons: The first 10,000 errors.
        num_requests: Number of all requests that could not be read.
        is_open_ended: Whether the rest of a file is missing, with an unknown number of requests.
    """

    is_allowed: bool = False
    report: Callable[[str], object] = lambda text: None
    reasons: list[str] = field(default_factory=list)
    num_requests: int = 0
    is_open_ended: bool = False

    def add(self, error: TraceError, num_requests: int = 1, *, ends_file: bool = False) -> None:
        """Count a bad row.

        Args:
            error: The error, which starts with the file and the line.
            num_requests: Requests in the row.
            ends_file: Whether the rest of the file cannot be read.

        Raises:
            TraceError: Bad rows are not allowed.
        """
        if not self.is_allowed:
            raise error
        self.num_requests += num_requests
        self.is_open_ended |= ends_file
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(str(error))
        if len(self.reasons) <= _NUM_REPORTED:
            self.report(str(error))


_MAX_REASONS = 10_000
_NUM_REPORTED = 20
