"""One run: two engines, a router and a network, compared with the model at each second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvview import FullAttention
from kvview.errors import ConfigError, HandoffError, split_law
from kvview.handoff import Handoff
from kvview.testing.connector.scenario.scenario import Add, Scenario
from kvview.testing.handoff.harness import PDHarness, TwoEngines
from kvview.testing.handoff.model import BROKEN, GRACE, Decode, HandoffModel, Kept, Kind
from kvview.testing.handoff.network import Network
from kvview.testing.results.law_broken import LawBroken
from kvview.testing.suites.capability import Capability
from kvview.testing.suites.conformance import ContractMachine

NAMES = ("P", "D")
_LONGEST_RUN = 1_500  # maximum of seconds until two engines without new requests are idle


class HandoffRun:
    """Two engines and their router, with the model of their handoffs.

    Args:
        laws: The machine, whose methods break laws.
        pair: Two engines that are not built yet.
        scenarios: Sizes of each engine by name.
        lease: Seconds for which an offer waits for its consumer.
        seed: Seed of the network.
    """

    def __init__(
        self,
        laws: ContractMachine,
        pair: TwoEngines,
        scenarios: Mapping[str, Scenario],
        lease: int,
        seed: int,
    ) -> None:
        fitted = {name: pair.fit(scenario) for name, scenario in scenarios.items()}
        layouts = [(scenario.geometry, scenario.ranks) for scenario in fitted.values()]
        self.laws, self.pair, self.lease = laws, pair, lease
        self.network = Network(seed, lease)
        self.model = HandoffModel(layouts[0] == layouts[1], pair.renews_leases)
        self.num_requests = 0
        self._geometries = {name: scenario.geometry for name, scenario in fitted.items()}
        self.block_size = self._geometries["P"].scheduler_block_size
        has_windows = any(not isinstance(one, FullAttention) for one in fitted["P"].geometry.groups)
        self.may_refuse_offers = has_windows or fitted["P"].pin_budget is not None
        """Whether the producer may offer nothing of a prompt."""
        self._prompts: dict[tuple[str, str], Add] = {}  # prefills whose KV is not offered yet
        self._pressed_until = dict.fromkeys(NAMES, 0.0)
        pair.start(fitted, self.network, lease)
        self._counts = {name: self.counters(name) for name in NAMES}

    @property
    def engines(self) -> Mapping[str, PDHarness]:
        """The current engines; a restart replaces an engine."""
        return self.pair.engines

    def counters(self, name: str) -> tuple[int, int]:
        """Return the number of wrong blocks and the number of loaded blocks of an engine so far."""
        engine = self.engines[name]
        return engine.stats.mismatches, engine.num_loaded_blocks

    # --- calls ---

    def act(self, name: str, method: str, *args: Any) -> Any:
        """Call an engine; an error of the connector breaks a law."""
        try:
            return self.laws.call(self.engines[name], method, *args, permitted=(ConfigError,))
        except LawBroken as failure:
            error = failure.__cause__
            if error is None:
                raise
            if getattr(error, "law", None) == "ENGINE":
                raise error from None  # the engine has failed, not the connector
            law = self.pair.laws_of_errors.get(split_law(str(error))[0], "HAND-6")
            what = f"{method} of engine {name} must not raise"
            self.laws.fail(what, failure.got, "no error", law)

    def add(self, name: str, add: Add, method: str = "add", *args: Any) -> bool:
        """Queue a request, unless a request with its id is unfinished or still loads."""
        if add.request_id in self.engines[name].unfinished():
            return False
        self.num_requests += 1
        self._prompts.pop((name, add.request_id), None)
        try:
            self.act(name, method, add, self.num_requests, *args)
        except ConfigError:
            return False
        return True

    def prefill(self, name: str, add: Add) -> None:
        """Queue a prompt whose KV is offered."""
        if self.add(name, add, "add_prefill"):
            self._prompts[name, add.request_id] = add

    def route(self, name: str, kept: Kept, add: Add, kind: Kind, **changes: Any) -> None:
        """Deliver parameters with a request, as a router does; ``"missing"`` drops an entry."""
        params = json.loads(json.dumps({**kept.params, "router": "r1", **changes}))
        params = {key: value for key, value in params.items() if value != "missing"}
        if self.add(name, add, "add_decode", params):
            self.model.decodes[name, add.request_id] = Decode(kept, kind)
            if kind == "right":
                kept.is_routed, kept.num_faults = True, self.network.num_faults

    def abort(self, name: str, request_id: str) -> None:
        """Abort a request."""
        self.act(name, "abort", request_id)
        self._prompts.pop((name, request_id), None)
        self._take_ends(name)

    def overwrite(self, name: str, num_kept: int) -> None:
        """Overwrite all free blocks of an engine, and hold some of these blocks."""
        self.act(name, "squeeze", self.engines[name].num_blocks)
        self.act(name, "squeeze", num_kept)

    def press(self, name: str, seconds: int) -> None:
        """Let other requests overwrite the free blocks of an engine for some time."""
        self._pressed_until[name] = max(self._pressed_until[name], self.network.now + seconds)

    def restart(self, name: str) -> None:
        """Start a new life of an engine."""
        self.pair.restart(name)
        self.model.restart(name)
        self._prompts = {key: add for key, add in self._prompts.items() if key[0] != name}
        self._counts[name] = self.counters(name)
        self.network.num_faults += 1  # requests that are in transit may be lost with the old life

    # --- time ---

    def tick(self, seconds: int = 1) -> None:
        """Let one second pass, in which messages arrive, and engines with work make a step."""
        for _ in range(seconds):
            self.network.tick()
            for name in NAMES:
                if self.engines[name].has_work():
                    self.act(name, "step")
                self._take_offers(name)
                self._take_ends(name)
                if self.network.now < self._pressed_until[name]:
                    self.overwrite(name, 0)
            self.laws.compare()

    def tick_until(self, is_done: Callable[[], bool], what: str, law: str = "HAND-10") -> None:
        """Advance the clock, second by second, until a condition holds."""
        for _ in range(2 * GRACE):
            if is_done():
                return
            self.tick()
        self.laws.true(is_done(), what, f"not after {2 * GRACE} s", "it happens", law)

    def finish(self) -> None:
        """Heal the network, and let both engines finish all work."""
        self.network.heal()
        for name in NAMES:
            self.act(name, "squeeze", 0)
            self._pressed_until[name] = 0.0
        end = self.network.now + _LONGEST_RUN
        while left := [name for name, engine in self.engines.items() if engine.has_work()]:
            law = "HAND-9" if "D" in left else "HAND-3"  # a load without a report, or an offer
            is_in_time = self.network.now < end
            self.laws.true(
                is_in_time, "engines end their work", f"work left in {left}", "none", law
            )
            self.tick()
        self.tick(self.lease + 1)  # messages in transit
        for name, engine in self.engines.items():
            held = dict(engine.held_blocks())
            what = f"{name} holds nothing when all handoffs have ended"
            self.laws.equal(held, {}, what, "HAND-3")

    def _take_offers(self, name: str) -> None:
        """Add new offers to the model."""
        for request_id, (params, tables) in self.engines[name].take_offered().items():
            add = self._prompts.pop((name, request_id))
            handoff = self._read_params(params, name, add.num_prompt_tokens)
            blocks = self.pair.offered_blocks(handoff, self._geometries[name], tables)
            until = self.network.now + self.lease
            self.model.kept.append(Kept(name, add, params, handoff, blocks, until, self.lease))

    def _read_params(self, params: Mapping[str, Any], name: str, num_tokens: int) -> Handoff:
        """Read parameters in the form in which a router passes them on (HAND-1)."""
        laws = self.laws
        try:
            copied = json.loads(json.dumps(dict(params)))
            handoff = self.pair.read_handoff(copied, num_tokens)
        except (TypeError, ValueError, HandoffError) as error:
            laws.fail("the parameters are plain JSON", f"{params}: {error}", "a handoff", "HAND-1")
        if laws.can(Capability.NAMES_THE_KV):
            laws.equal(copied, dict(params), "parameters survive JSON", "HAND-1")
        named = handoff.engine_id, handoff.life, handoff.address
        me = name, self.pair.life(name), self.pair.address(name)
        laws.equal(named, me, "parameters name this life of the producer", "HAND-1")
        return handoff

    def _take_ends(self, name: str) -> None:
        """Check all loads that have ended in this step."""
        laws, engine, now = self.laws, self.engines[name], self.network.now
        ended = self.model.follow(name, engine.unfinished(), now)
        (wrong_before, loaded_before), counts = self._counts[name], self.counters(name)
        self._counts[name] = wrong, loaded = counts
        kinds: set[Kind] = {one.kind for one in ended}
        if wrong > wrong_before:
            law = next((BROKEN[k] for k in ("repeated", "wrong") if k in kinds), "HAND-7")
            laws.fail("loaded blocks have the KV of the prompt", f"{wrong} differ", "none", law)
        if loaded > loaded_before and kinds and (kinds == {"wrong"} or not self.model.are_alike):
            laws.fail("a wrong handoff is refused", "it was loaded", "computed", "HAND-6")
        for (engine_name, request_id), decode in self.model.decodes.items():
            since = decode.loading_since
            if engine_name == name and since is not None:
                is_late = now > since + self.lease + GRACE
                what = f"the load of {request_id} ends within a lease of {self.lease} s"
                laws.true(not is_late, what, f"loads for {now - since} s", "a report", "HAND-9")

    # --- offers ---

    def new_offers(self) -> Sequence[Kept]:
        """List the offers that no consumer has received: the live ones, or else all."""
        new = [one for one in self.model.kept if not one.is_routed]
        return [one for one in new if self.network.now < one.until] or new[-1:]

    def old_offers(self) -> Sequence[Kept]:
        """List the offers that a consumer has received."""
        return [one for one in self.model.kept if one.is_routed]
