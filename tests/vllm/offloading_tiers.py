"""The offloading managers of the vLLM release that can be imported, as harnesses of the kit."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from kvview import ConfigError, OffloadKey
from kvview.testing import Capability, ManagerPlayer
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


_policy = getattr(make_manager(), "_policy", None)
TRANSFERS_ARE_USES = "Load job completion" in str(type(_policy).__doc__)
"""Whether LRU counts the end of a transfer as a use, as its docstring states in 0.24 to 0.30."""


class BareTier:
    """The bare manager, translated to kvview's calls."""

    policy = "lru"
    policies = known_policies()

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.manager: Any = self.make_tier()

    def make_tier(self) -> Any:
        return TranslatedManager(make_manager(self.policy, self.capacity))

    def sized(self, capacity: int) -> Any:
        return type(self)(capacity)

    @property
    def capabilities(self) -> frozenset[Capability]:
        has = {Capability.EVENTS, Capability.PAGES, Capability.POLICIES, Capability.SIZED}
        has.add(Capability[self.policy.upper()])
        if SEAM.cache_reset:
            has.add(Capability.RESETS)
        return frozenset(has)

    def with_policy(self, name: str) -> Any:
        return make_manager(name)


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


class BareARCTier(BareTier):
    policy = "arc"


class ConnectorPlayer(ManagerPlayer):
    """Makes the calls of vLLM's OffloadingConnector alone.

    It names a key once, completes the transfers that it started, and never resets.
    """

    be_refused = finish_twice_in_one_call = reset = use_keys_alone = None  # type: ignore[assignment]

    @override
    def any_keys(self) -> list[OffloadKey]:
        return list(dict.fromkeys(super().any_keys()))

    @override
    def some(self, among: Iterable[OffloadKey], *, repeat: bool = False) -> list[OffloadKey]:
        return list(dict.fromkeys(super().some(among)))

    @override
    def mixed(self, some: list[OffloadKey], others: list[OffloadKey]) -> list[OffloadKey]:
        return list(dict.fromkeys(super().mixed(some, others)))
