"""A cold node in memory for tierkv 0.1.0: the service ``VllmColdVaultService`` of its Rust package.

No package index has the cold node (``tierkv-core``), so this server replaces it:
``python server.py [PORT]``. As there, each stored block gets a new key, and nothing is removed.
"""

import sys
from concurrent import futures
from importlib import import_module
from typing import Any

grpc: Any = import_module("grpc")
wire: Any = import_module("tierkv.connectors.vault_client")
_blocks: dict[str, bytes] = {}


def store_block(request: bytes, context: Any) -> bytes:
    """Keep a block, and return its key."""
    fields = {number: value for number, _, value in wire._decode_fields(request)}
    key = f"vk-{fields[1].decode()}-{len(_blocks)}"
    block = wire._encode_string(1, fields[1].decode()) + wire._encode_bytes(2, fields[3])
    _blocks[key] = block + wire._encode_bool(3, bool(fields.get(4)))
    return bytes(wire._encode_string(1, key))


def batch_promote(request: bytes, context: Any) -> bytes:
    """Return the blocks of some keys; a missing block is empty."""
    keys = [value.decode() for number, _, value in wire._decode_fields(request) if number == 1]
    return b"".join(wire._encode_bytes(1, _blocks.get(key, b"")) for key in keys)


methods = {
    "StoreBlock": grpc.unary_unary_rpc_method_handler(store_block),
    "BatchPromote": grpc.unary_unary_rpc_method_handler(batch_promote),
}
server = grpc.server(futures.ThreadPoolExecutor(8))
service = grpc.method_handlers_generic_handler("tierkv.VllmColdVaultService", methods)
server.add_generic_rpc_handlers((service,))
server.add_insecure_port(f"127.0.0.1:{sys.argv[1] if sys.argv[1:] else 50051}")
server.start()
server.wait_for_termination()
