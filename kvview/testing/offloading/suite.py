"""The suite of offloading managers, from which implementers derive one class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from kvview.errors import ConfigError
from kvview.offloading import OffloadingManager, ReqContext
from kvview.testing.offloading.machine import KEYS, OffloadingMachine
from kvview.testing.suites.capability import Capability as C
from kvview.testing.suites.conformance import Conformance, example

_CAPACITY = 8


class OffloadingConformance(Conformance):
    """The laws of an offloading manager.

    A manager keeps one order of eviction, or none that the contract defines, so ``lacks`` names
    ``"lru"``, ``"arc"``, or both.

    Example:
        >>> class TestMyManager(OffloadingConformance):
        ...     lacks = {"arc", "policies", "store_threshold"}
        ...
        ...     def make(self, capacity):
        ...         return MyManager(capacity)
    """

    contract = "offloading"
    machine = OffloadingMachine
    protocols: ClassVar[Mapping[str, type]] = {"manager": OffloadingManager}
    policies: Sequence[str]
    """The names of the known policies, for the capability ``"policies"``."""

    def make(self, capacity: int) -> OffloadingManager:
        """Make a manager that holds no key, and stores every offer.

        Args:
            capacity: Number of keys that fit.
        """
        raise NotImplementedError

    @override
    @contextmanager
    def parts(self) -> Iterator[Mapping[str, object]]:
        if self.has(C.LRU) and self.has(C.ARC):
            raise ConfigError("a manager keeps one order; add 'arc', 'lru' or both to lacks")
        yield {"suite": self, "manager": self.make(_CAPACITY)}

    @example("OFF-5")
    def test_off_5_growth_of_keys_that_are_gone(self, machine: OffloadingMachine) -> None:
        """Growth: evicted keys, failed stores and ended loads keep no memory allocated."""
        machine.start(capacity=2, threshold=1, most=1, used=[])
        manager: Any = machine.manager
        no_request = ReqContext()  # a manager may remember the keys of a request until it ends

        def serve(times: int) -> None:
            for _ in range(times):
                stored, failed = machine.fresh(1), machine.fresh(1)
                manager.prepare_store(failed, no_request)
                manager.complete_store(failed, no_request, success=False)
                manager.prepare_store(stored, no_request)
                manager.complete_store(stored, no_request)
                manager.prepare_load(stored, no_request)
                manager.touch(stored + failed, no_request)
                manager.complete_load(stored, no_request)
                list(manager.take_events())

        what = "keys that are gone leave no memory behind"
        machine.keeps_size(what, partial(serve, 700), partial(serve, 100))

    @example("OFF-7", C.POLICIES)
    def test_off_7_names_of_policies(self, machine: OffloadingMachine) -> None:
        """An unknown policy is refused with a list of the known ones."""
        for name in ("builtins:object", "builtins:bytearray"):
            machine.refused(ValueError, self, "with_policy", name)
        error = machine.refused(ValueError, self, "with_policy", "no-such-policy")
        for name in self.policies:
            machine.true(name in str(error), f"the message lists {name!r}", str(error), repr(name))
            machine.call(self, "with_policy", name)

    @example("OFF-8")
    def test_off_8_shutdown_during_transfers(self, machine: OffloadingMachine) -> None:
        """A manager can be shut down twice, also while its keys are stored and loaded."""
        machine.start(capacity=4, threshold=1, most=1, used=KEYS[:3])
        machine.begin_load(KEYS[:2])
        machine.offer(KEYS[3:5])
        machine.call(machine.manager, "shutdown")
        machine.call(machine.manager, "shutdown")

    @example("OFF-12", C.STORE_THRESHOLD)
    def test_off_12_impossible_thresholds(self, machine: OffloadingMachine) -> None:
        """A threshold below 1 is refused."""
        for threshold in (0, -1):
            machine.refused(ConfigError, self, "with_threshold", _CAPACITY, threshold)
