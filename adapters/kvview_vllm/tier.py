"""``KVViewTier``: any tier store below vLLM's host memory, behind the guard (0.22.0 and later).

    PYTHONHASHSEED=0 vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "KVViewTieringSpec", "spec_module_path": "kvview_vllm.tier",
        "cpu_bytes_to_use": 10000000000,
        "secondary_tiers": [{
          "type": "kvview", "weights": "REVISION",
          "store": "my_store.py:Store", "options": {"root": "/kv"}}]}}'

- VTIER-1 A tier **must not** start if the weights, or the root of the chain of hashes, are unknown,
  because it would return KV of other weights, or never find its own KV. If vLLM chooses the root
  later, the tier **must** be suspended, and log the reason.
- VTIER-3 If the engine publishes KV events, they **must** include the events of the tier, in the
  medium ``STORAGE``: the keys that it stored and the keys that it can no longer load.
- VTIER-2 Each job **must** be reported to vLLM once, without an exception and, if the release
  supports partial loads, with the part that was loaded.

Source: :mod:`kvview.tier`, whose laws this module satisfies; ``SecondaryTierManager``,
vllm/v1/kv_offload/tiering/base.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

from kvview import ConfigError, TierJobError
from kvview.bridge import TierOptions, open_tier
from kvview.errors import one_line
from kvview.options import parse_options
from kvview.tier import Namespace, TierEvents
from kvview_vllm.metrics.tier_metrics import TierReporter, definitions
from kvview_vllm.releases import reading
from kvview_vllm.releases.compat.tiers import (
    TierSeam,
    constructor_options,
    has_random_hash_root,
    job_result,
    lookup_answers,
    namespace_facts,
    places_of,
    publishes_events,
    request_preference,
    require_tier_class,
    storage_medium,
    tier_event,
    tier_seam,
    with_events_of_tiers,
)
from kvview_vllm.transfer import check_whole_blocks

_log = logging.getLogger(__name__)

tier_seam()
_Tier: Any = require_tier_class("SecondaryTierManager")
_Spec: Any = require_tier_class("TieringOffloadingSpec")


class KVViewTier(_Tier):  # type: ignore[misc]
    """The tier to and from which vLLM's tiering manager moves pages.

    Args:
        offloading_spec: The ``TieringOffloadingSpec``.
        primary_kv_view: The host's memory, one row per chunk.
        tier_type: The type in the user's configuration.
        given: The other options of the entry, and the arguments that the release adds.

    Raises:
        ConfigError: An option cannot be used, or the weights or the root of the hashes are unknown
            (VTIER-1).
        NamespaceMismatchError: The store already holds pages of other weights or another layout.
    """

    medium = storage_medium()
    tolerates_off_thread_polling = False  # this tier serves no external requests (0.33)

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **given: Any
    ) -> None:
        own, rest = constructor_options(given)
        super().__init__(offloading_spec, primary_kv_view, tier_type, **own)
        try:
            options = parse_options(TierOptions, rest)
            self._page_bytes = (primary_kv_view.strides or (len(primary_kv_view),))[0]
            with reading(TierSeam.seam, "the configuration of tiering"):
                facts = namespace_facts(offloading_spec, self._page_bytes)
            seed = os.environ.get("PYTHONHASHSEED", "")
            if not seed and not tier_seam().fixed_hash_root:
                raise ConfigError(
                    "VTIER-1: this vLLM starts its block hashes at random, so no stored page "
                    "would be found after a restart. Set this before the start: export "
                    "PYTHONHASHSEED=0"
                )
            namespace = Namespace(**facts, weights=options.weights, hash_seed=seed)
            self.guard = open_tier(options, namespace)
        except ConfigError as error:
            raise ConfigError(f"secondary_tiers, type {tier_type!r}: {error}") from None
        self._memory = primary_kv_view.cast("B")
        self._answers = lookup_answers()
        self._jobs: dict[int, tuple[list[Any], bool]] = {}  # keys, and whether it is a load
        self._events = TierEvents() if publishes_events(offloading_spec) else None
        self._reporter = TierReporter(self.guard, options.store)
        self._has_started = False

    def lookup(self, key: Any, req_context: Any = None) -> Any:
        """Return a hit, a miss or a retry for a chunk."""
        (flag,) = self.guard.lookup((bytes(key),))
        if flag is False and self._events is not None:
            self._events.gone(bytes(key))
        return self._answers[flag]

    def submit_store(self, job_metadata: Any) -> None:
        """Start to store rows of the host's memory."""
        self._submit(self.guard.put, job_metadata, is_get=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Start to load into rows of the host's memory."""
        self._submit(self.guard.get, job_metadata, is_get=True)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that have ended since the last call."""
        results = []
        evicted = self.guard.take_evicted()  # before the stores are reported
        for job_id, flags in self.guard.poll():
            keys, is_get = self._jobs.pop(job_id)
            flags = flags or [False] * len(keys)
            if self._events is not None:
                self._events.ended([bytes(key) for key in keys], flags, is_get=is_get)
            results.append(job_result(job_id, keys, flags))
        if self._events is not None:
            self._events.evicted(evicted)
        return results

    def get_finished(self) -> Iterable[Any]:
        """Return the jobs that have ended since the last call, for 0.22."""
        return self.get_finished_jobs()

    def take_events(self) -> Iterable[Any]:
        """Return the keys that the tier stored, and the keys that it has lost (VTIER-3)."""
        events = () if self._events is None else self._events.take()
        return [tier_event(event, self.tier_type) for event in events]

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """Return the metric series of a tier (0.25)."""
        return definitions()

    def get_stats(self) -> Any:
        """Return the changes of the metrics since the last call (0.25)."""
        return self._reporter.news()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping, because a job has not been reported."""
        return bool(self._jobs)

    def touch(self, keys: Collection[Any], req_context: Any = None) -> None:
        """Record that chunks were used."""
        self.guard.touch([bytes(key) for key in keys])

    def on_new_request(self, req_context: Any) -> Any:
        """Return no preference, and check the root of the hashes at the first request."""
        if not self._has_started:
            self._has_started = True
            if has_random_hash_root():
                _log.error(
                    "VTIER-1: the block hashes of this server start at random, so no stored page "
                    "would be found after a restart. The tier is suspended. Set this before the "
                    "start: export PYTHONHASHSEED=0"
                )
                self.guard.close()
        return request_preference()

    def drain_jobs(self) -> None:
        """Block until every job has ended, at most until its deadline."""
        while not self.guard.drain(1.0):
            pass

    def shutdown(self) -> None:
        """Close the store and release the host's memory."""
        self.guard.close()
        self._memory.release()  # otherwise vLLM cannot close its region

    def _submit(self, call: Any, job: Any, *, is_get: bool) -> None:
        size, memory = self._page_bytes, self._memory
        keys = list(job.keys)
        self._jobs[job.job_id] = keys, is_get
        if self._events is not None and not is_get:
            self._events.began([bytes(key) for key in keys])
        pages = [memory[place * size : (place + 1) * size] for place in places_of(job)]
        try:
            call(job.job_id, [bytes(key) for key in keys], pages)
        except TierJobError as error:
            _log.error("job %s fails: %s", job.job_id, one_line(error))
            self.guard.put(job.job_id, (), ())  # so that the job is reported


class KVViewTieringSpec(_Spec):  # type: ignore[misc]
    """vLLM's own spec; importing this module registers the type ``kvview``."""

    _with_events: Any = None

    def create_worker(self, kv_caches: Any) -> Any:
        """Return the worker's side, from 0.25 on."""
        check_whole_blocks(self, kv_caches)
        return super().create_worker(kv_caches)

    def get_manager(self) -> Any:
        """Return vLLM's own manager, with the events of its tiers in every release."""
        made = super().get_manager()
        if made is not self._with_events:
            self._with_events = self._manager = with_events_of_tiers(made, KVViewTier)
        return self._with_events


with suppress(ValueError):  # the module was loaded again
    require_tier_class("SecondaryTierFactory").register_tier("kvview", __name__, "KVViewTier")
