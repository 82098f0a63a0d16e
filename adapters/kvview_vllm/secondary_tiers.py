r"""A secondary tier of vLLM with the interface of a store, so that the kit can check it.

    kvview check kvview_vllm.secondary_tiers:SecondaryTierStore --option type=fs \
      --option root_dir={tmp}

1. The tier receives the arguments that vLLM would pass: a spec, rows of the host's memory, and keys
   made of a hash and a group. All rows of a tier have one size, so the store makes one tier for
   each size of page, and splits a job by size. A row contains the bytes of a page and, at its end,
   their number.
2. No result of the tier is cached: each lookup queries the tier again.

This module needs vLLM 0.26.0 or later, whose specs can be made without a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import sleep
from typing import Any

from kvview import ConfigError
from kvview.tier import Namespace, Polled
from kvview_vllm.releases.build.tier_specs import make_tiering_spec
from kvview_vllm.releases.compat.tiers import (
    lookup_answers,
    make_tier_job,
    succeeded_keys,
    tier_seam,
)
from kvview_vllm.releases.compat.versions import vllm

_ROWS = 640  # a job of the kit has up to 600 keys
_MOST_BYTES = 1 << 28
_SECTOR = 4096
_LENGTH_BYTES = 8
_BETWEEN_POLLS = 0.0003  # seconds
_MOST_POLLS = 4000
_BASE = "v1.kv_offload.base"


@dataclass(slots=True, eq=False)
class _Tier:
    """The tier for pages of one size."""

    manager: Any
    tier: Any
    memory: memoryview
    row_bytes: int
    free: list[int]


@dataclass(slots=True, eq=False)
class _Job:
    flags: list[bool]
    parts_left: int = 0


@dataclass(slots=True, eq=False)
class _Part:
    job: int
    places: list[int]
    keys: list[bytes]
    pages: list[memoryview]
    is_get: bool
    tier: _Tier
    rows: list[int] = field(default_factory=list)


class SecondaryTierStore(Polled):
    """A :class:`~kvview.tier.TierStore` over a tier that comes with vLLM.

    Args:
        namespace: Namespace of the store; vLLM passes its model, dtype, ranks and block size to a
            tier.
        type: Type of the tier in ``secondary_tiers``; ``"fs"`` or ``"example"``.
        options: Options of the tier.

    Raises:
        ConfigError: The installed vLLM is older than 0.26.0.
    """

    verifies = True  # vLLM does not verify pages

    def __init__(self, namespace: Namespace, type: str = "fs", **options: Any) -> None:
        if not tier_seam().config_objects:
            raise ConfigError("tiers of vLLM can be checked from 0.26.0 on; use a newer vLLM")
        super().__init__(namespace)
        self._entry = {"type": type, **options}
        self._tiers: dict[int, _Tier] = {}
        self._jobs: dict[int, _Job] = {}
        self._parts: dict[int, _Part] = {}
        self._numbers = itertools.count()
        self._answers = {answer: flag for flag, answer in lookup_answers().items()}
        self._requests = 0
        self._tier(2 * _SECTOR)  # so that lookups before the first put have a tier

    def lookup(self, keys: Sequence[bytes], /) -> list[bool | None]:
        """Merge the results of the tiers of all sizes: True if one of them has the key."""
        if self._is_closed:
            return [False] * len(keys)
        flags: list[bool | None] = [False] * len(keys)
        for tier in self._tiers.values():
            self._requests += 1
            context = vllm(_BASE).ReqContext(str(self._requests))
            tier.tier.on_new_request(context)
            for _ in range(_MOST_POLLS):
                found = [self._answers[tier.tier.lookup(_key(key), context)] for key in keys]
                self._end_step(tier)
                if None not in found:
                    break
                sleep(_BETWEEN_POLLS)
            tier.tier.on_request_finished(context)
            flags = [one or other for one, other in zip(flags, found, strict=True)]
        return flags

    def begin(
        self, job: int, keys: Sequence[bytes], pages: Sequence[memoryview], *, is_get: bool
    ) -> None:
        """Submit a job to the tier of each size."""
        places: dict[int, list[int]] = {}
        for place, page in enumerate(pages):
            size = -(-(len(page) + _LENGTH_BYTES) // _SECTOR) * _SECTOR
            places.setdefault(size, []).append(place)
        self._jobs[job] = _Job([False] * len(keys), len(places))
        for size, found in places.items():
            chosen = [keys[n] for n in found], [pages[n] for n in found]
            self._submit(_Part(job, found, *chosen, is_get, self._tier(size)))

    def collect(self) -> None:
        """Return the ended jobs of all tiers."""
        for tier in self._tiers.values():
            for result in tier.tier.get_finished_jobs():
                self._finish(self._parts.pop(result.job_id), result)
            self._end_step(tier)

    def end(self) -> None:
        """Shut the tiers down."""
        for tier in self._tiers.values():
            tier.tier.drain_jobs()
        self.collect()
        for tier in self._tiers.values():
            tier.memory.release()
            tier.manager.shutdown()

    def _submit(self, part: _Part) -> None:
        tier = part.tier
        while len(tier.free) < len(part.keys):
            self.collect()
        part.rows = [tier.free.pop() for _ in part.keys]
        for row, page in zip(part.rows, part.pages, strict=True):
            end = (row + 1) * tier.row_bytes
            if part.is_get:
                tier.memory[end - _LENGTH_BYTES : end] = bytes(_LENGTH_BYTES)
            else:
                tier.memory[end - tier.row_bytes : end] = _filled(page, tier.row_bytes)
        number = next(self._numbers)
        self._parts[number] = part
        submit = tier.tier.submit_load if part.is_get else tier.tier.submit_store
        submit(make_tier_job(number, [_key(key) for key in part.keys], part.rows, part.is_get))

    def _finish(self, part: _Part, result: Any) -> None:
        good = succeeded_keys(result)
        tier, job = part.tier, self._jobs[part.job]
        for place, key, page, row in zip(
            part.places, part.keys, part.pages, part.rows, strict=True
        ):
            flag = bool(result.success) or _key(key) in good
            if flag and part.is_get:
                content = tier.memory[row * tier.row_bytes : (row + 1) * tier.row_bytes]
                flag = int.from_bytes(content[-_LENGTH_BYTES:], "big") == len(page)
                page[:] = content[: len(page)]
            job.flags[place] = flag
        tier.free += part.rows
        job.parts_left -= 1
        if not job.parts_left:
            del self._jobs[part.job]
            self.report(part.job, job.flags)

    @staticmethod
    def _end_step(tier: _Tier) -> None:
        context = vllm(_BASE).ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        tier.tier.on_schedule_end(context)

    def _tier(self, page_bytes: int) -> _Tier:
        if page_bytes not in self._tiers:
            manager = self._manager(page_bytes)
            view = manager.primary_tier.get_kv_memoryview()
            rows, stride = view.shape[0], view.strides[0]
            tier = manager.secondary_tiers[0]
            self._tiers[page_bytes] = _Tier(manager, tier, view.cast("B"), stride, [*range(rows)])
        return self._tiers[page_bytes]

    def _manager(self, page_bytes: int) -> Any:
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": min(page_bytes * _ROWS, _MOST_BYTES),
            "secondary_tiers": [self._entry],
        }
        return make_tiering_spec(extra, self.namespace, page_bytes).get_manager()


def _filled(page: memoryview, num_bytes: int) -> bytes:
    tail = len(page).to_bytes(_LENGTH_BYTES, "big")
    return bytes(page) + bytes(num_bytes - len(page) - len(tail)) + tail


def _key(key: bytes) -> Any:
    return vllm(_BASE).make_offload_key(key, 0)
