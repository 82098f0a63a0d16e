"""NVIDIA Dynamo's own reader of KV events, from its package on PyPI.

``python -m dynamo.indexer`` subscribes to a publisher for each registered worker, and lists on
``/dump`` the blocks of each worker (``ai-dynamo-runtime``; the reader is
``lib/kv-router`` of ai-dynamo/dynamo).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import zmq

_DEADLINE_S = 30.0
_PAUSE_S = 0.02


class DynamoIndexer:
    """A running indexer, until it is closed."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port), "--threads", "1"],
            env={**os.environ, "DYN_LOG": "error"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def is_up(self) -> bool:
        """Whether the indexer responds."""
        try:
            self.ask("workers")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def close(self) -> None:
        """Stop the workers and the indexer."""
        for worker in self.workers:
            worker.close()
        self._process.kill()
        self._process.wait()

    def ask(self, path: str, **body: Any) -> Any:
        """Send a request, as a POST if it has a body; returns the response."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/{path}",
            data=data,
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as response:
            return json.load(response)

    def held(self) -> dict[int, dict[str, set[int]]]:
        """Block hashes by worker and storage tier ("device", "host_pinned", "disk", "external")."""
        found: dict[int, dict[str, set[int]]] = {}
        for model in self.ask("dump").values():
            for entry in model["events"]:
                tiers = found.setdefault(entry["worker_id"], {})
                stored = entry["event"]["data"].get("stored", {"blocks": []})
                hashes = {block["block_hash"] for block in stored["blocks"]}
                if hashes:
                    tiers.setdefault(entry["storage_tier"], set()).update(hashes)
        return found


class Worker:
    """One publisher that an indexer follows.

    Args:
        indexer: The indexer that subscribes to it.
        number: Number of the worker.
        block_size: Tokens in a block.
    """

    def __init__(self, indexer: DynamoIndexer, number: int, block_size: int) -> None:
        self.number = number
        self._sent = 0
        indexer.workers.append(self)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:*")
        indexer.ask(
            "register",
            instance_id=number,
            endpoint=self._socket.getsockopt_string(zmq.LAST_ENDPOINT),
            model_name=f"model-{number}",  # workers of one model share a tree
            block_size=block_size,
        )
        if not self._socket.poll(int(_DEADLINE_S * 1e3)):
            raise TimeoutError(f"worker {number}: the indexer does not subscribe")
        self._socket.recv()

    def send(self, payload: bytes) -> None:
        """Publish a batch."""
        number = struct.pack(">q", self._sent)
        self._socket.send_multipart([b"", number, payload])
        self._sent += 1

    def close(self) -> None:
        """Stop publishing."""
        self._socket.close()


def wait_until(condition: Any, problem: str, seconds: float = _DEADLINE_S) -> None:
    """Return once the condition holds.

    Raises:
        TimeoutError: It does not hold in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(problem)
        time.sleep(_PAUSE_S)
