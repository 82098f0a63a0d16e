"""``KVViewOffloadingSpec``: a kvview manager and worker, run by vLLM's OffloadingConnector.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
      "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "KVViewOffloadingSpec",
        "spec_module_path": "kvview_vllm.offloading_spec",
        "kvview": {"num_blocks": 1000}}}'

A failed job ends the engine, because vLLM asserts that no job fails (#39732).

Source: ``OffloadingSpec``, vllm/v1/kv_offload/base.py (before 0.21 spec.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvview import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ConfigError,
    GPULoadStoreSpec,
    OffloadingManager,
    TransferWorker,
)
from kvview.options import make_with_options, parse_options
from kvview.targets import load_target
from kvview_vllm.offloading.for_vllm import ManagerForVLLM, PagesSpec
from kvview_vllm.releases import (
    OffloadingSeam,
    installed,
    reading,
    require_class,
    require_concrete,
)
from kvview_vllm.releases.calls import (
    blocks_per_chunk,
    cache_config_of,
    make_known,
    tokens_per_chunk,
)
from kvview_vllm.transfer import canonical_kv_caches, check_whole_blocks

_Spec: Any = require_class("OffloadingSpec")
# Up to 0.24 a handler has the role of a worker.
_Worker: Any = require_class(
    "OffloadingHandler" if installed().offloading.handlers else "OffloadingWorker"
)

_release = installed().offloading
_GPUSpec: Any = require_class("GPULoadStoreSpec")
_Result: Any = require_class("TransferResult")


class KVViewOffloadingOptions(BaseModel):
    """The settings under the key ``kvview`` of ``kv_connector_extra_config``.

    Args:
        num_blocks: Capacity of the tier, in offloaded blocks.
        manager: Target of the manager, called with ``num_blocks`` and its options.
        manager_options: Options of the manager.
        worker: Target of the transfer worker, called with the KV caches,
            ``num_blocks``, ``blocks_per_chunk=`` and its options.
        worker_options: Options of the worker.
        media: A map from the manager's media to vLLM's names, for the media that differ.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_blocks: int = Field(gt=0)
    manager: str = "kvview_reference.offloading:CPUOffloadingManager"
    manager_options: dict[str, Any] = Field(default_factory=dict)
    worker: str = "kvview_reference.transfer:CPUGPUTransferWorker"
    worker_options: dict[str, Any] = Field(default_factory=dict)
    media: dict[str, str] = Field(default_factory=dict)


class KVViewOffloadingSpec(_Spec):  # type: ignore[misc]
    """The spec of vLLM's OffloadingConnector for a kvview manager and worker.

    Args:
        args: ``(vllm_config)``, with ``kv_cache_config`` from 0.14, or one
            ``OffloadingConfig`` from 0.26.

    Raises:
        ConfigError: The key ``kvview`` is missing, has an unknown key, or names a target that
            cannot be imported or refuses its options; or the manager names a medium that vLLM does
            not know (VOFF-6).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with reading(OffloadingSeam.seam, "the configuration of offloading"):
            extra = self.extra_config.get("kvview") or {}
            blocks_per_chunk(self), tokens_per_chunk(self)
        try:
            self._options = parse_options(KVViewOffloadingOptions, extra)
        except ConfigError as error:
            raise ConfigError(f"kv_connector_extra_config['kvview']: {error}") from None
        self._manager: ManagerForVLLM | None = None

    def get_manager(self) -> ManagerForVLLM:
        """Return the manager of the scheduler's side, the same object for all calls."""
        if self._manager is None:
            options = self._options
            make = load_target(options.manager)
            try:
                manager: OffloadingManager = make_with_options(
                    make, options.manager_options, options.num_blocks, flag="manager_options"
                )
                self._manager = ManagerForVLLM(manager, tokens_per_chunk(self), options.media)
            except ConfigError as error:
                raise ConfigError(f"kv_connector_extra_config['kvview']: {error}") from None
        return self._manager

    def get_worker(self, kv_caches: Any) -> WorkerForVLLM:
        """Return the worker of the worker's side, from 0.25 on."""
        check_whole_blocks(self, kv_caches)
        options, num_blocks = self._options, blocks_per_chunk(self)
        make = load_target(options.worker)
        with reading(OffloadingSeam.seam, "the layout of the KV cache"):
            canonical = _canonical(kv_caches)
        try:
            worker: TransferWorker = make_with_options(
                make,
                options.worker_options,
                canonical,
                options.num_blocks,
                blocks_per_chunk=num_blocks,
                flag="worker_options",
            )
        except ConfigError as error:
            raise ConfigError(f"kv_connector_extra_config['kvview']: {error}") from None
        return WorkerForVLLM(worker, num_blocks)

    def get_handlers(
        self, kv_caches: Any, attn_backends: Any = None
    ) -> Iterator[tuple[Any, Any, WorkerForVLLM]]:
        """Yield the worker's handlers, up to 0.24; one handler serves both directions."""
        if isinstance(kv_caches, dict):  # tensors by layer, up to 0.18
            kv_caches = canonical_kv_caches(kv_caches, cache_config_of(self))
        worker = self.get_worker(kv_caches)
        yield _GPUSpec, PagesSpec, worker
        yield PagesSpec, _GPUSpec, worker


class WorkerForVLLM(_Worker):  # type: ignore[misc]
    """A kvview transfer worker with the interface of vLLM's.

    Args:
        worker: The kvview worker.
        blocks_per_chunk: Number of GPU blocks in an offloaded block.
    """

    def __init__(self, worker: TransferWorker, blocks_per_chunk: int) -> None:
        self.worker = worker
        self._blocks_per_chunk = blocks_per_chunk

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: PagesSpec) -> bool:
        """Start a store."""
        return self.worker.transfer_async(job_id, (self._blocks(src_spec), dst_spec.spec))

    def submit_load(
        self, job_id: int, src_spec: PagesSpec, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Start a load, which waits only for earlier jobs on the same pages."""
        return self.worker.transfer_async(job_id, (src_spec.spec, self._blocks(dst_spec)))

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Start a store or a load, up to 0.24."""
        src, dst = spec
        if isinstance(src, PagesSpec):
            return self.submit_load(job_id, src, dst)
        return self.submit_store(job_id, src, dst)

    def get_finished(self) -> list[Any]:
        """Return the jobs that ended since the last call."""
        results = self.worker.get_finished()
        if not _release.transfer_dataclass:
            return [(result.job_id, result.success) for result in results]
        return [
            make_known(
                _Result,
                job_id=result.job_id,
                success=result.success,
                transfer_size=result.transfer_size,
                transfer_time=result.transfer_time,
            )
            for result in results
        ]

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until each named job has ended."""
        self.worker.wait(job_ids)

    def shutdown(self) -> None:
        """Release memory."""
        self.worker.shutdown()

    def _blocks(self, spec: Any) -> GPULoadStoreSpec:
        block_ids = [int(block_id) for block_id in spec.block_ids]
        group_sizes: Sequence[int] = [len(block_ids)]
        block_indices: Sequence[int] | None = None
        if _release.block_indices:
            group_sizes, block_indices = spec.group_sizes, spec.block_indices
        if block_indices is None:  # up to 0.19 a transfer ends at the end of a chunk
            block_indices = [-size % self._blocks_per_chunk for size in group_sizes]
        return GPULoadStoreSpec(block_ids, list(group_sizes), list(block_indices))


def _canonical(kv_caches: Any) -> CanonicalKVCaches[Any]:
    """Convert vLLM's caches to kvview's class, which has fewer fields."""
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(one.tensor, one.page_size_bytes) for one in kv_caches.tensors],
        [
            [CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
    )


for _kind in (KVViewOffloadingSpec, WorkerForVLLM, ManagerForVLLM, PagesSpec):
    require_concrete(OffloadingSeam.seam, _kind)
