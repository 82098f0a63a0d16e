"""StrataCache copies other slots, and plans no load for a request that is resumed.

StrataCache 4bf3a7a knows pages of shape (2, blocks, slots, ...), as in FlashAttention of vLLM 0.13,
and of shape (blocks, slots, ...). In FlashInfer and Triton of vLLM 0.13, and in vLLM 0.33, the
shape is (blocks, 2, slots, ...), which it takes for blocks of 2 slots.

This script needs no GPU, no model and no kvview; ``src`` of a clone of StrataCache must be in
``PYTHONPATH``. ``python stratacache_loads.py`` stores each of two blocks, loads it into empty
pages, and prints how many elements are right, and how many elements of other blocks the load
overwrites. Expected: 32 and 0. It then plans the load of 32 promised tokens. Expected: 32.
"""

import threading
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

module: Any = import_module("stratacache.adapters.vllm.connector_v1")

BLOCKS, SLOTS = 8, 16


def pages(shape: tuple[int, ...]) -> torch.Tensor:
    """Return pages in which each element has another value."""
    return torch.arange(1, 1 + BLOCKS * 2 * SLOTS).reshape(shape)


for name, shape in {
    "(2, blocks, slots)": (2, BLOCKS, SLOTS, 1),
    "(blocks, 2, slots)": (BLOCKS, 2, SLOTS, 1),
}.items():
    for block in (0, 1):
        stored, loaded = pages(shape), torch.zeros(shape, dtype=torch.int64)
        slots = torch.arange(block * SLOTS, (block + 1) * SLOTS)
        axis = shape.index(BLOCKS)
        module._scatter_by_slots(loaded, slots, module._gather_by_slots(stored, slots))
        right = int((stored.select(axis, block) == loaded.select(axis, block)).sum())
        others = int(loaded.count_nonzero() - loaded.select(axis, block).count_nonzero())
        print(f"{name}, block {block}: {right} right, {others} of other blocks")

scheduler: Any = object.__new__(module._StrataConnectorImpl)  # its constructor needs a VllmConfig
new = SimpleNamespace(req_id="request", block_ids=([1, 2, 3],), num_computed_tokens=32)
resumed = SimpleNamespace(
    req_ids=["request"], new_block_ids=[([1, 2, 3],)], num_computed_tokens=[32]
)
plans: dict[str, dict[str, Any]] = {
    "a new request": {"scheduled_new_reqs": [new]},
    "a request that is resumed after a preemption": {"scheduled_cached_reqs": resumed},
}
for name, requests in plans.items():
    scheduler.__dict__ |= {
        "_lock": threading.Lock(),
        "_block_size": SLOTS,
        "_chunk_size": SLOTS,
        "_save_partial_chunks": False,
        "_slot_offs": torch.arange(SLOTS),
        "_slot_blocks_by_req": {},
        "_slot_mapping_by_req": {},
        "_ph_map_by_req": {},
        "_prompt_tokens": {"request": list(range(33))},
        "_num_external_tokens": {"request": 32},
        "_alloc_blocks": {"request": [1, 2, 3]},
    }
    output = SimpleNamespace(**requests, num_scheduled_tokens={"request": 1})
    (planned,) = scheduler.build_connector_meta(output).requests
    print(f"{name}: {planned.tokens_to_load} of 32 tokens are loaded")
