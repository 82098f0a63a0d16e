"""The model of handoffs: the blocks that a producer must hold, and the end of each hold.

The model has offers, requests of consumers and the time, and does not depend on a connector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvview.handoff import Handoff
from kvview.testing.connector.scenario.scenario import Add

GRACE = 6
"""Maximum of seconds from an event at one engine to its effect at the other, without faults."""

Kind = Literal["right", "repeated", "wrong"]
"""The handoff that a router chose: the request's own, its own again, or a wrong one or none."""

BROKEN: Mapping[Kind, str] = {"right": "HAND-7", "repeated": "HAND-5", "wrong": "HAND-6"}
"""The law that wrong KV breaks, for each kind of choice."""


@dataclass(eq=False)
class Kept:
    """KV that a producer has offered.

    Args:
        engine: The producer.
        add: The prompt.
        params: The parameters.
        handoff: The handoff that the parameters describe.
        blocks: Blocks that the tokens of the handoff need.
        until: Time at which the lease ends.
        lease: Length of the lease.
        renewed_until: Time at which the lease ends if a consumer extends the lease.
    """

    engine: str
    add: Add
    params: Mapping[str, Any]
    handoff: Handoff
    blocks: set[int]
    until: float
    lease: float
    renewed_until: float = 0.0
    is_routed: bool = False
    is_wanted: bool = True
    """Whether the blocks must be held, because no consumer has started to load or has given up."""
    free_by: float | None = None
    """Time at which the blocks must be free, even before the end of the lease, if the network stays
    intact."""
    num_faults: int = 0
    """Number of network faults at the time when a consumer received the handoff."""


@dataclass(eq=False)
class Decode:
    """A request of a consumer.

    Args:
        kept: Handoff of the request.
        kind: The way in which the router chose the handoff.
    """

    kept: Kept
    kind: Kind
    loading_since: float | None = None


@dataclass
class HandoffModel:
    """All offers, and the requests that use offers.

    Args:
        are_alike: Whether both engines have the same layout, so that they can use handoffs.
        renews_leases: Whether a consumer with the parameters may extend the lease.
    """

    are_alike: bool
    renews_leases: bool = False
    kept: list[Kept] = field(default_factory=list)
    decodes: dict[tuple[str, str], Decode] = field(default_factory=dict)
    """Waiting and loading requests, by engine and request id."""

    def must_hold(self, engine: str, now: float) -> set[int]:
        """Return the blocks that an engine must hold."""
        live = (one for one in self.of(engine) if one.is_wanted and now < one.until)
        return {block for one in live for block in one.blocks}

    def may_hold(self, engine: str, now: float, num_faults: int) -> set[int]:
        """Return the blocks that an engine may hold."""
        live = (
            one
            for one in self.of(engine)
            if now < max(one.until, one.renewed_until) + GRACE
            and (one.free_by is None or now < one.free_by or num_faults > one.num_faults)
        )
        return {block for one in live for block in one.blocks}

    def of(self, engine: str) -> Iterator[Kept]:
        """Yield the offers of an engine."""
        return (one for one in self.kept if one.engine == engine)

    def restart(self, engine: str) -> None:
        """Drop the blocks of a restarted engine, whose old parameters remain in routers."""
        for one in self.of(engine):
            one.blocks = set()
        self.decodes = {key: one for key, one in self.decodes.items() if key[0] != engine}

    def follow(self, engine: str, unfinished: Mapping[str, str], now: float) -> list[Decode]:
        """Update the model from the states of a consumer's requests.

        Args:
            engine: The consumer.
            unfinished: Requests of the consumer, with their states.
            now: The time.

        Returns:
            The requests that have ended their loads.
        """
        ended = []
        for (name, request_id), decode in list(self.decodes.items()):
            state = unfinished.get(request_id)
            is_queued = state == "waiting" and decode.loading_since is None
            if name == engine and self.renews_leases:
                kept = decode.kept
                kept.renewed_until = now + 2 * kept.lease  # the renewal may be late
            if name != engine or is_queued:
                continue
            decode.kept.is_wanted &= decode.kind == "wrong"
            if state == "loading":
                decode.loading_since = now if decode.loading_since is None else decode.loading_since
                continue
            ended.append(decode)
            del self.decodes[name, request_id]
            if decode.kind == "right" and self.are_alike:
                decode.kept.free_by = now + GRACE
        return ended
