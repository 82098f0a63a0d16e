"""OpenLake transfers other bytes than a block where layers share one allocation.

openlake-vllm 0.8.1 with vLLM 0.33.0, whose layers are views of one allocation. This script needs no
GPU, no model, no server and no kvview. ``python openlake_layout.py`` registers two layers of 4
blocks, and prints how many bytes of block 1 its addresses cover. Expected: 512 of 512 each time.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

adapter: Any = import_module("openlake_client.openlake_adapter")

NUM_BLOCKS, PAGE = 4, 256  # bytes of one layer in one block


def addresses(caches: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Return the addresses and sizes of block 1, as the worker passes them to its client."""
    worker: Any = object.__new__(adapter.OpenLakeWorker)  # its constructor needs a server
    worker.__dict__ |= {
        "_client": SimpleNamespace(register_memory=lambda *_: None, attach=lambda *_: None),
        "_num_blocks": NUM_BLOCKS,
        "_nodes": [],
        "layout": adapter.GroupLayout(),
        "_sync_max_slot_bytes": lambda size: size,
        "kv_role": "none",
        "num_recv_threads": 0,
    }
    worker.register_kv_caches(caches)
    found: list[tuple[int, int]] = worker.layout.addrs_for(1)
    return found


def covered(caches: dict[str, torch.Tensor]) -> int:
    """Return the number of bytes of block 1 that the addresses cover."""
    mine = {
        one
        for cache in caches.values()
        for one in range(cache[1].data_ptr(), cache[1].data_ptr() + PAGE)
    }
    return len(mine & {address + i for address, size in addresses(caches) for i in range(size)})


def allocate() -> torch.Tensor:
    """Return the memory of two layers."""
    return torch.zeros(2 * NUM_BLOCKS * PAGE, dtype=torch.uint8)


apart = {f"layer.{i}": allocate()[: NUM_BLOCKS * PAGE].clone() for i in range(2)}
apart = {name: cache.view(NUM_BLOCKS, PAGE) for name, cache in apart.items()}
layers = allocate().view(2, NUM_BLOCKS, PAGE)  # the blocks of a layer are adjacent: LB...
blocks = allocate().view(NUM_BLOCKS, 2, PAGE)  # the layers of a block are adjacent: BL...
for name, caches in {
    "an allocation for each layer": apart,
    "one allocation, layers first": {f"layer.{i}": layers[i] for i in range(2)},
    "one allocation, blocks first": {f"layer.{i}": blocks[:, i] for i in range(2)},
}.items():
    print(f"{name}: {covered(caches)} of {2 * PAGE} bytes")
