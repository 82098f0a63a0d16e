"""OFF-10 to OFF-12: which key goes when room is needed, and which keys come at all."""

from __future__ import annotations

from kvview.errors import ConfigError
from kvview.offloading import LookupResult
from kvview.testing.checks import check
from kvview.testing.harness import Capability, Factory
from kvview.testing.offloading.driver import ManagerDriver, key, keys, manager_check

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
LRU, ARC, STORE_THRESHOLD = Capability.LRU, Capability.ARC, Capability.STORE_THRESHOLD


def _evicted(tier: ManagerDriver, num_keys: int = 1, first: int = 100) -> list[bytes]:
    """What goes, in order, for so many new keys, stored one by one."""
    return [gone for new in range(num_keys) for gone in tier.store(first + new).evicted_keys]


# --- OFF-10: least recently used ---


@manager_check("OFF-10", LRU)
def check_off_10_lru_evicts_in_the_order_of_stores(tier: ManagerDriver) -> None:
    """What was stored first goes first, one by one and many at once."""
    held = tier.fill()
    tier.equal(_evicted(tier, 2), held[:2], "what was stored first goes first")
    many = tier.capacity - 3
    output = tier.must_offer(keys(*range(200, 200 + many)))
    evicted = list(output.evicted_keys)
    tier.equal(evicted, held[2:-1], "many go in the order in which they were stored")


@manager_check("OFF-10", LRU)
def check_off_10_lru_touch_is_a_use(tier: ManagerDriver) -> None:
    """What was touched goes last; of one call the first key is the most recent."""
    held = tier.fill()
    tier.touch(held[:3])
    tier.touch([held[4]])
    wanted = [held[3], *held[5:], *reversed(held[:3]), held[4]]
    tier.equal(_evicted(tier, tier.capacity), wanted, "what was used longest ago goes first")


@manager_check("OFF-10", LRU)
def check_off_10_lru_first_mention_of_a_key_counts(tier: ManagerDriver) -> None:
    """A key that one touch names twice stands where its first mention is."""
    held = tier.fill()
    one, two, three = held[:3]
    tier.touch([one, two, one, three, two])
    last = _evicted(tier, tier.capacity)[-3:]
    tier.equal(last, [three, two, one], "the first mention is the most recent")


@manager_check("OFF-10", LRU)
def check_off_10_lru_nothing_else_is_a_use(tier: ManagerDriver) -> None:
    """Lookups, loads, their completions and offers of held keys leave the order."""
    held = tier.fill()
    tier.expect(HIT, reversed(held))
    for one in held[:3]:
        tier.load([one])
    tier.end_load(held[:3])
    tier.must_offer(held[:2])
    tier.equal(_evicted(tier, tier.capacity), held, "only stores and touches are uses")


@manager_check("OFF-10", LRU)
def check_off_10_lru_refused_calls_are_no_uses(tier: ManagerDriver) -> None:
    """What raised, or found no room, has left the order as it was."""
    held = tier.fill()
    tier.not_loadable([held[0], key(99)])
    tier.no_load(held[:1])
    tier.no_store(held[:1])
    too_many = keys(*range(300, 301 + tier.capacity))
    tier.equal(tier.offer([*held[:2], *too_many]), None, "more than the capacity")
    tier.equal(_evicted(tier, tier.capacity), held, "a refused call is no use")


@manager_check("OFF-10", LRU)
def check_off_10_lru_key_in_flight_keeps_its_place(tier: ManagerDriver) -> None:
    """What is passed over under load is the oldest still when its load has ended."""
    held = tier.fill()
    tier.load(held[:3])
    tier.equal(_evicted(tier, 2), held[3:5], "keys under load are passed over")
    tier.end_load([held[1]])
    tier.equal(_evicted(tier, 2, 200), [held[1], held[5]], "a key keeps its place over a load")
    tier.touch([held[2]])
    tier.end_load([held[2], held[0]])
    wanted = [held[0], *held[6:]]
    tier.equal(_evicted(tier, len(wanted), 300), wanted, "a touch under load is a use too")


@manager_check("OFF-10", LRU)
def check_off_10_lru_store_in_flight_keeps_its_place(tier: ManagerDriver) -> None:
    """A key is as old as its ``prepare_store``, whenever it is completed."""
    tier.must_offer(keys(0))
    held = keys(*range(tier.capacity))
    for number in range(1, tier.capacity):
        tier.store(number)
    tier.equal(_evicted(tier), held[1:2], "a key under store is passed over")
    tier.finish(held[:1])
    tier.equal(_evicted(tier, 2, 200), [held[0], held[2]], "its completion is no use")


@manager_check("OFF-10", LRU, Capability.RESET)
def check_off_10_lru_reset_forgets_the_order(tier: ManagerDriver) -> None:
    """Keys stored anew after a reset are as old as that."""
    held = tier.fill()
    tier.touch(held[:4])
    tier.reset()
    for one in reversed(range(tier.capacity)):
        tier.store(one)
    tier.equal(_evicted(tier, tier.capacity), held[::-1], "a reset forgets the order")


# --- OFF-11: adaptive replacement ---


@manager_check("OFF-11", ARC)
def check_off_11_arc_keeps_what_was_used_again(tier: ManagerDriver) -> None:
    """A scan of keys that are used once takes none of those that were touched."""
    held = tier.fill()
    again, once = held[: tier.capacity // 2], held[tier.capacity // 2 :]
    for one in again:
        tier.touch([one])
    evicted = _evicted(tier, 2 * tier.capacity)
    tier.equal(evicted[: len(once)], once, "what was used once goes first, the oldest first")
    tier.equal(sorted(set(evicted) & set(again)), [], "a scan takes nothing that was used again")
    tier.expect(HIT, again, "OFF-11")


@manager_check("OFF-11", ARC)
def check_off_11_arc_orders_what_was_used_again(tier: ManagerDriver) -> None:
    """Where all were used again, the one used longest ago goes; a touch moves to the end."""
    held = tier.fill()
    for one in [*held, *held[:2]]:
        tier.touch([one])
    output = tier.must_offer(keys(*range(100, 100 + tier.capacity)))
    wanted = [*held[2:], *held[:2]]
    tier.equal(list(output.evicted_keys), wanted, "what was used again longest ago goes first")


@manager_check("OFF-11", ARC)
def check_off_11_arc_touch_under_store_is_the_first_use(tier: ManagerDriver) -> None:
    """A touch belongs to the use that stores the key: it is used once."""
    held = keys(*range(tier.capacity))
    for one in held[:-1]:
        tier.must_offer([one])
        tier.touch([one])
        tier.finish([one])
    tier.store(tier.capacity - 1)
    tier.touch(held[-1:])
    evicted = _evicted(tier, tier.capacity - 1)
    tier.equal(evicted, held[:-1], "a touch under store is no second use")


@manager_check("OFF-11", ARC)
def check_off_11_arc_looking_and_loading_are_no_uses(tier: ManagerDriver) -> None:
    """A key that was looked up, loaded and completed was used once."""
    held = tier.fill()
    tier.expect(HIT, held)
    tier.load(held[:3])
    tier.end_load(held[:3])
    tier.must_offer(held[:3])
    tier.equal(_evicted(tier, 3), held[:3], "only a touch is a second use")


@check("OFF-11", ARC, contract="offloading")
def check_off_11_arc_is_the_published_algorithm(factory: Factory) -> None:
    """Random single stores and touches, compared with figure 4 of the paper."""
    from kvview.testing.offloading.arc import run_arc_machine  # hypothesis is slow to import

    run_arc_machine(factory)


@manager_check("OFF-11", ARC)
def check_off_11_arc_use_under_load_counts(tier: ManagerDriver) -> None:
    """What an eviction passed over, and was used while it was loaded, was used again."""
    held = tier.fill()
    tier.load(held[:2])
    tier.equal(_evicted(tier), held[2:3], "keys under load are passed over")
    tier.touch(held[:1])
    tier.end_load(held[:2])
    wanted = [held[1], *held[3:]]
    tier.equal(_evicted(tier, len(wanted), 200), wanted, "a touch under load is a second use")
    tier.expect(HIT, held[:1], "OFF-11")


@manager_check("OFF-11", ARC)
def check_off_11_arc_third_use_under_load_counts(tier: ManagerDriver) -> None:
    """Of keys that were used again, one that is used under load goes last."""
    held = tier.fill()
    for one in held:
        tier.touch([one])
    tier.load(held[:2])
    output = tier.must_offer(keys(*range(100, 98 + tier.capacity)))
    tier.equal(list(output.evicted_keys), held[2:], "keys under load are passed over")
    tier.finish(output.keys_to_store, success=False)
    tier.touch(held[:1])
    tier.end_load(held[:2])
    output = tier.must_offer(keys(*range(200, 200 + tier.capacity)))
    wanted = [held[1], held[0]]
    tier.equal(list(output.evicted_keys), wanted, "a touch under load is a use too")


@manager_check("OFF-11", ARC)
def check_off_11_arc_store_that_failed_leaves_no_key(tier: ManagerDriver) -> None:
    """Of one that came for the first time, and of one that was evicted and came again."""
    held = tier.fill()
    again = held[: tier.capacity // 2]
    for one in again:
        tier.touch([one])
    (gone,) = tier.store(100).evicted_keys
    held = [key(100), *(one for one in held if one != gone)]
    for one in (gone, key(300)):
        output = tier.must_offer([one])
        held = [other for other in held if other not in output.evicted_keys]
        tier.finish([one], success=False)
        tier.expect(MISS, [one], "OFF-4")
    tier.touch(held)  # what is left behind would be the oldest now
    output = tier.must_offer(keys(*range(400, 400 + tier.capacity)))
    evicted = sorted(output.evicted_keys)
    tier.equal(evicted, sorted(held), "all that is held goes, and nothing else")


@manager_check("OFF-11", ARC)
def check_off_11_arc_new_key_beside_one_that_comes_again(tier: ManagerDriver) -> None:
    """Of two that are stored in one call, only the one that was evicted lately was used again."""
    held = tier.fill()
    for one in held[: tier.capacity // 2]:
        tier.touch([one])
    (again,) = tier.store(100).evicted_keys
    new = key(300)
    tier.must_offer([again, new])
    tier.finish([again, new])
    evicted = _evicted(tier, tier.capacity, 400)
    tier.true(new in evicted, "a scan takes what was used once", evicted, f"{new!r} among them")
    tier.expect(HIT, [again], "OFF-11")


# --- OFF-12: the store threshold ---


@manager_check("OFF-12", STORE_THRESHOLD)
def check_off_12_key_is_stored_at_its_nth_offer(tier: ManagerDriver) -> None:
    """Not before, and then at once; another key counts for itself, a repeat not at all."""
    for threshold in (1, 2, 3):
        tier.use(tier.call(tier.harness, "with_threshold", threshold), "manager")
        first, other = keys(0, 1)
        for number in range(1, threshold + 2):
            output = tier.must_offer([first, first] if number < threshold else [first, other])
            wanted = [first] if number == threshold else []
            wanted += [other] if (number, threshold) in ((1, 1), (3, 2)) else []
            tier.equal(list(output.keys_to_store), wanted, f"offer {number} of {threshold}")
            answer = MISS if number < threshold else PENDING if number == threshold else HIT
            tier.expect(answer, [first])
            tier.finish(output.keys_to_store)


@manager_check("OFF-12", STORE_THRESHOLD)
def check_off_12_threshold_of_none_is_refused(tier: ManagerDriver) -> None:
    """No key can be stored before it is offered."""
    for threshold in (0, -1):
        tier.refused(ConfigError, tier.harness, "with_threshold", threshold)


@manager_check("OFF-12", STORE_THRESHOLD)
def check_off_12_key_left_out_takes_no_room(tier: ManagerDriver) -> None:
    """A full tier evicts nothing for keys that are below the threshold."""
    tier.use(tier.call(tier.harness, "with_threshold", 2), "manager")
    held = keys(*range(tier.capacity))
    tier.must_offer(held)
    tier.finish(tier.must_offer(held).keys_to_store)
    output = tier.must_offer(keys(*range(100, 102 + tier.capacity)))
    got = [list(output.keys_to_store), list(output.evicted_keys)]
    tier.equal(got, [[], []], "a key below the threshold takes no room")
    tier.expect(HIT, held)


@manager_check("OFF-12", STORE_THRESHOLD)
def check_off_12_refused_offer_is_no_offer(tier: ManagerDriver) -> None:
    """What came with an offer that found no room is counted as if that had not been."""
    tier.use(tier.call(tier.harness, "with_threshold", 2), "manager")
    storing = keys(*range(tier.capacity))
    tier.must_offer(storing)
    tier.must_offer([*storing, key(100)])  # their second, its first
    tier.equal(tier.offer(keys(100, 101)), None, "no key under store is evicted")
    tier.equal(tier.offer(keys(100, 101)), None, "no key under store is evicted")
    tier.finish(storing)
    output = tier.must_offer(keys(101, 100))
    tier.equal(list(output.keys_to_store), keys(100), "a refused offer is no offer")


@manager_check("OFF-12", STORE_THRESHOLD, Capability.RESET)
def check_off_12_reset_forgets_offers(tier: ManagerDriver) -> None:
    """After a reset a key needs as many offers as ever."""
    tier.use(tier.call(tier.harness, "with_threshold", 2), "manager")
    tier.must_offer(keys(0))
    tier.reset()
    for wanted in ([], keys(0)):
        output = tier.must_offer(keys(0))
        tier.equal(list(output.keys_to_store), wanted, "a reset forgets offers")
