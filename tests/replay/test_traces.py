"""Reading request traces: the formats, their meaning, bad rows, other files, real traces."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvview.cli.commands import cli
from kvview.errors import ConfigError, KVViewError, TraceError
from kvview_reference.replay.workload import generate_trace
from kvview_reference.traces import files
from kvview_reference.traces.reader import read_trace
from kvview_reference.traces.trace import SkippedRows, Trace, TraceRequest
from tests.cases import read_cases
from tests.replay import trace_rows
from tests.replay.trace_rows import flat, session, to_lines, weka
from tests.traces import CC, MOONCAKE, mooncake_row, trace_file


def size(path: Path, *options: str) -> tuple[int, ...]:
    """Return requests, blocks, prompt tokens, hits and block size, as kvview size reports them."""
    report = path.with_suffix(".report")
    result = CliRunner().invoke(cli, ["size", str(path), "--json", str(report), *options])
    assert result.exit_code == 0, result.stderr
    found = json.loads(report.read_text())
    num_hits = round(found["unlimited_hit_rate"] * found["blocks"])
    counts = [found[name] for name in ("requests", "blocks", "prompt_tokens")]
    return *counts, num_hits, found["block_size"]


def read(path: Path, **options: Any) -> tuple[Trace, list[str]]:
    """A trace without its bad rows, and their errors."""
    skipped = SkippedRows(is_allowed=True)
    return read_trace(path, skipped=skipped, **options), skipped.reasons


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def write(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    path.write_bytes(
        b"".join(row + b"\n" if isinstance(row, bytes) else to_lines([row]) for row in rows)
    )
    return path


# --- the meaning of rows ---


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "as written": bytes,
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data.rstrip(),
    "blank lines": lambda data: data.replace(b"\n", b"\n \t\r\n"),
    "gzip": gzip.compress,
    "unknown fields": lambda data: data.replace(b"{", b'{"unknown": [{}, null], '),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", trace_rows.TRACES)
def test_ids_stand_for_what_their_format_says(name: str, encoding: str, path: Path) -> None:
    rows, found = trace_rows.TRACES[name]
    path.write_bytes(ENCODINGS[encoding](to_lines(rows)))
    assert size(path) == size(path, "--block-size", str(found[-1])) == found


def test_fields_have_two_names_in_mooncake(path: Path) -> None:
    renamed = to_lines(trace_rows.CUMULATIVE)
    for name, other in (("put_length", "put_tokens"), ("timestamp", "created_time")):
        renamed = renamed.replace(name.encode(), other.encode())
    path.write_bytes(renamed.replace(b"delay", b"delay_ms"))
    assert size(path) == trace_rows.TRACES["cumulative"][1]


def test_delays_and_the_clocks_of_subagents_give_arrival_times(path: Path) -> None:
    turns = read_trace(write(path, *trace_rows.CUMULATIVE)).requests
    times = [0.001, 0.011, 0.501, 0.511, 1.001, 1.011]
    assert [one.arrival_s for one in turns] == pytest.approx(times)
    requests = read_trace(write(path, trace_rows.WEKA[0])).requests
    assert [one.arrival_s for one in requests] == [0, 1.5, 2, 4, 5, 21, 30.5]


@pytest.mark.parametrize("name", ["mooncake", "unchained", "bailian", "weka"])
def test_requests_arrive_in_the_order_of_their_times(name: str, path: Path) -> None:
    rows, found = trace_rows.TRACES[name]
    assert size(write(path, *rows[::-1])) == found


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([flat(512, 1, session_id=1, delay=5)], "'delay': is present, but this is the first turn"),
        ([flat(512, 1, delay=5)], "'delay': is present, but the row has no session_id"),
        ([flat(512, 1), flat(512, 1, timestamp=1)], "'timestamp': is present, but the first row"),
        ([flat(512, 1, timestamp=1), flat(512, 1)], "'timestamp': is missing, but the first row"),
        (
            [flat(512, 1, session_id=1, timestamp=at) for at in (2, 1)],
            "'timestamp': before the previous turn",
        ),
    ],
)
def test_a_row_whose_time_does_not_fit_is_refused(
    rows: trace_rows.Rows, part: str, path: Path
) -> None:
    with pytest.raises(TraceError, match=f":{len(rows)}: field {part}"):
        read_trace(write(path, *rows))


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([flat(400, 1), flat(100, 2)], "no prompt fills a block of 512 tokens"),
        ([flat(2000, 1), flat(2000, 2)], "the rows fit blocks of 1,001 to more tokens"),
        ([flat(96, 1, 2), flat(480, *range(10))], "the rows fit blocks of 44 to 53 tokens"),
        ([flat(2, 1), flat(5120, 1), flat(64, *range(32)), flat(9, *[1] * 9)], "size to name"),
        (
            [*trace_rows.CUMULATIVE, *trace_rows.INCREMENTAL[2:5:2]],
            "pass --turns cumulative or --turns incremental",
        ),
        (
            [flat(9, 1, session_id=1, timestamp=0), flat(1024, 2, 3, session_id=1, delay=1)],
            "the rows do not show whether later turns repeat them",
        ),
    ],
)
def test_an_ambiguous_trace_is_refused(rows: trace_rows.Rows, part: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=part):
        read_trace(write(path, *rows))


# --- bad rows ---

GOOD = {
    "mooncake": flat(51_200, *range(100), timestamp=1500),
    "bailian": flat(33, 1089, 1090, 6326, chat_id=159, parent_chat_id=55, timestamp=61.114),
    "weka": session(weka(0.0, 133, 1, 2)),
}
BAD = [
    *read_cases(Path(__file__).with_name("bad_rows.txt")),
    ("mooncake", b"\x00\xff\x17\x80", "not JSON"),
    ("mooncake", b"[" * 9_000, "not JSON: recursion limit"),
    ("mooncake", b'{"timestamp": ' + b"9" * 5_000 + b"}", "not JSON: number out of range"),
    ("mooncake", b"version https://git-lfs.github.com/spec/v1", "this is a Git LFS pointer"),
]


@pytest.mark.parametrize(("name", "bad", "part"), BAD)
def test_a_bad_row_ends_the_command_or_is_counted(
    name: str, bad: str | bytes, part: str, path: Path
) -> None:
    row = bad.encode() if isinstance(bad, str) else bad
    write(path, GOOD[name], b"", row, GOOD[name])
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: {part}")
    trace, reasons = read(path)
    assert [request.line for request in trace.requests] == [1, 4]
    assert reasons == [str(caught.value)]
    assert trace.headline == "trace.jsonl: 2 of 3 requests read"


def test_one_bad_request_costs_one_request_of_its_session(path: Path) -> None:
    rows = [session(*(weka(float(n), 64, 0) for n in range(100)), id=name) for name in "ab"]
    rows[1]["requests"][50]["in"] = 0
    rows.append(session(*rows[0]["requests"], block_size=32))
    with pytest.raises(TraceError, match=r":2: field 'requests\[50\]\.in'"):
        read_trace(write(path, *rows))
    trace, reasons = read(path)
    assert trace.headline == "trace.jsonl: 199 of 300 requests read"
    assert len(reasons) == 2
    result = CliRunner().invoke(cli, ["size", str(path), "--skip-bad-rows"])
    assert result.exit_code == 0
    assert "trace.jsonl: 199 of 300 requests read" in result.stdout
    assert f"kvview: skipped: {reasons[0]}" in result.stderr


def test_a_skipped_turn_would_change_incremental_turns(path: Path) -> None:
    write(path, *trace_rows.INCREMENTAL[:3], b"{", *trace_rows.INCREMENTAL[3:])
    with pytest.raises(ConfigError, match="--skip-bad-rows would change prompts"):
        read(path)


def test_reasons_are_bounded() -> None:
    shown: list[str] = []
    skipped = SkippedRows(is_allowed=True, report=shown.append)
    for number in range(20_000):
        skipped.add(TraceError(f"row {number}"))
    assert (len(shown), skipped.num_requests, len(skipped.reasons)) == (20, 20_000, 10_000)


# --- files ---


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "no rows"),
        (b"\n\r\n  \n", "no rows"),
        (gzip.compress(b"", mtime=0), "no rows"),
        (b"\x1f\x8b garbage", "gzip data truncated or damaged"),
        (b'{"prompt": "hi", "max_tokens": 3}\n', "fit no known format; known formats: mooncake ("),
        (b'{"event": "stored", "block_hashes": [1]}\n', "are those of an event log, which lacks"),
        (b'{"ts": 1, "events": []}\n', "are those of an event log, which lacks"),
        (b"PAR1\x15\x04", "is a Parquet file; write its rows as JSON Lines"),
        (b"\x28\xb5\x2f\xfd\x04", "is compressed with Zstandard; decompress it with 'zstd -d'"),
        (b'[{"input_length": 1}]', "is a JSON array; write one element per line"),
        (b'{\n  "id": "x"\n}\n', "is one JSON object over several lines; write it in one line"),
        (b"TIMESTAMP,ContextTokens\n0,5\n", "is a CSV file, which lacks the hash_ids"),
        (gzip.compress(b'"a","b"\n1,2\n', mtime=0), "is a CSV file, which lacks the hash_ids"),
    ],
)
def test_a_file_without_requests_says_what_it_lacks(content: bytes, part: str, path: Path) -> None:
    path.write_bytes(content)
    for skipped in (SkippedRows(), SkippedRows(is_allowed=True)):
        with pytest.raises(KVViewError, match=re.escape(part)) as caught:
            read_trace(path, skipped=skipped)
        assert "\n" not in str(caught.value)


def test_truncated_gzip_is_not_an_answer(path: Path) -> None:
    rows = [{**GOOD["mooncake"], "timestamp": zlib.crc32(b"%d" % i)} for i in range(60)]
    path.write_bytes(gzip.compress(to_lines(rows))[:-200])
    with pytest.raises(TraceError, match=r"trace\.jsonl:\d+: gzip data truncated"):
        read_trace(path)
    trace, _ = read(path)
    number = len(trace.requests)
    assert number > 9
    assert trace.headline == f"trace.jsonl: {number} of at least {number + 1} requests read"


def test_a_folder_is_a_trace(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.json", session(weka(0.0, 64, 1), weka(1.0, 64, 1)))
    (tmp_path / "README.md").write_text("not a trace")
    ids = [list(request.hash_ids) for request in read_trace(tmp_path).requests]
    assert ids == [[0], [1], [0], [1]], "the ids of a session with local ids are its own"
    write(tmp_path / "c.json", GOOD["mooncake"])
    with pytest.raises(TraceError, match=r"c\.json:1: the trace is weka, but this row is mooncake"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("row", "part"),
    [(b"9" * 4_000_000, "longer than"), (b'{"hash_ids":[' + b"1," * 10**6, "of more than")],
)
def test_a_long_row_is_not_parsed(
    row: bytes, part: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 3_000_000)
    monkeypatch.setattr(files, "MAX_ROW_VALUES", 500_000)
    trace, (reason,) = read(write(path, GOOD["mooncake"], row, GOOD["mooncake"]))
    assert f"{path}:2: row {part}" in reason
    assert len(trace.requests) == 2


def test_a_generated_trace_is_read_from_a_file_with_the_same_hits(path: Path) -> None:
    rows = list(generate_trace(num_requests=300))
    trace = read_trace(write(path, *map(mooncake_row, rows)))
    assert prefix_hits(trace.requests) == prefix_hits(rows)
    assert [one.arrival_s for one in trace.requests] == [one.arrival_s for one in rows]
    assert len(read_trace(path, max_requests=7).requests) == 7


# --- real files (tests/traces) ---


def prefix_hits(requests: Iterable[TraceRequest]) -> tuple[int, int, int, int]:
    """Requests, references, different ids, hits of an infinite cache."""
    seen: set[int] = set()
    num_requests = references = hits = 0
    for request in requests:
        num_requests += 1
        references += len(request.hash_ids)
        hits += sum(1 for _ in takewhile(seen.__contains__, request.hash_ids))
        seen.update(request.hash_ids)
    return num_requests, references, len(seen), hits


def test_the_mooncake_file() -> None:
    trace = read_trace(trace_file(MOONCAKE))
    num_requests, references, unique, hits = prefix_hits(trace.requests)
    assert (trace.block_size, num_requests, references, unique) == (512, 12_031, 288_500, 182_790)
    assert hits / references == pytest.approx(0.366, abs=0.001)
    assert trace.requests[-1].arrival_s == 3536.999


def test_the_weka_file() -> None:
    requests = read_trace(trace_file(CC)).requests
    assert len({request.request_id for request in requests}) == len(requests) == 3_330
    assert sum("." in request.request_id.rpartition("/")[2] for request in requests) == 121
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(requests))
