"""The prompts and arrival times of the turns of sessions, and ids that stand for prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvview.errors import ConfigError
from kvview_reference.traces.rows import Row, RowError
from kvview_reference.traces.trace import TraceRequest

Turns = Literal["cumulative", "incremental"]

_GENERATED = 2**64
"""The ids of blocks with generated tokens start here, because no id of a row is as large."""


class PrefixIds:
    """Numbers that are equal for equal ids after equal prefixes.

    An id that follows two different ids stands for two different blocks: some formats number the
    tokens of a block, and KV depends on all tokens before it.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._scopes: dict[str, int] = {}

    def chain(self, ids: Iterable[int], scope: str) -> Sequence[int]:
        """Number the blocks of a prompt."""
        parent = -1 - self._scopes.setdefault(scope, len(self._scopes))
        chained = array("Q")
        for block_id in ids:
            key = (parent << 65) + block_id
            parent = self._numbers.setdefault(key, len(self._numbers))
            chained.append(parent)
        return chained


@dataclass
class _Session:
    number: int
    last: Row
    arrival_s: float
    num_tokens: int = 0  # prompts and outputs of all turns so far
    hash_ids: list[int] = field(default_factory=list)  # of full blocks without generated tokens


def find_turns(rows: Iterable[Row], block_size: int) -> Turns:
    """Find out whether the prompts of later turns repeat the turns before them.

    Raises:
        ConfigError: The rows do not show it, or contradict each other.
    """
    last: dict[str, Row] = {}
    evidence: dict[Turns, str] = {}
    num_later = 0
    for row in rows:
        if row.session is None:
            continue
        if (before := last.get(row.session)) is not None:
            num_later += 1
            if before.num_prompt_tokens >= block_size and row.hash_ids:
                repeats = row.hash_ids[0] == before.hash_ids[0]
                evidence.setdefault("cumulative" if repeats else "incremental", row.place)
        last[row.session] = row
    if len(evidence) == 1 or not num_later:
        return next(iter(evidence), "cumulative")
    if evidence:
        raise ConfigError(
            f"{evidence['cumulative']} repeats the blocks of its session's previous turn, but "
            f"{evidence['incremental']} does not; pass --turns cumulative or --turns incremental"
        )
    raise ConfigError(
        "the prompts of all first turns are shorter than a block, so the rows do not show whether "
        "later turns repeat them; pass --turns cumulative or --turns incremental"
    )


class Timeline:
    """Makes requests from rows in the order of the file.

    Args:
        block_size: Tokens of a block.
        turns: Whether a later turn of a session repeats the turns before it.
        has_times: Whether the rows have times.
    """

    def __init__(self, block_size: int, turns: Turns, *, has_times: bool) -> None:
        self._block_size, self._turns, self._has_times = block_size, turns, has_times
        self._sessions: dict[str, _Session] = {}
        self._ids = PrefixIds()

    def add(self, row: Row) -> TraceRequest:
        """Make the request of a row.

        Raises:
            RowError: The time of the row is missing or wrong.
        """
        session = None if row.session is None else self._sessions.get(row.session)
        arrival_s = self._arrival_s(row, session)
        num_tokens, hash_ids, continues = row.num_prompt_tokens, row.hash_ids, row.continues
        if row.session is not None:
            if session is None:
                session = _Session(len(self._sessions), row, arrival_s)
                self._sessions[row.session] = session
            else:
                continues = session.last.name
                session.last, session.arrival_s = row, arrival_s
            if self._turns == "incremental":
                num_tokens, hash_ids = self._put_together(session, row)
        return TraceRequest(
            row.name,
            arrival_s,
            num_tokens,
            row.num_output_tokens,
            self._ids.chain(hash_ids, row.scope),
            row.line,
            continues,
        )

    def _arrival_s(self, row: Row, session: _Session | None) -> float:
        if session is None and row.delay_s is not None and row.at_s is None:
            raise RowError("is present, but this is the first turn of its session", "delay")
        if row.at_s is not None:
            if not self._has_times:
                raise RowError("is present, but the first row lacks it", "timestamp")
            if session is not None and row.at_s < session.arrival_s:
                raise RowError(f"before the previous turn ({session.last.place})", "timestamp")
            return row.at_s
        if not self._has_times:
            return 0.0  # in the order of the file
        if session is None or row.delay_s is None:
            raise RowError("is missing, but the first row has it", "timestamp")
        return session.arrival_s + row.delay_s

    def _put_together(self, session: _Session, row: Row) -> tuple[int, Sequence[int]]:
        """Append a turn to its session, and return the tokens and ids of the whole prompt.

        A block that starts or ends after a generated token has content of its own.
        """
        size = self._block_size
        if session.num_tokens == len(session.hash_ids) * size:
            session.hash_ids += row.hash_ids[: row.num_prompt_tokens // size]
        num_tokens = session.num_tokens + row.num_prompt_tokens
        session.num_tokens = num_tokens + row.num_output_tokens
        own = _GENERATED + session.number
        rest = -(-num_tokens // size) - len(session.hash_ids)
        return num_tokens, [*session.hash_ids, *[own] * rest]
