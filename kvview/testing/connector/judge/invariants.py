"""Invariants between an engine and a connector, which hold after every step.

Each check takes plain values, and raises an :class:`InvariantBroken` with the law and the numbers.
The checks apply to any engine that can report these values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from kvview.keys import OffloadKey
from kvview.testing.supervision.source_lines import at_places


@dataclass(eq=False, repr=False)
class InvariantBroken(AssertionError):
    """A law does not hold.

    Args:
        law: Number of the law, ``"CONN-4"`` for example.
        message: Text with the found and the expected values.
        is_timeout: Whether a hook did not return.
        is_hook_error: Whether a hook raised an exception, or returned a value that no engine can
            use.
        hint: The remedy; None for the hint of the law.
    """

    law: str
    message: str
    is_timeout: bool = False
    is_hook_error: bool = False
    hint: str | None = None

    @override
    def __str__(self) -> str:
        return f"{self.law}: {self.message}"


class EndedLoudly(InvariantBroken):
    """A hook did not catch a simulated failure, which would have ended a real engine."""


def check_free_list(free_ids: Sequence[int], ref_counts: Mapping[int, int]) -> None:
    """Require that the free queue has exactly the blocks without references, each once.

    Args:
        free_ids: The free queue, next victim first.
        ref_counts: References of every block except the null block.

    Raises:
        InvariantBroken: POOL-2 or POOL-1 is broken.
    """
    if len(set(free_ids)) < len(free_ids):
        twice = sorted(block for block, times in Counter(free_ids).items() if times > 1)
        raise InvariantBroken("POOL-2", f"blocks {twice} are in the free queue more than once")
    unreferenced = {block for block, count in ref_counts.items() if count == 0}
    if unreferenced != set(free_ids):
        raise InvariantBroken(
            "POOL-1",
            "the free queue does not match the references: blocks "
            f"{sorted(set(free_ids) - unreferenced)} are in the queue but have references, blocks "
            f"{sorted(unreferenced - set(free_ids))} have no references but are not in the queue",
        )


def check_conservation(
    ref_counts: Mapping[int, int],
    engine_refs: Mapping[int, int],
    connector_refs: Mapping[int, int],
) -> None:
    """Require that all references to a block belong to requests or to the connector.

    Args:
        ref_counts: References of every block except the null block.
        engine_refs: The number of these references that block tables have.
        connector_refs: References that the connector's view counts.

    Raises:
        InvariantBroken: CONN-4 is broken, because a block was held or released too often.
    """
    expected = Counter(engine_refs)
    expected.update(connector_refs)
    if {block: count for block, count in ref_counts.items() if count} == expected:
        return
    for block, count in ref_counts.items():
        engine, connector = engine_refs.get(block, 0), connector_refs.get(block, 0)
        if engine + connector != count:
            raise InvariantBroken(
                "CONN-4",
                f"block {block} has {count} references: {engine} of requests and {connector} of "
                f"the connector; {count - engine - connector} have no owner",
            )


def check_drained(
    held: Mapping[int, int], when: str, touched_at: Sequence[Mapping[int, Sequence[str]]] = ()
) -> None:
    """Require that the connector holds no block.

    Args:
        held: References that the connector still has, ``{block_id: count}``.
        when: When the check was made, for the message.
        touched_at: The lines of the author's code that last held each block, by connector.

    Raises:
        InvariantBroken: CONN-4.
    """
    if held:
        first = next(iter(held))
        places: Sequence[str] = next((one[first] for one in touched_at if first in one), ())
        place = at_places(places)
        raise InvariantBroken(
            "CONN-4",
            f"{when} the connector still holds {len(held)} blocks: {dict(held)}"
            f"{place and f'; it took the hold of block {first}{place}'}",
        )


def short(key: OffloadKey) -> str:
    """Format a key for a message: the start of its hash, and its group."""
    return f"{key[:4].hex()}.../{int.from_bytes(key[-4:], 'big')}"
