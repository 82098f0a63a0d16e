"""A log of the last hooks, transfers and holds of a run, for the report of a failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvview import FinishReason, RequestInfo, StepInfo, TransferJob, TransferResult

_LONGEST = 200
"""Number of last entries that are kept."""


class RunLog:
    """The last entries of the log of a run, which are formatted only when they are read."""

    def __init__(self) -> None:
        self._entries: deque[list[object]] = deque(maxlen=_LONGEST)

    def add(self, *words: object) -> None:
        """Add an entry, such as the name of a hook and its arguments."""
        kept = [tuple(map(tuple, word)) if type(word) is tuple else word for word in words]
        self._entries.append(kept)  # copies of block tables, because the tables grow later

    def lines(self) -> list[str]:
        """Return the entries as text, the oldest first."""
        return [" ".join(filter(None, map(_shown, words))) for words in self._entries]


def _shown(value: object) -> str:
    match value:
        case bool():
            return ""
        case str():
            return value
        case int():
            return f"({value} tokens)"
        case RequestInfo():
            return value.request_id
        case FinishReason():
            return f"({value.name.lower()})"
        case StepInfo():
            return _joined(one.request.request_id for one in value.scheduled)
        case TransferJob():
            return f"job {value.job_id}: {_side(value.src)} -> {_side(value.dst)}"
        case TransferResult():
            return f"job {value.job_id}" + ("" if value.success else " failed")
        case dict():  # references by block
            refs = sorted(value.items())
            return _joined(f"{b} ({n}x)" if n > 1 else str(b) for b, n in refs) or "none"
        case tuple():  # the block table of each group
            return f"blocks {' | '.join(_joined(map(str, group)) for group in value)}"
        case list():
            return _joined(map(_shown, value))
    return ""


def _side(spec: object) -> str:
    blocks = getattr(spec, "block_ids", None)
    medium = getattr(spec, "medium", type(spec).__name__)
    return str(medium) if blocks is None else f"{medium} {_joined(map(str, blocks))}"


def _joined(words: Iterable[str]) -> str:
    return ", ".join(words)
