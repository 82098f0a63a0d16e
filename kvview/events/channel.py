"""KV events over ZMQ: a listener, which can request missed messages.

1. A message has three frames: topic, number (8 bytes, big-endian), batch. Numbers increase by one.
2. A listener that has missed messages sends the first missing number to the replay endpoint. The
   publisher sends every batch that it still has, and then a message with the number -1.
3. A listener skips frames that are not a message, and reports them.
4. A number below that of the last message means that the publisher has restarted, because a
   publisher never reuses a number.

Source: ``ZmqEventPublisher``, vllm/distributed/kv_events.py; replays have no topic up to 0.25.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence

import zmq

from kvview.errors import ConfigError, WireFormatError, line_of
from kvview.events.recording import MAX_PAYLOAD_BYTES, Message, require_size

_MOST_QUEUED = 100_000  # messages that a slow listener keeps; later messages are dropped
_LARGEST = 4 * MAX_PAYLOAD_BYTES  # bytes of a frame; a larger frame ends the connection
_HANDSHAKE_MS = 3000
_END = (-1).to_bytes(8, "big", signed=True)


def read_frames(frames: Sequence[bytes]) -> Message | None:
    """Read a message of a stream, or of a replay in either layout; None is the end of a replay.

    Raises:
        WireFormatError: The frames are not a message.
    """
    topic, number, payload = b"", b"", b""
    if len(frames) == 2:
        number, payload = frames
    elif len(frames) == 3:
        topic, number, payload = frames
    if len(number) != 8:
        sizes = ", ".join(str(len(frame)) for frame in frames[:5])
        raise WireFormatError(
            f"not a KV event message: {len(frames)} frames of {sizes} bytes, "
            f"expected a topic, an 8-byte sequence number, and the batch"
        )
    if number == _END and not payload:
        return None
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
        replay_endpoint: Endpoint from which missed messages can be requested, or None.
        replay_seconds: Maximum of seconds to wait for each message of a replay.

    Attributes:
        num_replayed: Messages that :meth:`follow` received from replays.

    Raises:
        ConfigError: An endpoint is not valid.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        replay_seconds: float = 2.0,
    ) -> None:
        self._context = zmq.Context()
        self._replay_endpoint, self._replay_seconds = replay_endpoint, replay_seconds
        self._expected = self.num_replayed = 0
        self._next: Message | None = None  # to be yielded after the missed messages
        try:
            self._socket = self._connect(zmq.SUB, endpoint)
            if replay_endpoint is not None:  # so that a wrong endpoint is reported now
                self._connect(zmq.DEALER, replay_endpoint).close(linger=0)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)  # also closes the socket of an unfinished replay

    def receive(self, seconds: float) -> Message | None:
        """Return the next message, or None if no message arrives in time.

        Raises:
            WireFormatError: The frames are not a message (3.); later messages can still be
                received.
        """
        self._check_open()
        if not self._socket.poll(int(seconds * 1000)):
            return None
        return read_frames(self._socket.recv_multipart())

    def follow(self, seconds: float, report: Callable[[str], None]) -> Iterator[Message]:
        """Yield the missed messages that the publisher can still replay, and then the next message.

        If the caller stops the iteration, the next call continues at the same message.

        Args:
            seconds: Maximum of seconds to wait for the next message.
            report: Called with one line for each wrong message or failed replay (3.).
        """
        first = self._expected
        try:
            message = self._next or self.receive(seconds)
        except WireFormatError as error:
            report(str(error))
            return
        if message is None:
            return
        if message.sequence < first:
            first = 0  # 4.
        self._next = message
        if message.sequence > first and self._replay_endpoint is not None:
            try:
                for missed in self.replay(first):
                    if missed.sequence >= message.sequence:
                        break
                    self.num_replayed += 1
                    self._expected = missed.sequence + 1
                    yield missed
            except (WireFormatError, ConfigError) as error:
                self._check_open()
                report(str(error))
        self._next, self._expected = None, message.sequence + 1
        yield message

    def replay(self, first: int) -> Iterator[Message]:
        """Yield the messages that the publisher still has, starting at a number.

        Raises:
            ConfigError: The listener has no replay endpoint, or the endpoint does not respond.
            WireFormatError: The frames are not a message, or its number is not higher.
        """
        if self._replay_endpoint is None:
            raise ConfigError("the listener has no replay endpoint; pass replay_endpoint")
        self._check_open()
        socket = self._connect(zmq.DEALER, self._replay_endpoint)
        try:
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                if not socket.poll(int(self._replay_seconds * 1000)):
                    raise ConfigError(
                        f"replay endpoint {self._replay_endpoint!r} did not respond within "
                        f"{self._replay_seconds:g} s"
                    )
                _, *frames = socket.recv_multipart()
                message = read_frames(frames)
                if message is None:
                    return
                if message.sequence < first:
                    raise WireFormatError(
                        f"replay endpoint {self._replay_endpoint!r} sent message "
                        f"{message.sequence}, expected {first} or later"
                    )
                first = message.sequence + 1
                yield message
                self._check_open()
        finally:
            socket.close(linger=0)

    def _check_open(self) -> None:
        if self._context.closed:
            raise ConfigError("the listener was closed; make another one")

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_MOST_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        try:
            socket.connect(_with_a_port(endpoint))
        except (zmq.ZMQError, UnicodeError) as error:
            socket.close(linger=0)
            raise ConfigError(
                f"endpoint {endpoint!r}: {line_of(error)}; expected tcp://HOST:PORT or ipc://PATH"
            ) from None
        return socket


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
