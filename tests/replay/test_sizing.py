"""``kvview size``: one pass compared with plain simulations, the report, charts, recordings."""

from __future__ import annotations

import json
import random
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings, strategies as st

from kvview.cli.commands import cli
from kvview.errors import ConfigError
from kvview.events.formats import WIRE_FORMATS
from kvview.events.recording import Message, Recording
from kvview.events.wire import Batch, codec, encode
from kvview_reference.sizing.curves import knee_of, lru_curve, lru_reaches, optimum_hits
from kvview_reference.sizing.hit_curve import SizeReport, parse_sizes, size as run_size
from kvview_reference.sizing.references import References, read_references
from kvview_reference.traces.reader import read_trace
from kvview_reference.traces.recordings import SAME_REQUEST_S
from kvview_reference.traces.trace import SkippedRows, Trace, TraceRequest

BLOCK_SIZE = 4


def traced(prompts: Iterable[Sequence[int]]) -> Trace:
    rows = [
        TraceRequest(str(n), float(n), max(1, len(ids) * BLOCK_SIZE), 1, tuple(ids), n)
        for n, ids in enumerate(prompts)
    ]
    return Trace("t", rows, BLOCK_SIZE, SkippedRows())


def referred(prompts: Iterable[Sequence[int]]) -> References:
    return read_references(traced(prompts).requests, BLOCK_SIZE)


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


def plain_lru(prompts: Iterable[Sequence[int]], size: int, skip: int = 0) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, prompt in enumerate(prompts):
        for block in prompt:
            if block not in cache:
                break
            hits += number >= skip
        for block in reversed(prompt):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


def plain_optimum(prompts: Sequence[Sequence[int]], size: int, skip: int) -> int:
    cache: set[int] = set()
    hits = 0
    for number, prompt in enumerate(prompts):
        hits += len(cache.intersection(prompt)) * (number >= skip)
        due = {}
        for block in cache | set(prompt):
            later = (n for n, p in enumerate(prompts[number + 1 :]) if block in p)
            due[block] = next(later, None)
        wanted = sorted((when, block) for block, when in due.items() if when is not None)
        cache = {block for _, block in wanted[:size]}
    return hits


# --- one pass compared with plain simulations ---


@given(seed=st.integers(0, 10**6), num_requests=st.integers(0, 40), skip=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_lru_at_every_size_in_one_pass(seed: int, num_requests: int, skip: int) -> None:
    prompts = chains(seed, num_requests)
    references = referred(prompts)
    curve = lru_curve(islice(lru_reaches(references), skip, None))
    for size in range(references.num_blocks + 2):
        assert curve.hits(size) == plain_lru(prompts, size, skip), size
    assert curve.hits(curve.full_size) == curve.hits(10**9)
    if curve.full_size:
        assert curve.hits(curve.full_size - 1) < curve.hits(curve.full_size)


@given(seed=st.integers(0, 10**6), size=st.integers(0, 40), skip=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_no_policy_exceeds_the_optimum(seed: int, size: int, skip: int) -> None:
    prompts = chains(seed, 25)
    (bound,) = optimum_hits(referred(prompts), [size], skip)
    assert bound == plain_optimum(prompts, size, skip)
    assert optimum_hits(referred(prompts), [size])[0] >= plain_lru(prompts, size)


def test_blocks_of_the_same_requests_are_one_run() -> None:
    references = referred([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3, 4, 5]])
    assert references.weights() == [2, 2, 1, 1]
    assert list(map(list, references.requests)) == [[0, 1], [0, 2], [0, 1, 3]]
    partial = TraceRequest("1", 0.0, BLOCK_SIZE + 1, 0, (1, 2), 1)
    assert read_references([partial], BLOCK_SIZE).num_blocks == 1


# --- the report ---


def test_the_report_adds_up() -> None:
    prompts = chains(5, 300)
    trace = traced(prompts)
    report = run_size(trace, block_bytes=2**20, skip=100)
    counted = prompts[100:]
    assert (report.requests, report.warmup_requests) == (200, 100)
    assert report.blocks == sum(map(len, counted))
    assert report.prompt_tokens == sum(max(1, len(prompt) * BLOCK_SIZE) for prompt in counted)
    for point in report.points:
        hits = plain_lru(prompts, point.blocks, 100)
        assert point.lru_hit_rate == pytest.approx(hits / report.blocks)
        assert point.lru_token_rate == pytest.approx(hits * BLOCK_SIZE / report.prompt_tokens)
        assert point.lru_hit_rate <= point.optimum_hit_rate <= report.unlimited_hit_rate
        assert point.gib == point.blocks / 1024
    assert report.points[-1].lru_hit_rate == pytest.approx(report.unlimited_hit_rate)
    assert report.lru_curve[-1] == (report.full_blocks, report.points[-1].lru_hit_rate)
    with pytest.raises(ConfigError, match="--skip 300 leaves none of the 300 requests"):
        run_size(trace, skip=300)


def test_the_knee_is_where_the_curve_bends_most() -> None:
    assert knee_of([(10, 0.0), (20, 0.8), (30, 0.85), (100, 1.0)]) == 20
    assert knee_of([(10, 0.0), (20, 0.1), (100, 1.0)]) == 100  # each block gains more than the last
    assert knee_of([(10, 0.5)]) == 10
    # Ten prompts of one block are used again at once; one long prompt is used again at the end.
    short = [[n] for n in range(100, 110)] * 5
    long = list(range(50))
    report = run_size(traced([long, *short, long]))
    assert (report.knee_blocks, report.full_blocks) == (10, 60)
    assert report.knee_share == pytest.approx(40 / 90)


def test_sizes() -> None:
    assert parse_sizes("5000, 7", None) == [5000, 7]
    assert parse_sizes("1.5GiB,3", 2**20) == [1536, 3]
    for bad in ("", "-1", "1.5", "GiB", "5 GB", "1e3", "0x10", "50%"):
        with pytest.raises(ConfigError, match="--sizes"):
            parse_sizes(bad, 1)
    with pytest.raises(ConfigError, match="add --block-bytes"):
        parse_sizes("64GiB", None)


# --- the command ---


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["size", *map(str, args)])


def test_the_outputs_of_the_command(tmp_path: Path) -> None:
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    outputs = ("--json", tmp_path / "r.json", "--block-bytes", 2**20, "--skip", 100)
    for path in paths:
        result = run("--requests", 400, *outputs, "--chart", path)
        assert result.exit_code == 0, result.output
    assert "300 requests, " in result.output
    assert "after 100 to fill the cache" in result.output
    fields = json.loads((tmp_path / "r.json").read_text())
    report = SizeReport(**{**fields, "points": []})
    assert f"Knee: with {report.knee_blocks:,} blocks" in result.output
    assert "█" in result.output
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"<svg" in paths[0].read_bytes()
    assert run("--requests", 50, "--json", "-").output.startswith("{")
    assert "No cache gains anything" in run("--requests", 1).output


def test_a_chart_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "kvview_reference.sizing.chart", raising=False)
    result = run("--requests", 5, "--chart", tmp_path / "x.svg")
    assert result.exit_code == 2
    assert result.stderr == "kvview: this needs matplotlib: pip install 'kvview[chart]'\n"


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    wire_format = WIRE_FORMATS[-1]
    soon, later = 1.0, 1.0 + 2 * SAME_REQUEST_S
    steps: list[tuple[float, list[int], int | None]] = [
        (0.0, [11, 12], None),
        (soon, [13], 12),  # the same request continues
        (soon, [21], None),
        (later, [14, 15], 13),  # the next turn
        (later + 1, [16], 12),  # another branch of the first request
    ]
    path = tmp_path / "events.jsonl"

    def record(first: int) -> None:
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
                payload = encode(Batch(at, [event], None, wire_format))
                recording.write(Message(first * bool(number) + number, payload))

    record(0)
    trace = read_trace(path)
    assert trace.block_size == BLOCK_SIZE
    assert [(row.arrival_s, list(row.hash_ids)) for row in trace.requests] == [
        (0.0, [0, 1, 2]),
        (soon, [3]),
        (later, [0, 1, 2, 4, 5]),
        (later + 1, [0, 1, 6]),
    ]
    assert run_size(trace).unlimited_hit_rate == 5 / 12
    for command in ("size", "replay"):
        result = CliRunner().invoke(cli, [command, str(path), "--json", "-"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["requests"] == 4
    record(7)
    assert "events.jsonl: 7 messages from 1 are missing" in run(path).stderr
    assert "4 of 11 requests read" in run(path, "--skip-bad-rows").stdout
