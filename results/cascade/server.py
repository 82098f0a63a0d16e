"""The daemon of Cascade (engine/cmd/disk-cache), for machines that cannot build its Go module.

It answers the calls of ``adapter/vllm/go_client.py`` as ``engine/pkg/cache/engine.go`` does, in
memory and without an eviction. Each path before the name of a call is a new, empty daemon.
``python server.py [port]`` (9100) serves until it is killed.
"""

import hashlib
import json
import struct
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

sentinels: dict[tuple[str, str], int] = {}
chunks: dict[tuple[str, str, str], dict[int, int]] = {}


def hashes(token_ids: list[int], mm_hashes: list[str], block_size: int) -> list[str]:
    """Return the hash of each prefix of whole blocks (``Match`` and ``RecordAll``)."""
    state, found = hashlib.sha256(), []
    for number in range(len(token_ids) // block_size):
        for token in token_ids[number * block_size : (number + 1) * block_size]:
            state.update(struct.pack(">I", token & 0xFFFFFFFF))
        clone = state.copy()
        for item in mm_hashes:
            clone.update(item.encode())
        found.append(clone.hexdigest()[:32])
    return found


class Handler(BaseHTTPRequestHandler):
    """Answer the calls of the connector."""

    protocol_version = "HTTP/1.1"

    def answer(self, body: Any) -> None:
        """Send a body as JSON."""
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Answer ``chunk_list`` and ``stats``."""
        url = urlsplit(self.path)
        place, _, call = url.path.rpartition("/")
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if call == "chunk_list":
            found = chunks.get((place, query["prefix_key"], query["layer_name"]), {})
            self.answer({"chunks": sorted(found)})
        else:
            self.answer({"sentinel_entries": len(sentinels)})

    def do_POST(self) -> None:
        """Answer the other calls."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        place, _, call = self.path.rpartition("/")
        if call == "chunk_put":
            layer = chunks.setdefault((place, body["prefix_key"], body["layer_name"]), {})
            layer[body["chunk_index"]] = body["num_tokens"]
        elif call == "record_batch":
            size = body["block_size"]
            for number, key in enumerate(hashes(body["token_ids"], body["mm_hashes"] or [], size)):
                sentinels.setdefault((place, key), (number + 1) * size)
        elif call == "match":
            size = body["block_size"]
            keys = hashes(body["token_ids"], body["mm_hashes"] or [], size)
            low, high = 0, len(keys) - 1
            while low <= high:
                middle = (low + high) // 2
                if (place, keys[middle]) in sentinels:
                    low = middle + 1
                else:
                    high = middle - 1
            hit = high >= 0
            self.answer(
                {
                    "matched_tokens": (high + 1) * size if hit else 0,
                    "prompt_hash": keys[high] if hit else "",
                }
            )
            return
        self.answer({})

    def log_message(self, *args: object) -> None:
        """Say nothing."""


ThreadingHTTPServer(
    ("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 9100), Handler
).serve_forever()
