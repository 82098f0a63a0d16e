"""The suite of the transfer contract: the machine, and tests of races, memory and construction."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import ref

from typing_extensions import override

from kvview.errors import ConfigError
from kvview.testing.suites.capability import Capability as C, Contract
from kvview.testing.suites.conformance import Conformance, example
from kvview.testing.supervision.yield_points import new_threads_yield_often
from kvview.testing.transfer.drawn_caches import Layout, make_caches, wrong_caches
from kvview.testing.transfer.machine import TransferMachine
from kvview.testing.transfer.model import Part
from kvview.transfer import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferWorker,
)

_LAYOUT: Layout = ([(0, 0, 64, 64, 8), (1, 0, 64, 48, 8)], [[(0, 64), (1, 40)], [(1, 48)]])
_MANY = 1500  # jobs


class TransferConformance(Conformance):
    """The tests of a transfer worker, over KV caches that the tests draw.

    The KV caches have tensors of different sizes, with gaps and padding; tensors share storages,
    and groups share tensors. Their compute stream is a
    :class:`~kvview.testing.GatedComputeStream`, or None without the capability ``compute``.

    Example:
        >>> class TestMyWorker(TransferConformance):
        ...     lacks = {"fail", "fail_block", "pause", "tier_spec"}
        ...
        ...     def make(self, kv_caches, num_cpu_blocks, blocks_per_chunk):
        ...         return MyWorker(kv_caches, num_cpu_blocks, blocks_per_chunk)
    """

    contract: ClassVar[Contract] = "transfer"
    machine = TransferMachine
    protocols: ClassVar[Mapping[str, type]] = {"worker": TransferWorker}
    device: ClassVar[str] = "cpu"
    """The device of the tensors."""
    worker: Any = None
    """The worker that :meth:`make` returned last, for the methods that delay copies or fail."""

    def make(
        self, kv_caches: CanonicalKVCaches[Any], num_cpu_blocks: int, blocks_per_chunk: int
    ) -> TransferWorker:
        """Make a worker, which the tests shut down.

        Args:
            kv_caches: The KV caches.
            num_cpu_blocks: Number of pages of the tier.
            blocks_per_chunk: Number of GPU blocks that one page of the tier holds.

        Raises:
            ConfigError: The worker cannot move these KV caches exactly (XFER-7).
        """
        raise NotImplementedError(
            f"define {type(self).__name__}.make(kv_caches, num_cpu_blocks, blocks_per_chunk)"
        )

    @override
    @contextmanager
    def parts(self) -> Iterator[Mapping[str, object]]:
        worker = self.make(make_caches(_LAYOUT, self.device, None)[0], 8, 1)
        try:
            yield {"suite": self, "worker": worker}
        finally:
            worker.shutdown()

    @example("XFER-5")
    def test_xfer_5_race_of_wait_and_report(self, machine: TransferMachine) -> None:
        """Threads: a report is available when ``wait`` returns, even if the worker is slow."""
        with new_threads_yield_often():
            machine.start(_LAYOUT)
            parts = {group: Part([group], [group]) for group in range(len(machine.model.groups))}
            machine.submit(True, parts)
            machine.finish_all()
            for _ in range(10):
                machine.submit(False, parts)
                machine.finish_all()

    @example("XFER-5")
    def test_xfer_5_many_jobs(self, machine: TransferMachine) -> None:
        """Growth: a worker takes many jobs before it reports; it may refuse, but not wait."""
        parts = {0: Part([1], [0])}
        for is_paused in (False, True)[: 1 + self.has(C.PAUSE)]:
            machine.start(_LAYOUT)
            machine.submit(True, parts)
            machine.finish_all()
            if is_paused:
                machine.pause()
            spec = machine.spec(False, parts)
            for job_id in range(_MANY):
                if not machine.call(machine.worker, "transfer_async", job_id, spec):
                    break
                machine.model.submit(job_id, False, parts)
            machine.finish_all()
            machine.compare()

    @example("XFER-5")
    def test_xfer_5_memory_after_shutdown(self, machine: TransferMachine) -> None:
        """Memory: after a shutdown the KV caches are freed, even while the worker is referenced."""
        import torch

        tensor = torch.zeros(8, 64, dtype=torch.int8, device=self.device)
        kept = ref(tensor)
        refs = [[CanonicalKVCacheRef(0, 64)]]
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 64)], refs)
        worker = self.make(caches, 4, 1)
        worker.transfer_async(1, (GPULoadStoreSpec([5], [1], [0]), machine.tier([0])))
        worker.wait([1])
        worker.get_finished()
        worker.shutdown()
        del tensor, caches
        gc.collect()
        machine.equal(kept(), None, "after its shutdown a worker has no KV cache")

    @example("XFER-7")
    def test_xfer_7_wrong_caches(self, machine: TransferMachine) -> None:
        """KV caches that cannot be moved exactly are refused at once."""
        right, _ = make_caches(_LAYOUT, self.device, None)
        for group in range(len(right.group_data_refs)):
            for what, caches, num_chunks in wrong_caches(right, group):
                try:
                    self.make(caches, num_chunks, 1)
                except ConfigError:
                    continue
                except Exception as error:
                    machine.fail(f"make refuses {what}", repr(error), "ConfigError")
                machine.fail(f"make refuses {what}", "no error", "ConfigError")
