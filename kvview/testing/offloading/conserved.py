"""OFF-2 to OFF-5 and OFF-8: no page is lost, and none is given twice, whatever went wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvview.errors import TransferNotInFlightError
from kvview.keys import OffloadKey
from kvview.offloading import LookupResult
from kvview.testing.harness import Capability
from kvview.testing.offloading.driver import ManagerDriver, key, keys, manager_check, pages_of

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


def _check_all_room(tier: ManagerDriver, held: Sequence[OffloadKey], law: str) -> None:
    """The whole tier can be taken at once, for what is held goes; leaves it empty."""
    new = keys(*range(1000, 1000 + tier.capacity))
    output = tier.must_offer(new)
    tier.equal(sorted(output.evicted_keys), sorted(held), "what is held makes room for all", law)
    tier.equal(list(output.keys_to_store), new, "all of the capacity can be used", law)
    tier.equal(tier.offer(keys(2000)), None, "no more than the capacity can be used")
    tier.finish(new, success=False)
    tier.expect(MISS, new, "OFF-4")


# --- a key that one call names twice ---


@manager_check("OFF-3")
def check_off_3_key_offered_twice_is_stored_once(tier: ManagerDriver) -> None:
    """With one page, and one completion; the first mention says where it stands."""
    tier.store(0)
    output = tier.must_offer(keys(2, 1, 2, 0, 1, 0))
    tier.equal(list(output.keys_to_store), keys(2, 1), "each new key is stored once")
    tier.finish(keys(2, 1))
    tier.expect(HIT, keys(0, 1, 2))
    _check_all_room(tier, keys(0, 1, 2), "OFF-5")


@manager_check("OFF-3")
def check_off_3_repeats_need_no_room(tier: ManagerDriver) -> None:
    """As many different keys as fit are stored, however often they are named."""
    held = keys(*range(tier.capacity))
    output = tier.must_offer([*held, *held[::-1], *held])
    tier.equal(list(output.keys_to_store), held, "each new key is stored once")
    tier.finish(held)
    output = tier.must_offer([key(100)] * (tier.capacity + 1))
    tier.equal(len(output.evicted_keys), 1, "one new key needs the room of one")
    tier.finish(keys(100))


@manager_check("OFF-2", Capability.PAGES)
def check_off_2_key_loaded_twice_has_its_page_twice(tier: ManagerDriver) -> None:
    """One page for each mention, and one completion for each too."""
    output = tier.must_offer(keys(0, 1))
    first, second = pages_of(output)
    tier.finish(keys(0, 1))
    spec = tier.load(keys(1, 0, 1))
    tier.equal(list(spec.block_ids), [second, first, second], "a load names the stored pages")
    tier.end_load(keys(1, 0))
    tier.equal(tier.offer(keys(*range(100, 100 + tier.capacity))), None, "a key under load stays")
    tier.end_load(keys(1))
    _check_all_room(tier, keys(0, 1), "OFF-1")


def _ends(tier: ManagerDriver, stored: Sequence[OffloadKey], *, success: bool) -> bool:
    """Complete stores, or be refused; returns whether it was done."""
    code = f"manager.complete_store({stored}, ctx, success={success})"
    try:
        tier.manager.complete_store(stored, tier.context, success=success)
    except TransferNotInFlightError:
        tier.line(f"with suppress(TransferNotInFlightError): {code}")
        return False
    except Exception as error:
        tier.line(code)
        tier.fail(f"{code} is done or refused", repr(error), "TransferNotInFlightError at most")
    tier.line(code)
    return True


@manager_check("OFF-9")
def check_off_9_completion_that_names_a_key_twice(tier: ManagerDriver) -> None:
    """One completion, or refused whole: its page is given back once."""
    for success in (True, False):
        tier.must_offer(keys(0, 1))
        repeated = keys(0, 1, 0)
        if not _ends(tier, repeated, success=success):
            tier.expect(PENDING, keys(0, 1))
            tier.finish(keys(0, 1), success=success)
        tier.expect(HIT if success else MISS, keys(0, 1))
        if success and tier.can(Capability.EVENTS):
            tier.equal(tier.changes(), [("+", k) for k in keys(0, 1)], "each is advertised once")
        _check_all_room(tier, keys(0, 1) if success else [], "OFF-5")
        if tier.can(Capability.EVENTS):
            tier.events()


# --- after every kind of trouble ---


def _fail_some(tier: ManagerDriver) -> list[OffloadKey]:
    tier.must_offer(keys(0, 1, 2, 3))
    tier.finish(keys(1, 3), success=False)
    tier.finish(keys(0))
    tier.finish(keys(2), success=False)
    return keys(0)


def _fail_what_evicted(tier: ManagerDriver) -> list[OffloadKey]:
    held = tier.fill()
    output = tier.must_offer(keys(100, 101, 102))
    tier.finish(output.keys_to_store, success=False)
    return [one for one in held if one not in output.evicted_keys]


def _refuse_stores(tier: ManagerDriver) -> list[OffloadKey]:
    held = tier.fill()
    tier.load(held[1:])
    for number in range(4):
        tier.equal(tier.offer(keys(100, 101 + number)), None, "no key under load is evicted")
        tier.equal(tier.offer([held[0], key(100)]), None, "no key of the input is evicted")
    tier.end_load(held[1:])
    return held


def _offer_what_is_loaded(tier: ManagerDriver) -> list[OffloadKey]:
    held = tier.fill()
    tier.load(held[:2])
    output = tier.must_offer([*held[:3], key(100)])
    tier.true(held[0] not in output.evicted_keys, "a key under load stays", output, "not evicted")
    rest = tier.capacity - 3  # all but the loaded ones and the one under store
    again = tier.must_offer(keys(*range(200, 200 + rest)))
    left = sorted({*held[2:]} - {*output.evicted_keys})
    tier.equal(sorted(again.evicted_keys), left, "all that is not in flight makes room")
    tier.finish([key(100), *again.keys_to_store])
    tier.end_load(held[:2])
    return [*held[:2], key(100), *again.keys_to_store]


def _refuse_loads(tier: ManagerDriver) -> list[OffloadKey]:
    held = tier.fill(batch=2)
    for wrong in ([held[0], key(99)], [key(99), held[0]], [held[0], held[0], key(99)]):
        tier.not_loadable(wrong)
    return held


def _load_again_and_again(tier: ManagerDriver) -> list[OffloadKey]:
    held = tier.fill()
    for _ in range(3):
        tier.load(held[::-1])
    tier.load([held[0], held[0]])
    for _ in range(3):
        tier.end_load(held)
    tier.end_load([held[0]])
    tier.end_load([held[0]])
    return held


TROUBLES: Sequence[Callable[[ManagerDriver], list[OffloadKey]]] = (
    _fail_some,
    _fail_what_evicted,
    _refuse_stores,
    _offer_what_is_loaded,
    _refuse_loads,
    _load_again_and_again,
)


@manager_check("OFF-5")
def check_off_5_capacity_outlives_every_failure(tier: ManagerDriver) -> None:
    """Failures, refusals, loads and stores of one key: all room is there afterwards."""
    for _ in range(2):
        for trouble in TROUBLES:
            held = trouble(tier)
            found = [one for one in held if tier.lookup(one) is HIT]
            tier.derive()  # which keys are held is the tier's own choice
            tier.equal(found, held, "what was neither evicted nor failed is held")
            _check_all_room(tier, held, "OFF-5")


@manager_check("OFF-8", Capability.RESET)
def check_off_8_completions_of_before_and_after_in_one_call(tier: ManagerDriver) -> None:
    """A call may end transfers of before a reset and newer ones, each its own."""
    tier.store(0, 1)
    tier.must_offer(keys(2, 3))
    tier.load(keys(0, 1, 0))
    tier.reset()
    tier.store(5)
    tier.must_offer(keys(6, 7))
    tier.load(keys(5, 5))
    tier.finish(keys(2, 6))
    tier.end_load(keys(0, 5))
    tier.expect(MISS, keys(0, 1, 2, 3), "OFF-8")
    tier.expect(HIT, keys(5, 6), "OFF-8")
    tier.finish(keys(7, 3), success=False)
    tier.no_load(keys(0, 0))
    tier.end_load(keys(5, 0, 1))
    _check_all_room(tier, keys(5, 6), "OFF-8")


@manager_check("OFF-8", Capability.RESET)
def check_off_8_resets_one_after_another(tier: ManagerDriver) -> None:
    """What was in flight at the first goes on over the second, and takes its room so long."""
    tier.store(0)
    tier.load(keys(0))
    tier.must_offer(keys(1))
    tier.reset()
    tier.must_offer(keys(2))
    tier.reset()
    tier.reset()
    for late in (0, 1, 2):
        output = tier.must_offer(keys(late))
        tier.equal(list(output.keys_to_store), [], "a key that a late transfer uses is left out")
    too_many = keys(*range(100, 98 + tier.capacity))  # one more than there is room for
    if tier.can(Capability.PAGES):  # where keys name the room, a late one takes none
        tier.equal(tier.offer(too_many), None, "room in flight is given to nobody")
    output = tier.must_offer(too_many[1:])
    tier.finish(output.keys_to_store)
    tier.finish(keys(2, 1), success=False)
    tier.end_load(keys(0))
    _check_all_room(tier, too_many[1:], "OFF-8")
