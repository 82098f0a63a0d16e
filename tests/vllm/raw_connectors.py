"""Right raw connectors of vLLM, without kvview; ``raw_connectors.txt`` has faulty ones."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.mutants.edits import Base, Variant, read_variants

_base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
TAKES_CONFIG = hasattr(_base, "SupportsHMA")  # from 0.11.1
SupportsHMA: Any = getattr(_base, "SupportsHMA", object)
BlockStored: Any = importlib.import_module("vllm.distributed.kv_events").BlockStored

Copies = list[tuple[bytes, int]]  # (key of a block, its place on the GPU) pairs
Match = tuple[int | None, bool]
Kept = tuple[bool, dict[str, Any] | None]
Ended = tuple[set[str] | None, set[str] | None]


@dataclass
class Meta(_base.KVConnectorMetadata):  # type: ignore[misc]
    stores: dict[str, Copies] = field(default_factory=dict)
    loads: dict[str, Copies] = field(default_factory=dict)


def window_of(spec: Any) -> int | None:
    """Return the tokens that the next token reads; None for all of them."""
    if hasattr(spec, "mamba_type"):
        return 2  # the next token and the state before it
    return getattr(spec, "sliding_window", None)


class HostConnector(_base.KVConnectorBase_V1):  # type: ignore[misc]
    """Stores the blocks of finished requests, and loads prefixes between steps or within one.

    Options: ``within_step`` (the step waits for its loads), ``delay`` (most steps of a copy).
    """

    takes_groups: ClassVar = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, *([kv_cache_config] if TAKES_CONFIG else []))
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.within_step = bool(extra.get("within_step", False))
        self.delay = int(extra.get("delay", 3))
        self.block_size = int(vllm_config.cache_config.block_size)
        # For a connector of one group, vLLM makes windows full attention, and keeps their size.
        groups = kv_cache_config.kv_cache_groups if self.takes_groups else []
        self.windows = [window_of(group.kv_cache_spec) for group in groups] or [None]
        self.layer_names = [group.layer_names for group in groups]
        # scheduler
        self.stored: set[bytes] = set()
        self.storing: dict[str, tuple[int, Copies]] = {}  # with the reset that they started after
        self.first_block: dict[str, int] = {}
        self.loading: set[str] = set()
        self.meta = Meta()
        self.num_resets = 0
        # worker
        self.host: dict[bytes, list[torch.Tensor]] = {}
        self.queue: list[tuple[int, str, bool, Copies]] = []
        self.step = 0
        self.num_jobs = 0

    # --- scheduler ---

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # it is a cache: by default 0.27 to 0.29 may preempt forever (vLLM #49674)

    def key(self, group: int, block_hash: bytes) -> bytes:
        return bytes([group]) + block_hash

    def first_needed(self, group: int, last: int) -> int:
        window = self.windows[group]
        return max(0, last * self.block_size - window + 1) // self.block_size if window else 0

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> Match:
        first = num_computed // self.block_size
        last = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        while last > first and not self.has_all(request, first, last):
            last -= 1
        self.first_block[request.request_id] = first
        num_tokens = max(0, last - first) * self.block_size
        return num_tokens, not self.within_step and num_tokens > 0

    def has_all(self, request: Any, first: int, last: int) -> bool:
        return all(
            self.has(request, group, number)
            for group in range(len(self.windows))
            for number in range(max(first, self.first_needed(group, last)), last)
        )

    def has(self, request: Any, group: int, number: int) -> bool:
        return self.key(group, request.block_hashes[number]) in self.stored

    def update_state_after_alloc(self, request: Any, blocks: Any, num_tokens: int) -> None:
        if not num_tokens:
            return
        first = self.first_block[request.request_id]
        last = first + num_tokens // self.block_size
        self.meta.loads[request.request_id] = [
            (self.key(group, request.block_hashes[number]), table[number])
            for group, table in enumerate(self.tables_of(blocks))
            for number in range(max(first, self.first_needed(group, last)), last)
        ]
        if not self.within_step:
            self.loading.add(request.request_id)

    def tables_of(self, blocks: Any) -> Sequence[Sequence[int]]:
        tables: Sequence[Sequence[int]] = blocks.get_block_ids()
        return tables

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta, self.meta = self.meta, Meta()
        return meta

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> Kept:
        return self.keep(request, (block_ids,))

    def keep(self, request: Any, tables: Sequence[Sequence[int]]) -> Kept:
        copies = self.copies_of(request, tables)
        if not copies or request.request_id in self.loading:
            return False, None
        self.meta.stores[request.request_id] = copies
        self.storing[request.request_id] = self.num_resets, copies
        return True, None

    def copies_of(self, request: Any, tables: Sequence[Sequence[int]]) -> Copies:
        return [
            (key, table[number])
            for group, table in enumerate(tables)
            for number in range(min(self.num_full_blocks(request), len(table)))
            if (key := self.key(group, request.block_hashes[number])) not in self.stored
            and table[number]
        ]

    def num_full_blocks(self, request: Any) -> int:
        num_computed = min(request.num_computed_tokens, request.num_tokens - 1)
        return int(num_computed) // self.block_size

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_sending or ():
            began, copies = self.storing.pop(request_id, (-1, []))
            self.stored.update(key for key, _ in copies if began == self.num_resets)
        self.loading.difference_update(connector_output.finished_recving or ())

    def reset_cache(self) -> bool:
        self.stored.clear()
        self.num_resets += 1
        return True

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers = list(kv_caches.values())
        self.layers_by_group = [[kv_caches[n] for n in names] for names in self.layer_names]

    def blocks(self, layer: torch.Tensor) -> torch.Tensor:
        """Return the layer with the blocks first: up to 0.22 keys and values come before them."""
        return layer.transpose(0, 1) if layer.shape[0] == 2 else layer

    def layers_of(self, key: bytes) -> list[torch.Tensor]:
        return self.layers_by_group[key[0]] if len(self.layers_by_group) > 1 else self.layers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, copies in self._get_connector_metadata().loads.items():
            if self.within_step:
                self.load(copies)
            else:
                self.put(request_id, True, copies)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def put(self, request_id: str, is_load: bool, copies: Copies) -> None:
        self.num_jobs += 1
        due = self.step + self.num_jobs % (self.delay + 1)
        self.queue.append((due, request_id, is_load, copies))

    def load(self, copies: Copies) -> None:
        for key, block_id in copies:
            for layer, page in zip(self.layers_of(key), self.host[key], strict=True):
                self.blocks(layer)[block_id] = page

    def store(self, copies: Copies) -> None:
        for key, block_id in copies:
            self.host[key] = [self.blocks(layer)[block_id].clone() for layer in self.layers_of(key)]

    def get_finished(self, finished_req_ids: set[str]) -> Ended:
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


class GroupsConnector(HostConnector, SupportsHMA):  # type: ignore[misc]
    """The same for several KV-cache groups, of full attention and of windows."""

    takes_groups = True

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Kept:
        return self.keep(request, block_ids)


class EventsConnector(HostConnector):
    """Reports its stores, and their removal at a reset."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.described: dict[bytes, dict[str, Any]] = {}
        self.advertised: set[bytes] = set()
        self.events: list[Any] = []

    def make(self, kind: str, **fields: Any) -> Any:
        events = importlib.import_module("vllm.distributed.kv_events")
        return getattr(events, kind)(medium="CPU", **fields)

    def keep(self, request: Any, tables: Sequence[Sequence[int]]) -> Kept:
        convert = importlib.import_module("vllm.v1.core.kv_cache_utils").maybe_convert_block_hash
        parent = None
        for number, block_hash in enumerate(request.block_hashes):
            tokens = request.all_token_ids[number * 16 : (number + 1) * 16]
            described: dict[str, Any]
            described = {"block_hashes": [convert(block_hash)], "parent_block_hash": parent}
            described |= {"token_ids": [*tokens], "block_size": 16, "lora_id": None}
            self.described[self.key(0, block_hash)] = described
            parent = convert(block_hash)
        return super().keep(request, tables)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        lora = {"lora_name": None} if BlockStored.__struct_fields__.count("lora_name") else {}
        for key in sorted(self.stored - self.advertised):
            self.events.append(self.make("BlockStored", **self.described[key], **lora))
        self.advertised |= self.stored

    def reset_cache(self) -> bool:
        for key in sorted(self.advertised):
            hashes = self.described[key]["block_hashes"]
            self.events.append(self.make("BlockRemoved", block_hashes=hashes))
        self.advertised.clear()
        return super().reset_cache()

    def take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events


class DoesNothing(HostConnector):
    """Runs degraded: it never finds a block."""

    def has(self, request: Any, group: int, number: int) -> bool:
        return False


class ReadsItsRanks(HostConnector):
    """Computes the size of its caches from the model and the ranks, as LMCache does."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        config = self._vllm_config
        model, parallel = config.model_config, config.parallel_config
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        self.broadcast = state.get_tp_group().broadcast  # LMCache passes it on, too
        rank = state.get_tensor_model_parallel_rank(), state.get_pp_group().rank_in_group
        size = parallel.tensor_parallel_size
        assert rank == (parallel.rank % size, parallel.rank // size)
        assert state.get_tensor_model_parallel_world_size() == parallel.tensor_parallel_size
        assert len(kv_caches) == model.get_num_layers(parallel)
        per_block = 2 * 16 * model.get_num_kv_heads(parallel) * model.get_head_size()
        num_blocks = config.cache_config.num_gpu_blocks
        assert {cache.numel() for cache in kv_caches.values()} == {num_blocks * per_block}


class RefusesRanks(HostConnector):
    """Refuses several ranks, as a connector whose keys contain no rank must."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError("one rank only")


class AgreesOnSizes(HostConnector):
    """Its ranks agree on the size of a page with a collective operation of torch."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        if (group := state.get_world_group()).world_size > 1:
            torch.distributed.all_reduce(torch.tensor(1), group=group.cpu_group)


class RecordsEvents(HostConnector):
    """Records an event of CUDA in each step, and waits for it, as if it copied on a GPU."""

    def get_finished(self, finished_req_ids: set[str]) -> Ended:
        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()
        with cuda.stream(cuda.Stream()):
            cuda.current_stream().wait_event(event)
        event.synchronize()
        return super().get_finished(finished_req_ids)


class OneRankReports(HostConnector):
    """Reports the end of a copy on the first rank only; all ranks copy in the same step."""

    def get_finished_count(self) -> int:
        return 1

    def get_finished(self, finished_req_ids: set[str]) -> Ended:
        ended = super().get_finished(finished_req_ids)
        return (None, None) if self._vllm_config.parallel_config.rank else ended


class FailsOnTheLastRank(HostConnector):
    """Fails every second load, on the last rank alone."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.rank = vllm_config.parallel_config.rank
        self.is_last = self.rank == vllm_config.parallel_config.world_size - 1
        self.num_loads = 0
        self.failed: set[int] = set()

    def load(self, copies: Copies) -> None:
        self.num_loads += 1
        if self.is_last and self.num_loads % 2 == 0:
            self.failed.update(block_id for _, block_id in copies)
            return
        super().load(copies)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed


class SavesInItsStep(HostConnector):
    """Saves the blocks of prompts in the step that fills them, and loads within a step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.within_step = True
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[int]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> Match:
        self.requests[request.request_id] = request
        return super().get_num_new_matched_tokens(request, num_computed)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        starts = {}
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id] = [*new.block_ids[0]]
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            if hasattr(cached, "resumed_req_ids"):
                is_resumed = name in cached.resumed_req_ids
            else:
                is_resumed = cached.resumed_from_preemption[place]
            table = [] if is_resumed else self.tables[name]
            self.tables[name] = [*table, *(cached.new_block_ids[place] or [()])[0]]
            starts[name] = cached.num_computed_tokens[place]
        meta = super().build_connector_meta(scheduler_output)
        for name, start in starts.items():
            end = start + scheduler_output.num_scheduled_tokens[name]
            meta.stores[name] = self.filled(name, start, end)
            self.stored.update(key for key, _ in meta.stores[name])
        return meta

    def filled(self, name: str, start: int, end: int) -> Copies:
        request, table = self.requests[name], self.tables[name]
        end = min(end, request.num_prompt_tokens)
        return [
            (self.key(0, request.block_hashes[number]), table[number])
            for number in range(start // self.block_size, end // self.block_size)
        ]

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> Kept:
        return False, None

    def wait_for_save(self) -> None:
        self.save()

    def save(self) -> None:
        for copies in self._get_connector_metadata().stores.values():
            self.store(copies)

    def get_finished(self, finished_req_ids: set[str]) -> Ended:
        return None, None


class WritesBehind(HostConnector):
    """Finds a store two steps after its report, as if it wrote the pages to a disk then."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.writing: list[set[bytes]] = [set(), set()]

    def update_connector_output(self, connector_output: Any) -> None:
        written, self.stored = self.stored, set()
        super().update_connector_output(connector_output)
        self.writing[-1] |= self.stored
        self.stored = written

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.stored |= self.writing.pop(0)
        self.writing.append(set())
        return super().build_connector_meta(scheduler_output)

    def reset_cache(self) -> bool:
        self.writing = [set(), set()]
        return super().reset_cache()


_FILE = Path(__file__)


def faults(family: str) -> list[Variant]:
    """Return the connectors with faults of one kind."""
    base = Base("EventsConnector" if family == "faults of events" else "HostConnector", (_FILE,))
    variants = read_variants(_FILE.with_suffix(".txt"), base)
    return [variant for variant in variants if variant.family == family]


def load_fault(name: str) -> type:
    """Return the class of one connector with a fault."""
    (found,) = (one for one in faults("faults") if one.name == name)
    connector: type = found.load()
    return connector
