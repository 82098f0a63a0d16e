"""Infera stores chunks that are not computed yet, and does not load resumed requests.

Infera 5890f7f. The connector stores each chunk whose blocks are allocated. If a step computes a
part of the last block, the chunk is stored without the other part, and never again. If Model Runner
V1 resumes a request after a preemption, the connector promises its chunks, but plans no load.

This script needs no GPU, no model, no server and no kvview; a clone of Infera must be in
``PYTHONPATH``. ``python infera_unfinished_chunk.py`` plans a step that computes 24 of 64 tokens,
and a step that resumes a request with two stored chunks. Expected: 1 stored chunk, and 2 loaded
chunks.
"""

from collections import OrderedDict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

module: Any = import_module("infera.engine.vllm.kvd_connector")

BLOCK = 16
HASHES = [n.to_bytes(32, "big") for n in range(4)]


def make_connector() -> Any:
    """Return a connector whose chunks have one block each."""
    connector: Any = object.__new__(module.InferaKvdConnector)  # the constructor needs a server
    connector.__dict__ |= {
        "_async_load": False,
        "_block_size_now": lambda _: BLOCK,
        "_chunk_tokens": BLOCK,
        "_group_kv_spec": {0: {"block_size": BLOCK, "layer_names": ["layer"]}},
        "_max_saved_content_keys": 1000,
        "_pending_block_hashes": {"a": HASHES},
        "_pending_external_blocks": {"a": 0},
        "_req_save_state": {},
        "_saved_content_keys": OrderedDict(),
        "_saved_content_ttl_s": -1,
        "_stat_inc": lambda *_: None,
        "_extract_retention": lambda _: "long",
    }
    return connector


def plan(connector: Any, new: list[Any], cached: Any) -> Any:
    """Return the metadata of a step."""
    output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
    return connector.build_connector_meta(output)


none = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
connector = make_connector()
first = SimpleNamespace(req_id="a", block_ids=([1, 2],), num_computed_tokens=0)
stored = len(plan(connector, [first], none).packed_chunks_to_save)
print(f"a step computes 24 tokens in two blocks of 16: {stored} chunks are stored")

connector._pending_block_hashes["a"] = HASHES  # as get_num_new_matched_tokens leaves them
connector._pending_external_blocks["a"] = 2
resumed = SimpleNamespace(req_ids=["a"], new_block_ids=[([3, 4, 5, 6],)], resumed_req_ids={"a"})
loaded = len(plan(connector, [], resumed).packed_chunks_to_load)
print(f"a request is resumed, and two chunks are promised: {loaded} chunks are loaded")
