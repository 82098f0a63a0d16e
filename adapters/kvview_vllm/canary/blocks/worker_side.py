"""The worker half of the canary: digests the blocks of a step, and compares loaded blocks.

- CANARY-6 A loaded block **must** be digested after the connector has reported its load, and before
  another step may write to it. Blocks that the connector reports as not loaded are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvview import ConnectorError
from kvview_vllm.canary.blocks.digests import Digests, PendingDigests
from kvview_vllm.canary.blocks.known_digests import KnownDigests
from kvview_vllm.canary.incidents import Incidents
from kvview_vllm.canary.wrapper.canary_messages import SampledBlock, Work


class CanaryWorker:
    """One worker.

    Args:
        on_difference: Reaction to wrong KV.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in 0.11.0.
        incidents: Receives the differences.
        counts: Counters of the metrics.
    """

    def __init__(
        self, on_difference: str, kv_cache_config: Any, incidents: Incidents, counts: Counter[str]
    ) -> None:
        self.known = KnownDigests(counts)
        self.wrong_requests: set[str] = set()
        """Requests of wrong loads in this step, for vLLM to compute."""
        self._wrong_blocks: set[int] = set()
        self._config = kv_cache_config
        self._incidents = incidents
        self._counts = counts
        self._waits = on_difference != "log"
        self._stops = on_difference == "stop"
        self._digests: Digests | None = None
        self._work = Work()
        self._loads: dict[str, Sequence[SampledBlock]] = {}  # that the connector has not reported
        self._computed: list[PendingDigests] = []
        self._loaded: list[tuple[str, PendingDigests]] = []
        self._failed: set[int] = set()  # blocks of loads that were not compared yet

    def on_registered(self, kv_caches: Any) -> None:
        """Receive the KV-cache tensors."""
        self._digests = Digests(kv_caches, self._config)

    def on_bound(self, work: Work | None) -> None:
        """Receive the work of a step, before it runs."""
        self._work = work or Work()
        self.settle(wait=self._work.reset)
        if not self._loaded:
            self._failed.clear()
        if self._work.reset:
            self.known.reset()
        for name in self._work.ended:
            self._loads.pop(name, None)
        self._loads.update(self._work.loads)

    def on_computed(self) -> None:
        """Digest the blocks that the step has computed."""
        if self._work.computed:
            self._computed += self._start(self._work.computed)

    def on_loaded(self, received: Iterable[str], failed: Collection[str] = ()) -> None:
        """Digest the blocks of the loads that have ended."""
        work, self._work = self._work, Work()
        for name in (*work.within_step, *received):
            places = self._loads.pop(name, None)
            if places and name not in failed:
                self._loaded += [(name, pending) for pending in self._start(places)]

    def on_failed_blocks(self, block_ids: Iterable[int]) -> None:
        """Note blocks that the connector could not load."""
        self._failed.update(block_ids)
        for name, places in self._loads.items():
            self._loads[name] = [one for one in places if one.block_id not in self._failed]

    def on_step_end(self) -> None:
        """Find the wrong loads of the step, before vLLM receives the reports of its loads."""
        self.settle(wait=self._waits)

    def take_wrong_blocks(self) -> set[int]:
        """Return the blocks of wrong loads, for vLLM to compute. vLLM asks last in each step."""
        wrong, self._wrong_blocks = self._wrong_blocks, set()
        self.wrong_requests.clear()
        return wrong

    def _start(self, places: Sequence[SampledBlock]) -> list[PendingDigests]:
        if self._digests is None:
            return []
        self._counts["canary_digests"] += len(places)
        return [self._digests.start(places)]

    def settle(self, *, wait: bool = False) -> None:
        """Compare the digests that are ready."""
        # Computed blocks come first, because a load in the same step may bring the same block.
        while self._computed and (wait or self._computed[0].is_ready()):
            pending = self._computed.pop(0)
            for place, digest in zip(pending.places, pending.read(), strict=True):
                self.known.add(place, digest)
        while self._loaded and not self._computed and (wait or self._loaded[0][1].is_ready()):
            name, pending = self._loaded.pop(0)
            for place, digest in zip(pending.places, pending.read(), strict=True):
                if place.block_id not in self._failed:
                    self._compare(name, place, digest)

    def _compare(self, name: str, place: SampledBlock, digest: tuple[int, ...]) -> None:
        difference = self.known.compare(place, digest)
        if difference is None:
            return
        block_hash = place.block_hash.hex()
        message = (
            f"request {name!r} loaded wrong KV into block {place.block_id} of group "
            f"{place.group}, block hash {block_hash[:16]}: {difference.message}"
        )
        details = {
            "request_id": name,
            "block_hash": block_hash,
            "group": place.group,
            "block_id": place.block_id,
            "tensors": [*difference.layers],
            "digest": [*digest],
        }
        self._incidents.report(difference.law, message, details)
        if self._stops:
            raise ConnectorError(f"{difference.law}: canary: {message}; on_difference is 'stop'")
        if self._waits:
            self._wrong_blocks.add(place.block_id)
            self.wrong_requests.add(name)
