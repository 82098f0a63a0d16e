"""OFF-2, 3, 6 and 12: a tier whose keys come and go, whichever of them may go."""

from __future__ import annotations

import random
from itertools import product

from kvview.testing.harness import Capability
from kvview.testing.offloading.driver import ManagerDriver, key, keys, manager_check, pages_of
from kvview.testing.profiles import current_profile

_MOST_CALLS = 20_000  # keys that loads name, in a large tier
_MOST_ROUNDS = 480


@manager_check("OFF-3")
def check_off_3_what_may_go_is_found(tier: ManagerDriver) -> None:
    """Wherever it stands, however often it, the others, and what is gone were used."""
    rng = random.Random(current_profile().seed or 0)
    held, gone = tier.fill(), keys(*range(100, 100 + tier.capacity))
    for number in range(1000, 1000 + min(_MOST_ROUNDS, _MOST_CALLS // tier.capacity)):
        for _ in range(rng.randrange(4)):
            tier.touch(rng.sample(held + gone, rng.randint(1, tier.capacity)))
        may_go = rng.sample(held, rng.choice([1, 1, 2, tier.capacity]))
        busy = [one for one in held if one not in may_go]
        tier.load(busy)
        output = tier.must_offer([key(number)])
        evicted = list(output.evicted_keys)
        is_right = bool(evicted) and set(evicted) <= set(may_go)
        tier.true(is_right, "what may go makes room", evicted, f"one of {may_go}")
        tier.finish(output.keys_to_store)
        tier.end_load(busy)
        held = [one for one in held if one not in evicted] + [key(number)]
        gone = [*gone, *evicted][-tier.capacity :]


@manager_check("OFF-6", Capability.LEADING_HITS)
def check_off_6_prefix_ends_at_its_first_hole(tier: ManagerDriver) -> None:
    """``num_leading_hits`` over every pattern of five keys that are held or not."""
    for number, is_held in enumerate(product((False, True), repeat=5)):
        asked = keys(*range(10 * number, 10 * number + 5))
        tier.store(*(10 * number + place for place in range(5) if is_held[place]))
        got = tier.call(tier.manager, "num_leading_hits", asked)
        wanted = [*is_held, False].index(False)
        tier.equal(got, wanted, "num_leading_hits ends at the first miss")


@manager_check("OFF-2", Capability.PAGES)
def check_off_2_answer_stays_as_it_was(tier: ManagerDriver) -> None:
    """What a call returned is not changed by the next one: a transfer may still read it."""
    outputs = [tier.must_offer(keys(number, number + 1)) for number in (0, 2, 4)]
    pages = [pages_of(output) for output in outputs]
    tier.finish(keys(0, 1, 2, 3, 4, 5))
    specs = [tier.load(keys(number)) for number in range(6)]
    loaded = [list(spec.block_ids) for spec in specs]
    tier.end_load(keys(0, 1, 2, 3, 4, 5))
    tier.derive()
    now = [pages_of(output) for output in outputs]
    tier.equal(now, pages, "the pages of a store stay as they were told")
    stored = [[page] for output in pages for page in output]
    tier.equal(loaded, stored, "a load names the stored page")
    now = [list(spec.block_ids) for spec in specs]
    tier.equal(now, loaded, "the pages of a load stay as they were told")


@manager_check("OFF-12", Capability.STORE_THRESHOLD)
def check_off_12_key_that_was_evicted_is_stored_again_at_once(tier: ManagerDriver) -> None:
    """It was offered often enough before."""
    tier.use(tier.call(tier.harness, "with_threshold", 2), "manager")
    for number in range(tier.capacity + 1):
        tier.must_offer(keys(number))
        output = tier.must_offer(keys(number))
        tier.finish(output.keys_to_store)
    gone = list(output.evicted_keys)
    again = tier.must_offer(gone)
    tier.derive()
    tier.equal(list(again.keys_to_store), gone, "a key that was offered often enough is stored")
