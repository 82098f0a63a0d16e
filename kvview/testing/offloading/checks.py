"""The laws of the offloading contract, one small scenario each."""

from __future__ import annotations

from kvview.offloading import LookupResult
from kvview.testing.checks import check
from kvview.testing.harness import Capability, Factory
from kvview.testing.offloading.driver import ManagerDriver, key, keys, manager_check, pages_of

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


# --- OFF-1: what is in flight stays ---


@manager_check("OFF-1")
def check_off_1_key_under_load_is_not_evicted(tier: ManagerDriver) -> None:
    """However many new keys come, a key that is being read stays."""
    held = tier.fill()
    loading = held[: tier.capacity // 2]
    tier.load(loading)
    for number in range(2 * tier.capacity):
        output = tier.store(100 + number)
        evicted = sorted(set(output.evicted_keys) & set(loading))
        tier.equal(evicted, [], "no key under load is evicted")
    tier.expect(HIT, loading)
    tier.end_load(loading)


@manager_check("OFF-1")
def check_off_1_key_under_store_is_not_evicted(tier: ManagerDriver) -> None:
    """A tier full of keys that are being written has no room to make."""
    storing = keys(*range(tier.capacity))
    tier.must_offer(storing)
    output = tier.offer([key(100)])
    tier.equal(output, None, "no key under store is evicted")
    tier.expect(PENDING, storing)
    tier.finish(storing)
    tier.expect(HIT, storing)


@manager_check("OFF-1")
def check_off_1_two_loads_of_a_key_need_two_completions(tier: ManagerDriver) -> None:
    """A key that two requests read is protected until both are done."""
    held = tier.fill()
    tier.load(held)
    tier.load(held[:1])
    tier.end_load(held)
    output = tier.must_offer(keys(*range(100, 100 + tier.capacity - 1)))
    tier.true(held[0] not in output.evicted_keys, "a key under load stays", output, "not evicted")
    tier.finish(output.keys_to_store)
    tier.equal(tier.offer([key(200), *output.keys_to_store]), None, "a key under load stays")
    tier.end_load(held[:1])
    again = tier.store(200)
    tier.equal(len(again.evicted_keys), 1, "after the last completion room can be made")


@manager_check("OFF-1")
def check_off_1_completed_load_may_be_evicted(tier: ManagerDriver) -> None:
    """Protection ends with the load: nothing is pinned for ever."""
    held = tier.fill()
    tier.load(held)
    tier.equal(tier.offer([key(100)]), None, "no key under load is evicted")
    tier.end_load(held)
    output = tier.must_offer(keys(*range(100, 100 + tier.capacity)))
    tier.equal(set(output.evicted_keys), set(held), "all keys may go after their loads ended")


# --- OFF-2: only what is ready is loaded ---


@manager_check("OFF-2")
def check_off_2_load_of_what_is_not_ready_is_refused(tier: ManagerDriver) -> None:
    """Unknown, pending, failed and evicted keys raise KeyNotLoadableError."""
    tier.not_loadable(keys(0))
    tier.must_offer(keys(0, 1))
    tier.not_loadable(keys(0))
    tier.finish(keys(0))
    tier.finish(keys(1), success=False)
    tier.not_loadable(keys(1))
    tier.load(keys(0))
    tier.end_load(keys(0))
    tier.fill(batch=tier.capacity)
    output = tier.store(100)
    tier.not_loadable(output.evicted_keys)


@manager_check("OFF-2")
def check_off_2_failed_load_protects_nothing(tier: ManagerDriver) -> None:
    """A load that raises, wherever its wrong key stands, leaves every key evictable."""
    held = tier.fill()
    tier.not_loadable([*held[:3], key(99)])
    tier.not_loadable([key(99), *held[:3]])
    tier.not_loadable([held[0], key(99), held[1]])
    output = tier.must_offer(keys(*range(100, 100 + tier.capacity)))
    tier.equal(set(output.evicted_keys), set(held), "a refused load protects nothing")


@manager_check("OFF-2", Capability.PAGES)
def check_off_2_load_names_the_pages_of_the_store(tier: ManagerDriver) -> None:
    """A load reads the pages that the store wrote, in the order asked for."""
    stored = keys(0, 1, 2, 3)
    output = tier.must_offer(stored)
    tier.finish(stored)
    pages = dict(zip(output.keys_to_store, pages_of(output), strict=True))
    asked = [stored[2], stored[0], stored[3]]
    spec = tier.load(asked)
    tier.equal(list(spec.block_ids), [pages[k] for k in asked], "a load names the stored pages")
    tier.end_load(asked)


# --- OFF-3: prepare_store is atomic ---


@manager_check("OFF-3")
def check_off_3_store_never_evicts_its_own_input(tier: ManagerDriver) -> None:
    """Keys that are offered again together with new ones are not evicted for them."""
    held = tier.fill()
    kept = held[0]  # the next victim of many a policy
    for number in range(100, 100 + tier.capacity):
        output = tier.must_offer([kept, key(number)])
        tier.finish(output.keys_to_store)
        tier.expect(HIT, [kept], "OFF-3")
    offered = [kept, *keys(*range(300, 300 + tier.capacity))]
    tier.equal(tier.offer(offered), None, "more keys than fit beside those of the input")
    tier.expect(HIT, [kept], "OFF-3")


@manager_check("OFF-3")
def check_off_3_refused_store_changes_nothing(tier: ManagerDriver) -> None:
    """When there is no room for all, nothing is evicted, stored, or advertised."""
    held = tier.fill()
    tier.load(held[:1])
    if tier.can(Capability.EVENTS):
        tier.events()
    new = keys(*range(100, 100 + tier.capacity))
    tier.equal(tier.offer(new), None, "too many keys for the room that may be made")
    tier.expect(HIT, held, "OFF-3")
    tier.expect(MISS, new, "OFF-3")
    if tier.can(Capability.EVENTS):
        tier.equal(tier.events(), [], "a refused store has no events")
    tier.end_load(held[:1])
    tier.equal(tier.offer(keys(*range(100, 101 + tier.capacity))), None, "more than the capacity")
    tier.expect(HIT, held, "OFF-3")


@manager_check("OFF-3")
def check_off_3_store_leaves_out_what_is_held(tier: ManagerDriver) -> None:
    """Keys that are stored or being stored are not stored again."""
    tier.store(0, 1)
    tier.must_offer(keys(2))
    output = tier.must_offer(keys(3, 1, 2, 4))
    tier.equal(list(output.keys_to_store), keys(3, 4), "keys_to_store are the new keys, in order")
    tier.finish(keys(3, 4))
    output = tier.must_offer(keys(0, 1))
    tier.equal(list(output.keys_to_store), [], "nothing is new")
    tier.expect(HIT, keys(0, 1, 3, 4))
    tier.expect(PENDING, keys(2))


@manager_check("OFF-3")
def check_off_3_makes_room_for_all_at_once(tier: ManagerDriver) -> None:
    """A batch as large as the tier replaces all of it, when nothing is in flight."""
    held = tier.fill()
    new = keys(*range(100, 100 + tier.capacity))
    output = tier.must_offer(new)
    tier.equal(list(output.keys_to_store), new, "all of a batch are stored")
    tier.equal(set(output.evicted_keys), set(held), "what was there makes room")
    tier.expect(MISS, held)


@manager_check("OFF-3", Capability.PAGES)
def check_off_3_no_page_belongs_to_two_keys(tier: ManagerDriver) -> None:
    """Over evictions, failures and re-use, each held key has a page of its own."""
    pages: dict[bytes, int] = {}
    for number in range(0, 3 * tier.capacity, 2):
        output = tier.must_offer(keys(number, number + 1))
        for gone in output.evicted_keys:
            pages.pop(gone, None)
        new = dict(zip(output.keys_to_store, pages_of(output), strict=True))
        shared = sorted(set(new.values()) & set(pages.values()))
        tier.equal(shared, [], "a new key gets a page that no held key has")
        if number % 6:
            tier.finish(output.keys_to_store)
            pages |= {bytes(k): page for k, page in new.items()}
        else:
            tier.finish(output.keys_to_store, success=False)


# --- OFF-4: a failed store leaves no trace ---


@manager_check("OFF-4")
def check_off_4_failed_store_is_gone(tier: ManagerDriver) -> None:
    """A failed key is a MISS, cannot be loaded, and can be stored again."""
    tier.must_offer(keys(0, 1))
    tier.finish(keys(0, 1), success=False)
    tier.expect(MISS, keys(0, 1), "OFF-4")
    tier.not_loadable(keys(0))
    output = tier.must_offer(keys(0))
    tier.equal(list(output.keys_to_store), keys(0), "a failed key is new again")
    tier.finish(keys(0))
    tier.expect(HIT, keys(0), "OFF-4")


@manager_check("OFF-4")
def check_off_4_failed_store_gives_its_room_back(tier: ManagerDriver) -> None:
    """After any number of failures the whole tier can be filled without an eviction."""
    for number in range(2 * tier.capacity):
        tier.must_offer([key(100 + number)])
        tier.finish([key(100 + number)], success=False)
    output = tier.must_offer(keys(*range(tier.capacity)))
    tier.equal(list(output.evicted_keys), [], "failed stores take no room")


@manager_check("OFF-4")
def check_off_4_failure_of_some_keys_leaves_the_others(tier: ManagerDriver) -> None:
    """Keys of one batch may end differently."""
    tier.must_offer(keys(0, 1, 2))
    tier.finish(keys(1), success=False)
    tier.expect(PENDING, keys(0, 2), "OFF-4")
    tier.finish(keys(0, 2))
    tier.expect(HIT, keys(0, 2), "OFF-4")
    tier.expect(MISS, keys(1), "OFF-4")


@manager_check("OFF-4")
def check_off_4_store_may_succeed_in_part(tier: ManagerDriver) -> None:
    """A full batch, completed bit by bit: room comes back with each failure, nothing else goes."""
    has_events = tier.can(Capability.EVENTS)
    batch = keys(*range(tier.capacity))
    tier.must_offer(batch)
    for number in range(0, tier.capacity - 1, 2):
        lost, kept = batch[number : number + 1], batch[number + 1 : number + 2]
        tier.finish(lost, success=False)
        tier.expect(MISS, lost, "OFF-4")
        tier.expect(PENDING, batch[number + 1 :], "OFF-4")
        output = tier.must_offer([key(100 + number)])
        tier.equal(list(output.evicted_keys), [], "a failed key leaves room for another one")
        tier.finish(kept)
        tier.expect(HIT, batch[1 : number + 2 : 2], "OFF-4")
        tier.finish(output.keys_to_store, success=False)
        if has_events:
            tier.equal(tier.changes(), [("+", k) for k in kept], "what succeeded is advertised")


@manager_check("OFF-4")
def check_off_4_failed_key_is_never_evicted(tier: ManagerDriver) -> None:
    """What failed is not among the evicted later on."""
    tier.must_offer(keys(50))
    tier.finish(keys(50), success=False)
    evicted = []
    for number in range(3 * tier.capacity):
        evicted += list(tier.store(100 + number).evicted_keys)
    tier.true(key(50) not in evicted, "a failed key is not evicted", evicted, "without it")


# --- OFF-5: the capacity ---


@manager_check("OFF-5")
def check_off_5_capacity_is_never_exceeded(tier: ManagerDriver) -> None:
    """Stored and pending keys together are at most as many as fit."""
    offered = []
    for number in range(0, 3 * tier.capacity, 3):
        batch = keys(number, number + 1, number + 2)
        output = tier.offer(batch)
        if output is not None:
            offered += batch
            if number % 2:
                tier.finish(output.keys_to_store)
        with tier.unrecorded():
            held = [k for k in offered if tier.lookup(k) in (HIT, PENDING)]
            tier.true(
                len(held) <= tier.capacity,
                "stored and pending keys fit",
                len(held),
                f"at most {tier.capacity}",
            )


@manager_check("OFF-5")
def check_off_5_whole_capacity_can_be_used(tier: ManagerDriver) -> None:
    """As many keys as the capacity says are held at once."""
    held = tier.fill(batch=3)
    tier.expect(HIT, held, "OFF-5")


@manager_check("OFF-5", Capability.TIER_COUNTS)
def check_off_5_manager_tells_its_room(tier: ManagerDriver) -> None:
    """What a store may take without an eviction, and what transfers use, at any time."""

    def check(num_taken: int, num_protected: int) -> None:
        free = tier.call(tier.manager, "num_free_blocks")
        tier.equal(free, tier.capacity - num_taken, "num_free_blocks counts what nobody has")
        used = tier.call(tier.manager, "num_protected_blocks")
        tier.equal(used, num_protected, "num_protected_blocks counts what transfers use")

    check(0, 0)
    tier.must_offer(keys(0, 1, 2))
    check(3, 3)
    tier.finish(keys(0))
    check(3, 2)
    tier.load(keys(0))
    tier.load(keys(0))
    check(3, 3)
    tier.finish(keys(1), success=False)
    check(2, 2)
    if tier.can(Capability.RESET):
        tier.reset()
        check(2, 2)
        tier.end_load(keys(0))
    tier.end_load(keys(0))
    tier.finish(keys(2))
    check(0 if tier.can(Capability.RESET) else 2, 0)


# --- OFF-6: lookup tells the truth ---


@manager_check("OFF-6")
def check_off_6_completion_without_a_word_is_a_success(tier: ManagerDriver) -> None:
    """``success`` is True where it is left out."""
    output = tier.must_offer(keys(0, 1))
    tier.call(tier.manager, "complete_store", list(output.keys_to_store), tier.context)
    for number in (0, 1):
        tier.equal(tier.lookup(key(number)), LookupResult.HIT, "what was stored can be loaded")


@manager_check("OFF-6")
def check_off_6_lookup_follows_a_store(tier: ManagerDriver) -> None:
    """MISS, then HIT_PENDING from the offer on, then HIT when it is complete."""
    tier.expect(MISS, keys(0, 1))
    tier.must_offer(keys(0))
    tier.expect(PENDING, keys(0))
    tier.finish(keys(0))
    tier.expect(HIT, keys(0))
    tier.expect(MISS, keys(1))
    tier.load(keys(0))
    tier.expect(HIT, keys(0))
    tier.end_load(keys(0))
    tier.expect(HIT, keys(0))


@manager_check("OFF-6", Capability.LEADING_HITS)
def check_off_6_prefix_is_looked_up_as_its_keys_are(tier: ManagerDriver) -> None:
    """``num_leading_hits`` counts what ``lookup`` calls a hit, up to a miss or a store."""
    asked = keys(0, 1, 2, 3)

    def check(num_hits: int) -> None:
        got = tier.call(tier.manager, "num_leading_hits", asked)
        tier.equal(got, num_hits, "num_leading_hits says what lookup says, key by key")

    check(0)
    tier.store(0, 1, 3)
    check(2)
    tier.must_offer(keys(2))
    check(2)
    tier.finish(keys(2))
    check(4)
    tier.must_offer(keys(9))
    check(4)
    tier.finish(keys(9), success=False)
    check(4)


@manager_check("OFF-6")
def check_off_6_evicted_keys_are_what_became_a_miss(tier: ManagerDriver) -> None:
    """What is reported as evicted is a MISS at once; everything else is still a HIT."""
    held = set(tier.fill())
    for number in range(100, 100 + tier.capacity, 2):
        new = keys(number, number + 1)
        output = tier.must_offer(new)
        missed = [one for one in sorted(held) if tier.lookup(one) is MISS]
        tier.equal(missed, sorted(output.evicted_keys), "what is told as evicted became a MISS")
        held -= set(missed)
        tier.expect(HIT, sorted(held))
        tier.finish(new)
        held |= set(new)


@manager_check("OFF-6")
def check_off_6_groups_are_different_keys(tier: ManagerDriver) -> None:
    """The same block hash in another KV-cache group is another key."""
    tier.must_offer([key(0, 1)])
    tier.finish([key(0, 1)])
    tier.expect(HIT, [key(0, 1)])
    tier.expect(MISS, [key(0, 0), key(0, 2)])


@manager_check("OFF-6")
def check_off_6_touch_ignores_what_is_not_held(tier: ManagerDriver) -> None:
    """Touching unknown keys among others raises nothing and stores nothing."""
    tier.store(0, 1)
    tier.touch(keys(5, 0, 6))
    tier.expect(MISS, keys(5, 6))
    tier.expect(HIT, keys(0, 1))


@check("OFF-6", contract="offloading")
def check_off_6_lookup_changes_no_order(factory: Factory) -> None:
    """Two managers evict the same, however often one of them is asked."""
    quiet, asked = ManagerDriver(factory, "OFF-6"), ManagerDriver(factory, "OFF-6")
    for tier in (quiet, asked):
        tier.fill()
    for _ in range(2):
        for held in keys(0, 1, 2):
            asked.lookup(held)
    new = keys(*range(100, 100 + quiet.capacity // 2))
    evicted = [list(tier.must_offer(new).evicted_keys) for tier in (quiet, asked)]
    asked.equal(evicted[1], evicted[0], "lookup changes no order of eviction")


# --- OFF-7, OFF-8, and the end (OFF-9 is in completion_checks) ---


@manager_check("OFF-7", Capability.POLICIES)
def check_off_7_unknown_policy_lists_the_known_ones(tier: ManagerDriver) -> None:
    """An unknown policy is a ValueError that names every known one; so is what is no policy."""
    for no_policy in ("builtins:object", "builtins:list"):  # where a target may name one
        tier.refused(ValueError, tier.harness, "with_policy", no_policy)
    error = tier.refused(ValueError, tier.harness, "with_policy", "no-such-policy")
    for name in tier.harness.policies:
        tier.true(name in str(error), f"the message lists {name!r}", str(error), repr(name))
        tier.call(tier.harness, "with_policy", name)


@manager_check("OFF-8", Capability.RESET)
def check_off_8_reset_forgets_every_key(tier: ManagerDriver) -> None:
    """After a reset all is a MISS, and the whole tier can be filled without eviction."""
    held = tier.fill()
    tier.reset()
    tier.expect(MISS, held, "OFF-8")
    tier.not_loadable(held[:1])
    output = tier.must_offer(keys(*range(100, 100 + tier.capacity)))
    tier.equal(list(output.evicted_keys), [], "a reset tier is empty")
    tier.finish(output.keys_to_store)
    tier.expect(HIT, output.keys_to_store, "OFF-8")


@manager_check("OFF-8", Capability.RESET)
def check_off_8_late_store_is_not_taken_for_a_newer_one(tier: ManagerDriver) -> None:
    """The completion of a store from before the reset makes no key loadable."""
    tier.must_offer(keys(0))
    tier.reset()
    tier.expect(MISS, keys(0), "OFF-8")
    output = tier.offer(keys(0))
    stored = list(output.keys_to_store) if output is not None else []
    tier.equal(stored, [], "a key whose old store is in flight is not stored again")
    tier.finish(keys(0))
    tier.expect(MISS, keys(0), "OFF-8")
    tier.store(0)
    tier.expect(HIT, keys(0), "OFF-8")


@manager_check("OFF-8", Capability.RESET)
def check_off_8_late_load_may_still_be_completed(tier: ManagerDriver) -> None:
    """The completion of a load from before the reset raises nothing and ends nothing else."""
    tier.store(0)
    tier.load(keys(0))
    tier.reset()
    tier.expect(MISS, keys(0), "OFF-8")
    tier.end_load(keys(0))
    held = tier.fill()
    tier.expect(HIT, held, "OFF-8")


@manager_check("OFF-8", Capability.RESET, Capability.PAGES)
def check_off_8_pages_in_flight_are_not_reused(tier: ManagerDriver) -> None:
    """Pages that are read or written while the tier is reset go to nobody else."""
    tier.store(0)
    busy = list(tier.load(keys(0)).block_ids)
    busy += pages_of(tier.must_offer(keys(1)))
    tier.reset()
    for number in range(tier.capacity - 2):
        output = tier.must_offer([key(100 + number)])
        taken = sorted(set(pages_of(output)) & set(busy))
        tier.equal(taken, [], "pages in flight are not given away")
        tier.finish(output.keys_to_store)
    tier.end_load(keys(0))
    tier.finish(keys(1), success=False)
    held = tier.fill()
    tier.expect(HIT, held, "OFF-8")


@manager_check("OFF-8")
def check_off_8_shutdown_may_be_called_twice(tier: ManagerDriver) -> None:
    """Shutting down with transfers in flight, and again, raises nothing."""
    tier.store(0)
    tier.must_offer(keys(1))
    tier.load(keys(0))
    tier.call(tier.manager, "shutdown")
    tier.call(tier.manager, "shutdown")


@check("OFF-*", contract="offloading")
def check_off_any_sequence_of_calls(factory: Factory) -> None:
    """Random stores, loads, failures and resets, compared with an oracle after each."""
    from kvview.testing.offloading.machine import run_offloading_machine  # hypothesis is slow

    run_offloading_machine(factory)
