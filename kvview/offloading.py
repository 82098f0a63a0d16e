"""The offloading contract: the keys that a tier holds, their pages, and their eviction.

The manager belongs to the scheduler half. The manager moves no bytes. The manager names pages of
its medium, protects them while they are read or written, and evicts keys.

Laws: OFF-1 to OFF-12 in ``kvview/laws.toml``.

Source: vLLM PR #36644; ``vllm/v1/kv_offload/base.py`` (0.33.0).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable

from kvview.events import OffloadingEvent
from kvview.keys import OffloadKey
from kvview.transfer import LoadStoreSpec


class LookupResult(Enum):
    """The result of :meth:`OffloadingManager.lookup`."""

    MISS = auto()
    """The key is not held."""
    HIT = auto()
    """The key is held and can be loaded now."""
    HIT_PENDING = auto()
    """The key is being stored; call again."""
    RETRY = auto()
    """The result is unknown now, because a slow tier is looking the key up; call again."""


@dataclass(frozen=True)
class ReqContext:
    """The request on whose behalf a call is made.

    Args:
        req_id: Id of the request; empty if the call belongs to no request.
        kv_transfer_params: Parameters that the client sent with the request, or None.
    """

    req_id: str = ""
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(slots=True)
class PrepareStoreOutput:
    """The keys to copy, their pages, and the keys that were evicted for them.

    Args:
        keys_to_store: New keys, in the order given; keys already held or below
            the store threshold are skipped.
        store_spec: A page for each of ``keys_to_store``, in the same order.
        evicted_keys: Keys evicted to make room, in the order of their eviction.
    """

    keys_to_store: Sequence[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: Sequence[OffloadKey]


@runtime_checkable
class OffloadingManager(Protocol):
    """Tracks the keys that one tier holds, with calls to look up, prepare and complete.

    Examples:
        Store two keys, and load one of them for a later request:

        >>> output = manager.prepare_store(keys[:2], ctx)
        >>> manager.complete_store(output.keys_to_store, ctx)  # after the copy to output.store_spec
        >>> manager.lookup(keys[0], ctx).name
        'HIT'
        >>> source = manager.prepare_load(keys[:1], ctx)  # not evicted during the copy
        >>> manager.complete_load(keys[:1], ctx)
    """

    def lookup(self, key: OffloadKey, ctx: ReqContext, /) -> LookupResult:
        """Whether a key is held and loadable now (OFF-6); a lookup is not a use of the key."""
        ...

    def prepare_load(self, keys: Collection[OffloadKey], ctx: ReqContext, /) -> LoadStoreSpec:
        """Protect keys from eviction until ``complete_load``, and name their pages.

        Args:
            keys: Keys for which ``lookup`` returns HIT; a key named twice is loaded twice.

        Returns:
            One page for each key, in the order given.

        Raises:
            KeyNotLoadableError: A key is not held or not ready; nothing was protected.
        """
        ...

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext, /) -> None:
        """End a load that ``prepare_load`` of these keys started, whether it succeeded or failed.

        Raises:
            TransferNotInFlightError: A key has no load in flight (OFF-9).
        """
        ...

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext, /) -> None:
        """Record that a request used these keys; the first one becomes the most recent.

        Keys are passed in prefix order, so that a chain is evicted from its tail, because its head
        serves more requests. Keys that are not held are ignored. A touch of a key that is still
        being stored does not count as a further use.
        """
        ...

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext, /
    ) -> PrepareStoreOutput | None:
        """Make room for new keys and protect them until ``complete_store`` (OFF-3).

        Returns:
            The keys to store and their pages, or None if no room can be made. After None, the
            order, the history and the counts of keys are unchanged.
        """
        ...

    def complete_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext, /, success: bool = True
    ) -> None:
        """End the stores of these keys: they are loadable from now on, or gone (OFF-4).

        A store may succeed in part, so the keys of one ``prepare_store`` may be completed in
        several calls, some with success and some without.

        Raises:
            TransferNotInFlightError: A key is not being stored; this includes a key that is already
                held (OFF-9).
        """
        ...

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, in order; empty if events are off."""
        ...

    def reset(self) -> None:
        """Forget every key (OFF-8, EVENT-5)."""
        ...

    def shutdown(self) -> None:
        """Release all resources of the manager; may be called twice."""
        ...
