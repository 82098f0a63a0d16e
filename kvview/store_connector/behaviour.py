"""The choices of the author and the user of a :class:`~kvview.StoreConnector`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvview.store_connector.page_policy import Policy
from kvview.tier import GuardedTier

Mode = Literal["eager", "finish", "victim", "exclusive"]


@dataclass(frozen=True)
class Behaviour:
    """The choices of one connector.

    Args:
        mode: The moment at which blocks are stored.
        prefetch: Whether pages are copied from the store to memory when their tokens are promised.
        memory: Budget of memory; 0 for no pages in memory.
        is_in_bytes: Whether the budget of memory is in bytes, not blocks.
        store: Budget of the store in blocks; 0 for no store.
        can_delete: Whether pages are deleted from the store.
        policy: Makes the policy of a level; called without arguments.
        max_bytes: Returns the maximum of bytes that a page of a given size takes after the
            transform.
        shared: Store for lookups of pages that other runs may have stored; None if the store is not
            shared.
        events: Whether events are recorded.
    """

    mode: Mode
    prefetch: bool
    memory: int
    is_in_bytes: bool
    store: int
    can_delete: bool
    policy: Callable[[], Policy]
    max_bytes: Callable[[int], int]
    shared: GuardedTier | None
    events: bool

    @property
    def targets(self) -> tuple[bool, bool]:
        """Whether a block is stored in memory, and in the store."""
        writes_through = self.mode in ("eager", "finish")
        in_memory = self.memory > 0 or not self.store
        return in_memory, self.store > 0 and (writes_through or not in_memory)
