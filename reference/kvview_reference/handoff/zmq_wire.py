"""Messages between engines over TCP, with ZeroMQ.

Frames are sent without a copy, and a ticket ends when ZeroMQ has released the frames. Any program
that can reach the port can send messages, so use the wire only in a trusted network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import zmq

from kvview.handoff import Frame


class ZmqWire:
    """The wire of one worker half in one life of an engine.

    Rank 0 uses the port of the address, rank 1 the next port, and so on, so all ranks must be on
    one host.

    Args:
        address: Address of this engine for its peers; ``*`` for any free port.
        rank: Rank of the worker half.
        patience: Seconds after which frames are dropped if their peer does not receive them.
    """

    def __init__(
        self, address: str = "tcp://127.0.0.1:*", rank: int = 0, patience: float = 30.0
    ) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._rank = rank
        self._inbox.bind(self._of_rank(address))
        self.address: str = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._patience = patience
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._unsent: dict[int, tuple[Any, str, float]] = {}  # tracker, address, time
        self._lost: list[int] = []
        self._tickets = count()

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        return time.monotonic()

    def send(self, address: str, message: Sequence[Frame]) -> int:
        """Queue a message, which is lost if the address is wrong or the queue is full."""
        ticket = next(self._tickets)
        try:
            tracker = self._peer(address).send_multipart(
                message, flags=zmq.NOBLOCK, copy=False, track=True
            )
            self._unsent[ticket] = tracker, address, self.now()
        except (zmq.ZMQError, ValueError):  # a wrong address
            self._lost.append(ticket)
        return ticket

    def _peer(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._peers:
            socket = self._peers[address] = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._of_rank(address))
        return self._peers[address]

    def _of_rank(self, address: str) -> str:
        """Return the address with the port of this rank."""
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + self._rank}" if self._rank else address

    def sent(self) -> Sequence[int]:
        """Return the tickets whose frames ZeroMQ has released."""
        ended, self._lost = self._lost, []
        for ticket, (tracker, address, since) in list(self._unsent.items()):
            if tracker.done:
                del self._unsent[ticket]
                ended.append(ticket)
            elif self.now() > since + self._patience and address in self._peers:
                self._peers.pop(address).close()  # which releases its frames
        return ended

    def receive(self) -> Sequence[Sequence[bytes]]:
        """Return the messages that have arrived."""
        messages = []
        while self._inbox.poll(0):
            messages.append(self._inbox.recv_multipart())
        return messages

    def close(self) -> None:
        """Close all sockets and drop their messages."""
        self._context.destroy(linger=0)
