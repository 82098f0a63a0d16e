"""The halves of a connector that hands KV from one engine to another, in both roles.

The producer computes a prompt, offers its blocks and holds them. The consumer receives the
parameters with a request, promises their tokens in ``match_prefix`` and loads the pages like any
connector. An offer is a store job, which is in flight until the handoff ends; after its report the
scheduler half frees the blocks. A fetch is a load job.

All messages between two engines go through the wire, which the engine provides, so a connector
opens no socket. A wire may lose, delay, repeat, reorder and cut messages.

Laws: HAND-1 to HAND-9 in ``kvview/laws.toml``. ``docs/handoff.md`` draws the life of a handoff.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from kvview.connector import BlockIds, RequestInfo, SchedulerConnector, WorkerConnector
from kvview.connector.hooks import Hooked
from kvview.handoff.params import Peer

Frame = bytes | bytearray | memoryview


class Wire(Protocol):
    """Messages between engines. No call waits.

    Each worker half of an engine has a separate wire. A message reaches the worker half of the same
    rank in the other engine, whose KV must be split in the same way.
    """

    def now(self) -> float:
        """Return the time in seconds, for leases and timeouts."""
        ...

    def send(self, address: str, message: Sequence[Frame]) -> int:
        """Send a message of several frames.

        1. The wire may read the frames until ``sent`` has returned the ticket, so the frames must
           not change until then (HAND-4).
        2. The message may not arrive.

        Returns:
            A ticket of the message, which differs from the tickets of all other messages.
        """
        ...

    def sent(self) -> Collection[int]:
        """Return the tickets of messages that the wire has finished reading since the last call."""
        ...

    def receive(self) -> Sequence[Sequence[Frame]]:
        """Return the messages that arrived since the last call, from any sender."""
        ...

    def close(self) -> None:
        """Drop all messages. The engine closes its wire after the worker half has shut down."""
        ...


class HandoffScheduler(SchedulerConnector, Hooked):
    """The scheduler half. Every method has a default that does nothing."""

    def bind_peer(self, me: Peer, lease_seconds: float) -> None:
        """Receive the identity of this life of the engine, before the first request.

        Args:
            me: This engine.
            lease_seconds: Seconds for which an offer waits for its consumer.
        """

    def offer_blocks(self, request: RequestInfo, block_ids: BlockIds) -> Mapping[str, Any] | None:
        """In the producer: hold the blocks of a finished prompt for a consumer.

        Called just before ``on_request_finished``, if the router wants a handoff and the request
        was not aborted.

        Args:
            request: The request; ``num_tokens`` counts its prompt alone, because the consumer's
                request has none of the generated tokens.
            block_ids: Block table of the request, per group.

        Returns:
            The parameters for the router (HAND-1), at least those of
            :meth:`~kvview.handoff.Handoff.to_params`; None if nothing is offered.
        """
        return None

    def accept_params(self, request: RequestInfo, params: Mapping[str, Any]) -> None:
        """In the consumer: receive a request's parameters, before its first ``match_prefix``.

        Args:
            request: The request; it has no blocks.
            params: The parameters as the router delivered them, which may contain any errors
                (HAND-6).
        """


class HandoffWorker(WorkerConnector, Hooked):
    """The worker half. Every method has a default that does nothing.

    ``wait`` returns at once, because only messages and time end offers and fetches.
    """

    def bind_wire(self, me: Peer, wire: Wire, lease_seconds: float) -> None:
        """Receive the wire, before the first plan.

        Args:
            me: This engine.
            wire: The wire of this worker half.
            lease_seconds: As in :meth:`HandoffScheduler.bind_peer`.
        """
