"""The offers of KV that one life of an engine makes, for any connector.

Laws: HAND-3, HAND-4, HAND-5 and HAND-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvview.errors import HandoffError
from kvview.handoff.params import Handoff, Peer

ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class _Offer(Generic[ItemT]):
    handoff: Handoff
    item: ItemT
    deadline: float
    reader: str = ""
    num_reads: int = 0
    is_closed: bool = False


class Offers(Generic[ItemT]):
    """Tracks the reader and the end of each offer.

    1. Only the first reader of an offer is served (HAND-5).
    2. An offer ends once: when its reader has confirmed the offer, when a consumer has returned it
       unread, or at its deadline. An offer never ends during a read (HAND-4).
    3. Numbers of handoffs increase. A consumer may ask for an offer before the plan has added it,
       so a number above all known numbers is not an error.

    Args:
        me: The engine that makes the offers.
    """

    def __init__(self, me: Peer) -> None:
        self._me = me
        self._offers: dict[int, _Offer[ItemT]] = {}
        self._latest = -1
        self._closed_early: set[Handoff] = set()

    def add(self, handoff: Handoff, item: ItemT, deadline: float) -> None:
        """Start to track an offer.

        Args:
            handoff: The handoff.
            item: The object that :meth:`begin_read` and :meth:`take_ended` return for this offer.
            deadline: Time at which the offer ends if no consumer has confirmed it.
        """
        number = self._latest = handoff.handoff_id
        is_closed = handoff in self._closed_early
        self._closed_early = {early for early in self._closed_early if early.handoff_id > number}
        self._offers[number] = _Offer(handoff, item, deadline, is_closed=is_closed)

    def begin_read(self, handoff: Handoff, reader: str, now: float) -> ItemT | None:
        """Start a read; the offer does not end before :meth:`end_read`.

        Returns:
            The item; None if the offer was not added yet, so the reader may try again later.

        Raises:
            HandoffError: The handoff belongs to another engine, life or prompt (HAND-6), or it has
                ended or has another reader (HAND-5).
        """
        offer = self._find(handoff)
        if handoff.handoff_id > self._latest:
            return None
        if offer is None or offer.is_closed or now >= offer.deadline:
            raise HandoffError(
                f"HAND-5: handoff {handoff.handoff_id} was consumed or returned, or has expired; "
                "compute the prompt instead"
            )
        if offer.reader not in ("", reader):
            raise HandoffError(
                f"HAND-5: handoff {handoff.handoff_id} is read by {offer.reader}, not by {reader}"
            )
        offer.reader = reader
        offer.num_reads += 1
        return offer.item

    def end_read(self, handoff: Handoff) -> None:
        """End one read."""
        self._offers[handoff.handoff_id].num_reads -= 1

    def close(self, handoff: Handoff, reader: str) -> None:
        """End an offer that its reader has consumed, or that was returned unread.

        Unknown, ended and foreign handoffs are ignored, because messages may be repeated.
        """
        try:
            offer = self._find(handoff)
        except HandoffError:
            return
        if handoff.handoff_id > self._latest:
            self._closed_early.add(handoff)
        elif offer is not None and offer.reader in ("", reader):
            offer.is_closed = True

    def take_ended(self, now: float) -> list[tuple[ItemT, bool]]:
        """Remove the offers that have ended.

        Returns:
            The item of each offer, and whether the consumer confirmed or returned the offer.
        """
        ended = [
            number
            for number, offer in self._offers.items()
            if not offer.num_reads and (offer.is_closed or now >= offer.deadline)
        ]
        offers = [self._offers.pop(number) for number in ended]
        return [(offer.item, offer.is_closed) for offer in offers]

    def _find(self, handoff: Handoff) -> _Offer[ItemT] | None:
        if (handoff.engine_id, handoff.life) != (self._me.engine_id, self._me.life):
            raise HandoffError(
                f"HAND-6: handoff {handoff.handoff_id} belongs to engine "
                f"{handoff.engine_id!r}, life {handoff.life!r}; this is engine "
                f"{self._me.engine_id!r}, life {self._me.life!r}"
            )
        offer = self._offers.get(handoff.handoff_id)
        if offer is not None and offer.handoff != handoff:
            raise HandoffError(f"HAND-6: handoff {handoff.handoff_id} belongs to another prompt")
        return offer
