"""A publisher of KV events as vLLM's, for tests of the listener."""

from __future__ import annotations

import threading

import zmq

ANY_PORT = "tcp://127.0.0.1:*"
_END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Publishes batches, and replays them from a thread; a context manager.

    Args:
        topic: Topic of every message.
        replay_topic: Whether replayed batches have a topic frame, as in vLLM since 0.26.
    """

    def __init__(self, *, topic: str = "", replay_topic: bool = True) -> None:
        self.context = zmq.Context()
        self._topic, self._replay_topic = topic.encode(), replay_topic
        self._kept: list[bytes] = []
        self._closing = threading.Event()
        self.socket = self.context.socket(zmq.PUB)
        self.socket.set_hwm(0)
        self.socket.bind(ANY_PORT)
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)
        replies = self.context.socket(zmq.ROUTER)
        replies.bind(ANY_PORT)
        self.replay_endpoint = replies.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, args=(replies,))
        self._thread.start()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self.socket.close(linger=1000)
        self.context.term()

    def publish(self, payload: bytes) -> int:
        """Send a batch; returns its number."""
        number = len(self._kept)
        self._kept.append(payload)
        self.socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        return number

    def _serve(self, replies: zmq.Socket[bytes]) -> None:
        topic, end = ((self._topic,), (b"",)) if self._replay_topic else ((), ())
        while not self._closing.is_set():
            if not replies.poll(50):
                continue
            client, _, first = replies.recv_multipart()
            for number in range(int.from_bytes(first, "big"), len(self._kept)):
                frames = (number.to_bytes(8, "big"), self._kept[number])
                replies.send_multipart((client, b"", *topic, *frames))
            replies.send_multipart((client, b"", *end, _END, b""))
        replies.close(linger=1000)
