"""The halves of a connector that hands KV from one engine to another, in both roles.

The producer computes a prompt, offers its blocks and holds them. The consumer receives the
parameters with a request, promises their tokens in ``match_prefix`` and loads the pages like any
connector. An offer is a store job, which is in flight until the handoff ends; after its report the
scheduler half frees the blocks. A fetch is a load job.

All messages between two engines go through the wire, which the engine provides, so a connector
opens no socket. A wire may lose, delay, repeat, reorder and cut messages.

Laws: HAND-1 to HAND-10 in ``kvview/laws.toml``. ``docs/handoff.md`` draws the life of a handoff.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from kvview.connector import BlockIds, RequestInfo, SchedulerConnector, WorkerConnector
from kvview.connector.hooks import Hooked
from kvview.errors import ConfigError
from kvview.handoff.params import Peer

Frame = bytes | bytearray | memoryview


class Wire(Protocol):
    """Messages between engines. No call waits.

    Each worker half of an engine has a separate wire. A message reaches the worker half of the same
    rank in the other engine, whose KV must be split in the same way.

    Examples:
        Send a page, and change it only when the wire has read it:

        >>> page = bytearray(b"page")
        >>> ticket = wire.send("tcp://c:1", [b"header", page])
        >>> network.tick()  # time passes
        >>> ticket in wire.sent()  # so the page may change now
        True
        >>> other_wire.receive()
        [(b'header', b'page')]
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

        Examples:
            Number the offers of this life of the engine:

            >>> class Producer(HandoffScheduler):
            ...     def bind_peer(self, me, lease_seconds):
            ...         self.me, self.lease_seconds, self.next_id = me, lease_seconds, 0
            >>> half = Producer()
            >>> half.bind_peer(me, lease_seconds=30.0)
            >>> half.me.engine_id, half.next_id
            ('P', 0)
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

        Examples:
            Hold the full blocks of the prompt, and describe them to the consumer:

            >>> class Producer(HandoffScheduler):
            ...     def offer_blocks(self, request, block_ids):
            ...         full = full_blocks(geometry, request, block_ids)
            ...         view.touch_blocks([block.block_id for block in full])
            ...         return handoff.to_params()  # num_tokens and the hash of these blocks
            >>> Producer().offer_blocks(request, ([1, 2, 3, 4],))["num_tokens"]
            48
        """
        return None

    def accept_params(self, request: RequestInfo, params: Mapping[str, Any]) -> None:
        """In the consumer: receive a request's parameters, before its first ``match_prefix``.

        Args:
            request: The request; it has no blocks.
            params: The parameters as the router delivered them, which may contain any errors
                (HAND-6).

        Examples:
            Accept the handoff if its parameters fit the request, and compute the prompt otherwise:

            >>> class Consumer(HandoffScheduler):
            ...     def accept_params(self, request, params):
            ...         try: Handoff.from_params(params).require_for(request, geometry, "layout")
            ...         except HandoffError: print("compute", request.request_id)
            >>> Consumer().accept_params(new_request, handoff.to_params())
            >>> Consumer().accept_params(new_request, {"engine_id": "P"})
            compute r1
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

        Examples:
            Keep the wire, and read its clock rather than that of the machine:

            >>> class Worker(HandoffWorker):
            ...     def bind_wire(self, me, wire, lease_seconds):
            ...         self.wire, self.deadline = wire, wire.now() + lease_seconds
            >>> half = Worker()
            >>> half.bind_wire(me, wire, lease_seconds=30.0)
            >>> half.deadline
            30.0
        """


def require_no_wire(scheduler: SchedulerConnector, owner: str) -> None:
    """Refuse a half for handoffs in an engine that has no wire.

    Args:
        scheduler: The scheduler half.
        owner: Name of the connector.

    Raises:
        ConfigError: The half is a :class:`HandoffScheduler`.

    Examples:
        A plain half needs no wire:

        >>> require_no_wire(SchedulerConnector(), "Mine")
    """
    if isinstance(scheduler, HandoffScheduler):
        raise ConfigError(
            f"connector {owner} hands KV to other engines, and this engine has no wire; check it "
            f"with kvview check --pd"
        )
