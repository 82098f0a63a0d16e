"""Random draws, and the same calls of the offloading contract on a manager and its model."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from kvview.keys import OffloadKey, make_offload_key
from kvview.offloading import PrepareStoreOutput, ReqContext
from kvview.testing.harness import Capability as C
from kvview.testing.offloading.model import ManagerModel
from kvview.testing.offloading.orders import AnyOrder, ARCOrder, LRUOrder
from kvview.testing.search import Plan, Player

_SIZES = (1, 2, 3, 5, 5, 8, 8, 8, 12, 12, 12, 20, 40, 300)
_SMALLEST = 2
_GROUPS = (0, 1, 258)


class ManagerMoves(Player):
    """Makes the same calls on a manager and on its model."""

    contract = "offloading"
    subject_name = "manager"
    first_moves = ("warm", "load")

    @override
    def start(self) -> None:
        self.context = ReqContext("r")
        self.give_name(self.context, "ctx", "ctx = ReqContext('r')")
        if self.can(C.SIZED):
            size = self.rng.choice(_SIZES)
            size = _SMALLEST if self.plan.is_small else size
            self.use(self.call(self.harness, "sized", size), "manager")
        threshold = self.rng.choice((1, 1, 1, 1, 2, 3))
        if threshold > 1 and self.can(C.STORE_THRESHOLD):
            self.use(self.call(self.harness, "with_threshold", threshold), "manager")
        else:
            threshold = 1
        self.capacity: int = self.harness.capacity
        self.is_large = self.capacity > 50
        make_order: Any = LRUOrder if self.can(C.LRU) else AnyOrder
        if self.can(C.ARC):
            make_order = partial(ARCOrder, self.capacity)
        self.model = ManagerModel(
            self.capacity, make_order, threshold=threshold, has_pages=self.can(C.PAGES)
        )
        self.num_keys = 3 * self.capacity + 4
        self.num_fresh = 0
        self.recent: deque[OffloadKey] = deque(maxlen=max(16, self.capacity))
        """Keys that recent calls named."""
        self.evicted: deque[OffloadKey] = deque(maxlen=2 * self.capacity)
        self.results: deque[tuple[Any, str]] = deque(maxlen=6)
        """Results of recent calls, with a copy of their content at the time of the call."""

    @override
    def draw_most(self) -> int:
        return self.rng.choice((1, 3, 3, 6, self.capacity, self.capacity + 2))

    @override
    def num_moves(self, longest: int) -> int:
        return longest if not self.is_large else longest // 2

    @override
    def draw(self, longest: int) -> Plan:
        plan = super().draw(longest)
        last = [("end_all", self.rng.getrandbits(32))]  # this shows the whole order of eviction
        return replace(plan, moves=[*plan.moves, *last])

    # --- draws ---

    def key(self, number: int) -> OffloadKey:
        """Return a key of the run; neighbouring numbers share a block hash in several groups."""
        return make_offload_key(b"k%d" % (number // len(_GROUPS)), _GROUPS[number % len(_GROUPS)])

    def fresh(self, number: int) -> list[OffloadKey]:
        """Return keys that no call has named."""
        self.num_fresh += number
        return [make_offload_key(b"new%d" % (self.num_fresh - at), 0) for at in range(number)]

    def wanted(self, number: int) -> list[OffloadKey]:
        """Return new keys that are stored at their next offer, because it reaches the threshold."""
        keys = self.fresh(number)
        for _ in range(self.model.threshold - 1):
            self.offer(keys)
        return keys

    def some(self, among: Iterable[OffloadKey], *, repeat: bool = False) -> list[OffloadKey]:
        """Draw at least one of some keys; empty if there are no keys."""
        return self.named(self.some_of(sorted(among), repeat=repeat))

    def any_keys(self) -> list[OffloadKey]:
        """Draw keys: a part of a chain, keys from anywhere, new keys, or recently named keys."""
        number = self.rng.randint(1, self.most)
        start, style = self.rng.randrange(self.num_keys), self.rng.random()
        if style < 0.3:
            return self.named([self.key((start + at) % self.num_keys) for at in range(number)])
        if style < 0.5:
            numbers = [self.rng.randrange(self.num_keys) for _ in range(number)]
            return self.named([self.key(one) for one in numbers])
        if style < 0.75 or not self.recent:
            return self.named(self.fresh(number))
        return self.named(self.rng.choices(self.recent, k=number))

    def named(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Remember keys as recently named, and return them."""
        self.recent.extend(keys)
        return keys

    def collection(self, keys: Sequence[OffloadKey]) -> Collection[OffloadKey]:
        """Return the keys as a list, sometimes as a tuple."""
        return tuple(keys) if self.rng.random() < 0.1 else list(keys)

    def mixed(self, some: list[OffloadKey], others: list[OffloadKey]) -> list[OffloadKey]:
        """Return the keys of both lists in a random order."""
        return self.rng.sample(some + others, len(some) + len(others))

    # --- calls on both ---

    def offer(self, keys: Sequence[OffloadKey]) -> bool:
        """Call ``prepare_store``; returns whether the manager accepted it."""
        lacking = self.model.num_lacking(keys)[1]
        may_go = self.model.may_go(keys)
        offered = self.collection(keys)
        output = self.call(self.subject, "prepare_store", offered, self.context)
        if output is None:
            what = f"prepare_store makes room: {len(may_go)} keys may go, {lacking} lack room"
            self.true(
                lacking > len(may_go), what, None, "an output", "OFF-3" if lacking else "OFF-5"
            )
            self.model.why |= dict.fromkeys(keys, "OFF-3")
            return False
        is_output = isinstance(output, PrepareStoreOutput)
        self.true(is_output, "prepare_store returns an output", output, "one", "OFF-3")
        taken, evicted = list(output.keys_to_store), list(output.evicted_keys)
        pages = list(output.store_spec.block_ids) if self.can(C.PAGES) else []
        self.results.append((output, repr(output)))
        self.derive()
        self.judge(self.model.store(keys, taken, evicted, pages), output)
        self.evicted.extend(self.named(evicted))
        return True

    def end_stores(self, keys: Sequence[OffloadKey], *, success: bool) -> None:
        """Call ``complete_store``, for a success sometimes with the default argument."""
        if not keys:
            return
        more = {} if success and self.rng.random() < 0.3 else {"success": success}
        self.call(self.subject, "complete_store", self.collection(keys), self.context, **more)
        self.model.end_stores(keys, success=success)

    def begin_load(self, keys: Sequence[OffloadKey]) -> None:
        """Call ``prepare_load``."""
        if not keys:
            return
        spec = self.call(self.subject, "prepare_load", self.collection(keys), self.context)
        self.model.load(keys)
        if self.can(C.PAGES):
            pages = list(spec.block_ids)
            self.results.append((spec, repr(spec)))
            self.derive()
            expected = [self.model.pages[key] for key in keys]
            self.equal(pages, expected, "a load names the page of each key, in order", "OFF-2")

    def end_loads(self, keys: Sequence[OffloadKey]) -> None:
        """Call ``complete_load``."""
        if not keys:
            return
        self.call(self.subject, "complete_load", self.collection(keys), self.context)
        self.model.end_loads(keys)

    def use_one(self, key: OffloadKey) -> None:
        """Let a request use a key, by a touch or by a completed store."""
        self.named([key])
        if key in self.model.stored:
            self.call(self.subject, "touch", [key], self.context)
            self.model.touch([key])
        elif self.offer([key]) and key in self.model.storing:
            self.end_stores([key], success=True)
