"""A connector for vLLM in one file, which keeps the KV of finished requests in host memory.

Try it without a GPU, in an environment in which vLLM's Python files can be imported:

    kvview check examples/raw_host_cache.py:HostCacheConnector --engine vllm \
        --option host_blocks={blocks}

Serve with it:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HostCacheConnector", \
"kv_connector_module_path": "raw_host_cache", "kv_role": "kv_both"}'

Copy this file and change the copy. The file imports vLLM and torch, but not kvview.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

Copies = list[tuple[int, int]]  # (GPU block, host slot) pairs


@dataclass
class HostCacheMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The jobs that the scheduler's half passes to the worker's half in one step."""

    loads: Copies = field(default_factory=list)
    stores: dict[str, Copies] = field(default_factory=dict)  # of the requests that ended


class HostCacheConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both halves.

    A connector whose host memory holds ``host_blocks`` (in ``kv_connector_extra_config``) blocks.

    The connector is made for models with one KV-cache group of full attention.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.host_blocks = int(options.get("host_blocks", 1000))
        # The scheduler's half tracks the host slot of each block, and the jobs in flight.
        self.block_size = int(vllm_config.cache_config.block_size)
        self.slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.free_slots = list(range(self.host_blocks))
        # And the number of the last reset before their start.
        self.stores: dict[str, tuple[int, dict[bytes, int]]] = {}
        # The part of a promised prefix that the GPU does not have.
        self.first_block: dict[str, int] = {}
        self.planned = HostCacheMetadata()
        self.num_resets = 0

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because no other engine waits for the stores of this cache."""
        return False  # by default vLLM 0.27 to 0.29 may preempt requests forever (#49674)

    # The scheduler's half. Loading: promise a prefix, get blocks for it, plan the copy.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        first = last = num_computed_tokens // self.block_size
        # The last token is always computed, because the engine needs its logits.
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        while last < len(hashes) and hashes[last] in self.slots:
            last += 1
        self.first_block[request.request_id] = first
        return (last - first) * self.block_size, False  # loaded within the step

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self.first_block.pop(request.request_id, 0)
        table = blocks.get_block_ids()[0]
        for number in range(first, first + num_external_tokens // self.block_size):
            key = request.block_hashes[number]
            self.slots.move_to_end(key)
            self.planned.loads.append((table[number], self.slots[key]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        planned, self.planned = self.planned, HostCacheMetadata()
        return planned

    # Storing: vLLM keeps the blocks of a request that ended until its store is reported.

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.first_block.pop(request.request_id, None)
        in_flight = {key for _, slots in self.stores.values() for key in slots}
        # The KV of the last sampled token is not computed.
        num_full = min(request.num_computed_tokens, request.num_tokens - 1) // self.block_size
        slots: dict[bytes, int] = {}
        copies: Copies = []
        for key, block in zip(request.block_hashes[:num_full], block_ids, strict=False):
            if not block or key in self.slots or key in in_flight:  # block 0 stands for none
                continue
            if self.free_slots:
                slots[key] = self.free_slots.pop()
            elif self.slots:
                # A slot that a load of this step still reads may be reused, because loads run
                # first.
                slots[key] = self.slots.popitem(last=False)[1]
            else:
                break
            copies.append((block, slots[key]))
        if not copies:
            return False, None
        self.planned.stores[request.request_id] = copies
        self.stores[request.request_id] = self.num_resets, slots
        return True, None

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_sending or ():
            begun, slots = self.stores.pop(request_id, (self.num_resets, {}))
            if begun == self.num_resets:
                self.slots.update(slots)
            else:
                self.free_slots += slots.values()

    def reset_cache(self) -> bool | None:
        self.free_slots += self.slots.values()
        self.slots.clear()
        self.num_resets += 1
        return True

    # The worker's half: copies pages.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # Up to vLLM 0.22 keys and values come before the blocks.
        self.gpu = [
            layer.transpose(0, 1) if layer.shape[0] == 2 else layer for layer in kv_caches.values()
        ]
        self.host = [
            torch.empty((self.host_blocks, *pages.shape[1:]), dtype=pages.dtype)
            for pages in self.gpu
        ]

    def plan(self) -> HostCacheMetadata:
        plan = self._get_connector_metadata()
        assert isinstance(plan, HostCacheMetadata)
        return plan

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for block, slot in self.plan().loads:
            for gpu, host in zip(self.gpu, self.host, strict=True):
                gpu[block].copy_(host[slot])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because all loads have ended before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because requests are stored when they end."""

    def wait_for_save(self) -> None:
        """Do nothing, because no store was started in this step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        stores = self.plan().stores
        for copies in stores.values():
            for block, slot in copies:
                for gpu, host in zip(self.gpu, self.host, strict=True):
                    host[slot].copy_(gpu[block])
        return set(stores) or None, None
