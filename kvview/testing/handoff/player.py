"""Handoffs between two engines, which run with faults and are compared with the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import override

from kvview import CacheGeometry, ChunkedLocalAttention, FullAttention, SlidingWindow
from kvview.errors import ConfigError, HandoffError, split_law
from kvview.handoff import Handoff
from kvview.testing.connector.judge.invariants import (
    InvariantBroken,
    check_conservation,
    check_free_list,
)
from kvview.testing.connector.run.engine import all_ref_counts
from kvview.testing.connector.scenario.scenario import NUM_LAYERS, PAGE_BYTES, Add, Scenario
from kvview.testing.handoff.harness import PDHarness, TwoEngines
from kvview.testing.handoff.model import BROKEN, GRACE, Decode, HandoffModel, Kept, Kind
from kvview.testing.handoff.network import Network
from kvview.testing.harness import Capability
from kvview.testing.search import Label, Player, check_by_search, observable, operation

_FULL, _WINDOW = FullAttention(4), SlidingWindow(4, 6)
_GEOMETRIES = (
    CacheGeometry.single(4),
    CacheGeometry.single(4),
    CacheGeometry(4, 4, (_FULL, _WINDOW)),
    CacheGeometry(8, 4, (FullAttention(8), _FULL)),
    CacheGeometry(4, 4, (_FULL, ChunkedLocalAttention(4, 8))),
)
_SPLITS = ((), (), (NUM_LAYERS, NUM_LAYERS), (1, NUM_LAYERS - 1))
"""The numbers of tensors of each rank: one rank, tensor parallelism, and pipeline parallelism."""
_LEASES = (16, 24)
_LONGEST_RUN = 1_500  # maximum of seconds until two engines without new requests are idle
_NAMES = ("P", "D")


@check_by_search
class HandoffPlayer(Player):
    """Plays operations on two engines, their router and the network."""

    contract = "handoff"
    subject_name = "engines"
    first_moves: ClassVar[tuple[str, ...]] = ("prefill", "pass_time", "route", "pass_time")
    labels: ClassVar[Mapping[str, Label]] = {
        "HAND-1": Label("Parameters are JSON and name the KV.", (Capability.NAMES_THE_KV,)),
        "HAND-2": Label("Offered blocks stay until the handoff ends."),
        "HAND-3": Label("Every handoff ends once, and its blocks are freed."),
        "HAND-4": Label("No block is freed while a transfer reads it."),
        "HAND-5": Label("A handoff is used once."),
        "HAND-6": Label("Stale, foreign and incomplete handoffs are refused; nothing raises."),
        "HAND-7": Label("A failed transfer is never a success."),
        "HAND-8": Label("Nothing is written after the report of a load."),
        "HAND-9": Label("A load ends within the time of a lease."),
        "HAND-10": Label("An intact handoff is used."),
    }

    # --- the run ---

    @override
    def start(self) -> None:
        rng = self.rng
        self.pair: TwoEngines = self.harness
        self.lease: int = rng.choice(_LEASES)
        self.network = Network(rng.getrandbits(32), self.lease)
        self.prompts: dict[tuple[str, str], Add] = {}  # prefills whose KV is not offered yet
        self.num_requests = 0
        self.pressed_until = dict.fromkeys(_NAMES, 0.0)
        """For each engine, time until which other requests overwrite all free blocks."""
        geometry = _GEOMETRIES[0] if self.plan.is_small else rng.choice(_GEOMETRIES)
        is_mixed = not self.plan.is_small and rng.random() < 0.15
        splits = [() if self.plan.is_small else rng.choice(_SPLITS)] * 2
        geometries = [geometry] * 2
        if is_mixed and rng.random() < 0.5:
            geometries[1] = _doubled(geometry)
        elif is_mixed:
            splits[1] = rng.choice([one for one in _SPLITS if one != splits[0]])
        self.pin_budget = rng.choice((None, None, None, 0.2))
        scenarios = {
            name: self.pair.fit(
                Scenario(
                    of_engine,
                    num_gpu_blocks=rng.choice((14, 20, 40)) * len(geometry.groups),
                    events=(),
                    max_running=rng.choice((1, 3)),
                    ranks=ranks,
                    pin_budget=self.pin_budget,
                    group_pages=_pages(ranks) * len(geometry.groups),
                )
            )
            for name, of_engine, ranks in zip(_NAMES, geometries, splits, strict=True)
        }
        self.geometries = {name: scenario.geometry for name, scenario in scenarios.items()}
        self.geometry = self.geometries["P"]
        layouts = [(scenario.geometry, scenario.ranks) for scenario in scenarios.values()]
        are_alike = layouts[0] == layouts[1]
        self.model = HandoffModel(are_alike, self.pair.renews_leases)
        self.pair.start(scenarios, self.network, self.lease)
        self.counts = {name: self.counters(name) for name in _NAMES}

    @override
    def end(self) -> None:
        self.pair.close()

    @property
    def engines(self) -> Mapping[str, PDHarness]:
        """The current engines; a restart replaces an engine."""
        return self.pair.engines

    def counters(self, name: str) -> tuple[int, int]:
        """Return the number of wrong blocks and the number of loaded blocks of an engine so far."""
        engine = self.engines[name]
        return engine.stats.mismatches, engine.num_loaded_blocks

    def act(self, name: str, method: str, *args: Any) -> Any:
        """Call an engine; an error of the connector breaks a law."""
        self.line(f"# {name}.{method}{args}")
        try:
            return getattr(self.engines[name], method)(*args)
        except ConfigError:
            raise
        except Exception as error:
            if getattr(error, "law", None) == "ENGINE":
                raise  # the engine has failed, not the connector
            law, _ = split_law(str(error))
            got = f"{type(error).__name__}: {error}"
            self.fail(
                f"{method} of engine {name} must not raise",
                got,
                "no error",
                law=self.pair.laws_of_errors.get(law, "HAND-6"),
            )

    def tick(self, seconds: int = 1) -> None:
        """Let one second pass, in which messages arrive, and engines with work make a step."""
        for _ in range(seconds):
            self.network.tick()
            for name in _NAMES:
                if self.engines[name].has_work():
                    self.act(name, "step")
                self.take_offers(name)
                self.take_ends(name)
                if self.network.now < self.pressed_until[name]:
                    self.overwrite(name, 0)
            self.compare()

    def take_offers(self, name: str) -> None:
        """Add new offers to the model."""
        for request_id, (params, tables) in self.engines[name].take_offered().items():
            self.line(f"# {name} offers {request_id}: {params}")
            add = self.prompts.pop((name, request_id))
            handoff = self.read_params(params, name, add.num_prompt_tokens)
            blocks = self.pair.offered_blocks(handoff, self.geometries[name], tables)
            until = self.network.now + self.lease
            kept = Kept(name, add, params, handoff, blocks, until, self.lease)
            self.model.kept.append(kept)

    def read_params(self, params: Mapping[str, Any], name: str, num_tokens: int) -> Handoff:
        """Read parameters in the form in which a router passes them on (HAND-1)."""
        try:
            copied = json.loads(json.dumps(dict(params)))
            handoff = self.pair.read_handoff(copied, num_tokens)
        except (TypeError, ValueError, HandoffError) as error:
            self.fail("the parameters are plain JSON", f"{params}: {error}", "a handoff", "HAND-1")
        if self.can(Capability.NAMES_THE_KV):
            self.equal(copied, dict(params), "parameters survive JSON", "HAND-1")
        named = handoff.engine_id, handoff.life, handoff.address
        me = name, self.pair.life(name), self.pair.address(name)
        self.equal(named, me, "parameters name this life of the producer", "HAND-1")
        return handoff

    def take_ends(self, name: str) -> None:
        """Check all loads that have ended in this step."""
        engine, now = self.engines[name], self.network.now
        unfinished = engine.unfinished()
        ended = self.model.follow(name, unfinished, now)
        (wrong_before, loaded_before), counts = self.counts[name], self.counters(name)
        self.counts[name] = wrong, loaded = counts
        kinds: set[Kind] = {one.kind for one in ended}
        if wrong > wrong_before:
            law = next((BROKEN[k] for k in ("repeated", "wrong") if k in kinds), "HAND-7")
            self.fail("loaded blocks have the KV of the prompt", f"{wrong} differ", "none", law)
        if loaded > loaded_before and kinds and (kinds == {"wrong"} or not self.model.are_alike):
            self.fail("a wrong handoff is refused", "it was loaded", "computed", "HAND-6")
        for (engine_name, request_id), decode in self.model.decodes.items():
            since = decode.loading_since
            if engine_name == name and since is not None:
                is_late = now > since + self.lease + GRACE
                what = f"the load of {request_id} ends within a lease of {self.lease} s"
                self.true(not is_late, what, f"loads for {now - since} s", "a report", "HAND-9")

    # --- observables ---

    @observable("HAND-2")
    def offered_blocks_are_held(self) -> None:
        """Check that blocks are held if a consumer may still load them."""
        for name, engine in self.engines.items():
            missing = self.model.must_hold(name, self.network.now) - {*engine.held_blocks()}
            self.equal(missing, set(), f"{name} holds the blocks that it offers", "HAND-2")

    @observable("HAND-3")
    def ended_blocks_are_free(self) -> None:
        """Check that blocks of handoffs that have ended are not held."""
        for name, engine in self.engines.items():
            if self.network.is_reading(self.pair.address(name)):
                continue
            network = self.network
            held = {*engine.held_blocks()}
            held -= self.model.may_hold(name, network.now, network.num_faults)
            self.equal(held, set(), f"{name} frees the blocks of ended handoffs", "HAND-3")

    @observable("HAND-3")
    def references(self) -> None:
        """Check that every reference of the pool belongs to an owner."""
        for name, engine in self.engines.items():
            refs = all_ref_counts(engine)
            try:
                check_free_list(engine.free_block_ids(), refs)
                check_conservation(refs, engine.engine_refs(), engine.held_blocks())
            except InvariantBroken as broken:
                self.fail(f"the blocks of {name} have an owner", str(broken), "all", "HAND-3")

    @observable("HAND-4")
    def reads(self) -> None:
        """Check that frames do not change before they are read."""
        self.equal(self.network.overwritten, [], "frames stay until they are read", "HAND-4")

    @observable("HAND-8")
    def cached_bytes(self) -> None:
        """Check that every block has the bytes of its owner."""
        for name, engine in self.engines.items():
            what = f"nothing writes into blocks of {name} that have another owner"
            self.equal(engine.num_wrong_blocks(), 0, what, "HAND-8")

    # --- requests ---

    def draw_add(self, **changes: Any) -> Add:
        """Draw a prompt."""
        size = self.geometry.scheduler_block_size
        number = self.rng.randrange(3)
        add = Add(
            f"r{self.num_requests if self.pair.names_are_unique else number}",
            self.rng.randrange(8),
            size * self.rng.randint(1, 3) + self.rng.randint(1, size),
            self.rng.randint(0, 6),
            num_shared_blocks=self.rng.randint(0, 1),
        )
        return replace(add, **changes)

    def add(self, name: str, add: Add, method: str = "add", *args: Any) -> bool:
        """Queue a request, unless a request with its id is unfinished or still loads."""
        if add.request_id in self.engines[name].unfinished():
            return False
        self.num_requests += 1
        self.prompts.pop((name, add.request_id), None)
        try:
            self.act(name, method, add, self.num_requests, *args)
        except ConfigError:
            return False
        return True

    @operation("HAND-2", weight=4)
    def prefill(self) -> None:
        """Compute a prompt whose KV is offered."""
        name = self.rng.choices(_NAMES, (4, 1))[0]
        add = self.draw_add(num_output_tokens=0)
        if self.add(name, add, "add_prefill"):
            self.prompts[name, add.request_id] = add

    @operation("HAND-2", weight=0.7)
    def serve(self) -> None:
        """Add a request without a handoff."""
        self.add(self.rng.choice(_NAMES), self.draw_add())

    def route_to(self, name: str, kept: Kept, add: Add, kind: Kind, **changes: Any) -> None:
        """Deliver parameters with a request, as a router does."""
        params = json.loads(json.dumps({**kept.params, "router": "r1", **changes}))
        params = {key: value for key, value in params.items() if value != "missing"}
        if self.add(name, add, "add_decode", params):
            self.model.decodes[name, add.request_id] = Decode(kept, kind)
            if kind == "right":
                kept.is_routed, kept.num_faults = True, self.network.num_faults

    def other(self, name: str) -> str:
        """Return the other engine, or sometimes the same engine."""
        is_same = self.rng.random() < 0.1 and self.pair.serves_itself
        return name if is_same else _NAMES[name == "P"]

    def new_offers(self) -> list[Kept]:
        """List the offers that no consumer has received, sometimes only expired offers."""
        new = [one for one in self.model.kept if not one.is_routed]
        live = [one for one in new if self.network.now < one.until]
        return live if self.rng.random() < 0.9 else new

    @operation("HAND-7", weight=4)
    def route(self) -> None:
        """Deliver a handoff for the first time, with faults on the way."""
        if not (new := self.new_offers()):
            self.prefill()
            self.tick(3)
        if not (new := self.new_offers()):
            return
        kept = self.rng.choice(new)
        request_id = self.draw_add().request_id
        add = replace(kept.add, request_id=request_id, num_output_tokens=self.rng.randint(0, 2))
        rng, left = self.rng, int(kept.until - self.network.now)
        if left > 4 and rng.random() < 0.2:
            self.tick(left - rng.randint(1, 4))  # the lease ends during the read
        if rng.random() < 0.6:
            self.disturb()
        if rng.random() < 0.4:
            self.press()
        self.route_to(self.other(kept.engine), kept, add, "right")
        self.tick(rng.randint(0, 5))

    @operation("HAND-5", weight=1.5)
    def route_again(self) -> None:
        """Deliver a handoff again, even if it is in use, consumed, expired or of an old life."""
        if old := [one for one in self.model.kept if one.is_routed]:
            kept = self.rng.choice(old)
            add = replace(kept.add, request_id=f"again{self.num_requests}", num_output_tokens=2)
            self.route_to(self.other(kept.engine), kept, add, "repeated")

    @operation("HAND-6")
    def route_wrong(self) -> None:
        """Deliver a handoff with another prompt, or with wrong or missing parameters."""
        if not self.model.kept:
            return
        kept = self.rng.choice(self.model.kept)
        name = _NAMES[kept.engine == "P"]
        request_id = f"wrong{self.num_requests}"
        if self.rng.random() < 0.4:
            add = self.draw_add(request_id=request_id, family=100 + self.num_requests)
            self.route_to(name, kept, replace(add, num_shared_blocks=0), "wrong")
            return
        field, value = self.rng.choice([*self.pair.entries(kept.params).items()])
        others: list[Any] = [
            None,
            "missing",
            [],
            value + 1 if isinstance(value, int) else f"{value}x",
        ]
        add = replace(kept.add, request_id=request_id, num_output_tokens=1)
        self.route_to(name, kept, add, "wrong", **{field: self.rng.choice(others)})

    @operation("HAND-3")
    def abort(self) -> None:
        """Abort a request, in any state."""
        name = self.rng.choice(_NAMES)
        if unfinished := [*self.engines[name].unfinished()]:
            request_id = self.rng.choice(unfinished)
            self.act(name, "abort", request_id)
            self.prompts.pop((name, request_id), None)
            self.take_ends(name)

    # --- time, memory and faults ---

    @operation("HAND-7", weight=5)
    def pass_time(self) -> None:
        """Let some seconds pass."""
        self.tick(self.rng.choice((1, 1, 2, 3, 6)))

    @operation("HAND-3", weight=0.5)
    def wait(self) -> None:
        """Let a lease pass."""
        self.tick(self.lease + self.rng.randint(-2, GRACE))

    @operation("HAND-2", weight=3)
    def squeeze(self) -> None:
        """Let another owner overwrite free blocks, and hold some of these blocks."""
        name = self.rng.choice(_NAMES)
        num_blocks = self.engines[name].num_blocks
        self.overwrite(name, self.rng.choice((0, num_blocks // 2, num_blocks)))

    @operation("HAND-4")
    def press(self) -> None:
        """Let other requests overwrite the free blocks of an engine for some time."""
        until = self.network.now + self.rng.randint(4, 2 * self.lease)
        self.pressed_until[self.rng.choice(_NAMES)] = until

    def overwrite(self, name: str, num_kept: int) -> None:
        """Overwrite all free blocks, and hold some of these blocks."""
        self.act(name, "squeeze", self.engines[name].num_blocks)
        self.act(name, "squeeze", num_kept)

    @operation("HAND-2", weight=0.3)
    def reset(self) -> None:
        """Reset the caches of an engine."""
        self.act(self.rng.choice(_NAMES), "reset")

    @operation("HAND-7", weight=2)
    def disturb(self) -> None:
        """Plan faults for some of the next messages."""
        some = self.rng.choices((None, *self.pair.faults), k=self.rng.randint(1, 4))
        self.network.faults += some

    @operation("HAND-9", weight=0.5)
    def cut_off(self) -> None:
        """Lose all messages for some time."""
        self.network.cut_off_until = self.network.now + self.rng.randint(1, 2 * self.lease)

    @operation("HAND-6", weight=0.4)
    def crash(self) -> None:
        """Kill an engine, and start it again."""
        self.restart(self.rng.choice(_NAMES))

    @operation("HAND-3", weight=0.3)
    def shut_down(self) -> None:
        """Shut an engine down in order, and start it again."""
        name = self.rng.choice(_NAMES)
        leaked = self.act(name, "shutdown")
        self.equal(dict(leaked), {}, f"{name} frees all blocks at shutdown", "HAND-3")
        self.restart(name)

    def restart(self, name: str) -> None:
        """Start a new life of an engine."""
        self.line(f"# {name} starts again")
        self.pair.restart(name)
        self.model.restart(name)
        self.prompts = {key: add for key, add in self.prompts.items() if key[0] != name}
        self.counts[name] = self.counters(name)
        self.network.num_faults += 1  # requests that are in transit may be lost with the old life

    # --- goals ---

    @operation("HAND-3", weight=0.3)
    def settle(self) -> None:
        """Heal the network, and let both engines finish all work."""
        self.network.heal()
        for name in _NAMES:
            self.act(name, "squeeze", 0)
            self.pressed_until[name] = 0.0
        end = self.network.now + _LONGEST_RUN
        while any(engine.has_work() for engine in self.engines.values()):
            self.true(self.network.now < end, "engines end their work", "work left", "none")
            self.tick()
        self.tick(self.lease + 1)  # messages in transit
        for name, engine in self.engines.items():
            held = dict(engine.held_blocks())
            self.equal(held, {}, f"{name} holds nothing when all handoffs have ended", "HAND-3")

    def offer_now(self, name: str, family: int) -> Kept | None:
        """Compute a new prompt and wait for its offer; None if the producer may offer nothing."""
        size, num_before = self.geometry.scheduler_block_size, len(self.model.kept)
        length = size * self.rng.randint(1, 3) + 1
        add = Add(f"over{self.num_requests}", family, length, num_shared_blocks=0)
        self.add(name, add, "add_prefill")
        self.prompts[name, add.request_id] = add
        self.tick_until(lambda: not self.engines[name].unfinished(), "a prompt is computed")
        if len(self.model.kept) > num_before:
            return self.model.kept[-1]
        has_windows = any(not isinstance(group, FullAttention) for group in self.geometry.groups)
        may_refuse = has_windows or self.pin_budget is not None
        self.true(may_refuse, "a finished prompt is offered", "no offer", "an offer", "HAND-10")
        return None

    @operation("HAND-10", weight=0.8)
    def hand_over(self) -> None:
        """Hand over one prompt on an intact network; then the producer's blocks must be free."""
        self.settle()
        family = 1000 + self.num_requests
        if self.rng.random() < 0.5:
            self.offer_now("P", family)  # the handoff never reaches a consumer
        if (kept := self.offer_now("P", family + 1)) is None or not self.model.are_alike:
            return
        add = replace(kept.add, num_output_tokens=1)
        ways = "load", "load the rest", "abort in the queue", "abort the load", "hit"
        how, size = self.rng.choice(ways), self.geometry.scheduler_block_size
        if how == "hit" or (how == "load the rest" and add.num_prompt_tokens > 2 * size):
            num_tokens = add.num_prompt_tokens if how == "hit" else size + 1
            self.add("D", replace(add, request_id="first", num_prompt_tokens=num_tokens))
            self.tick_until(lambda: not self.engines["D"].unfinished(), "a prompt is computed")
        _, num_loaded = self.counters("D")
        self.route_to("D", kept, add, "right")
        if how.startswith("abort"):
            self.tick(2 * (how == "abort the load"))
            self.act("D", "abort", add.request_id)
            self.take_ends("D")
        self.tick_until(lambda: not self.engines["D"].unfinished(), "the consumer serves")
        if how.startswith("load"):
            is_loaded = self.counters("D")[1] > num_loaded
            self.true(is_loaded, "the KV is loaded", "it was computed", "a load")
        self.tick_until(
            lambda: not kept.blocks & {*self.engines["P"].held_blocks()},
            f"{how}: the producer frees the blocks before the end of the lease",
            "HAND-3",
        )

    def tick_until(self, is_done: Callable[[], bool], what: str, law: str = "HAND-10") -> None:
        """Advance the clock, second by second, until a condition holds."""
        for _ in range(2 * GRACE):
            if is_done():
                return
            self.tick()
        self.true(is_done(), what, f"not after {2 * GRACE} s", "it happens", law)


def _pages(ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the page sizes of a group on all ranks; an empty tuple for one rank."""
    return ((PAGE_BYTES,) * sum(ranks),) if ranks else ()


def _doubled(geometry: CacheGeometry) -> CacheGeometry:
    """Double the block sizes; the hashes do not change, so only the layout differs."""
    groups = (replace(group, block_size=2 * group.block_size) for group in geometry.groups)
    size = 2 * geometry.scheduler_block_size
    return CacheGeometry(size, geometry.hash_block_size, tuple(groups))
