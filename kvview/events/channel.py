"""KV events over ZMQ: a listener.

A message has three frames: topic, number (8 bytes, big-endian), batch. Numbers increase by one.

Source: ``ZmqEventPublisher``, vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence

import zmq

from kvview.errors import ConfigError, WireFormatError, line_of
from kvview.events.recording import MAX_PAYLOAD_BYTES, Message, require_size

_MOST_QUEUED = 100_000  # messages that a slow listener keeps; later messages are dropped
_LARGEST = 4 * MAX_PAYLOAD_BYTES  # bytes of a frame; a larger frame ends the connection
_HANDSHAKE_MS = 3000


def read_frames(frames: Sequence[bytes]) -> Message:
    """Read a message.

    Raises:
        WireFormatError: The frames are not a message.
    """
    topic, number, payload = frames if len(frames) == 3 else (b"", b"", b"")
    if len(number) != 8:
        sizes = ", ".join(str(len(frame)) for frame in frames[:5])
        raise WireFormatError(
            f"not a KV event message: {len(frames)} frames of {sizes} bytes, "
            f"expected a topic, an 8-byte sequence number, and the batch"
        )
    sequence = int.from_bytes(number, "big", signed=True)
    if sequence < 0:
        raise WireFormatError(
            f"not a KV event message: its sequence number is {sequence}, expected 0 or more"
        )
    try:
        require_size(payload)
    except ValueError as error:
        raise WireFormatError(f"not a KV event message: {error}") from None
    return Message(sequence, payload, topic.decode(errors="backslashreplace"), time.time())


class Listener:
    """Subscribes to a publisher; a context manager. After ``close``, calls raise ``ConfigError``.

    Args:
        endpoint: Endpoint of the publisher.

    Raises:
        ConfigError: The endpoint is not valid.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(_MOST_QUEUED)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        try:
            self._socket.connect(_with_a_port(endpoint))
        except (zmq.ZMQError, UnicodeError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"endpoint {endpoint!r}: {line_of(error)}; expected tcp://HOST:PORT or ipc://PATH"
            ) from None
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def receive(self, seconds: float) -> Message | None:
        """Return the next message, or None if no message arrives in time.

        Raises:
            WireFormatError: The frames are not a message; later messages can still be received.
        """
        if self._context.closed:
            raise ConfigError("the listener was closed; make another one")
        if not self._socket.poll(int(seconds * 1000)):
            return None
        return read_frames(self._socket.recv_multipart())


def _with_a_port(endpoint: str) -> str:
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
