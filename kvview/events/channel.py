"""KV events over ZMQ: a publisher with a replay, and who listens to one.

1. A message is three frames: topic, number (8 bytes, big-endian), batch. Numbers rise by one.
2. Who missed some asks the replay endpoint with the first number that it wants; the answer is
   a message for each batch that is still kept, and one whose number is -1.
3. Frames that are none of these are told and passed over, and so is a publisher that is not
   there, goes, comes back or speaks something else: a listener goes on.
4. A number below the last one is a publisher that began anew: numbers never come twice.

Source: ``ZmqEventPublisher``, vllm/distributed/kv_events.py; no topic in replays up to 0.25.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq

from kvview.errors import ConfigError, WireFormatError, line_of
from kvview.events.link import Link, with_a_port
from kvview.events.recording import MAX_PAYLOAD_BYTES, Message, require_size

_MOST_QUEUED = 100_000  # messages that a slow listener keeps: what comes after is a gap
_LARGEST = 4 * MAX_PAYLOAD_BYTES  # bytes of a frame; a publisher that sends more is disconnected
_HANDSHAKE_MS = 3000
_END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 50


def read_frames(frames: Sequence[bytes]) -> Message | None:
    """A message of a stream, or of a replay in either layout; None for a replay's end.

    Raises:
        WireFormatError: The frames are none.
    """
    topic, number, payload = b"", b"", b""
    if len(frames) == 2:
        number, payload = frames
    elif len(frames) == 3:
        topic, number, payload = frames
    if len(number) != 8:
        sizes = ", ".join(str(len(frame)) for frame in frames[:5])
        raise WireFormatError(
            f"not a message of KV events: {len(frames)} frames of {sizes} bytes, "
            f"wanted a topic, 8 bytes for the number, and the batch"
        )
    if number == _END and not payload:
        return None
    sequence = int.from_bytes(number, "big", signed=True)
    if sequence < 0:
        raise WireFormatError(f"not a message of KV events: its number is {sequence}")
    try:
        require_size(payload)
    except ValueError as error:
        raise WireFormatError(f"not a message of KV events: {error}") from None
    return Message(sequence, payload, topic.decode(errors="backslashreplace"), time.time())


class Publisher:
    """Publishes batches, and replays them from a thread of its own; a context manager.

    Args:
        endpoint: To bind, ``tcp://127.0.0.1:5557`` for example.
        replay_endpoint: To bind; None for no replay.
        topic: Of every message.
        replay_topic: Whether replayed batches have a frame for it, as from vLLM 0.26 on.
        buffer_steps: Batches that are kept for replays.

    Raises:
        ConfigError: An endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        replay_topic: bool = True,
        buffer_steps: int = 10_000,
    ) -> None:
        self._context = zmq.Context()
        self._topic, self._replay_topic = topic.encode(errors="surrogateescape"), replay_topic
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._next = 0
        self._thread: threading.Thread | None = None
        self._socket = self._bind(zmq.PUB, endpoint)
        self._socket.set_hwm(0)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str | None = None
        if replay_endpoint is not None:
            replies = self._bind(zmq.ROUTER, replay_endpoint)
            self.replay_endpoint = replies.get_string(zmq.LAST_ENDPOINT)
            self._thread = threading.Thread(target=self._serve, args=(replies,), daemon=True)
            self._thread.start()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(self, payload: bytes) -> int:
        """Send a batch.

        Returns:
            Its number.
        """
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._kept.append((number, payload))
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        return number

    def close(self) -> None:
        """Send what is queued, for a second at most, and end."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close(linger=1000)
        self._context.term()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        try:
            socket.bind(with_a_port(endpoint))
        except (zmq.ZMQError, UnicodeError) as error:
            socket.close(linger=0)
            self._context.destroy(linger=0)
            raise ConfigError(f"endpoint {endpoint!r}: cannot be bound: {line_of(error)}") from None
        return socket

    def _serve(self, replies: zmq.Socket[bytes]) -> None:
        while not self._closing.is_set():
            if not replies.poll(_POLL_MS):
                continue
            frames = replies.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a question of this protocol
            client, first = frames[0], int.from_bytes(frames[2], "big")
            with self._lock:
                wanted = [kept for kept in self._kept if kept[0] >= first]
            topic = (self._topic,) if self._replay_topic else ()
            for number, payload in wanted:
                replies.send_multipart((client, b"", *topic, number.to_bytes(8, "big"), payload))
            end = (b"",) if self._replay_topic else ()
            replies.send_multipart((client, b"", *end, _END, b""))
        replies.close(linger=1000)


class Listener:
    """Hears a publisher; a context manager. A closed one raises ``ConfigError`` at every call.

    Args:
        endpoint: To connect to.
        replay_endpoint: Where to ask for what was missed; None for nowhere.
        topic: What the topics of its messages begin with.
        replay_seconds: How long to wait for each message of a replay.

    Attributes:
        num_replayed: Messages that :meth:`follow` asked for again.

    Raises:
        ConfigError: An endpoint is none.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        replay_seconds: float = 2.0,
    ) -> None:
        self._context = zmq.Context()
        self._replay_endpoint, self._replay_seconds = replay_endpoint, replay_seconds
        self._expected = self.num_replayed = 0
        self._next: Message | None = None  # comes after those that were missed
        try:
            self._socket = self._connect(zmq.SUB, endpoint)
            if replay_endpoint is not None:  # one that is none is told now, not when it is needed
                self._connect(zmq.DEALER, replay_endpoint).close(linger=0)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._link = Link(self._socket, endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode(errors="surrogateescape"))

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._context.destroy(linger=0)  # with the socket of a replay that was not read to its end

    def receive(self, seconds: float) -> Message | None:
        """The next message; None when none came in time.

        Raises:
            WireFormatError: What came is no message (3.); the next call goes on.
        """
        self._check_open()
        if not self._socket.poll(int(seconds * 1000)):
            return None
        return read_frames(self._socket.recv_multipart())

    def follow(self, seconds: float, tell: Callable[[str], None]) -> Iterator[Message]:
        """The next message, and before it what was missed, as far as a replay has it.

        The next call continues where the caller stopped.

        Args:
            seconds: How long to wait; nothing comes when none came in time.
            tell: Is told what was no message, and why there is no replay (3.).
        """
        first = self._expected
        try:
            message = self._next or self.receive(seconds)
        except WireFormatError as error:
            tell(str(error))
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
                tell(str(error))
        self._next, self._expected = None, message.sequence + 1
        yield message

    def replay(self, first: int) -> Iterator[Message]:
        """What the publisher still has, from a number on.

        Raises:
            ConfigError: There is no replay endpoint, or nobody answers there.
            WireFormatError: What came is no message, or its number is not higher.
        """
        if self._replay_endpoint is None:
            raise ConfigError("no replay endpoint was given")
        self._check_open()
        socket = self._connect(zmq.DEALER, self._replay_endpoint)
        try:
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                if not socket.poll(int(self._replay_seconds * 1000)):
                    raise ConfigError(
                        f"replay endpoint {self._replay_endpoint!r}: no answer in "
                        f"{self._replay_seconds:g} s"
                    )
                _, *frames = socket.recv_multipart()
                message = read_frames(frames)
                if message is None:
                    return
                if message.sequence < first:
                    raise WireFormatError(
                        f"replay endpoint {self._replay_endpoint!r}: sent message "
                        f"{message.sequence}, wanted {first} or later"
                    )
                first = message.sequence + 1
                yield message
                self._check_open()
        finally:
            socket.close(linger=0)

    def link_news(self) -> list[str]:
        """What became of the connection since the last call, a line each (3.)."""
        self._check_open()
        return self._link.news()

    def _check_open(self) -> None:
        if self._context.closed:
            raise ConfigError("the listener was closed; open another one")

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_MOST_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        try:
            socket.connect(with_a_port(endpoint))
        except (zmq.ZMQError, UnicodeError) as error:
            socket.close(linger=0)
            raise ConfigError(
                f"endpoint {endpoint!r}: {line_of(error)}; wanted tcp://HOST:PORT or ipc://PATH"
            ) from None
        return socket
