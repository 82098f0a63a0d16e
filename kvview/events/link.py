"""The state of a connection to a publisher, from ZMQ's monitor events."""

from __future__ import annotations

import errno
import time
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

_TRY_AGAIN_S = 1.0
_FOREIGN = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.DISCONNECTED,  # counts only before a handshake succeeded
)
_LINK = (
    *_FOREIGN,
    zmq.Event.HANDSHAKE_SUCCEEDED,
    zmq.Event.CONNECT_RETRIED,
)


class Link:
    """Watches one connection.

    Args:
        socket: The connected socket of the subscription.
        endpoint: The endpoint of the publisher.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self._socket, self._endpoint = socket, endpoint
        self._monitor = socket.get_monitor_socket(sum(_LINK, zmq.Event(0)))
        self._is_up, self._reported, self._try_again_at = False, "", 0.0

    def close(self) -> None:
        """Stop watching."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def news(self) -> list[str]:
        """Return the changes since the last call, each as a line of text."""
        lines = []
        if self._try_again_at and time.monotonic() > self._try_again_at:
            self._try_again_at = 0.0  # zmq itself does not reconnect to a peer of another protocol
            with suppress(zmq.ZMQError):
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            change = ""
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._is_up = True
                change = "connected" if self._reported else ""
            elif event == zmq.Event.DISCONNECTED and self._is_up:
                self._is_up = False
                change = "the publisher has disconnected; waiting for it"
            elif event in _FOREIGN:
                change = "the peer is not a ZMQ publisher; trying again"
                self._try_again_at = time.monotonic() + _TRY_AGAIN_S
            elif event == zmq.Event.CONNECT_RETRIED and not self._reported:
                change = "no publisher is listening yet; waiting"
            if change and change != self._reported:
                self._reported = change
                lines.append(f"endpoint {self._endpoint!r}: {change}")
        return lines


def with_a_port(endpoint: str) -> str:
    """Return an endpoint to which another process can connect.

    Raises:
        ZMQError: The endpoint is ``inproc``, or has a port that zmq would take modulo 65,536.
    """
    if endpoint.startswith("inproc:"):
        raise zmq.ZMQError(errno.EPROTONOSUPPORT)
    port = endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else ""
    if port.isdecimal() and int(port) > 65_535:
        raise zmq.ZMQError(errno.EINVAL)
    return endpoint
