"""The offloading managers of the vLLM release that can be imported, as suites of the kit."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from typing_extensions import override

from kvview import ConfigError
from kvview.testing import OffloadingConformance
from kvview.testing.offloading.machine import KeyLists, Keys, OffloadingMachine
from kvview_vllm.offloading import TranslatedManager, make_cpu_manager
from kvview_vllm.releases import probe_offloading

CAPACITY = 8
POLICIES = ("lru", "arc")


def make_manager(policy: str = "lru", capacity: int = CAPACITY, **options: Any) -> Any:
    """Make a manager of the release, with events."""
    return make_cpu_manager(capacity, policy, enable_events=True, **options)


SEAM = probe_offloading(make_manager())


def known_policies() -> tuple[str, ...]:
    """Return the eviction policies of this release; 0.11.0 has no ARC."""
    try:
        make_manager("arc")
    except ConfigError:
        return POLICIES[:1]
    return POLICIES


_ABSENT = {"store_threshold", "tier_counts", "leading_hits"}
_ABSENT |= set() if SEAM.cache_reset else {"resets"}
_policy = getattr(make_manager(), "_policy", None)
TRANSFERS_ARE_USES = "Load job completion" in str(type(_policy).__doc__)
"""Whether LRU counts the end of a transfer as a use, as its docstring states in 0.24 to 0.30."""


class BareTier(OffloadingConformance):
    """The bare LRU manager, translated to kvview's calls."""

    lacks: ClassVar[Collection[str]] = _ABSENT | {"arc"}
    policy = "lru"
    policies = known_policies()

    @override
    def make(self, capacity: int) -> Any:
        return TranslatedManager(make_manager(self.policy, capacity))

    def with_policy(self, name: str) -> Any:
        return make_manager(name)


class BareARCTier(BareTier):
    lacks = _ABSENT | {"lru"}
    policy = "arc"


class KeysSpec:
    """A spec for a worker of files, such as llm-d's: keys, and no pages."""

    def __init__(self, keys: Iterable[Any]) -> None:
        self.keys = list(keys)


def make_keyed_manager(capacity: int = CAPACITY) -> Any:
    """Make the release's manager, changed so that its specs name blocks by key."""
    manager = make_manager(capacity=capacity)
    kind = type(manager)

    class Keyed(kind):  # type: ignore[misc,valid-type]
        def prepare_load(self, *args: Any) -> Any:
            keys = list(args[0])
            super().prepare_load(keys, *args[1:])
            return KeysSpec(keys)

        def prepare_store(self, *args: Any) -> Any:
            output = super().prepare_store(*args)
            if output is not None:
                by_hash = hasattr(output, "block_hashes_to_store")
                stored = output.block_hashes_to_store if by_hash else output.keys_to_store
                output.store_spec = KeysSpec(stored)
            return output

    # The adapter reads signatures.
    for name in ("prepare_load", "prepare_store"):
        getattr(Keyed, name).__signature__ = inspect.signature(getattr(kind, name))
    manager.__class__ = Keyed
    return manager


class ConnectorMachine(OffloadingMachine):
    """Makes the calls of vLLM's OffloadingConnector alone.

    It names a key once, completes the transfers that it started, and never resets.
    """

    be_refused = finish_twice_in_one_call = reset = None  # type: ignore[assignment]

    @override
    def any_keys(self) -> KeyLists:
        return super().any_keys().map(lambda keys: [*dict.fromkeys(keys)])

    @override
    def begin_load(self, keys: Keys) -> None:
        super().begin_load([*dict.fromkeys(keys)])


class OfConnector(BareTier):
    machine = ConnectorMachine


class ARCOfConnector(BareARCTier):
    machine = ConnectorMachine
