"""Random puts, gets and lookups, against the oracle of the driver."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvview.testing.harness import Capability, Factory
from kvview.testing.machines import run_machine
from kvview.testing.recorder import LawBroken
from kvview.testing.tier.driver import TierDriver

_SIZES = (300, 1500, 4096, 9001)
_KEYS = [f"key {number}".encode() for number in range(12)]

some_keys = st.lists(st.sampled_from(range(len(_KEYS))), max_size=5, unique=True)


def tier_machine(factory: Factory) -> type[RuleBasedStateMachine]:
    """The machine over the stores that ``factory`` makes."""

    class TierMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.driver = TierDriver(factory, "TIER-*")

        def can(self, capability: Capability) -> bool:
            return self.driver.can(capability)

        def keys(self, numbers: list[int], size: int) -> list[bytes]:
            """Keys whose pages have one size: it follows from the key."""
            return [_KEYS[n] for n in numbers if n % len(_SIZES) == size]

        @rule(numbers=some_keys, size=st.integers(0, 3))
        def put(self, numbers: list[int], size: int) -> None:
            self.driver.put(*self.keys(numbers, size), num_bytes=_SIZES[size])

        @rule(numbers=some_keys, size=st.integers(0, 3))
        def get(self, numbers: list[int], size: int) -> None:
            self.driver.get(*self.keys(numbers, size), num_bytes=_SIZES[size])

        @rule(number=st.integers(0, 11))
        def get_in_another_size(self, number: int) -> None:
            self.driver.wait()
            self.driver.get(_KEYS[number], num_bytes=777)
            self.driver.wait()

        @rule(numbers=some_keys)
        def lookup(self, numbers: list[int]) -> None:
            self.driver.lookup(*(_KEYS[n] for n in numbers))

        @rule()
        def poll(self) -> None:
            self.driver.poll()

        @rule()
        def wait(self) -> None:
            driver = self.driver
            driver.wait()
            sure = sorted(driver.stored.keys() - driver.unsure - driver.failed)
            if sure:
                driver.check_held(*sure)

        @rule()
        def reuse_pages(self) -> None:
            self.driver.overwrite_reported()

        @precondition(lambda self: self.can(Capability.REOPEN))
        @rule()
        def reopen(self) -> None:
            driver = self.driver
            driver.finish()
            driver.go_on_with(driver.call(driver.harness, "reopen"))
            driver.forget_failures()

        @precondition(lambda self: self.can(Capability.VERIFIES))
        @rule(how=st.sampled_from(["flip", "cut", "grow", "swap"]))
        def damage(self, how: str) -> None:
            self.driver.finish()
            self.driver.damage(how)

        @precondition(lambda self: self.can(Capability.DELETE))
        @rule(numbers=some_keys)
        def delete(self, numbers: list[int]) -> None:
            driver, keys = self.driver, [_KEYS[n] for n in numbers]
            driver.finish()
            driver.call(driver.store, "delete", keys)
            driver.unsure |= {*keys}  # it need not be done at once

        def teardown(self) -> None:
            self.driver.check_untouched()
            self.driver.end()

    return TierMachine


def run_tier_machine(factory: Factory) -> None:
    """Search for a sequence of calls that breaks a law of a store.

    Raises:
        LawBroken: With the shortest script found, or the first one where threads made it come
            only once.
    """
    try:
        run_machine(lambda: tier_machine(factory))
    except Flaky as flaky:
        for error in getattr(flaky, "exceptions", ()):
            if isinstance(error, LawBroken):
                raise error from None
        raise
