"""Connectors whose own tier is not conserved: what a fault occupied is never used again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from examples.host_cache import HostCacheScheduler
from kvview import OffloadKey, ReqContext, TransferResult
from kvview.testing import Mutant
from kvview_reference.connector.offload import OffloadOptions, OffloadScheduler
from kvview_reference.offloading import CPUOffloadingManager

from .connector import STEADY_SEEDS, Offload, breaker
from .example import Host

MUTANTS: list[Mutant] = []
breaks = breaker(MUTANTS, seeds=STEADY_SEEDS)


@breaks("CONN-10", "the host pages of a store that failed are not free again")
class LosesPagesOfFailedStores(Host):
    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                if not result.success and result.job_id in self.stores:
                    self.stores[result.job_id][0].clear()
            super().on_transfers_finished(results)


# --- over a manager of the contract ---


class Managed(Offload):
    """The right one, with a place to put a wrong manager."""

    manager: type[CPUOffloadingManager] = CPUOffloadingManager

    def make_scheduler(self) -> OffloadScheduler:
        half = OffloadScheduler(self.config, self.options)
        options: OffloadOptions = self.options
        if options.cpu_blocks:
            half._manager = self.manager(
                options.cpu_blocks, options.policy, enable_events=options.enable_events
            )
        return half


@breaks("CONN-10", "a manager that does not free the pages of failed stores")
class ManagerLosesFailedStores(Managed):
    class manager(CPUOffloadingManager):
        def complete_store(
            self,
            keys: Collection[OffloadKey],
            ctx: ReqContext | None = None,
            /,
            success: bool = True,
        ) -> None:
            free = list(self._free_pages)
            super().complete_store(keys, ctx, success)
            if not success:
                self._free_pages = free
