"""What must hold between an engine and a connector after every step.

Plain values in; out comes nothing, or one :class:`InvariantBroken` that names the
law and the numbers. Any engine that can say these values can be watched with
them: the oracle here is its own dicts and sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from kvview.events import OffloadingEvent, fold
from kvview.keys import OffloadKey


class InvariantBroken(AssertionError):
    """A law does not hold.

    Args:
        law: Its number, ``"CONN-4"`` for example.
        message: The values, and what was expected of them.
        is_timeout: Whether it is a hook that did not return.
        is_hook_error: Whether a hook raised, or returned a value that no engine can use.
    """

    def __init__(
        self, law: str, message: str, *, is_timeout: bool = False, is_hook_error: bool = False
    ) -> None:
        super().__init__(f"{law}: {message}")
        self.law = law
        self.message = message
        self.is_timeout = is_timeout
        self.is_hook_error = is_hook_error


class EndedLoudly(InvariantBroken):
    """A fault of the simulation came through a hook: an engine would have ended, told why."""


def check_free_list(free_ids: Sequence[int], ref_counts: Mapping[int, int]) -> None:
    """Each block is in the free queue exactly when nobody refers to it, and once.

    Args:
        free_ids: The free queue, next victim first.
        ref_counts: References of every block but the null block.

    Raises:
        InvariantBroken: POOL-2 or POOL-1.
    """
    if len(set(free_ids)) < len(free_ids):
        twice = sorted(block for block, times in Counter(free_ids).items() if times > 1)
        raise InvariantBroken("POOL-2", f"blocks {twice} are in the free queue more than once")
    unreferenced = {block for block, count in ref_counts.items() if count == 0}
    if unreferenced != set(free_ids):
        raise InvariantBroken(
            "POOL-1",
            f"the free queue and the references disagree: {sorted(set(free_ids) - unreferenced)} "
            f"are queued and referred to, {sorted(unreferenced - set(free_ids))} neither",
        )


def check_conservation(
    ref_counts: Mapping[int, int],
    engine_refs: Mapping[int, int],
    connector_refs: Mapping[int, int],
) -> None:
    """Free + engine-held + connector-held = all, reference by reference.

    Args:
        ref_counts: References of every block but the null block.
        engine_refs: Of them, those of block tables.
        connector_refs: Of them, those that the connector's view counts.

    Raises:
        InvariantBroken: CONN-4, with the blocks that somebody took or gave too often.
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
                f"the connector, who holds the other {count - engine - connector}?",
            )


def check_drained(held: Mapping[int, int], when: str) -> None:
    """At the end the connector holds nothing.

    Args:
        held: References that it still has, ``{block_id: count}``.
        when: At the end of what.

    Raises:
        InvariantBroken: CONN-4.
    """
    if held:
        raise InvariantBroken(
            "CONN-4", f"{when} the connector still holds {len(held)} blocks: {dict(held)}"
        )


class EventFold:
    """Folds offloading events into what is advertised, and checks them on the way."""

    def __init__(self) -> None:
        self.num_events = 0
        self._model: fold.FoldedEvents[OffloadKey] = fold.FoldedEvents()

    def apply(self, events: Iterable[OffloadingEvent]) -> None:
        """Take more events in.

        Raises:
            InvariantBroken: EVENT-1, a key is removed that is not there, or stored that is.
        """
        for event in events:
            self.num_events += 1
            for key in event.keys:
                if not self._model.change(event.medium, key, removed=event.removed):
                    done, why = ("removed", "not") if event.removed else ("stored", "already")
                    what = f"event {self.num_events}: key {short(key)} is {done}"
                    where = f"medium {event.medium!r} {why} holding it"
                    raise InvariantBroken("EVENT-1", f"{what}, with {where}")

    @property
    def advertised(self) -> set[OffloadKey]:
        """Keys that some medium is said to hold."""
        return self._model.advertised()


def check_advertised(
    advertised: Collection[OffloadKey],
    stored: Collection[OffloadKey],
    failed: Collection[OffloadKey],
) -> None:
    """What is advertised was stored.

    Args:
        advertised: Keys by the events so far.
        stored: Keys of all stores that were reported as a success.
        failed: Keys of all stores that were reported as a failure.

    Raises:
        InvariantBroken: EVENT-4 for a failed store, EVENT-2 for one that never ended.
    """
    stored, failed = set(stored), set(failed)
    for key in advertised:
        if key in stored:
            continue
        if key in failed:
            raise InvariantBroken(
                "EVENT-4", f"key {short(key)} is advertised, and each of its stores has failed"
            )
        raise InvariantBroken(
            "EVENT-2",
            f"key {short(key)} is advertised, and no store of it has ended that began since the "
            f"last reset",
        )


def check_promise(
    request_id: str,
    promised: Iterable[OffloadKey],
    stored: Collection[OffloadKey],
    advertised: Collection[OffloadKey] | None,
) -> None:
    """What ``match_prefix`` promises was stored, and is advertised.

    Args:
        request_id: To whom.
        promised: Keys that the promised prefix needs.
        stored: Keys of all stores that were reported as a success.
        advertised: Keys by the events so far; None when the connector gives no events.

    Raises:
        InvariantBroken: CONN-2 or EVENT-2.
    """
    for key in promised:
        if key not in stored:
            raise InvariantBroken(
                "CONN-2",
                f"match_prefix promised key {short(key)} to request {request_id!r}, and no store "
                f"of it that began since the last reset was reported as a success",
            )
        if advertised is not None and key not in advertised:
            raise InvariantBroken(
                "EVENT-2",
                f"match_prefix promised key {short(key)} to request {request_id!r}, which the "
                f"events do not advertise",
            )


def check_reset(advertised: Collection[OffloadKey]) -> None:
    """After a reset that was not refused, nothing is advertised.

    Raises:
        InvariantBroken: EVENT-5.
    """
    if advertised:
        keys = ", ".join(sorted(map(short, advertised))[:5])
        raise InvariantBroken(
            "EVENT-5", f"after a reset {len(advertised)} keys are still advertised: {keys}"
        )


def check_bytes(num_wrong: int, num_wrong_before: int) -> None:
    """No block that a request reads differs from what its hash stands for.

    Raises:
        InvariantBroken: XFER-1.
    """
    if num_wrong > num_wrong_before:
        raise InvariantBroken(
            "XFER-1",
            f"{num_wrong - num_wrong_before} blocks that a request reads hold other bytes than "
            f"their hashes stand for",
        )


def short(key: OffloadKey) -> str:
    """A key as messages write it: the start of the hash, and the group."""
    return f"{key[:4].hex()}.../{int.from_bytes(key[-4:], 'big')}"
