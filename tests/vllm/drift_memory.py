"""Drifts of geometry, of the pool and of offloading."""

# The texts of vLLM are found as they stand, however long.
# ruff: noqa: E501

from __future__ import annotations

from drift_edits import (  # type: ignore[import-not-found]
    CPU,
    OFFLOAD,
    OFFLOAD_SCHEDULER,
    POOL,
    SCHEDULER,
    UTILS,
    drift,
    field,
    method,
    rename,
    swap,
)

# --- geometry ---

drift(
    "KVCacheConfig.kv_cache_groups renamed",
    "0.29: shared_by -> layers",
    rename("kv_cache_groups", "cache_groups"),
    harness={"kv_cache_groups": "cache_groups"},
)
drift(
    "KVCacheGroupSpec.layer_names renamed",
    "0.29: shared_by -> layers",
    rename("layer_names", "layers_of_group"),
)
drift(
    "KVCacheConfig.num_blocks renamed",
    "0.33: hisparse_host_num_blocks beside it",
    rename("kv_cache_config\\.num_blocks", "kv_cache_config.num_device_blocks"),
    swap(
        "vllm/v1/kv_cache_interface.py",
        '    num_blocks: int\n    """The number of KV cache blocks"""\n',
        '    num_device_blocks: int\n    """The number of KV cache blocks"""\n',
        "            return self.num_blocks\n",
        "            return self.num_device_blocks\n",
    ),
    harness={r"num_blocks=num_blocks,(\s+kv_cache_tensors)": r"num_device_blocks=num_blocks,\1"},
)
drift(
    "block_size of cache specs renamed",
    "0.26: tokens_per_block in offloading",
    rename("block_size", "tokens_per_block"),
    harness={
        r"\*\*vars\(group\)": "**vars(group), 'tokens_per_block': group.block_size",
        "block_size=16": "tokens_per_block=16",
        r"cache_config\.block_size": "cache_config.tokens_per_block",
        '"block_size"': '"tokens_per_block"',
    },
)
drift(
    "page_size_bytes renamed",
    "0.29: layouts of KVCacheTensor",
    rename("page_size_bytes", "page_bytes"),
    harness={"page_size_bytes": "page_bytes"},
)
drift(
    "resolve_kv_cache_block_sizes answers an object",
    "0.16: TransferResult from a tuple to an object",
    swap(
        UTILS,
        "def resolve_kv_cache_block_sizes(",
        "class BlockSizes:\n    def __init__(self, sizes):\n        self.scheduler, self.hash = sizes\n\n\ndef resolve_kv_cache_block_sizes(kv_cache_config, vllm_config):\n    return BlockSizes(_resolve(kv_cache_config, vllm_config))\n\n\ndef _resolve(",
    ),
)
drift(
    "resolve_kv_cache_block_sizes in another order",
    "0.21: req_context before success",
    swap(
        UTILS,
        "    kv_cache_config: KVCacheConfig,\n    vllm_config: VllmConfig,\n) -> tuple[int, int]:",
        "    vllm_config: VllmConfig,\n    kv_cache_config: KVCacheConfig,\n) -> tuple[int, int]:",
    ),
)
drift(
    "SlidingWindowSpec.sliding_window renamed",
    "0.28: extra_retained_tokens",
    rename("sliding_window", "window_tokens"),
)

# --- the pool ---

drift(
    "BlockPool.num_gpu_blocks renamed",
    "0.33: host blocks beside the GPU's",
    rename("num_gpu_blocks", "num_device_blocks"),
    harness={r"config\.num_gpu_blocks": "config.num_device_blocks"},
)
drift(
    "free_blocks requires an argument",
    "0.23.0: prepend",
    swap(
        POOL,
        "def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:",
        "def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock], reason: str) -> None:",
    ),
    rename("block_pool\\.free_blocks\\(", "block_pool.free_blocks(reason='', ordered_blocks="),
)
drift(
    "touch takes groups again",
    "up to 0.13",
    swap(
        POOL,
        "        for block in blocks:\n            if block.is_null:\n                continue\n            # ref",
        "        for block in (b for group in blocks for b in group):\n            if block.is_null:\n                continue\n            # ref",
    ),
    swap(
        POOL,
        "    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:",
        "    def touch_flat(self, blocks):\n        self.touch((blocks,))\n\n"
        "    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:",
    ),
    rename("block_pool\\.touch", "block_pool.touch_flat"),
)
drift(
    "get_cached_block answers blocks by group",
    "0.24: block hashes by block",
    swap(
        POOL,
        '    ) -> list[KVCacheBlock] | None:\n        """Get the cached block by the block hash for each group in',
        '    ) -> dict[int, KVCacheBlock] | None:\n        return dict(zip(kv_cache_group_ids, self._cached(block_hash, kv_cache_group_ids) or ())) or None\n\n    def _cached(self, block_hash, kv_cache_group_ids):\n        """Get the cached block by the block hash for each group in',
    ),
    rename("block_pool\\.get_cached_block", "block_pool._cached"),
)
drift(
    "unpin_blocks in another order",
    "0.21: req_context before success",
    swap(
        POOL,
        "        blocks: Iterable[KVCacheBlock],\n        on_reuse: Callable[[KVCacheBlock], None],\n",
        "        on_reuse: Callable[[KVCacheBlock], None],\n        blocks: Iterable[KVCacheBlock],\n",
    ),
)
drift("_reuse_watchers renamed", "0.30 brought it", rename("_reuse_watchers", "_watchers"))
drift(
    "cached_block_hashes_by_block renamed",
    "0.24 brought it",
    rename("cached_block_hashes_by_block", "extra_block_hashes"),
)
drift(
    "num_free_blocks of the queue renamed",
    "0.26: iter_blocks_after",
    rename("num_free_blocks", "free_count"),
)
drift(
    "hashes of blocks with the group in front",
    "0.11.1: bytes with the group behind",
    swap(
        UTILS,
        'return BlockHashWithGroupId(block_hash + group_id.to_bytes(4, "big", signed=False))',
        'return BlockHashWithGroupId(group_id.to_bytes(4, "big", signed=False) + block_hash)',
        "return BlockHash(key[:-4])",
        "return BlockHash(key[4:])",
        'return int.from_bytes(key[-4:], "big", signed=False)',
        'return int.from_bytes(key[:4], "big", signed=False)',
    ),
)
drift(
    "Scheduler.kv_cache_manager renamed",
    "0.30: bind_kv_cache_manager",
    swap(
        SCHEDULER,
        "self.kv_cache_manager = KVCacheManager(",
        "self.cache_manager = KVCacheManager(",
    ),
    rename("self\\.kv_cache_manager", "self.cache_manager"),
)

# --- offloading ---

drift(
    "OffloadingManager requires a method more",
    "0.23: on_new_request",
    method(OFFLOAD, "OffloadingManager", "on_idle(self) -> None"),
    swap(
        CPU,
        "class CPUOffloadingManager(OffloadingManager):",
        "class CPUOffloadingManager(OffloadingManager):\n    def on_idle(self) -> None: ...\n",
    ),
)
drift(
    "OffloadingSpec requires a method more",
    "0.25: get_worker",
    method(OFFLOAD, "OffloadingSpec", "get_tiers(self) -> list[Any]"),
)
drift(
    "OffloadingWorker requires a method more",
    "0.14: wait of OffloadingHandler",
    method(OFFLOAD, "OffloadingWorker", "cancel(self, job_id: int) -> None"),
)
drift(
    "LoadStoreSpec requires a method",
    "up to 0.25.1: medium",
    swap(OFFLOAD, "class LoadStoreSpec:", "class LoadStoreSpec(ABC):"),
    method(OFFLOAD, "LoadStoreSpec", "medium(self) -> str"),
    swap(
        OFFLOAD,
        "class GPULoadStoreSpec(BlockIDsLoadStoreSpec):",
        "class GPULoadStoreSpec(BlockIDsLoadStoreSpec):\n    medium = None\n",
    ),
)
drift(
    "LookupResult.HIT_PENDING renamed",
    "0.30: BLOCK_LEVEL -> CHUNK_LEVEL",
    rename("HIT_PENDING", "HIT_LATER"),
)
drift(
    "LookupResult.RETRY removed", "0.25: bool or None -> LookupResult", rename("RETRY", "DEFERRED")
)
drift(
    "lookup answers an object",
    "0.25: bool or None -> LookupResult",
    swap(
        OFFLOAD,
        '    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:\n        """Checks',
        '    def lookup(self, key: OffloadKey, req_context: ReqContext) -> tuple[LookupResult, str]:\n        """Checks',
    ),
)
drift(
    "lookup takes several keys",
    "up to 0.19.1",
    swap(
        OFFLOAD,
        "    def lookup(self, key: OffloadKey, req_context",
        "    def lookup(self, keys: Sequence[OffloadKey], req_context",
    ),
)
drift(
    "prepare_store answers a tuple",
    "0.16: TransferResult from a tuple to an object",
    swap(
        OFFLOAD,
        "    ) -> PrepareStoreOutput | None:",
        "    ) -> tuple[list[OffloadKey], LoadStoreSpec, list[OffloadKey]] | None:",
    ),
)
drift(
    "PrepareStoreOutput.evicted_keys renamed",
    "0.20: block_hashes_evicted -> evicted_keys",
    rename("evicted_keys", "keys_evicted"),
)
drift(
    "PrepareStoreOutput requires a field more",
    "0.26 - 0.33: fields of OffloadingEvent",
    field(OFFLOAD, "PrepareStoreOutput", "tier: str"),
    rename("PrepareStoreOutput\\(", "PrepareStoreOutput(tier='cpu', "),
)
drift(
    "OffloadingEvent.keys renamed",
    "0.20: block_hashes -> keys",
    swap(
        OFFLOAD,
        "    keys: list[OffloadKey]\n    medium: Medium",
        "    offload_keys: list[OffloadKey]\n    medium: Medium",
    ),
)
drift(
    "OffloadingEvent requires a field more",
    "0.29: ownership",
    field(OFFLOAD, "OffloadingEvent", "tier: str"),
)
drift(
    "ReqContext requires a field more",
    "0.22: req_id",
    field(OFFLOAD, "ReqContext", "tenant: str"),
    rename("ReqContext\\(req_id", "ReqContext(tenant='', req_id"),
)
drift(
    "ReqContext.req_id renamed",
    "0.22 brought it",
    swap(OFFLOAD, "class ReqContext:\n    req_id: str", "class ReqContext:\n    request_id: str"),
    rename("req_context\\.req_id", "req_context.request_id"),
    rename("ctx\\.req_id", "ctx.request_id"),
)
drift(
    "TransferResult requires a field more",
    "0.16: sizes and times",
    field(OFFLOAD, "TransferResult", "direction: str"),
)
drift(
    "TransferResult.transfer_time renamed",
    "0.25: transfer_type gone",
    rename("transfer_time", "seconds"),
)
drift(
    "submit_load requires an argument more",
    "0.33: expedited",
    swap(
        OFFLOAD,
        "        expedited: bool = False,\n    ) -> bool:",
        "        expedited: bool,\n        deadline: float,\n    ) -> bool:",
    ),
)
drift(
    "submit_store in another order",
    "0.25: directions of OffloadingHandler",
    swap(
        OFFLOAD,
        "self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec",
        "self, job_id: int, dst_spec: LoadStoreSpec, src_spec: GPULoadStoreSpec",
    ),
)
drift(
    "complete_store fails by default",
    "0.21: req_context before success",
    swap(
        OFFLOAD, "        success: bool = True,\n    ):", "        success: bool = False,\n    ):"
    ),
)
drift(
    "GPULoadStoreSpec.block_ids renamed",
    "0.20: block_indices required",
    swap(
        OFFLOAD,
        "self.block_ids = np.array",
        "self.page_ids = np.array",
        "return repr(self.block_ids)",
        "return repr(self.page_ids)",
    ),
)
drift(
    "Medium.CPU renamed",
    "0.26: FS and OBJ -> STORAGE",
    swap(OFFLOAD, '    CPU = "CPU"\n', '    HOST = "HOST"\n'),
    rename("Medium\\.CPU", "Medium.HOST"),
)
drift(
    "RequestOffloadingContext requires a policy",
    "0.30: BLOCK_LEVEL -> CHUNK_LEVEL",
    swap(
        OFFLOAD,
        "    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL",
        "    policy: OffloadPolicy",
    ),
)
drift(
    "ScheduleEndContext requires a field more",
    "0.25 brought it",
    field(OFFLOAD, "ScheduleEndContext", "step: int"),
    swap(OFFLOAD_SCHEDULER, "= ScheduleEndContext(", "= ScheduleEndContext(step=0, "),
)
drift(
    "CanonicalKVCaches.tensors renamed",
    "0.19 brought it",
    swap(
        OFFLOAD,
        "    tensors: list[CanonicalKVCacheTensor]",
        "    pages: list[CanonicalKVCacheTensor]",
    ),
    rename("CanonicalKVCaches\\(tensors", "CanonicalKVCaches(pages"),
    rename("kv_caches\\.tensors", "kv_caches.pages"),
)
drift(
    "OffloadingSpec.extra_config renamed",
    "0.26: OffloadingConfig",
    rename("self\\.extra_config", "self.options"),
)
drift(
    "OffloadingSpec.blocks_per_chunk renamed",
    "0.26: block_size_factor -> blocks_per_chunk",
    rename("blocks_per_chunk", "blocks_per_unit"),
)
drift(
    "OffloadingManager.lock a method",
    "0.33 brought it",
    swap(OFFLOAD, "    @property\n    def lock(self)", "    def lock(self)"),
    rename("manager\\.lock", "manager.lock()"),
)
drift(
    "get_worker requires an argument more",
    "0.12: attn_backends",
    swap(
        OFFLOAD,
        "def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:",
        "def get_worker(self, kv_caches: CanonicalKVCaches, rank: int) -> OffloadingWorker:",
    ),
)
