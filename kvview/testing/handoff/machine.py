"""The machine of handoffs: the calls of clients, a router, a network and failing engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize
from typing_extensions import override

from kvview.testing.connector.judge.invariants import (
    InvariantBroken,
    check_conservation,
    check_free_list,
)
from kvview.testing.connector.scenario.scenario import Add
from kvview.testing.handoff.harness import TwoEngines
from kvview.testing.handoff.model import Kept
from kvview.testing.handoff.network import Fault
from kvview.testing.handoff.run import NAMES, HandoffRun
from kvview.testing.handoff.sizes import GEOMETRIES, SPLITS, doubled, scenario_of
from kvview.testing.suites.capability import Capability
from kvview.testing.suites.conformance import (
    ContractMachine,
    Needs,
    observable,
    of_state,
    operation,
)

_NAME = st.sampled_from(NAMES)
_WAYS = ("load", "load the rest", "hit", "abort in the queue", "abort the load")
_NUMBER, _FAMILY = st.integers(0, 2), st.integers(0, 7)
_MANY = st.integers(0, 99)  # families of prompts that are mostly new, so that their KV is loaded
_AGE = st.sampled_from((0, 0, 1, 2, 5, 20))  # number of later offers
_PRESSED = st.sampled_from((0, 0, 6, 18, 36))
_TO_ITSELF = st.sampled_from((False,) * 9 + (True,))
_LOST = st.sampled_from((0, 0, 0, 0, 4, 16, 48))
_ROUTED: Mapping[str, Any] = {
    "family": _MANY,
    "number": _NUMBER,
    "to_itself": _TO_ITSELF,
    "seconds": st.integers(0, 5),
}
"""The strategies of each first delivery."""


_LENGTH = of_state(
    lambda machine: st.integers(machine.run.block_size + 1, 4 * machine.run.block_size)
)
"""Lengths of prompts."""
_FAULTS = of_state(
    lambda machine: (
        st.lists(st.sampled_from((None, *machine.pair.faults)), max_size=4)
        | st.sampled_from(machine.pair.faults).map(lambda fault: [fault] * 3)
    )
)
"""Faults of the next messages: mixed, or a request for pages, its answer and the receipt alike."""


class HandoffMachine(ContractMachine):
    """Runs two engines, their router and the network."""

    laws = tuple(f"HAND-{number}" for number in range(1, 11))
    needs: ClassVar[Needs] = {"HAND-1": (Capability.NAMES_THE_KV,)}
    pair: TwoEngines
    run: HandoffRun
    num_at_restart = num_at_hand_over = 0
    """Numbers of requests at the last restart and the last handoff on an intact network."""

    @initialize(
        groups=st.sampled_from(("full", *GEOMETRIES)),
        split=st.sampled_from(("none", *SPLITS)),
        consumer=st.sampled_from(("alike",) * 6 + ("other blocks", "other split")),
        num_blocks=st.tuples(st.sampled_from((14, 20, 40)), st.sampled_from((14, 20, 40))),
        max_running=st.tuples(st.sampled_from((1, 3)), st.sampled_from((1, 3))),
        pin_budget=st.sampled_from((None, None, None, 0.2)),
        lease=st.sampled_from((16, 24)),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(
        self,
        groups: str,
        split: str,
        consumer: str,
        num_blocks: tuple[int, int],
        max_running: tuple[int, int],
        pin_budget: float | None,
        lease: int,
        seed: int,
    ) -> None:
        """Build both engines; ``seed`` determines the model runners and the network's faults."""
        geometries, splits = [GEOMETRIES[groups]] * 2, [split] * 2
        if consumer == "other blocks":
            geometries[1] = doubled(geometries[1])
        elif consumer == "other split":
            splits[1] = next(other for other in SPLITS if other != split)
        scenarios = {
            name: replace(
                scenario_of(
                    geometries[at], splits[at], num_blocks[at], max_running[at], pin_budget
                ),
                other_runner=seed // 10**at % 10 > 6,
            )
            for at, name in enumerate(NAMES)
        }
        suite: Any = self.suite
        self.pair = suite.make()
        self.run = HandoffRun(self, self.pair, scenarios, lease, seed)

    @override
    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()

    # --- requests ---

    @operation(
        "HAND-2",
        name=st.sampled_from(("P", "P", "P", "P", "D")),
        number=_NUMBER,
        family=_FAMILY,
        num_tokens=_LENGTH,
        num_shared_blocks=st.integers(0, 1),
        num_outputs=st.sampled_from((None, None, None, None, None, 0, 1, 6)),
        seconds=st.integers(0, 3),
    )
    def prefill(
        self,
        name: str,
        number: int,
        family: int,
        num_tokens: int,
        num_shared_blocks: int,
        num_outputs: int | None,
        seconds: int,
    ) -> None:
        """Compute a prompt whose KV is offered, or serve a request if it has outputs."""
        request_id = self.request_id(number)
        add = Add(request_id, family, num_tokens, num_outputs or 0, None, None, num_shared_blocks)
        if num_outputs is None:
            self.run.prefill(name, add)
        else:
            self.run.add(name, add)
        self.run.tick(seconds)

    def request_id(self, number: int) -> str:
        """Name a request; names are used again, unless the engines forbid it."""
        return f"r{self.run.num_requests if self.pair.names_are_unique else number}"

    @operation("HAND-7", **_ROUTED)
    def route(self, **delivery: Any) -> None:
        """Deliver a handoff for the first time, over an intact network."""
        self.deliver(**delivery)

    @operation(
        "HAND-7",
        **_ROUTED,
        faults=_FAULTS,
        lost=_LOST,
        pressed=_PRESSED,
        has_part=st.booleans(),
    )
    def route_disturbed(self, **delivery: Any) -> None:
        """Deliver a handoff for the first time, with faults of the next messages."""
        self.deliver(**delivery)

    @operation("HAND-4", **_ROUTED, faults=_FAULTS, pressed=_PRESSED, left=st.integers(1, 4))
    def route_late(self, left: int, **delivery: Any) -> None:
        """Deliver a handoff for the first time, shortly before its lease ends."""
        self.deliver(**{**delivery, "seconds": left + 2}, seconds_left=left)

    def deliver(
        self,
        family: int,
        number: int,
        to_itself: bool = False,
        faults: Sequence[Fault | None] = (),
        lost: int = 0,
        pressed: int = 0,
        has_part: bool = False,
        seconds_left: int | None = None,
        seconds: int = 0,
    ) -> None:
        """Deliver a handoff for the first time; it is that of a new prompt, if none waits.

        Args:
            family: Family of the prompt.
            number: Number of the request.
            to_itself: Whether the producer is the consumer, if engines serve themselves.
            faults: Faults of the next messages.
            lost: Seconds in which all messages are lost.
            pressed: Seconds in which other requests overwrite the producer's free blocks.
            has_part: Whether the consumer has just computed the first block of the prompt.
            seconds_left: Seconds before the end of the lease; None for now.
            seconds: Seconds that pass afterwards.
        """
        if (kept := self.choose(family, number)) is None:
            return
        network = self.run.network
        if seconds_left is not None:
            self.run.tick(max(0, int(kept.until - network.now) - seconds_left))
        consumer = self.consumer_of(kept, to_itself)
        if has_part:
            num_tokens = self.run.block_size + 1
            first = replace(kept.add, request_id=f"first{number}", num_prompt_tokens=num_tokens)
            self.run.add(consumer, first)
            self.run.tick(2)
        network.faults += faults
        network.cut_off_until = max(network.cut_off_until, network.now + lost)
        self.run.press(kept.engine, pressed)
        add = replace(kept.add, request_id=self.request_id(number), num_output_tokens=number)
        self.run.route(consumer, kept, add, "right")
        self.run.tick(seconds)

    def choose(self, family: int, number: int) -> Kept | None:
        """Choose an offer that no consumer has received, or compute a prompt for a new one."""
        if not self.run.new_offers():
            num_tokens = (1 + family % 3) * self.run.block_size + 1
            request_id = self.request_id(number)
            add = Add(request_id, family, num_tokens, num_shared_blocks=family % 2)
            self.run.prefill("P", add)
            self.run.tick(3)
        new = self.run.new_offers()
        return new[family % len(new)] if new else None

    def consumer_of(self, kept: Kept, to_itself: bool) -> str:
        """Name the other engine, or the same one, if engines serve themselves."""
        return NAMES[(kept.engine == "P") ^ (to_itself and self.pair.serves_itself)]

    @operation(
        "HAND-5",
        when=lambda machine: machine.run.old_offers(),
        age=_AGE,
        to_itself=_TO_ITSELF,
        is_evicted=st.booleans(),
        seconds=st.integers(0, 3),
    )
    def route_again(self, age: int, to_itself: bool, is_evicted: bool, seconds: int) -> None:
        """Deliver a handoff again, even if it is in use, consumed, expired or of an old life.

        Args:
            age: Number of later handoffs.
            to_itself: Whether the producer is the consumer, if engines serve themselves.
            is_evicted: Whether other requests overwrite all free blocks of both engines before.
            seconds: Seconds that pass afterwards.
        """
        old = self.run.old_offers()
        self.evict(is_evicted)
        kept = old[-1 - age % len(old)]
        add = replace(kept.add, request_id=f"again{self.run.num_requests}", num_output_tokens=2)
        self.run.route(self.consumer_of(kept, to_itself), kept, add, "repeated")
        self.run.tick(seconds)

    @operation(
        "HAND-6",
        when=lambda machine: machine.run.model.kept,
        age=_AGE,
        longer=st.sampled_from((0, 4, 8, -4)),
        entry=st.sampled_from((None, None, None, None, *range(7))),
        value=st.sampled_from((None, "missing", [], "changed")),
        is_evicted=st.booleans(),
        seconds=st.integers(0, 3),
    )
    def route_wrong(
        self,
        age: int,
        longer: int,
        entry: int | None,
        value: Any,
        is_evicted: bool,
        seconds: int,
    ) -> None:
        """Deliver a handoff with another prompt, or with a wrong or missing entry.

        Args:
            age: Number of later offers.
            longer: Number of tokens by which the other prompt is longer.
            entry: Number of the wrong entry; None for another prompt.
            value: Value of the entry, or the way in which it is wrong.
            is_evicted: Whether other requests overwrite all free blocks of both engines before.
            seconds: Seconds that pass afterwards.
        """
        offers, number = self.run.model.kept, self.run.num_requests
        self.evict(is_evicted)
        kept = offers[-1 - age % len(offers)]
        add = replace(kept.add, request_id=f"wrong{number}", num_output_tokens=1)
        changes = {}
        if entry is None:
            num_tokens = add.num_prompt_tokens + longer
            add = Add(add.request_id, 100 + number, num_tokens, 1, num_shared_blocks=0)
        else:
            entries = [*self.pair.entries(kept.params).items()]
            key, right = entries[entry % len(entries)]
            if value == "changed":
                value = right + 1 if isinstance(right, int) else f"{right}x"
            changes = {key: value}
        self.run.route(self.consumer_of(kept, False), kept, add, "wrong", **changes)
        self.run.tick(seconds)

    def evict(self, is_evicted: bool) -> None:
        """Overwrite all free blocks of both engines."""
        for name in NAMES if is_evicted else ():
            self.run.overwrite(name, 0)

    @operation(
        "HAND-3",
        when=lambda machine: machine.unfinished(),
        request=of_state(lambda machine: st.sampled_from(machine.unfinished())),
    )
    def abort(self, request: tuple[str, str]) -> None:
        """Abort a request, in any state."""
        self.run.abort(*request)

    def unfinished(self) -> list[tuple[str, str]]:
        """List the unfinished requests of both engines."""
        engines = self.run.engines.items()
        return [(name, request) for name, engine in engines for request in engine.unfinished()]

    # --- time, memory and faults ---

    @operation("HAND-7", seconds=st.sampled_from((1, 2, 3, 6, 15, 22, 30)))
    def pass_time(self, seconds: int) -> None:
        """Let some seconds pass, or a lease."""
        self.run.tick(seconds)

    @operation(
        "HAND-2",
        name=_NAME,
        share=st.sampled_from((0, 0, 0.5, 1)),
        pressed=_PRESSED,
        seconds=st.integers(0, 3),
    )
    def squeeze(self, name: str, share: float, pressed: int, seconds: int) -> None:
        """Let another owner overwrite free blocks, and hold some of these blocks.

        Args:
            name: The engine.
            share: Share of the blocks that the owner holds.
            pressed: Seconds in which other requests overwrite all free blocks.
            seconds: Seconds that pass afterwards.
        """
        self.run.overwrite(name, int(share * self.run.engines[name].num_blocks))
        self.run.press(name, pressed)
        self.run.tick(seconds)

    @operation(
        "HAND-6",
        when=lambda machine: machine.run.num_requests >= machine.num_at_restart + 3,  # to lose
        name=_NAME,
        how=st.sampled_from(("reset", "kill", "shut down")),
    )
    def restart(self, name: str, how: str) -> None:
        """Reset the caches of an engine, or start the engine again."""
        self.num_at_restart = self.run.num_requests
        if how == "reset":
            self.run.act(name, "reset")
            return
        if how == "shut down":
            leaked = self.run.act(name, "shutdown")
            self.equal(dict(leaked), {}, f"{name} frees all blocks at shutdown", "HAND-3")
        self.run.restart(name)

    # --- goals ---

    @operation(
        "HAND-10",
        when=lambda machine: machine.run.num_requests >= machine.num_at_hand_over + 4,  # to disturb
        has_unused=st.booleans(),
        num_blocks=st.integers(1, 3),
        way=st.sampled_from(_WAYS),
    )
    def hand_over(self, has_unused: bool, num_blocks: int, way: str) -> None:
        """Hand over one prompt on an intact network; then the producer's blocks must be free.

        Args:
            has_unused: Whether an earlier offer has not reached a consumer.
            num_blocks: Full blocks of the prompt.
            way: The end of the handoff.
        """
        run, size = self.run, self.run.block_size
        run.finish()
        self.num_at_hand_over = run.num_requests
        if has_unused:
            self.offer_now(num_blocks)
        if (kept := self.offer_now(num_blocks)) is None or not run.model.are_alike:
            return
        add = replace(kept.add, num_output_tokens=1)
        if way == "hit" or (way == "load the rest" and num_blocks > 1):
            num_tokens = add.num_prompt_tokens if way == "hit" else size + 1
            run.add("D", replace(add, request_id="first", num_prompt_tokens=num_tokens))
            self.run.tick_until(lambda: not run.engines["D"].unfinished(), "a prompt is computed")
        _, num_loaded = run.counters("D")
        run.route("D", kept, add, "right")
        if way.startswith("abort"):
            run.tick(2 * (way == "abort the load"))
            run.abort("D", add.request_id)
        run.tick_until(lambda: not run.engines["D"].unfinished(), "the consumer serves")
        if way.startswith("load"):
            is_loaded = run.counters("D")[1] > num_loaded
            self.true(is_loaded, "the KV is loaded", "it was computed", "a load")
        run.tick_until(
            lambda: not kept.blocks & {*run.engines["P"].held_blocks()},
            f"{way}: the producer frees the blocks before the end of the lease",
            "HAND-3",
        )

    def offer_now(self, num_blocks: int) -> Kept | None:
        """Compute a new prompt and wait for its offer; None if the producer may offer nothing."""
        run, number, before = self.run, self.run.num_requests, len(self.run.model.kept)
        length = run.block_size * num_blocks + 1
        run.prefill("P", Add(f"over{number}", 1000 + number, length, num_shared_blocks=0))
        run.tick_until(lambda: not run.engines["P"].unfinished(), "a prompt is computed")
        if len(run.model.kept) > before:
            return run.model.kept[-1]
        what = "a finished prompt is offered"
        self.true(run.may_refuse_offers, what, "no offer", "an offer", "HAND-10")
        return None

    # --- observables ---

    @observable("HAND-2")
    def offered_blocks_are_held(self) -> None:
        """Check that blocks are held if a consumer may still load them."""
        for name, engine in self.run.engines.items():
            must = self.run.model.must_hold(name, self.run.network.now)
            missing = must - {*engine.held_blocks()}
            self.equal(missing, set(), f"{name} holds the blocks that it offers", "HAND-2")

    @observable("HAND-3")
    def ended_blocks_are_free(self) -> None:
        """Check that blocks of handoffs that have ended are not held."""
        network = self.run.network
        for name, engine in self.run.engines.items():
            if network.is_reading(self.pair.address(name)):
                continue
            held = {*engine.held_blocks()}
            held -= self.run.model.may_hold(name, network.now, network.num_faults)
            self.equal(held, set(), f"{name} frees the blocks of ended handoffs", "HAND-3")

    @observable("HAND-3")
    def references(self) -> None:
        """Check that every reference of the pool belongs to an owner."""
        for name, engine in self.run.engines.items():
            refs = dict(enumerate(engine.ref_counts(range(1, engine.num_blocks)), 1))
            try:
                check_free_list(engine.free_block_ids(), refs)
                check_conservation(refs, engine.engine_refs(), engine.held_blocks())
            except InvariantBroken as broken:
                self.fail(f"the blocks of {name} have an owner", str(broken), "all", "HAND-3")

    @observable("HAND-4")
    def reads(self) -> None:
        """Check that frames do not change before they are read."""
        overwritten = self.run.network.overwritten
        self.equal(overwritten, [], "frames stay until they are read", "HAND-4")

    @observable("HAND-8")
    def cached_bytes(self) -> None:
        """Check that every block has the bytes of its owner."""
        for name, engine in self.run.engines.items():
            what = f"nothing writes into blocks of {name} that have another owner"
            self.equal(engine.num_wrong_blocks(), 0, what, "HAND-8")
