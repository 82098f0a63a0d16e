"""A raw connector of vLLM, right, and the same with faults; none has heard of kvview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:

    class KVConnectorMetadata: ...

    class KVConnectorBase_V1:
        def __init__(self, *args: Any) -> None: ...
        def _get_connector_metadata(self) -> Any: ...

    class SupportsHMA: ...

    TAKES_CONFIG = True
else:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
    )

    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

        TAKES_CONFIG = True
    except ImportError:  # up to 0.11.0
        TAKES_CONFIG = False

        class SupportsHMA: ...


_Copies = list[tuple[bytes, int]]  # key of a block, and where it is


@dataclass
class Meta(KVConnectorMetadata):
    stores: dict[str, _Copies] = field(default_factory=dict)
    loads: dict[str, _Copies] = field(default_factory=dict)


class HostConnector(KVConnectorBase_V1):
    """Stores what a request leaves behind, and loads prefixes between steps, or within one.

    Options: ``within_step`` (loads are waited for), ``delay`` (most steps that a copy takes).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, *([kv_cache_config] if TAKES_CONFIG else []))
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.within_step = bool(extra.get("within_step", False))
        self.delay = int(extra.get("delay", 3))
        self.block_size = int(vllm_config.cache_config.block_size)
        # scheduler
        self.stored: set[bytes] = set()
        self.storing: dict[str, _Copies] = {}
        self.first_block: dict[str, int] = {}
        self.loading: set[str] = set()
        self.meta = Meta()
        self.generation = 0
        self.begun: dict[str, int] = {}  # generation of a store
        # worker
        self.host: dict[bytes, list[torch.Tensor]] = {}
        self.queue: list[tuple[int, str, bool, _Copies]] = []
        self.step = 0
        self.num_jobs = 0

    # --- scheduler ---

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # it is a cache: by default, 0.27 to 0.29 may preempt for ever (vLLM #49674)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        first = num_computed_tokens // self.block_size
        last = first
        while last < (request.num_tokens - 1) // self.block_size and self.has(request, last):
            last += 1
        self.first_block[request.request_id] = first
        return (last - first) * self.block_size, not self.within_step and last > first

    def has(self, request: Any, number: int) -> bool:
        hashes = request.block_hashes
        return number < len(hashes) and hashes[number] in self.stored

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        first = self.first_block[request.request_id]
        numbers = range(first, first + num_external_tokens // self.block_size)
        table = self.table_of(blocks)
        self.meta.loads[request.request_id] = [(request.block_hashes[n], table[n]) for n in numbers]
        if not self.within_step:
            self.loading.add(request.request_id)

    def table_of(self, blocks: Any) -> Sequence[int]:
        table: Sequence[int] = blocks.get_block_ids()[0]
        return table

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta, self.meta = self.meta, Meta()
        return meta

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id in self.loading:
            return False, None
        num_full = self.num_full_blocks(request)
        copies = [
            (request.block_hashes[n], block_ids[n])
            for n in range(min(num_full, len(block_ids)))
            if request.block_hashes[n] not in self.stored and block_ids[n]
        ]
        return self.keep(request.request_id, copies)

    def keep(self, request_id: str, copies: _Copies) -> tuple[bool, dict[str, Any] | None]:
        if not copies:
            return False, None
        self.meta.stores[request_id] = copies
        self.storing[request_id] = copies
        self.begun[request_id] = self.generation
        return True, None

    def num_full_blocks(self, request: Any) -> int:
        num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
        return int(num_computed) // self.block_size

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_sending or ():
            copies = self.storing.pop(request_id, [])
            if self.begun.pop(request_id, self.generation) == self.generation:
                self.stored.update(key for key, _ in copies)
        self.loading.difference_update(connector_output.finished_recving or ())

    def reset_cache(self) -> bool:
        self.stored.clear()
        self.generation += 1
        return True

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers = list(kv_caches.values())

    def blocks(self, layer: torch.Tensor) -> torch.Tensor:
        """Blocks first: up to 0.22 keys and values come before them."""
        return layer.transpose(0, 1) if layer.shape[0] == 2 else layer

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        for request_id, copies in meta.loads.items():
            if self.within_step:
                self.load(copies)
            else:
                self.put(request_id, True, copies)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def put(self, request_id: str, is_load: bool, copies: _Copies) -> None:
        self.num_jobs += 1
        self.queue.append(
            (self.step + self.num_jobs % (self.delay + 1), request_id, is_load, copies)
        )

    def layers_of(self, key: bytes) -> list[torch.Tensor]:
        return self.layers

    def load(self, copies: _Copies) -> None:
        for key, block_id in copies:
            for layer, page in zip(self.layers_of(key), self.host[key], strict=True):
                self.blocks(layer)[block_id] = page

    def store(self, copies: _Copies) -> None:
        for key, block_id in copies:
            self.host[key] = [self.blocks(layer)[block_id].clone() for layer in self.layers_of(key)]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for request_id, copies in self._get_connector_metadata().stores.items():
            self.put(request_id, False, copies)
        self.step += 1
        sent: set[str] = set()
        received: set[str] = set()
        for job in [job for job in self.queue if job[0] < self.step]:
            self.queue.remove(job)
            _, request_id, is_load, copies = job
            (self.load if is_load else self.store)(copies)
            (received if is_load else sent).add(request_id)
        return sent or None, received or None


class GroupsConnector(HostConnector, SupportsHMA):
    """The same for several KV-cache groups, of full attention and of windows."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self.windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
        self.layer_names = [group.layer_names for group in groups]

    def key(self, group: int, block_hash: bytes) -> bytes:
        return bytes([group]) + block_hash

    def first_needed(self, group: int, last: int) -> int:
        window = self.windows[group]
        return max(0, last * self.block_size - window + 1) // self.block_size if window else 0

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        first = num_computed_tokens // self.block_size
        last = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        while last > first and not self.has_all(request, first, last):
            last -= 1
        self.first_block[request.request_id] = first
        num_tokens = max(0, last - first) * self.block_size
        return num_tokens, not self.within_step and num_tokens > 0

    def has_all(self, request: Any, first: int, last: int) -> bool:
        return all(
            self.key(group, request.block_hashes[number]) in self.stored
            for group in range(len(self.windows))
            for number in range(max(first, self.first_needed(group, last)), last)
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        first = self.first_block[request.request_id]
        last = first + num_external_tokens // self.block_size
        self.meta.loads[request.request_id] = [
            (self.key(group, request.block_hashes[number]), table[number])
            for group, table in enumerate(blocks.get_block_ids())
            for number in range(max(first, self.first_needed(group, last)), last)
        ]
        if not self.within_step:
            self.loading.add(request.request_id)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id in self.loading:
            return False, None
        copies = [
            (key, table[number])
            for group, table in enumerate(block_ids)
            for number in range(min(self.num_full_blocks(request), len(table)))
            if (key := self.key(group, request.block_hashes[number])) not in self.stored
            and table[number]
        ]
        return self.keep(request.request_id, copies)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers_by_group = [[kv_caches[name] for name in names] for names in self.layer_names]

    def layers_of(self, key: bytes) -> list[torch.Tensor]:
        return self.layers_by_group[key[0]]


# --- faults ---


class LoadsTheNextBlock(HostConnector):
    """Takes the blocks to load into from the beginning of the table, hit or not."""

    def table_of(self, blocks: Any) -> Sequence[int]:
        table = super().table_of(blocks)
        return [*table[1:], table[0]]


class CountsTheLastToken(HostConnector):
    """Stores blocks whose last token is not computed."""

    def num_full_blocks(self, request: Any) -> int:
        return int(request.num_tokens + self.block_size - 1) // self.block_size

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        hashes = request.block_hashes
        if len(hashes) < self.num_full_blocks(request) and hashes:
            request = _With(request, [*hashes, hashes[-1]])
        return super().request_finished(request, block_ids)


class _With:
    def __init__(self, request: Any, block_hashes: list[bytes]) -> None:
        self._request = request
        self.block_hashes = block_hashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class SharesByTokensOfTheBlock(HostConnector):
    """Finds any stored block of the prefix's length: keys that say too little."""

    def has(self, request: Any, number: int) -> bool:
        return number < len(request.block_hashes) and bool(self.stored)

    def load(self, copies: _Copies) -> None:
        other = list(self.host)
        super().load([(key if key in self.host else other[0], block) for key, block in copies])


class StoresOneLayer(HostConnector):
    """Leaves the last layer as it is when it loads."""

    def load(self, copies: _Copies) -> None:
        for key, block_id in copies:
            self.blocks(self.layers[0])[block_id] = self.host[key][0]


class FreesBeforeItStores(HostConnector):
    """Says that the blocks are free while they are yet to be stored."""

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if super().request_finished(request, block_ids)[0]:
            copies = self.storing.pop(request.request_id)
            self.stored.update(key for key, _ in copies)
        return False, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, super().get_finished(finished_req_ids)[1]

    def load(self, copies: _Copies) -> None:
        super().load([copy for copy in copies if copy[0] in self.host])


class ForgetsAStore(HostConnector):
    """Every third store is never reported: the blocks are never freed."""

    def put(self, request_id: str, is_load: bool, copies: _Copies) -> None:
        super().put(request_id, is_load, copies)
        if not is_load and self.num_jobs % 3 == 0:
            self.queue.pop()


class ForgetsALoad(HostConnector):
    """Every third load is never reported."""

    def put(self, request_id: str, is_load: bool, copies: _Copies) -> None:
        super().put(request_id, is_load, copies)
        if is_load and self.num_jobs % 3 == 0:
            self.queue.pop()


class ReportsLoadsAtOnce(HostConnector):
    """Says that a load has ended when it has begun."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        waiting = {job[1] for job in self.queue if job[2]}
        sent, received = super().get_finished(finished_req_ids)
        told = set(self._get_connector_metadata().loads)
        return sent, (told | ((received or set()) - waiting)) or None


class NeverAnswers(HostConnector):
    """Waits for ever with a request that might hit."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (None, False) if found[0] else found


class Raises(HostConnector):
    """Looks up what it has forgotten."""

    def reset_cache(self) -> bool:
        self.first_block.clear()
        self.host.clear()
        self.loading.clear()
        return super().reset_cache()

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            del self.first_block[request_id]
            del self.first_block[request_id]


class PromisesAllTokens(HostConnector):
    """Promises the last token too, or more than there are blocks for."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (found + self.block_size if found else found), is_async


class LoadsWithoutTheHit(HostConnector):
    """Counts from the first token, whatever the GPU has."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.first_block[request.request_id] = 0
        return found


class LeaksBlocks(HostConnector):
    """Touches a block of the pool, and frees it never."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.pool.touch([self.pool.blocks[self.table_of(blocks)[0]]])


class FreesBlocksOfOthers(LeaksBlocks):
    """Frees a block of the pool that it never touched."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        HostConnector.update_state_after_alloc(self, request, blocks, num_external_tokens)
        if num_external_tokens:
            self.pool.free_blocks([self.pool.blocks[self.table_of(blocks)[0]]])


class HashesWhatIsScheduled(HostConnector):
    """Asks for the hash of each block that a step fills; a step ahead, its end is not known yet."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.requests: dict[str, Any] = {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.requests[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for name, number in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            num_full = (request.num_computed_tokens + number) // self.block_size
            assert len(request.block_hashes) >= num_full, "a block has no hash"
        return super().build_connector_meta(scheduler_output)


class HandsLoadsOverInAClass(HostConnector):
    """Its roles share a dictionary of the class: they are one process, or nothing is loaded."""

    handed: ClassVar[dict[str, _Copies]] = {}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        HandsLoadsOverInAClass.handed = meta.loads
        meta.loads = {}
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._get_connector_metadata().loads = HandsLoadsOverInAClass.handed
        HandsLoadsOverInAClass.handed = {}
        super().start_load_kv(forward_context, **kwargs)


class WantsDelivery(HostConnector):
    """Leaves a property as it is by default: preempted requests lose what is in flight."""

    @property
    def requires_kv_delivery(self) -> bool:
        return True


class DoesNotPickle(HostConnector):
    """What it tells its worker cannot leave the process."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.done = lambda: None
        return meta


class GroupsShareKeys(GroupsConnector):
    """Stores blocks of all groups under one name."""

    def key(self, group: int, block_hash: bytes) -> bytes:
        return b"\0" + block_hash


class ForgetsTheWindow(GroupsConnector):
    """Promises what full attention has, whether the window has it or not."""

    def has_all(self, request: Any, first: int, last: int) -> bool:
        return all(
            self.key(0, request.block_hashes[number]) in self.stored
            for number in range(first, last)
        )

    def load(self, copies: _Copies) -> None:
        super().load([copy for copy in copies if copy[0] in self.host])


class TakesTheFirstTable(GroupsConnector):
    """Loads every group into the blocks of the first."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            table = self.table_of(blocks)
            first = self.first_block[request.request_id]
            loads = self.meta.loads[request.request_id]
            self.meta.loads[request.request_id] = [
                (key, table[min(first + n, len(table) - 1)]) for n, (key, _) in enumerate(loads)
            ]


class DoesNothing(HostConnector):
    """Runs degraded: it never finds anything."""

    def has(self, request: Any, number: int) -> bool:
        return False


FAULTS = [
    LoadsTheNextBlock,
    CountsTheLastToken,
    SharesByTokensOfTheBlock,
    StoresOneLayer,
    FreesBeforeItStores,
    ForgetsAStore,
    ForgetsALoad,
    ReportsLoadsAtOnce,
    NeverAnswers,
    Raises,
    PromisesAllTokens,
    LoadsWithoutTheHit,
]
FAULTS_WITH_A_POOL = [LeaksBlocks, FreesBlocksOfOthers]
FAULTS_OF_STEPS_AND_PROCESSES = [HashesWhatIsScheduled, HandsLoadsOverInAClass, DoesNotPickle]
FAULTS_OF_GROUPS = [GroupsShareKeys, ForgetsTheWindow, TakesTheFirstTable]
