"""Connectors whose own tier is not conserved: what a fault occupied is never used again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from examples.host_cache import HostCacheScheduler
from kvview import (
    BlockIds,
    ConnectorConfig,
    FinishReason,
    OffloadKey,
    ReqContext,
    RequestInfo,
    TransferResult,
)
from kvview.testing import Mutant
from kvview_reference.connector.offload import OffloadOptions, OffloadScheduler
from kvview_reference.offloading import CPUOffloadingManager

from .connector import Offload, breaker
from .example import Host

MUTANTS: list[Mutant] = []
breaks = breaker(MUTANTS, seeds=[9, 59, 109, 159])  # those that are steady


@breaks("CONN-10", "the host pages of a store that failed are not free again")
class LosesPagesOfFailedStores(Host):
    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                if not result.success and result.job_id in self.stores:
                    self.stores[result.job_id][0].clear()
            super().on_transfers_finished(results)


@breaks("CONN-10", "a reset forgets the keys, and their host pages with them")
class LosesPagesAtResets(Host):
    class scheduler(HostCacheScheduler):
        def reset_cache(self) -> bool:
            if self.has_pending_work():
                return False
            self.slots.clear()
            return True


@breaks("CONN-10", "stores a key twice when two requests end at once, and forgets one page")
class LosesPagesOfTwins(Host):
    class scheduler(HostCacheScheduler):
        def store(self, request: RequestInfo, block_ids: BlockIds) -> None:
            stores, self.stores = self.stores, {}  # of keys in flight it knows nothing
            super().store(request, block_ids)
            self.stores = stores | self.stores


@breaks("CONN-10", "a load that fails stays counted: its pages are never evicted again")
class PinsPagesOfFailedLoads(Host):
    class scheduler(HostCacheScheduler):
        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                if not result.success and result.job_id in self.loads:
                    self.loads[result.job_id] = []
            super().on_transfers_finished(results)


@breaks("CONN-10", "pins host pages for a promise, and unpins them when the load has ended")
class PinsPagesOfPromises(Host):
    class scheduler(HostCacheScheduler):
        def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int:
            num_promised = super().match_prefix(request, num_computed_tokens)
            num_tokens = num_computed_tokens + num_promised
            if num_promised:
                self.loading.update(self.keys_of(request, num_computed_tokens, num_tokens))
            return num_promised

        def keys_of(self, request: RequestInfo, first: int, end: int) -> list[OffloadKey]:
            return [
                self.key(request, index, block)
                for index, group in enumerate(self.geometry.groups)
                for block in group.required_blocks(end)
                if block >= first // group.block_size
            ]

        def on_blocks_allocated(
            self,
            request: RequestInfo,
            block_ids: BlockIds,
            num_computed_tokens: int,
            num_external_tokens: int,
        ) -> None:
            super().on_blocks_allocated(
                request, block_ids, num_computed_tokens, num_external_tokens
            )
            end = num_computed_tokens + num_external_tokens
            if num_external_tokens:  # once, however often it was asked
                self.loading -= Counter(self.keys_of(request, num_computed_tokens, end))


@breaks("CONN-10", "what is evicted is forgotten, and its page is not used again")
class LosesPagesOfVictims(Host):
    class scheduler(HostCacheScheduler):
        def take_slot(self) -> int | None:
            if not self.free_slots:
                super().take_slot()
                return None
            return super().take_slot()


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


@breaks("CONN-10", "loads of aborted requests are never completed: their keys stay protected")
class ForgetsAbortedLoads(Offload):
    class scheduler(OffloadScheduler):
        def __init__(self, config: ConnectorConfig, options: OffloadOptions) -> None:
            super().__init__(config, options)
            self.aborted: set[str] = set()

        def on_request_finished(
            self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
        ) -> None:
            if reason is FinishReason.ABORTED:
                self.aborted.add(request.request_id)
            super().on_request_finished(request, block_ids, reason)

        def on_transfers_finished(self, results: Sequence[TransferResult]) -> None:
            for result in results:
                load = self._loads.get(result.job_id)
                if load is not None and load.ctx.req_id in self.aborted:
                    del self._loads[result.job_id]
            super().on_transfers_finished(results)
