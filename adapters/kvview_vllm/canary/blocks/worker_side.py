"""The worker half of the canary: digests the blocks of a step, and compares loaded blocks.

- CANARY-6 A loaded block **must** be digested after the connector has reported its load, and before
  another step may write to it. Blocks that the connector reports as not loaded are not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvview import ConnectorError, UnsupportedEngineError
from kvview_vllm.canary.blocks.digests import Digests, PendingDigests
from kvview_vllm.canary.blocks.known_digests import KnownDigests
from kvview_vllm.canary.incidents import Incidents
from kvview_vllm.canary.wrapper.canary_messages import SampledBlock, Work
from kvview_vllm.canary.wrapper.canary_options import CanaryOptions


class CanaryWorker:
    """One worker.

    Args:
        options: Options of the canary.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in 0.11.0.
        rank: Rank of the worker.
        identity: Text that identifies model and layout.
        incidents: Receives the differences.
    """

    def __init__(
        self,
        options: CanaryOptions,
        kv_cache_config: Any,
        rank: int,
        identity: str,
        incidents: Incidents,
    ) -> None:
        file = Path(options.digests) / f"rank{rank}.txt" if options.digests else None
        self.known = KnownDigests(options.max_digests, file, identity)
        self._config = kv_cache_config
        self._incidents = incidents
        self._waits = options.on_difference != "log"
        self._stops = options.on_difference == "stop"
        self._digests: Digests | None = None
        self._work: Work | None = None
        self._loads: dict[str, Sequence[SampledBlock]] = {}  # that the connector has not reported
        self._computed: list[PendingDigests] = []
        self._loaded: list[tuple[str, PendingDigests]] = []
        self._failed: set[int] = set()  # blocks, since the last step
        self._wrong_blocks: set[int] = set()
        self._wrong_requests: set[str] = set()
        self.num_digests = 0
        self.is_off = ""

    def register(self, kv_caches: Any) -> None:
        """Receive the KV-cache tensors."""
        try:
            self._digests = Digests(kv_caches, self._config)
        except UnsupportedEngineError as error:
            self.is_off = str(error)

    def begin(self, work: Work | None) -> None:
        """Receive the work of a step, before it runs."""
        self._failed.clear()
        self._settle(wait=False)
        self._work = work if self._digests is not None else None
        if self._work is None:
            return
        if self._work.reset:
            self._settle(wait=True)
            self.known.reset()
        for name in self._work.ended:
            self._loads.pop(name, None)
        self._loads.update(self._work.loads)

    def on_computed(self) -> None:
        """Digest the blocks that the step has computed."""
        work = self._work
        if work is not None and work.computed and self._digests is not None:
            self._computed.append(self._digests.start(work.computed))
            self.num_digests += len(work.computed)

    def on_loaded(self, received: Iterable[str], failed: Collection[str] = ()) -> None:
        """Digest the blocks of the loads that have ended."""
        work, self._work = self._work, None
        within_step = work.within_step if work is not None else ()
        for name in (*within_step, *received):
            places = self._loads.pop(name, None)
            if places is None or name in failed or self._digests is None:
                continue
            self._loaded.append((name, self._digests.start(places)))
            self.num_digests += len(places)

    def on_failed_blocks(self, block_ids: Iterable[int]) -> None:
        """Note blocks that the connector could not load."""
        self._failed.update(block_ids)
        for name, places in self._loads.items():
            self._loads[name] = [one for one in places if one.block_id not in self._failed]

    def take_wrong_blocks(self) -> set[int]:
        """Return the blocks of wrong loads, for vLLM to compute; waits for the device."""
        self._settle(wait=self._waits)
        wrong, self._wrong_blocks = self._wrong_blocks, set()
        return wrong

    def take_wrong_requests(self) -> set[str]:
        """Return the requests of wrong loads, for vLLM to compute; waits for the device."""
        self._settle(wait=self._waits)
        wrong, self._wrong_requests = self._wrong_requests, set()
        return wrong

    def counts(self) -> dict[str, int]:
        """Return the counters of the metrics."""
        return {
            "canary_digests": self.num_digests,
            "canary_compared": self.known.num_compared,
            "canary_learnt": self.known.num_learnt,
            "canary_changed": self.known.num_changed,
        }

    def settle(self, *, wait: bool = False) -> None:
        """Compare the digests that are ready."""
        self._settle(wait=wait)

    def _settle(self, *, wait: bool) -> None:
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
        message = (
            f"request {name!r} loaded wrong KV into block {place.block_id} of group "
            f"{place.group}, block hash {place.block_hash.hex()[:16]}: {difference.message} "
            f"(load {self.known.num_compared} that was compared)"
        )
        details = {
            "request_id": name,
            "block_hash": place.block_hash.hex(),
            "group": place.group,
            "block_id": place.block_id,
            "tensors": [*difference.layers],
            "digest": [*digest],
            "num_compared": self.known.num_compared,
        }
        self._incidents.report(difference.law, message, details)
        if self._stops:
            raise ConnectorError(f"{difference.law}: canary: {message}; on_difference is 'stop'")
        if self._waits:
            self._wrong_blocks.add(place.block_id)
            self._wrong_requests.add(name)
