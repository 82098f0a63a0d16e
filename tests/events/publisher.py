"""A publisher of KV events as vLLM's, for tests of the listener."""

from __future__ import annotations

import zmq

ANY_PORT = "tcp://127.0.0.1:*"


class Publisher:
    """Publishes batches; a context manager.

    Args:
        topic: Topic of every message.
    """

    def __init__(self, *, topic: str = "") -> None:
        self.context = zmq.Context()
        self._topic, self._num_published = topic.encode(), 0
        self.socket = self.context.socket(zmq.PUB)
        self.socket.set_hwm(0)
        self.socket.bind(ANY_PORT)
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=1000)
        self.context.term()

    def publish(self, payload: bytes) -> int:
        """Send a batch; returns its number."""
        number = self._num_published
        self._num_published += 1
        self.socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        return number
