"""Any tier store below vLLM's host memory, guarded: ``KVViewTier`` (vLLM 0.22.0 and later).

    PYTHONHASHSEED=0 vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "KVViewTieringSpec", "spec_module_path": "kvview_vllm.tier",
        "cpu_bytes_to_use": 10000000000,
        "secondary_tiers": [{
          "type": "kvview", "weights": "REVISION",
          "store": "my_store.py:Store", "options": {"root": "/kv"}}]}}'

- VTIER-1 A tier **must not** start where the weights, or what the chain of hashes begins with,
  are not known: it would answer with KV of other weights, or never find its own. Where vLLM
  chooses that later, the tier **must** be out of use, and say why.
- VTIER-3 Where the engine publishes KV events, those of the tier **must** be among them: what it
  stored and what it can no longer load, in the medium ``STORAGE``.
- VTIER-2 vLLM **must** hear of each job once, of what it loaded in part where the release
  knows of parts, and no exception.

Source: :mod:`kvview.tier`, whose laws it keeps; ``SecondaryTierManager``,
vllm/v1/kv_offload/tiering/base.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvview import ConfigError, TierJobError
from kvview.bridge import TierOptions, open_tier
from kvview.errors import one_line
from kvview.options import parse_options
from kvview.tier import Namespace, TierEvents
from kvview_vllm.offloading.offloading_canary import check_keys
from kvview_vllm.releases import reading
from kvview_vllm.releases.tiers import (
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
from kvview_vllm.tier_metrics import TierReporter, definitions

_log = logging.getLogger(__name__)

if TYPE_CHECKING:

    class _Tier:  # stands in for vLLM's, which mypy does not see
        tier_type: str

        def __init__(self, *args: Any, **options: Any) -> None: ...

    class _Spec:
        def get_manager(self) -> Any: ...
else:
    tier_seam()
    check_keys()
    _Tier = require_tier_class("SecondaryTierManager")
    _Spec = require_tier_class("TieringOffloadingSpec")


class KVViewTier(_Tier):
    """What vLLM's tiering manager moves pages to and from.

    Args:
        offloading_spec: The ``TieringOffloadingSpec``.
        primary_kv_view: The host's memory, a row a chunk.
        tier_type: What the user wrote as type.
        given: The rest of the entry, and what the release adds.

    Raises:
        ConfigError: An option that cannot be used, or unknown weights or hashes (VTIER-1).
        NamespaceMismatchError: The store holds other KV.
    """

    medium = storage_medium()
    tolerates_off_thread_polling = False  # it serves nobody outside (0.33), whatever the default

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
                    "VTIER-1: this vLLM begins its block hashes at random, so after a restart "
                    "nothing that was stored is found. Start it with: export PYTHONHASHSEED=0"
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
        self._has_begun = False

    def lookup(self, key: Any, req_context: Any = None) -> Any:
        """Whether a chunk is stored, or that it is not known yet."""
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
        """Jobs that ended since the last call."""
        results = []
        evicted = self.guard.take_evicted()  # before what is said to be stored
        for job_id, flags in self.guard.poll():
            keys, is_get = self._jobs.pop(job_id)
            flags = flags or [False] * len(keys)
            if self._events is not None:
                self._events.ended([bytes(key) for key in keys], flags, is_get=is_get)
            results.append(job_result(job_id, keys, flags))
        if self._events is not None:
            self._events.evicted(evicted)
        self._reporter.log()
        return results

    def get_finished(self) -> Iterable[Any]:
        """The same, as 0.22 calls it."""
        return self.get_finished_jobs()

    def take_events(self) -> Iterable[Any]:
        """What the tier stored, and what it can no longer load (VTIER-3)."""
        events = () if self._events is None else self._events.take()
        return [tier_event(event, self.tier_type) for event in events]

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """The series of a tier (0.25)."""
        return definitions()

    def get_stats(self) -> Any:
        """What has changed since the last call (0.25)."""
        return self._reporter.news()

    def has_pending_work(self) -> bool:
        """Whether a job was not reported: the engine keeps stepping."""
        return bool(self._jobs)

    def touch(self, keys: Collection[Any], req_context: Any = None) -> None:
        """Say that chunks were used."""
        self.guard.touch([bytes(key) for key in keys])

    def on_new_request(self, req_context: Any) -> Any:
        """No preference; the first one shows what the hashes began with."""
        if not self._has_begun:
            self._has_begun = True
            if has_random_hash_root():
                _log.error(
                    "VTIER-1: the block hashes of this server begin at random, so nothing that is "
                    "stored would be found after a restart: the tier stays out of use. Start it "
                    "with: export PYTHONHASHSEED=0"
                )
                self.guard.close()
        return request_preference()

    def drain_jobs(self) -> None:
        """Block until every job has ended; each ends at its deadline at last."""
        while not self.guard.drain(1.0):
            pass

    def shutdown(self) -> None:
        """Close the store and let go of the host's memory."""
        self.guard.close()
        self._memory.release()  # else vLLM cannot close its region

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
            self.guard.put(job.job_id, (), ())  # reported as the job that it is


class KVViewTieringSpec(_Spec):
    """vLLM's own spec; naming this module brings the type ``kvview`` in."""

    _telling: Any = None

    def get_manager(self) -> Any:
        """VLLM's own manager, with the events of its tiers in every release."""
        made = super().get_manager()
        if made is not self._telling:
            self._telling = self._manager = with_events_of_tiers(made, KVViewTier)
        return self._telling


with suppress(ValueError):  # the module was loaded again
    require_tier_class("SecondaryTierFactory").register_tier("kvview", __name__, "KVViewTier")
