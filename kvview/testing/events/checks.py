"""The laws of the events that an offloading manager reports."""

from __future__ import annotations

from kvview.offloading import LookupResult
from kvview.testing.harness import Capability
from kvview.testing.offloading.driver import ManagerDriver, key, keys, manager_check

EVENTS = Capability.EVENTS


def _loadable(tier: ManagerDriver, numbers: range) -> set[bytes]:
    with tier.unrecorded():
        return {k for k in keys(*numbers) if tier.lookup(k) is LookupResult.HIT}


@manager_check("EVENT-1", EVENTS)
def check_event_1_removal_follows_a_store(tier: ManagerDriver) -> None:
    """Nothing is removed that was not advertised: not after failures, not after evictions."""
    tier.must_offer(keys(0, 1))
    tier.finish(keys(0), success=False)
    tier.finish(keys(1))
    for number in range(2 * tier.capacity):
        tier.store(100 + number)
    tier.advertised()
    if tier.can(Capability.RESET):
        tier.must_offer(keys(2))
        tier.reset()
        tier.finish(keys(2), success=False)
        tier.reset()
        tier.equal(tier.advertised(), set(), "a reset removes what it held, once")


@manager_check("EVENT-1", EVENTS)
def check_event_1_each_key_is_told_once(tier: ManagerDriver) -> None:
    """However often it is offered, loaded or touched, alone or beside new ones."""
    tier.store(0, 1)
    tier.advertised()
    output = tier.must_offer(keys(1, 2, 0))
    tier.finish(output.keys_to_store)
    tier.load(keys(0, 0, 1))
    tier.touch(keys(1, 1, 0))
    tier.end_load(keys(1, 0, 0))
    output = tier.must_offer(keys(3, 0, 3))
    tier.finish(output.keys_to_store)
    tier.must_offer(keys(0, 1, 2, 3))
    tier.equal(tier.advertised(), set(keys(0, 1, 2, 3)), "each key is told once")
    if tier.can(Capability.RESET):
        tier.reset()
        tier.store(1, 0)
        tier.equal(tier.advertised(), set(keys(0, 1)), "a key that came again is told again")


@manager_check("EVENT-2", EVENTS)
def check_event_2_advertised_is_what_lookup_hits(tier: ManagerDriver) -> None:
    """After every call the folded events are the keys that lookup answers HIT for."""
    numbers = range(3 * tier.capacity)
    for number in numbers[::2]:
        output = tier.must_offer(keys(number, number + 1))
        loadable = _loadable(tier, numbers)
        tier.equal(tier.advertised("EVENT-2"), loadable, "pending keys are not advertised")
        tier.finish(output.keys_to_store, success=number % 3 > 0)
        loadable = _loadable(tier, numbers)
        tier.equal(tier.advertised("EVENT-2"), loadable, "advertised is what is loadable")


@manager_check("EVENT-2", EVENTS)
def check_event_2_eviction_is_reported_with_the_store_that_caused_it(tier: ManagerDriver) -> None:
    """A key that prepare_store evicted is removed at once, though that store fails later."""
    tier.fill()
    tier.advertised()
    output = tier.must_offer(keys(100, 101))
    tier.equal(
        tier.changes(),
        [("-", k) for k in output.evicted_keys],
        "evicted keys are removed when they are evicted",
    )
    tier.finish(keys(100, 101), success=False)
    tier.equal(tier.changes(), [], "a failed store changes nothing that is advertised")


@manager_check("EVENT-3", EVENTS)
def check_event_3_events_are_in_the_order_in_which_it_happened(tier: ManagerDriver) -> None:
    """Store, eviction and store again of one key come in that order, in one batch."""
    happened = []
    wanted = keys(0)
    for number in [*range(tier.capacity + 2), 0, *range(100, 100 + tier.capacity)]:
        output = tier.must_offer([key(number)])
        happened += [("-", k) for k in output.evicted_keys]
        tier.finish(output.keys_to_store)
        happened += [("+", k) for k in output.keys_to_store]
    got = tier.changes()
    tier.equal(got, happened, "events come in the order in which it happened")
    signs = [sign for sign, k in got if k in wanted]
    tier.true("".join(signs).startswith("+"), "key 0 was stored first", signs, "+ first")


@manager_check("EVENT-3", EVENTS)
def check_event_3_events_of_many_keys_are_in_order(tier: ManagerDriver) -> None:
    """Batches that end in parts, in another order, and that evict: key by key as it happened."""
    tier.must_offer(keys(*range(tier.capacity)))
    tier.finish(keys(2, 3))
    tier.finish(keys(0), success=False)
    tier.finish(keys(1))
    tier.finish(keys(*range(4, tier.capacity)))
    happened = [("+", k) for k in keys(2, 3, 1, *range(4, tier.capacity))]
    for number in range(100, 103):
        output = tier.must_offer([key(number), key(number + 50), key(number + 60)])
        happened += [("-", k) for k in output.evicted_keys]
        tier.finish(output.keys_to_store[1:])
        tier.finish(output.keys_to_store[:1])
        happened += [("+", k) for k in (*output.keys_to_store[1:], output.keys_to_store[0])]
    tier.equal(tier.changes(), happened, "events come in the order in which it happened")


@manager_check("EVENT-3", EVENTS)
def check_event_3_events_are_taken_once(tier: ManagerDriver) -> None:
    """What was taken is not given again; without changes there is nothing to take."""
    tier.store(0, 1)
    tier.equal(tier.changes(), [("+", k) for k in keys(0, 1)], "a store is advertised")
    tier.equal(tier.events(), [], "events are taken once")
    tier.load(keys(0))
    tier.end_load(keys(0))
    tier.lookup(key(1))
    tier.touch(keys(0))
    tier.equal(tier.events(), [], "looking, loading and touching change nothing")


@manager_check("EVENT-4", EVENTS)
def check_event_4_failed_store_advertises_nothing(tier: ManagerDriver) -> None:
    """Neither the offer nor the failure of a store has an event."""
    tier.must_offer(keys(0, 1))
    tier.equal(tier.events(), [], "an offer advertises nothing")
    tier.finish(keys(0, 1), success=False)
    tier.equal(tier.events(), [], "a failed store advertises nothing")


@manager_check("EVENT-5", EVENTS, Capability.RESET)
def check_event_5_reset_removes_everything_advertised(tier: ManagerDriver) -> None:
    """After a reset nothing is advertised; what comes late is not either."""
    tier.store(0, 1, 2)
    tier.load(keys(0))
    tier.must_offer(keys(3))
    tier.reset()
    tier.equal(tier.advertised(), set(), "a reset removes all that was advertised")
    tier.end_load(keys(0))
    tier.finish(keys(3))
    tier.equal(tier.advertised(), set(), "a store from before the reset advertises nothing")
    tier.store(1)
    tier.equal(tier.advertised(), set(keys(1)), "what is stored afterwards is advertised")


@manager_check("EVENT-5", EVENTS, Capability.RESET)
def check_event_5_reset_follows_what_was_not_taken_yet(tier: ManagerDriver) -> None:
    """Stores from before a reset are told before it, or not at all; a second one is silent."""
    tier.reset()
    tier.equal(tier.events(), [], "the reset of an empty tier has nothing to remove")
    tier.store(0, 1)
    tier.advertised()
    tier.store(2)
    output = tier.must_offer(keys(3))
    tier.reset()
    tier.store(1)
    tier.finish(output.keys_to_store)
    tier.equal(tier.advertised(), set(keys(1)), "what came after the reset is advertised")
    tier.reset()
    tier.reset()
    tier.equal(tier.advertised(), set(), "a reset removes all that was advertised, once")
    tier.equal(tier.events(), [], "events are taken once")
