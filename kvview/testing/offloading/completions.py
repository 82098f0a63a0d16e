"""OFF-9: each transfer is completed once, and nothing else is."""

from __future__ import annotations

from kvview.offloading import LookupResult
from kvview.testing.harness import Capability
from kvview.testing.offloading.driver import ManagerDriver, key, keys, manager_check, pages_of

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


@manager_check("OFF-9")
def check_off_9_completion_that_nothing_waits_for_is_refused(tier: ManagerDriver) -> None:
    """Of unknown keys, of idle ones, and of a transfer in the other direction."""
    tier.store(0, 1)
    tier.must_offer(keys(2))
    tier.load(keys(1))
    for not_stored in (3, 0, 1):
        tier.no_store(keys(not_stored))
        tier.no_store(keys(not_stored), success=False)
    for not_loaded in (3, 0, 2):
        tier.no_load(keys(not_loaded))


@manager_check("OFF-9")
def check_off_9_store_is_completed_once(tier: ManagerDriver) -> None:
    """A second completion is refused, whatever came of the first one."""
    tier.must_offer(keys(0, 1))
    tier.finish(keys(0))
    tier.finish(keys(1), success=False)
    for number in (0, 1):
        tier.no_store(keys(number))
        tier.no_store(keys(number), success=False)
    tier.expect(HIT, keys(0))
    tier.expect(MISS, keys(1))
    held = tier.fill()
    tier.expect(HIT, held)


@manager_check("OFF-9")
def check_off_9_store_may_be_completed_in_several_calls(tier: ManagerDriver) -> None:
    """In any order, in any mixture of success and failure, with other stores in between."""
    tier.must_offer(keys(0, 1, 2, 3))
    tier.must_offer(keys(4, 5))
    tier.finish(keys(2))
    tier.finish(keys(5, 1), success=False)
    tier.no_store(keys(2))
    tier.no_store(keys(1, 3), success=False)
    tier.finish(keys(4, 3))
    tier.finish(keys(0), success=False)
    tier.expect(HIT, keys(2, 3, 4))
    tier.expect(MISS, keys(0, 1, 5))


@manager_check("OFF-9", Capability.PAGES)
def check_off_9_page_of_a_failed_store_is_given_back_once(tier: ManagerDriver) -> None:
    """After a refused second completion, as many pages are there as before."""
    tier.must_offer(keys(50))
    tier.finish(keys(50), success=False)
    tier.no_store(keys(50), success=False)
    pages = pages_of(tier.must_offer(keys(*range(tier.capacity))))
    tier.equal(len(set(pages)), tier.capacity, "each key has a page of its own")
    tier.equal(tier.offer(keys(60)), None, "the tier is full of keys under store")


@manager_check("OFF-9")
def check_off_9_as_many_loads_are_completed_as_were_prepared(tier: ManagerDriver) -> None:
    """Loads count one by one, in several calls and within one."""
    tier.store(0, 1)
    tier.load(keys(0))
    tier.no_load(keys(0, 0))
    tier.end_load(keys(0))
    tier.no_load(keys(0))
    tier.load(keys(0, 1, 0))
    tier.no_load(keys(0, 0, 0))
    tier.end_load(keys(0, 0))
    tier.no_load(keys(0, 1))
    tier.end_load(keys(1))
    tier.no_load(keys(1))


@manager_check("OFF-9")
def check_off_9_refused_completion_of_stores_changes_nothing(tier: ManagerDriver) -> None:
    """Stores named beside a wrong key, wherever that stands, are under way still."""
    if tier.can(Capability.EVENTS):
        tier.events()
    tier.must_offer(keys(0, 1))
    for success in (True, False):
        tier.no_store(keys(0, 9), success=success)
        tier.no_store(keys(9, 1), success=success)
        tier.expect(PENDING, keys(0, 1))
    if tier.can(Capability.EVENTS):
        tier.equal(tier.events(), [], "a refused completion has no events")
    tier.finish(keys(0, 1))
    tier.expect(HIT, keys(0, 1))
    tier.expect(MISS, keys(9))


@manager_check("OFF-9")
def check_off_9_refused_completion_of_loads_changes_nothing(tier: ManagerDriver) -> None:
    """Loads named beside a wrong key are protected still, and each ends once."""
    held = tier.fill()
    tier.load(held)
    for wrong in ([*held, key(99)], [key(99), *held], [*held, held[0]]):
        tier.no_load(wrong)
        tier.equal(tier.offer([key(100)]), None, "no key under load is evicted")
    tier.end_load(held)
    output = tier.must_offer(keys(*range(100, 100 + tier.capacity)))
    tier.equal(set(output.evicted_keys), set(held), "all keys may go after their loads ended")


@manager_check("OFF-9", Capability.RESET)
def check_off_9_late_transfer_is_completed_once_too(tier: ManagerDriver) -> None:
    """What was in flight at a reset ends once; nothing else of before it does."""
    tier.store(0, 1)
    tier.must_offer(keys(2))
    tier.load(keys(0))
    tier.reset()
    tier.no_store(keys(0))
    tier.no_store(keys(1))
    tier.no_load(keys(1))
    tier.no_load(keys(2))
    tier.no_load(keys(0, 0))
    tier.end_load(keys(0))
    tier.no_load(keys(0))
    tier.finish(keys(2), success=False)
    tier.no_store(keys(2), success=False)
    held = tier.fill()
    tier.expect(HIT, held)
