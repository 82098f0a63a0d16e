"""The differences between vLLM releases, and the seams that record them.

1. A difference **must** be probed on the signatures and attributes of the given object, so that a
   fork, or a build with a wrong version string, is still supported.
2. A difference that the table lists for the version **must** be found. So a release that renames a
   member is refused, and is never mistaken for an older release. A defect need not be found,
   because a build of that release may have its fix.
3. No module outside this package **may** decide by a release, or test which members an
   object of vLLM has; :mod:`.calls` makes the calls that differ between releases.

The table of differences is ``differences.toml``. Each row is a field of a seam, which is true if
the difference is found. The documentation and ``kvview doctor`` use the same rows.

Source: ``vllm/v1/core/``, ``vllm/v1/kv_offload/`` and
``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` of every tested release.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from kvview_vllm.releases.compat.shapes import has_member
from kvview_vllm.releases.compat.versions import (
    OLDEST_TESTED,
    is_between,
    refusal,
    require_usable,
    vllm,
)


@dataclass(frozen=True)
class Difference:
    """One row of the table.

    Args:
        name: Name of the field of the seam that records the difference.
        seam: The surface of vLLM that the difference belongs to.
        description: The behaviour of a release that has the difference and, if needed, of a release
            that does not.
        source: The upstream pull request, or the path of the source file.
        releases: ``SINCE..UNTIL``; an empty end is the oldest or the newest tested release.
        members: The members of vLLM by which the difference is recognised; empty if :data:`_PROBES`
            has the difference.
        is_defect: Whether the difference is a defect of vLLM.
    """

    name: str
    seam: str
    description: str
    source: str
    releases: str
    members: tuple[str, ...] = ()
    is_defect: bool = False

    @property
    def first_release(self) -> str:
        """First release that has the difference."""
        return self.releases.partition("..")[0] or OLDEST_TESTED

    @property
    def last_release(self) -> str | None:
        """Last release that has the difference; None if the newest tested release has it."""
        return self.releases.partition("..")[2] or None

    def is_in(self, version: str) -> bool:
        """Whether the table lists the difference for a version; False for an unknown version."""
        return is_between(version, self.first_release, self.last_release)

    def is_found_on(self, owner: Any) -> bool:
        """Whether an object of the seam has the difference."""
        if self.name in _PROBES:
            return _PROBES[self.name](owner)
        return all(has_member(member, owner) for member in self.members)


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("differences.toml").read_text(encoding="utf-8"))


def differences(seam: str | None = None) -> tuple[Difference, ...]:
    """Return the rows of one seam, or of all seams if the seam is None."""
    return tuple(
        Difference(name, each, **{"source": rows["source"], **row})
        for each, rows in _table().items()
        if seam in (None, each)
        for name, row in rows.items()
        if name != "source"
    )


@dataclass(frozen=True)
class Seam:
    """The differences that were found on one surface of vLLM.

    Args:
        version: Version string of that vLLM.
    """

    seam: ClassVar[str]
    version: str

    @classmethod
    def differences(cls) -> tuple[Difference, ...]:
        """The fields of this seam, as rows of the table."""
        return differences(cls.seam)

    @classmethod
    def found_on(cls, owner: Any) -> Self:
        """Find the differences of an object of a known shape.

        Raises:
            UnsupportedEngineError: The release may not be used, or a difference that the table
                lists for the release was not found.
            VLLMNotInstalledError: No vLLM can be imported.
        """
        version = require_usable(cls.seam)
        found = {each.name: each.is_found_on(owner) for each in cls.differences()}
        for each in cls.differences():
            if each.is_in(version) and not (found[each.name] or each.is_defect):
                raise refusal(
                    cls.seam,
                    f"nothing of '{each.description}' ({each.name})",
                    f"the same as in every release from {each.first_release} on ({each.source})",
                )
        return cls(version, **found)


# --- probes that are more than a member ---


def takes(touch: Callable[[Any], object], blocks: object) -> bool:
    """Whether ``touch`` accepts this form of an empty group of blocks."""
    try:
        touch(blocks)
    except (AttributeError, TypeError):
        return False
    return True


def _scheduler_names_pool_hook() -> bool:
    code = inspect.unwrap(vllm("v1.core.sched.scheduler").Scheduler.__init__).__code__
    return "bind_gpu_block_pool" in (*code.co_consts, *code.co_names)


def _names_by_last_hash() -> bool:
    convert = getattr(vllm("v1.core.kv_cache_utils"), "BlockHashListWithBlockSize", None)
    return convert is not None and convert([b"a", b"b"], 1, 2)[0] == b"b"


_PROBES: Mapping[str, Callable[[Any], bool]] = {
    # The flat form reads the reference count of the inner list, and fails.
    "touch_nested": lambda pool: takes(pool.touch, ([],)),
    "optional_pool_hook": lambda base: (
        hasattr(base, "bind_kv_cache_manager") or _scheduler_names_pool_hook()
    ),
    "named_by_last_hash": lambda _: _names_by_last_hash(),
}


# --- the seams ---


@dataclass(frozen=True)
class PoolSeam(Seam):
    """``vllm.v1.core.block_pool.BlockPool``."""

    seam: ClassVar[str] = "pool"

    touch_nested: bool
    free_prepend: bool
    unhashed_first: bool
    several_hashes: bool

    @property
    def joins_in_front(self) -> bool:
        """Whether a freed block may become the next victim."""
        return self.unhashed_first or self.free_prepend


@dataclass(frozen=True)
class BindingSeam(Seam):
    """The way in which ``KVConnectorBase_V1`` receives the pool."""

    seam: ClassVar[str] = "binding"

    optional_pool_hook: bool
    pool_hook: bool
    manager_hook: bool


@dataclass(frozen=True)
class GeometrySeam(Seam):
    """Block sizes and the specs of KV-cache groups, ``vllm/v1/kv_cache_interface.py``."""

    seam: ClassVar[str] = "geometry"

    prefill_context_parallel: bool
    mamba_cache_modes: bool
    block_sizes_resolved: bool
    named_by_last_hash: bool
    retained_tokens: bool


@dataclass(frozen=True)
class ConnectorSeam(Seam):
    """``KVConnectorBase_V1``, and the messages of the scheduler and the workers."""

    seam: ClassVar[str] = "connector"

    cache_config_argument: bool
    several_groups: bool
    failed_blocks: bool
    unread_prefixes: bool
    preempted_ids: bool
    connector_reset: bool
    null_window_blocks: bool
    reserved_blocks: bool
    hits_come_first: bool
    uncounted_window_blocks: bool
    worker_metadata: bool
    asked_for_stats: bool
    stale_outputs: bool
    loads_after_launch: bool
    failed_requests: bool
