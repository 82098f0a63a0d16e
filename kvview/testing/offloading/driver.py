"""Calls on an offloading manager, with short keys and the usual combinations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvview.errors import KeyNotLoadableError, TransferNotInFlightError
from kvview.events import OffloadingEvent
from kvview.keys import OffloadKey, make_offload_key
from kvview.offloading import LookupResult, PrepareStoreOutput, ReqContext, SupportsMedia
from kvview.testing.checks import checks_driving
from kvview.testing.harness import Capability, Factory
from kvview.testing.recorder import Recorder


def key(number: int, group_idx: int = 0) -> OffloadKey:
    """A short key."""
    return make_offload_key(b"k%d" % number, group_idx)


def keys(*numbers: int) -> list[OffloadKey]:
    """Short keys."""
    return [key(number) for number in numbers]


def pages_of(output: PrepareStoreOutput) -> list[int]:
    """The pages that a manager with the capability ``pages`` gives to new keys."""
    spec: Any = output.store_spec
    return list(spec.block_ids)


class ManagerDriver(Recorder):
    """Calls a manager; every result is checked for what any result must be.

    Args:
        factory: Makes the harness.
        law: The law that is checked.
    """

    def __init__(self, factory: Factory, law: str) -> None:
        super().__init__(factory, law, "manager")
        self.capacity: int = self.harness.capacity
        self.context = ReqContext("r")
        self._names[id(self.context)] = "ctx"
        self._header.append("ctx = ReqContext('r')")
        self._taken: list[OffloadingEvent] = []

    @property
    def manager(self) -> Any:
        """The manager under test."""
        return self.subject

    def can(self, capability: Capability) -> bool:
        """Whether the harness declares a capability."""
        return capability in self.harness.capabilities

    def lookup(self, key: OffloadKey) -> LookupResult:
        """What ``lookup`` says."""
        answer = self.call(self.manager, "lookup", key, self.context)
        self.true(
            isinstance(answer, LookupResult), "lookup answers a LookupResult", answer, "a member"
        )
        assert isinstance(answer, LookupResult)
        return answer

    def expect(
        self, answer: LookupResult, wanted: Iterable[OffloadKey], law: str = "OFF-6"
    ) -> None:
        """Every key is looked up with this answer."""
        for one in wanted:
            got = self.call(self.manager, "lookup", one, self.context)
            self.equal(got, answer, f"lookup of {one!r} answers {answer.name}", law)

    def offer(self, offered: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        """``prepare_store``; what it returns is checked for form."""
        output = self.call(self.manager, "prepare_store", list(offered), self.context)
        if output is None:
            return None
        self.true(
            isinstance(output, PrepareStoreOutput),
            "prepare_store returns a PrepareStoreOutput or None",
            output,
            "one of them",
        )
        assert isinstance(output, PrepareStoreOutput)
        stored, evicted = list(output.keys_to_store), list(output.evicted_keys)
        order = [one for one in dict.fromkeys(offered) if one in stored]
        self.equal(stored, order, "keys_to_store are keys offered, in order, each once", "OFF-3")
        both = sorted(set(evicted) & set(offered))
        self.equal(both, [], "no key of the input is evicted for it", "OFF-3")
        self.equal(len(evicted), len(set(evicted)), "no key is evicted twice", "OFF-3")
        if self.can(Capability.PAGES):
            pages = pages_of(output)
            self.equal(len(pages), len(stored), "one page a key that is stored", "OFF-3")
            self.equal(len(set(pages)), len(pages), "no page is given to two keys", "OFF-3")
        return output

    def must_offer(self, offered: Sequence[OffloadKey]) -> PrepareStoreOutput:
        """``prepare_store`` where there is room, or room can be made."""
        output = self.offer(offered)
        if output is None:
            self.fail("prepare_store makes room when keys may be evicted", "None", "an output")
        return output

    def finish(self, stored: Sequence[OffloadKey], *, success: bool = True) -> None:
        """``complete_store``."""
        self.call(self.manager, "complete_store", list(stored), self.context, success=success)

    def store(self, *numbers: int) -> PrepareStoreOutput:
        """Store keys, from offer to completion."""
        output = self.must_offer(keys(*numbers))
        self.finish(output.keys_to_store)
        return output

    def fill(self, *, batch: int = 1) -> list[OffloadKey]:
        """Store as many keys as fit, key 0 first; returns them."""
        for number in range(0, self.capacity, batch):
            self.store(*range(number, min(number + batch, self.capacity)))
        return keys(*range(self.capacity))

    def load(self, loaded: Sequence[OffloadKey]) -> Any:
        """``prepare_load``."""
        spec = self.call(self.manager, "prepare_load", list(loaded), self.context)
        if self.can(Capability.PAGES):
            self.equal(len(spec.block_ids), len(loaded), "one page a key that is loaded", "OFF-2")
        return spec

    def end_load(self, loaded: Sequence[OffloadKey]) -> None:
        """``complete_load``."""
        self.call(self.manager, "complete_load", list(loaded), self.context)

    def touch(self, touched: Sequence[OffloadKey]) -> None:
        """``touch``."""
        self.call(self.manager, "touch", list(touched), self.context)

    def not_loadable(self, loaded: Sequence[OffloadKey]) -> None:
        """``prepare_load`` must refuse."""
        self.refused(
            KeyNotLoadableError,
            self.manager,
            "prepare_load",
            list(loaded),
            self.context,
            law="OFF-2",
        )

    def no_store(self, stored: Sequence[OffloadKey], *, success: bool = True) -> None:
        """``complete_store`` must refuse: one of the keys is not being stored."""
        self._no_transfer("complete_store", stored, success=success)

    def no_load(self, loaded: Sequence[OffloadKey]) -> None:
        """``complete_load`` must refuse: one load too many would end."""
        self._no_transfer("complete_load", loaded)

    def reset(self) -> None:
        """``reset``."""
        self.call(self.manager, "reset")

    def events(self) -> list[OffloadingEvent]:
        """Events since the last call, of media that may be named."""
        events = self.listed(self.manager, "take_events")
        media = self.manager.media if isinstance(self.manager, SupportsMedia) else None
        for event in events:
            is_name = isinstance(event.medium, str) and event.medium != ""
            is_known = is_name and (media is None or event.medium in media)
            named = "a name" if media is None else f"one of {list(media)}"
            self.true(is_known, "an event names a medium of its manager", event, named, "EVENT-1")
        return events

    def changes(self) -> list[tuple[str, OffloadKey]]:
        """Events since the last call, key by key: ``("+", key)`` and ``("-", key)``."""
        events = self.events()
        self.derive()
        return [("-" if event.removed else "+", one) for event in events for one in event.keys]

    def advertised(self, law: str = "EVENT-1") -> set[OffloadKey]:
        """What all events since the start advertise, folded here and not by kvview."""
        self._taken += self.events()
        held: dict[str, set[OffloadKey]] = {}
        for event in self._taken:
            medium = held.setdefault(event.medium, set())
            for one in event.keys:
                if not event.removed:
                    what = f"{one!r} is not stored again before it is removed"
                    self.true(one not in medium, what, event, "a removal", law)
                    medium.add(one)
                    continue
                self.true(
                    one in medium, f"{one!r} was stored before it is removed", event, "a store", law
                )
                medium.discard(one)
        return set().union(*held.values())

    def _no_transfer(self, method: str, named: Sequence[OffloadKey], **outcome: bool) -> None:
        self.refused(
            TransferNotInFlightError,
            self.manager,
            method,
            list(named),
            self.context,
            law="OFF-9",
            **outcome,
        )


manager_check = checks_driving(ManagerDriver, contract="offloading")
"""Register a check that drives the harness through :class:`ManagerDriver`."""
