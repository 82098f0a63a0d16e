"""What becomes of a connection to a publisher, as ZMQ's monitor tells it."""

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
    zmq.Event.DISCONNECTED,  # before a handshake succeeded
)
_LINK = (
    *_FOREIGN,
    zmq.Event.HANDSHAKE_SUCCEEDED,
    zmq.Event.CONNECT_RETRIED,
)


class Link:
    """Follows one connection.

    Args:
        socket: Of the subscription, connected.
        endpoint: Where to.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self._socket, self._endpoint = socket, endpoint
        self._monitor = socket.get_monitor_socket(sum(_LINK, zmq.Event(0)))
        self._is_up, self._told, self._try_again_at = False, "", 0.0

    def close(self) -> None:
        """Hear no more of it."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def news(self) -> list[str]:
        """What became of it since the last call, a line each."""
        lines = []
        if self._try_again_at and time.monotonic() > self._try_again_at:
            self._try_again_at = 0.0  # zmq does not, after a socket of another kind
            with suppress(zmq.ZMQError):
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            told = ""
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._is_up = True
                told = "connected" if self._told else ""
            elif event == zmq.Event.DISCONNECTED and self._is_up:
                self._is_up = False
                told = "the publisher is gone; waiting for it"
            elif event in _FOREIGN:
                told = "who is there is no publisher that speaks ZMQ; trying again"
                self._try_again_at = time.monotonic() + _TRY_AGAIN_S
            elif event == zmq.Event.CONNECT_RETRIED and not self._told:
                told = "nobody is there yet; waiting"
            if told and told != self._told:
                self._told = told
                lines.append(f"endpoint {self._endpoint!r}: {told}")
        return lines


def with_a_port(endpoint: str) -> str:
    """The endpoint, if another process can connect to it.

    Raises:
        ZMQError: It cannot: ``inproc``, or a port that zmq would take modulo 65,536.
    """
    if endpoint.startswith("inproc:"):
        raise zmq.ZMQError(errno.EPROTONOSUPPORT)
    port = endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else ""
    if port.isdecimal() and int(port) > 65_535:
        raise zmq.ZMQError(errno.EINVAL)
    return endpoint
