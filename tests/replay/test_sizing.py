"""``kvview size``: one pass compared with plain simulations, costs, recordings."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview.cli.commands import cli
from kvview.errors import ConfigError
from kvview.events.formats import WIRE_FORMATS
from kvview.events.recording import Message, Recording
from kvview.events.wire import Batch, codec, encode
from kvview_reference.replay.traces import TraceRequest, open_trace
from kvview_reference.sizing.accounts import PEAK_SECONDS
from kvview_reference.sizing.curves import knee_of, lru_curve, lru_reaches, optimum_hits
from kvview_reference.sizing.explain import explain
from kvview_reference.sizing.model import ModelShape, attention_layers, parse_size
from kvview_reference.sizing.recordings import SAME_REQUEST_S, RecordedTrace
from kvview_reference.sizing.references import References, read_references
from kvview_reference.sizing.stored import StoredBlocks
from kvview_reference.sizing.sweep import SizeReport
from kvview_reference.sizing.sweep import size as run_size
from kvview_reference.sizing.tier_hits import Tiers
from tests.traces import MOONCAKE, trace_file

BLOCK_SIZE = 4
MODEL = ModelShape((attention_layers("full", 2, 2, 8),))


def request(number: int, ids: Sequence[int], arrival_s: float | None = None) -> TraceRequest:
    at = float(number) if arrival_s is None else arrival_s
    return TraceRequest(str(number), at, max(1, len(ids) * BLOCK_SIZE), 1, tuple(ids), "", number)


def referred(prompts: Iterable[Sequence[int]], **options: Any) -> References:
    rows = [request(number, ids) for number, ids in enumerate(prompts)]
    return read_references(rows, BLOCK_SIZE, **options)


def chains(seed: int, num_requests: int) -> list[list[int]]:
    """Prompts that branch off one another, like conversations and system prompts."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    new = 0
    for _ in range(num_requests):
        prompt: list[int] = []
        if prompts and rng.random() < 0.7:
            other = rng.choice(prompts[-6:])
            prompt = other[: rng.randint(0, len(other))]
        length = rng.randint(0, 5)
        prompt += range(new, new + length)
        new += length
        prompts.append(prompt)
    return prompts


def plain_lru(prompts: Iterable[Sequence[int]], size: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        for block in prompt:
            if block not in cache:
                break
            hits += 1
        for block in reversed(list(dict.fromkeys(prompt))):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


def plain_optimum(prompts: Sequence[Sequence[int]], size: int) -> int:
    cache: set[int] = set()
    hits = 0
    for number, prompt in enumerate(prompts):
        hits += len(cache.intersection(prompt))
        due = {}
        for block in cache | set(prompt):
            later = (n for n, p in enumerate(prompts[number + 1 :]) if block in p)
            due[block] = next(later, None)
        wanted = sorted((when, block) for block, when in due.items() if when is not None)
        cache = {block for _, block in wanted[:size]}
    return hits


# --- one pass compared with plain simulations ---


@given(seed=st.integers(0, 10**6), num_requests=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_lru_at_every_size_in_one_pass(seed: int, num_requests: int) -> None:
    prompts = chains(seed, num_requests)
    references = referred(prompts)
    curve = lru_curve(lru_reaches(references))
    for size in range(references.num_blocks + 2):
        assert curve.hits(size) == plain_lru(prompts, size), size
    assert curve.hits(curve.full_size) == curve.hits(10**9)
    if curve.full_size:
        assert curve.hits(curve.full_size - 1) < curve.hits(curve.full_size)


@given(prompts=st.lists(st.lists(st.integers(0, 8), max_size=6), max_size=12))
@settings(max_examples=100, deadline=None)
def test_ids_that_do_not_name_prefixes(prompts: list[list[int]]) -> None:
    unique = [list(dict.fromkeys(prompt)) for prompt in prompts]
    curve = lru_curve(lru_reaches(referred(prompts)))
    for size in range(10):
        assert curve.hits(size) == plain_lru(unique, size)


@given(seed=st.integers(0, 10**6), size=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_no_policy_exceeds_the_optimum(seed: int, size: int) -> None:
    prompts = chains(seed, 25)
    (bound,) = optimum_hits(referred(prompts), [size])
    assert bound == plain_optimum(prompts, size)
    assert bound >= plain_lru(prompts, size)


def test_the_references_of_a_trace() -> None:
    references = referred([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4, 5]])
    assert references.weights() == [2, 2, 1, 1]  # a run has the blocks of the same requests
    assert [list(r.runs) for r in references.requests] == [[0, 1], [0, 2], [0, 1, 3]]
    assert [r.num_blocks for r in references.requests] == [4, 3, 5]
    rows = [request(0, [1, 2], 5.0), request(1, [7], 2.0), request(2, [1], 3.0)]
    by_arrival = read_references(rows, BLOCK_SIZE).requests
    assert [(r.arrival_s, r.num_blocks) for r in by_arrival] == [(0.0, 1), (1.0, 1), (3.0, 2)]
    partial = TraceRequest("1", 0.0, BLOCK_SIZE + 1, 0, (1, 2), "", 1)
    for has_partial_blocks, num_blocks in ((False, 1), (True, 2)):
        read = read_references([partial], BLOCK_SIZE, has_partial_blocks=has_partial_blocks)
        assert (read.num_ids, read.num_blocks) == (2, num_blocks)
    too_large = referred([[1], [1, 2, 3, 4], [1]], max_request_blocks=3)
    assert (len(too_large.requests), too_large.num_too_large) == (2, 1)


@pytest.mark.parametrize("gpu_blocks", [0, 40])
def test_a_replay_of_lru_agrees_with_the_curve(gpu_blocks: int) -> None:
    references = referred(chains(3, 400))
    tiers = Tiers(references, gpu_blocks)
    longest = max(request.num_blocks for request in references.requests)
    for host in (0, longest, 2 * longest, 1000):
        fast, replayed = tiers.lru(host), tiers.replay(host, "lru")
        assert list(fast.loaded) == list(replayed.loaded)
        assert sum(tiers.gpu_hits) + sum(fast.loaded) == tiers.curve.hits(max(gpu_blocks, host))
    assert list(tiers.lru(1000).stored) == list(tiers.replay(1000, "lru").stored)


# --- the report ---


def report_of(prompts: Sequence[Sequence[int]], **options: Any) -> SizeReport:
    defaults: dict[str, Any] = {"trace": "t", "block_size": BLOCK_SIZE, "gpu_blocks": 0}
    return run_size(referred(prompts), **{**defaults, "policies": ["lru", "arc"], **options})


def test_the_report_adds_up() -> None:
    blocks = StoredBlocks(MODEL, BLOCK_SIZE)
    report = report_of(chains(5, 300), gpu_blocks=20, blocks=blocks, prefill_tokens_per_s=100.0)
    for curve in report.curves:
        for point in curve.points:
            shares = point.gpu_hit_rate, point.host_hit_rate, point.computed_rate
            assert sum(shares) == pytest.approx(1.0)
            assert point.loaded_blocks == pytest.approx(point.host_hit_rate * report.blocks)
            assert point.prefill_seconds_saved == point.loaded_blocks * BLOCK_SIZE / 100.0
            assert point.gpu_hit_rate == pytest.approx(report.no_connector_hit_rate)
            bound = dict(report.optimum)[point.host_blocks]
            assert 1 - point.computed_rate <= bound + 1e-9
    lru = report.curves[0].points
    assert 1 - lru[-1].computed_rate == pytest.approx(report.unlimited_hit_rate)
    assert report.lru_curve[-1][1] == pytest.approx(report.unlimited_hit_rate)


def test_the_knee_is_where_the_curve_bends_most() -> None:
    assert knee_of([(10, 0.0), (20, 0.8), (30, 0.85), (100, 1.0)]) == 20
    assert knee_of([(10, 0.0), (20, 0.1), (100, 1.0)]) == 100  # each block gains more than the last
    assert knee_of([(10, 0.5)]) == 10
    # Ten prompts of one block are used again at once; one long prompt is used again at the end.
    short = [[n] for n in range(100, 110)] * 5
    long = list(range(50))
    report = report_of([long, *short, long])
    assert report.knee_host_blocks == 10
    assert report.knee_share == pytest.approx(40 / 90)
    assert report.full_host_blocks == 60


def test_a_peak_is_that_of_the_busiest_seconds() -> None:
    rows = [request(0, [1, 2]), *(request(n, [1, 2], 1000.0 + n) for n in range(1, 6))]
    rows.append(request(9, [5], 100_000.0))
    blocks = StoredBlocks(MODEL, BLOCK_SIZE)
    options: dict[str, Any] = {"block_size": BLOCK_SIZE, "gpu_blocks": 0, "policies": ["lru"]}
    report = run_size(read_references(rows, BLOCK_SIZE), trace="t", blocks=blocks, **options)
    (*_, point) = report.curves[0].points
    assert point.loaded_blocks == 10
    num_bytes = 10 * blocks.block_bytes(())
    assert point.peak_load_gb_per_s == pytest.approx(num_bytes / PEAK_SECONDS / 1e9)
    assert point.load_gb_per_s == pytest.approx(num_bytes / 100_000 / 1e9)


@pytest.mark.parametrize("prompts", [[], [[]], [[1]], [[1, 2], [3, 4]], [[1], [1]]])
def test_traces_without_gain(prompts: list[list[int]]) -> None:
    report = report_of(prompts, gpu_blocks=8)
    assert report.knee_host_blocks == report.full_host_blocks == 0
    assert "No host gains anything" in " ".join(explain(report))


def test_sizes() -> None:
    assert parse_size("5000", "--sizes", None, 10) == 5000
    assert parse_size("50%", "--sizes", None, 10) == 5
    assert parse_size("1.5GiB", "--sizes", lambda: 2**20, 10) == 1536
    for bad in ("", "-1", "1.5", "GiB", "5 GB", "1e3", "0x10"):
        with pytest.raises(ConfigError, match="--sizes"):
            parse_size(bad, "--sizes", lambda: 1, 10)


# --- recordings ---


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    wire_format = [known for known in WIRE_FORMATS if known.producer == "vllm"][-1]
    soon, later = 1.0, 1.0 + 2 * SAME_REQUEST_S
    steps: list[tuple[float, list[int], int | None]] = [
        (0.0, [11, 12], None),
        (soon, [13], 12),  # the same request continues
        (soon, [21], None),
        (later, [14, 15], 13),  # the next turn
        (later + 1, [16], 12),  # another branch of the first request
    ]
    path = tmp_path / "events.jsonl"
    with Recording(str(path)) as recording:
        for number, (at, hashes, parent) in enumerate(steps):
            event = codec(wire_format).make(
                "BlockStored",
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=[0] * (BLOCK_SIZE * len(hashes)),
                block_size=BLOCK_SIZE,
                medium="GPU",
                group_idx=0,
            )
            recording.write(Message(number, encode(Batch(at, [event], None, wire_format))))
    trace = RecordedTrace(str(path), None)
    assert trace.block_size == BLOCK_SIZE
    assert [(row.arrival_s, list(row.hash_ids)) for row in trace] == [
        (0.0, [0, 1, 2]),
        (soon, [3]),
        (later, [0, 1, 2, 4, 5]),
        (later + 1, [0, 1, 6]),
    ]
    assert lru_curve(lru_reaches(read_references(trace, BLOCK_SIZE))).hits(100) == 5
    for command in ("size", "replay"):
        result = CliRunner().invoke(cli, [command, str(path), "--json", "-", "-q"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["requests"] == 4


# --- the command ---


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["size", *map(str, args)])


def test_the_reports_of_the_command(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text('{"groups": [{"layers": 2, "kv_heads": 2, "head_size": 8}]}')
    outputs = ("--json", tmp_path / "r.json")
    result = run("--requests", 300, "--sizes", "500,1MiB,100%", "--model", model, *outputs)
    assert result.exit_code == 0, result.output
    assert "= 128 bytes a token; x 512 tokens" in result.output
    assert "GiB) alone hit" in result.output
    report = SizeReport.model_validate_json((tmp_path / "r.json").read_text())
    assert [curve.policy for curve in report.curves] == ["lru", "arc"]
    assert [point.host_blocks for point in report.curves[0].points][:2] == [16, 500]
    assert run("--requests", 50, "--json", "-").output.startswith("{")


def test_the_mooncake_trace() -> None:
    trace = open_trace(trace_file(MOONCAKE))
    references = read_references(trace, trace.block_size, has_partial_blocks=True)
    curve = lru_curve(lru_reaches(references))
    rates = [round(100 * curve.hits(size) / references.num_ids, 1) for size in (10_000, 50_000)]
    (most,) = optimum_hits(references, [10_000])
    rates.append(round(100 * most / references.num_ids, 1))
    assert rates == [21.2, 35.5, 36.6]
