"""What a connector is told of requests: how much is computed, and from what."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview import (
    BlockIds,
    CacheGeometry,
    Connector,
    ConnectorConfig,
    FinishReason,
    FullAttention,
    Mamba,
    RequestContent,
    RequestInfo,
    SlidingWindow,
    StepInfo,
    StepPlan,
    full_blocks,
)
from kvview_reference.connector.lazy_offload import LazyOffloadConnector, LazyOffloadScheduler
from kvview_reference.engine import Engine, Request, Status, chain_hashes

SIZE = 4
GEOMETRIES = {
    "one": CacheGeometry.single(SIZE),
    "window": CacheGeometry(4, 4, (FullAttention(4), SlidingWindow(4, 10))),
    "mixed": CacheGeometry(24, 2, (FullAttention(4), SlidingWindow(6, 9), Mamba(12))),
}


def make(
    ids: Sequence[object], more: int = 0, output: int = 0, name: str = "a", **keys: Any
) -> Request:
    """A prompt of one block an id, and some tokens more."""
    num_tokens = len(ids) * SIZE + more
    return Request(name, num_tokens, output, SIZE, chain_hashes(ids), **keys)


# --- how much is computed ---


class WatchingScheduler(LazyOffloadScheduler):
    """Looks at every call, with the engine's own bytes."""

    engine: Engine
    calls: dict[str, int]
    contents: dict[str, RequestContent]

    def look(self, hook: str, request: RequestInfo, block_ids: BlockIds) -> None:
        self.calls[hook] = self.calls.get(hook, 0) + 1
        content = self.contents.setdefault(request.request_id, request.content)
        assert request.content is content, "one object for its whole life"
        assert len(content.token_ids) >= request.num_tokens
        if any(block_ids):
            stored = list(full_blocks(self._geometry, request, block_ids))
            ids, keys = [b.block_id for b in stored], [b.key for b in stored]
            loading = self.engine._loads.get(request.request_id)
            limit = loading.num_gpu_tokens if loading else request.num_computed_tokens
            assert request.num_computed_tokens == limit, "what is still to be loaded is not there"
            if ids:
                assert self.engine.kv_bytes.count_mismatches(ids, keys) == 0
        else:
            assert request.num_computed_tokens == 0

    def match_prefix(self, request: RequestInfo, num_computed_tokens: int) -> int | None:
        assert request.num_computed_tokens == num_computed_tokens
        self.contents.setdefault(request.request_id, request.content)
        assert self.contents[request.request_id] is request.content
        return super().match_prefix(request, num_computed_tokens)

    def on_blocks_allocated(
        self,
        request: RequestInfo,
        block_ids: BlockIds,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        assert request.num_computed_tokens == num_computed_tokens
        self.look("allocated", request, block_ids)
        super().on_blocks_allocated(request, block_ids, num_computed_tokens, num_external_tokens)

    def plan_step(self, step: StepInfo) -> StepPlan:
        for scheduled in step.scheduled:
            assert scheduled.num_computed_tokens == scheduled.request.num_computed_tokens
            self.look("scheduled", scheduled.request, scheduled.block_ids)
        return super().plan_step(step)

    def on_request_preempted(self, request: RequestInfo, block_ids: BlockIds) -> None:
        self.look("preempted", request, block_ids)

    def on_request_finished(
        self, request: RequestInfo, block_ids: BlockIds, reason: FinishReason
    ) -> None:
        self.look(reason.name, request, block_ids)
        self.contents.pop(request.request_id, None)  # the id may come again
        if reason is FinishReason.FINISHED:
            # All but the token that was sampled last; with none sampled, all.
            has_output = request.num_tokens > self.num_prompt_tokens[request.request_id]
            assert request.num_computed_tokens == request.num_tokens - has_output

    num_prompt_tokens: dict[str, int]


class Watching(LazyOffloadConnector):
    def make_scheduler(self) -> WatchingScheduler:
        half = WatchingScheduler(self.config, self.options)
        half.calls, half.contents, half.num_prompt_tokens = {}, {}, {}
        return half


@pytest.mark.parametrize("decode_tokens", [1, 5])
@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_every_call_says_how_much_kv_is_in_the_blocks(name: str, decode_tokens: int) -> None:
    geometry, random = GEOMETRIES[name], Random(7)
    engine = Engine(
        geometry,
        Watching(ConnectorConfig(geometry, {"cpu_blocks": 300})),
        num_gpu_blocks={"one": 22, "window": 32, "mixed": 34}[name],
        page_bytes=16,
        max_running=4,
        max_tokens_per_step=24,
        decode_tokens=decode_tokens,
    )
    half = engine.scheduler_connector
    assert isinstance(half, WatchingScheduler)
    half.engine = engine
    alive: list[Request] = []
    size = geometry.hash_block_size
    for number in range(120):
        num_tokens = random.randint(1, 55)
        hashes = chain_hashes(
            f"{number % 3}/{i}" if i < 12 else f"{number}/{i}" for i in range(num_tokens // size)
        )
        request = Request(f"r{number}", num_tokens, random.choice([0, 1, 4, 9, 20]), size, hashes)
        half.num_prompt_tokens[request.request_id] = num_tokens
        engine.add_request(request)
        alive.append(request)
        for _ in range(random.randint(1, 8)):
            engine.step()
        if random.random() < 0.4:
            loading = [r for r in alive if r.status is Status.LOADING]
            unfinished = [r for r in alive if r.status not in {Status.FINISHED, Status.ABORTED}]
            for victim in (loading or unfinished)[:1]:
                engine.abort(victim.request_id)
    while engine.has_work():
        engine.step()
    assert engine.stats.loaded_blocks > 0
    assert engine.stats.mismatches == 0
    assert {"allocated", "scheduled", "preempted", "FINISHED", "ABORTED"} <= half.calls.keys()
    assert engine.shutdown() == {}


def test_a_request_that_loads_has_what_the_gpu_hit_and_no_more() -> None:
    geometry = GEOMETRIES["one"]
    engine = Engine(geometry, Watching(ConnectorConfig(geometry)), num_gpu_blocks=12, page_bytes=16)
    half = engine.scheduler_connector
    assert isinstance(half, WatchingScheduler)
    half.engine = engine

    def run(*requests: Request) -> None:
        for request in requests:
            half.num_prompt_tokens[request.request_id] = request.num_prompt_tokens
            engine.add_request(request)
        while engine.has_work():
            engine.step()
        engine.step()  # idle: what is about to go is offloaded
        while engine.has_work():
            engine.step()

    run(make(range(8), 1))
    run(make("stuvwxyz", 1, name="b"), make("STUVWXYZ", 1, name="c"))
    run(make(range(3), 1, name="d"))
    request = make(range(8), 1, name="e")
    engine.add_request(request)
    engine.step()
    assert request.status is Status.LOADING
    assert request.num_computed_tokens == 3 * SIZE
    engine.abort(request.request_id)
    assert half.calls["ABORTED"] == 1
    while engine.has_work():
        engine.step()


# --- from what ---


ids = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=200)
@given(ids, ids, st.integers(0, 3), st.integers(0, 3))
def test_tokens_are_equal_exactly_as_far_as_the_hashes_are(
    one: list[int], other: list[int], more: int, output: int
) -> None:
    first, second = make([9, *one], more, output), make([9, *other], more, output)
    first.generate(output)
    second.generate(output)
    num_equal = sum(a == b for a, b in zip(first.block_hashes, second.block_hashes, strict=False))
    a, b = list(first.content.token_ids), list(second.content.token_ids)
    assert len(a) == first.num_tokens
    assert a[: num_equal * SIZE] == b[: num_equal * SIZE]
    for start in range(num_equal * SIZE, min(len(a), len(b)), SIZE):
        assert a[start : start + SIZE] != b[start : start + SIZE]


def test_tokens_grow_and_never_change() -> None:
    request = make(range(3), 2, 40)
    tokens = request.content.token_ids
    seen: list[int] = []
    for _ in range(40):
        assert list(tokens)[: len(seen)] == seen
        seen = list(tokens)
        request.generate(1)
        assert request.content.token_ids is tokens
    assert len(tokens) == request.num_tokens == 54
    assert tokens[-1] == list(tokens)[53]
    assert tokens[4:9] == list(tokens)[4:9]
    assert all(0 <= token < 2**31 for token in tokens)
    with pytest.raises(IndexError):
        tokens[54]
    assert list(pickle.loads(pickle.dumps(request.content)).token_ids) == list(tokens)


def test_a_long_request_keeps_no_tokens() -> None:
    """A look at one token computes one, whatever the length."""
    request = Request("a", 10**9 + 1, 0, 10**6, chain_hashes(range(1000)))
    tokens = request.content.token_ids
    assert len(tokens) == 10**9 + 1
    assert tokens[5 * 10**8] != tokens[5 * 10**8 + 1]


@pytest.mark.parametrize("keys", [{"lora_name": "l", "lora_id": 3}, {"cache_salt": "s"}])
def test_a_salt_or_a_lora_changes_every_hash_and_no_token(keys: dict[str, Any]) -> None:
    plain, keyed, again = make(range(4), 3, 9), make(range(4), 3, 9, **keys), make(range(4), **keys)
    assert plain.content.token_ids[:16] == keyed.content.token_ids[:16]
    assert keyed.block_hashes == again.block_hashes
    assert not set(plain.block_hashes) & set(keyed.block_hashes)
    keyed.generate(9)
    assert len(keyed.block_hashes) == len(keyed.content.extra_keys) == 7
    assert keyed.info().content is keyed.content
    for name, value in keys.items():
        assert getattr(keyed.content, name) == value
    lora = keys.get("lora_name")
    expected = [(lora,)] * 7 if lora else [("s",)] + [None] * 6
    assert list(keyed.content.extra_keys) == expected
    assert plain.content.extra_keys == ()


def test_salts_loras_and_both_are_all_apart() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "s"},
        {"cache_salt": "t"},
        {"lora_name": "s"},
        {"lora_id": 5},
        {"lora_name": "s", "cache_salt": "s"},
        {"extra_keys": [("s", "image")]},
    ]
    hashes = [block_hash for kind in kinds for block_hash in make(range(3), **kind).block_hashes]
    assert len(set(hashes)) == len(hashes) == 3 * len(kinds)


def test_an_image_tells_prompts_apart_from_its_block_on() -> None:
    plain = make(range(5))
    one = make(range(5), extra_keys=[None, None, ("image 1",)])
    two = make(range(5), extra_keys=[None, None, ("image 2",)])
    assert plain.block_hashes[:2] == one.block_hashes[:2] == two.block_hashes[:2]
    assert len({r.block_hashes[n] for r in (plain, one, two) for n in (2, 3, 4)}) == 9
    assert list(one.content.extra_keys) == [None, None, ("image 1",), None, None]


def test_equal_tokens_with_another_salt_are_no_hit() -> None:
    engine = Engine(GEOMETRIES["one"], None, num_gpu_blocks=40, page_bytes=16)
    for name, salt in (("a", None), ("b", "s"), ("c", "s"), ("d", None)):
        engine.add_request(make(range(4), 1, name=name, cache_salt=salt))
        while engine.has_work():
            engine.step()
    assert engine.stats.gpu_hit_blocks == 8  # c after b, d after a


# --- conversations ---


@settings(max_examples=200)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9), st.booleans())
def test_the_next_turn_begins_with_all_tokens_of_the_last(
    more: int, output: int, new: int, is_salted: bool
) -> None:
    salt = "s" if is_salted else None
    first = make(range(2), more % SIZE, output, cache_salt=salt)
    first.generate(output)
    turn = first.next_turn("b", new, 3, (f"new {i}" for i in range(9)))
    other = first.next_turn("c", new, 3, (f"new {i}" for i in range(9)))
    assert turn.num_prompt_tokens == first.num_tokens + new
    assert turn.content.token_ids[: first.num_tokens] == list(first.content.token_ids)
    assert turn.block_hashes[: len(first.block_hashes)] == first.block_hashes
    assert turn.block_hashes == other.block_hashes
    before = list(first.content.token_ids)
    turn.generate(3)
    assert list(first.content.token_ids) == before


@pytest.mark.parametrize("wrong", [False, True])
def test_a_next_turn_reads_what_was_stored_of_the_last(wrong: bool) -> None:
    """The kit's laws aside: wrong bytes come back in a conversation, and only there."""
    from tests.mutants.connector import AtTheEnd, StoresTheLastToken

    kind: type[Connector] = StoresTheLastToken if wrong else AtTheEnd
    geometry = GEOMETRIES["one"]
    engine = Engine(
        geometry, kind(ConnectorConfig(geometry)), num_gpu_blocks=12, page_bytes=16, decode_tokens=1
    )

    def run(request: Request) -> Request:
        engine.add_request(request)
        while engine.has_work():
            engine.step()
        assert engine.kv_cache.reset_prefix_cache()
        return request

    first = run(make(range(2), 1, 7))
    assert first.num_tokens == 4 * SIZE
    assert len(first.block_hashes) == 4
    run(make(range(2), 3, 7, name="the same prompt"))
    assert engine.stats.mismatches == 0
    turn = run(first.next_turn("b", 5, 2, ["new", "newer"]))
    assert engine.stats.cpu_hit_blocks == (2 + 4 if wrong else 2 + 3)
    assert engine.stats.mismatches == (1 if wrong else 0)
    assert turn.status is Status.FINISHED


# --- refusals ---


@pytest.mark.parametrize(("num_tokens", "num_output"), [(0, 1), (-1, 1), (4, -1)])
def test_impossible_counts_are_refused_by_their_law(num_tokens: int, num_output: int) -> None:
    with pytest.raises(ValueError, match=r"^KEY-1: request 'a': "):
        Request("a", num_tokens, num_output, SIZE, [])


def test_hashes_that_are_not_those_of_full_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^KEY-1: request 'a': 3 block hashes for 2 full blocks"):
        Request("a", 11, 1, SIZE, chain_hashes(range(3)))
