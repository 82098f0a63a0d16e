"""The operations of the offloading contract, which run on a manager and on its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvview.errors import ConfigError, KeyNotLoadableError, TransferNotInFlightError
from kvview.keys import OffloadKey
from kvview.offloading import SupportsMedia
from kvview.testing.harness import Capability as C
from kvview.testing.offloading.moves import ManagerMoves
from kvview.testing.search import Label, check_by_search, observable, operation

_MOST_LOOKUPS = 150
_MOST_USES = 60


@check_by_search
class ManagerPlayer(ManagerMoves):
    """Plays the operations of an engine on one manager, and compares all results."""

    labels: ClassVar[Mapping[str, Label]] = {
        "OFF-1": Label("A key that is being loaded or stored is not evicted."),
        "OFF-2": Label("A load names the pages of its keys, and is refused unless all are ready."),
        "OFF-3": Label("A store makes room for all its new keys, or changes nothing."),
        "OFF-4": Label("A failed store leaves no trace."),
        "OFF-5": Label("The whole capacity can be used, and no more."),
        "OFF-6": Label("A key is a hit exactly while it can be loaded."),
        "OFF-7": Label(
            "An unknown policy is refused with a list of the known ones.", (C.POLICIES,)
        ),
        "OFF-8": Label("A reset forgets every key, and transfers in flight continue."),
        "OFF-9": Label("Each transfer is completed once; any other completion is refused."),
        "OFF-10": Label("The keys whose last use is longest ago are evicted first.", (C.LRU,)),
        "OFF-11": Label("Keys are evicted as ARC was published.", (C.ARC,)),
        "OFF-12": Label("A key is stored at its N-th offer.", (C.STORE_THRESHOLD,)),
        "EVENT-1": Label("Stores and removals of a key alternate.", (C.EVENTS,)),
        "EVENT-2": Label("The events advertise the keys that can be loaded.", (C.EVENTS,)),
        "EVENT-3": Label("Each event comes once, in the order of the changes.", (C.EVENTS,)),
        "EVENT-4": Label("A failed store advertises nothing.", (C.EVENTS,)),
        "EVENT-5": Label("A reset removes everything that was advertised.", (C.EVENTS, C.RESETS)),
    }

    # --- operations ---

    @operation("OFF-3", weight=5)
    def store(self) -> None:
        """Offer new, held and repeated keys, and keys in flight."""
        model = self.model
        among = self.rng.choice(((), model.stored, model.storing, model.late, self.evicted))
        self.offer(self.mixed(self.any_keys(), self.some(among)[:2]))

    @operation("OFF-6", weight=5)
    def finish_store(self) -> None:
        """Complete some stores, of one call or of several calls, as successes."""
        self.end_stores(self.some(self.model.storing), success=True)

    @operation("OFF-4", weight=2)
    def fail_store(self) -> None:
        """Complete some stores as failures."""
        self.end_stores(self.some(self.model.storing), success=False)

    @operation("OFF-2", weight=4)
    def load(self) -> None:
        """Load some keys, sometimes one of them twice."""
        self.begin_load(self.some(self.model.stored, repeat=self.rng.random() < 0.3))

    @operation("OFF-1", weight=4)
    def finish_load(self) -> None:
        """Complete some loads, of one call or of several calls."""
        self.end_loads(self.some((self.model.loads + self.model.late_loads).elements()))

    @operation("OFF-6", weight=4)
    def touch(self) -> None:
        """Touch keys that are held or not held, sometimes one of them twice."""
        among = self.rng.choice((None, self.model.stored, self.model.storing))
        keys = self.any_keys() if among is None else self.some(among)
        if keys:
            keys += self.rng.choices(keys, k=self.rng.choice((0, 0, 2)))
            self.call(self.subject, "touch", self.collection(keys), self.context)
            self.model.touch(keys)

    @operation("OFF-3", weight=2)
    def use_keys(self) -> None:
        """Use new, held, and recently evicted keys, one after another."""
        weights = [self.rng.choice((0.1, 1, 3)) for _ in range(4)]
        most = min(5 * self.capacity, self.plan.most or _MOST_USES)
        for _ in range(self.rng.randint(1, most)):
            held = sorted(self.model.stored)
            evicted = [key for key in self.evicted if key not in self.model.stored]
            among = self.rng.choices(([], held, evicted, evicted[-3:]), weights)[0]
            self.use_one(self.rng.choice(among or self.wanted(1)))

    @operation("OFF-3", C.RESETS)
    def use_keys_alone(self) -> None:
        """Use keys one after another in an empty tier, so that the eviction order is defined."""
        self.end_all()
        self.reset()
        for _ in range(8):
            self.use_keys()
        known = [key for key in self.evicted if key not in self.model.stored]
        self.offer(self.mixed(self.some(known)[:2], self.wanted(self.rng.randint(0, 2))))
        self.use_keys()
        self.end_all()

    @operation("OFF-5")
    def warm(self) -> None:
        """Store and complete new keys, at most as many as fit."""
        keys = self.wanted(self.rng.choice((self.capacity, self.rng.randint(1, self.capacity))))
        size = self.rng.choice((1, self.most))
        for at in range(0, min(len(keys), self.model.num_free()), size):
            if self.offer(keys[at : at + size]):
                self.end_stores(self.named(sorted(self.model.storing)), success=True)

    @operation("OFF-1", weight=1.5)
    def squeeze(self) -> None:
        """Load all keys except a few, store new keys in the remaining room, and store again."""
        idle = sorted(self.model.may_go([]))
        left = self.rng.choice((0, 1, 1, 2, self.most))
        busy = self.rng.sample(idle, max(0, len(idle) - left))
        self.begin_load(busy)
        keys = self.wanted(self.rng.choice((1, 1, left + 1))) + self.fresh(self.model.threshold - 1)
        is_done = self.offer(self.named(keys) + self.some(busy)[:2])
        if self.rng.random() < 0.8:
            self.end_loads(busy)
        if not is_done:
            self.offer(keys)

    @operation("OFF-5")
    def end_all(self) -> None:
        """Complete all transfers, and replace every key."""
        self.end_stores(sorted(self.model.late_stores), success=self.rng.random() < 0.5)
        self.end_stores(sorted(self.model.storing), success=self.rng.random() < 0.8)
        self.end_loads(sorted((self.model.loads + self.model.late_loads).elements()))
        if self.rng.random() < 0.7:
            self.offer(self.wanted(self.capacity + self.rng.choice((0, 0, 0, 1))))
            self.offer(self.wanted(1))

    @operation("OFF-9", weight=2)
    def be_refused(self) -> None:
        """Load keys that are not ready, and complete transfers that are not in flight."""
        model = self.model
        unready = self.some({*self.any_keys(), *model.storing} - model.stored)[:2]
        if unready:
            wrong = self.mixed(self.some(model.stored), unready)
            self.refuse(KeyNotLoadableError, "prepare_load", wrong, "OFF-2")
        others = {*self.any_keys(), *self.some(model.stored), *model.late_loads} - model.storing
        if wrong := self.some(others - model.late_stores)[:2]:
            wrong = self.mixed(self.some(model.storing | model.late_stores), wrong)
            more = {"success": self.rng.random() < 0.5}
            self.refuse(TransferNotInFlightError, "complete_store", wrong, "OFF-9", **more)
        loads = model.loads + model.late_loads
        among = ({*model.storing, *model.late_stores}, loads, model.stored, self.any_keys())
        wrong = self.some(self.rng.choice(among))[:2]
        right = self.rng.choice(([], self.some(loads.elements()), list(loads.elements())))
        wrong = self.mixed(right, wrong)
        if not model.is_loading(wrong):
            self.refuse(TransferNotInFlightError, "complete_load", wrong, "OFF-9")

    def refuse(
        self, error: type[Exception], method: str, keys: list[OffloadKey], law: str, **more: bool
    ) -> None:
        """Call a method with keys that it must refuse."""
        self.refused(error, self.subject, method, keys, self.context, law=law, **more)
        self.model.why |= dict.fromkeys(keys, law)

    @operation("OFF-9")
    def finish_twice_in_one_call(self) -> None:
        """Complete a store that the call names twice; the call must end it once or be refused."""
        keys = self.some(self.model.storing)
        if not keys:
            return
        self.model.why |= dict.fromkeys(keys, "OFF-9")
        success = self.rng.random() < 0.5
        code = f"manager.complete_store({keys + keys[:1]}, ctx, success={success})"
        try:
            self.subject.complete_store(keys + keys[:1], self.context, success=success)
        except TransferNotInFlightError:
            self.line(f"with suppress(TransferNotInFlightError): {code}")
            return
        except Exception as error:
            self.line(code)
            self.fail(
                f"{code} is executed or refused", repr(error), "TransferNotInFlightError at most"
            )
        self.line(code)
        self.model.end_stores(keys, success=success)

    @operation("OFF-8", C.RESETS)
    def reset(self) -> None:
        """Reset the manager, sometimes with new transfers in flight, and offer their keys again."""
        if self.rng.random() < 0.5:
            self.load()
            self.store()
        self.call(self.subject, "reset")
        self.model.reset()
        if self.rng.random() < 0.5:
            self.offer(self.some(self.model.late) + self.any_keys()[:2])

    @operation("OFF-8", C.RESETS, weight=2)
    def finish_late(self) -> None:
        """Complete transfers started before a reset, some of them together with newer transfers."""
        model = self.model
        if stores := self.some(model.late_stores):
            newer = self.some(model.storing) if self.rng.random() < 0.5 else []
            self.end_stores(self.mixed(stores, newer), success=self.rng.random() < 0.5)
        if loads := self.some(model.late_loads.elements()):
            newer = self.some(model.loads.elements()) if self.rng.random() < 0.5 else []
            self.end_loads(self.mixed(loads, newer))

    @operation("OFF-8", weight=0.15)
    def shut_down(self) -> None:
        """Shut the manager down twice, whatever is in flight."""
        self.call(self.subject, "shutdown")
        self.call(self.subject, "shutdown")
        self.is_over = True

    @operation("OFF-7", C.POLICIES, weight=0.3)
    def name_policies(self) -> None:
        """Make managers with names of known policies, of unknown policies, and of other targets."""
        for name in ("builtins:object", "builtins:bytearray"):
            self.refused(ValueError, self.harness, "with_policy", name)
        error = self.refused(ValueError, self.harness, "with_policy", "no-such-policy")
        for name in self.harness.policies:
            self.true(name in str(error), f"the message lists {name!r}", str(error), repr(name))
            self.call(self.harness, "with_policy", name)

    @operation("OFF-12", C.STORE_THRESHOLD, weight=0.15)
    def name_thresholds(self) -> None:
        """Request invalid thresholds."""
        for threshold in (0, -1):
            self.refused(ConfigError, self.harness, "with_threshold", threshold)

    # --- observables ---

    @observable("OFF-6")
    def lookup(self) -> None:
        """Compare ``lookup`` for the keys of the run, or for a sample if they are many."""
        keys = dict.fromkeys(
            [*self.recent, *self.model.stored, *map(self.key, range(self.num_keys))]
        )
        for key in self.rng.sample(list(keys), min(len(keys), _MOST_LOOKUPS)):
            got = self.call(self.subject, "lookup", key, self.context)
            expected = self.model.answer(key)
            what = f"lookup of {key!r} returns {expected.name}"
            self.equal(got, expected, what, self.model.why.get(key, "OFF-6"))

    @observable("OFF-6", C.LEADING_HITS)
    def leading_hits(self) -> None:
        """Compare the number of leading hits of some chains of keys."""
        held = sorted(self.model.stored | self.model.storing)
        for has_hole in (False, True, True):
            keys = self.rng.sample(held, min(len(held), 6))
            if has_hole:
                hole = self.key(self.rng.randrange(self.num_keys))
                keys.insert(self.rng.randint(0, len(keys)), hole)
            got = self.call(self.subject, "num_leading_hits", keys)
            expected = self.model.num_leading_hits(keys)
            self.equal(got, expected, f"num_leading_hits of {keys} counts the keys up to a miss")

    @observable("OFF-5", C.TIER_COUNTS)
    def counts(self) -> None:
        """Compare the number of free pages, and the number of pages that transfers use."""
        got = self.call(self.subject, "num_free_blocks")
        self.equal(got, self.model.num_free(), "num_free_blocks counts the room that is free")
        got = self.call(self.subject, "num_protected_blocks")
        what = "num_protected_blocks counts the room that transfers use"
        self.equal(got, self.model.num_protected(), what)

    @observable("OFF-2")
    def earlier_results(self) -> None:
        """Compare earlier results with their copies, because a transfer may still read them."""
        for result, text in self.results:
            self.equal(repr(result), text, "a result does not change after its call")

    @observable("EVENT-2", C.EVENTS)
    def events(self) -> None:
        """Compare the events since the last comparison; sometimes wait for a later comparison."""
        if self.rng.random() < 0.3:
            return
        events = self.listed(self.subject, "take_events")
        self.derive()
        media = self.subject.media if isinstance(self.subject, SupportsMedia) else None
        changes = []
        for event in events:
            is_name = isinstance(event.medium, str) and event.medium != ""
            is_known = is_name and (media is None or event.medium in media)
            expected = "a name" if media is None else f"one of {list(media)}"
            self.true(
                is_known, "an event names a medium of its manager", event, expected, "EVENT-1"
            )
            changes += [("-" if event.removed else "+", key) for key in event.keys]
        self.judge(self.model.take_events(changes), changes)
