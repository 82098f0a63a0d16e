"""A server in memory that speaks KVB1, the protocol of kvblockd's Python client 0.1.0.

The daemon of kvblockd is a Go program that no package index has, so this server replaces it:
``python server.py [PORT]``. It implements the verbs that the connector and the tier for vLLM use.
"""

import socketserver
import struct
import sys
from importlib import import_module
from typing import Any

protocol: Any = import_module("kvblockd.protocol")
xxhash: Any = import_module("xxhash")
_LONGEST_FRAME = 16 << 20
_blocks: dict[tuple[int, bytes], bytes] = {}
_namespaces: dict[bytes, int] = {}


class Connection(socketserver.StreamRequestHandler):
    """Serves one client, one request at a time."""

    def handle(self) -> None:
        """Answer frames until the client closes the connection."""
        parts: list[bytes] = []
        while head := self.rfile.read(protocol.HEADER_SIZE):
            frame = protocol.Header.parse(head)
            body = self.rfile.read(frame.payload_len)
            name = frame.ns, bytes(frame.key)
            step = protocol.subop(frame.flags)
            if frame.opcode == protocol.Op.HELLO:
                self._reply(frame, self._hello(body))
            elif frame.opcode != protocol.Op.PUT_STREAM:
                self._reply(frame, self._answer(frame, body))
            elif step == protocol.PUT_BEGIN:
                parts = []
                known = name in _blocks
                status = protocol.Status.OK_EXISTS if known else protocol.Status.OK
                self._reply(frame, protocol.pack_preamble(status, 0))
            elif step == protocol.PUT_CHUNK:
                parts.append(body)
            else:
                _blocks.setdefault(name, b"".join(parts))
                self._reply(frame, protocol.pack_preamble(protocol.Status.OK, 0))

    def _reply(self, frame: Any, body: bytes) -> None:
        header = protocol.Header(
            frame.opcode,
            flags=protocol.F_RESP,
            ns=frame.ns,
            request_id=frame.request_id,
            payload_len=len(body),
        )
        self.wfile.write(header.pack() + body)

    def _hello(self, body: bytes) -> bytes:
        fields = protocol._HELLO_REQ.unpack_from(body)
        start = protocol._HELLO_REQ.size + fields[7]
        number = _namespaces.setdefault(body[start : start + fields[8]], len(_namespaces) + 1)
        limits = (4096, _LONGEST_FRAME, 1 << 30, number, 64, 0, 0, 0)
        answer = protocol._HELLO_RESP.pack(
            protocol.VERSION1, protocol.FEAT_EXISTS_BITMAP, *limits, 0, 0
        )
        head: bytes = protocol.pack_preamble(protocol.Status.OK, 0)
        return head + bytes(answer)

    def _answer(self, frame: Any, body: bytes) -> bytes:
        count = struct.unpack_from("<I", body)[0]
        keys = [body[8 + 32 * i : 40 + 32 * i] for i in range(count)]
        found = [_blocks.get((frame.ns, key)) for key in keys]
        states = [protocol.Status.NOT_FOUND if one is None else protocol.Status.OK for one in found]
        preamble: bytes = protocol.pack_preamble(protocol.Status.OK, count)
        if frame.opcode == protocol.Op.BATCH_GET:
            described = b"".join(
                struct.pack("<B3xIQ", state, len(one or b""), xxhash.xxh3_64_intdigest(one or b""))
                for state, one in zip(states, found, strict=True)
            )
            blocks = b"".join(one for one in found if one is not None)
            return preamble + struct.pack("<II", 0, count) + described + blocks
        padded = bytes(states) + bytes(-count % 8)
        if frame.opcode == protocol.Op.BATCH_EXISTS:
            in_a_row = next((i for i, one in enumerate(found) if one is None), count)
            return preamble + struct.pack("<II", in_a_row, 0) + padded
        if frame.opcode == protocol.Op.DELETE:
            for key in keys:
                _blocks.pop((frame.ns, key), None)
        return preamble + padded


class Server(socketserver.ThreadingTCPServer):
    """Serves each connection in a thread."""

    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 9440
    Server(("127.0.0.1", port), Connection).serve_forever()
