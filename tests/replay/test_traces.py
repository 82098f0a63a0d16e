"""Reading request traces: real files, every kind of bad input, streaming, fuzz, generator."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import tracemalloc
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvview.errors import ConfigError, TraceError
from kvview_reference.replay.traces import TraceRequest, open_trace
from kvview_reference.replay.workload import generate_trace
from tests.traces import CC as CC_NAME
from tests.traces import MOONCAKE as MOONCAKE_NAME
from tests.traces import trace_file

MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}
BAILIAN = {
    "chat_id": 159,
    "parent_chat_id": 55,
    "timestamp": 61.114,
    "input_length": 33,
    "output_length": 132,
    "type": "text",
    "turn": 2,
    "hash_ids": [1089, 1090, 6326],
}


def cc_request(t: float, hash_ids: list[int], **changes: Any) -> dict[str, Any]:
    tokens = 64 * len(hash_ids) + 5
    return {"t": t, "type": "n", "in": tokens, "out": 9, "hash_ids": hash_ids, **changes}


def cc_subagent(t: float, requests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "agent_001", "requests": requests}


def cc_session(requests: list[Any], **changes: Any) -> dict[str, Any]:
    head = {"id": "trace_1", "block_size": 64, "hash_id_scope": "local"}
    return {**head, "requests": requests, **changes}


CC = cc_session([cc_request(0.0, [1, 2])])


def to_line(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).encode()


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_bytes(b"".join(to_line(row) + b"\n" for row in rows))
    return path


def read(path: Path) -> tuple[list[TraceRequest], list[str]]:
    """Requests, and the messages of the malformed rows."""
    errors: list[TraceError] = []
    requests = list(open_trace(path, on_error=errors.append))
    return requests, [str(error) for error in errors]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


# --- the three schemas -----------------------------------------------------------------


def test_mooncake(path: Path) -> None:
    trace = open_trace(write(path, [MOONCAKE, {**MOONCAKE, "hash_ids": [0, 8]}]))
    assert (trace.schema, trace.block_size) == ("mooncake", 512)
    first, second = trace
    assert first == TraceRequest("1", 1.5, 600, 3, (0, 7), "", 1)
    assert (second.request_id, second.line, second.hash_ids) == ("2", 2, (0, 8))


def test_bailian(path: Path) -> None:
    trace = open_trace(write(path, [BAILIAN]))
    assert (trace.schema, trace.block_size) == ("bailian", 16)
    assert list(trace) == [TraceRequest("159", 61.114, 33, 132, (1089, 1090, 6326), "", 1, "55")]


def test_cc_sub_agents_nest_and_arrive_in_time_order(path: Path) -> None:
    session = cc_session(
        [
            cc_request(0.0, [1, 2]),
            cc_subagent(10.0, [cc_request(0.0, [9]), cc_request(4.0, [9, 10], type="s")]),
            cc_request(12.0, [1, 2, 3]),
            # In other releases a sub-agent's requests carry the session's own clock.
            cc_subagent(20.0, [cc_request(21.0, [9]), cc_subagent(30.0, [cc_request(0.5, [9])])]),
        ]
    )
    trace = open_trace(write(path, [session]))
    assert (trace.schema, trace.block_size) == ("cc-traces", 64)
    assert [(r.request_id, r.arrival_s, r.hash_ids) for r in trace] == [
        ("trace_1/0", 0.0, (1, 2)),
        ("trace_1/1.0", 10.0, (9,)),
        ("trace_1/2", 12.0, (1, 2, 3)),
        ("trace_1/1.1", 14.0, (9, 10)),
        ("trace_1/3.0", 21.0, (9,)),
        ("trace_1/3.1.0", 30.5, (9,)),
    ]
    assert {r.scope for r in trace} == {"trace_1"}
    assert {r.line for r in trace} == {1}


@pytest.mark.parametrize(
    ("scope", "found"), [("local", "trace_1"), ("global", ""), (None, "trace_1")]
)
def test_cc_scope(path: Path, scope: str | None, found: str) -> None:
    session = {**CC, "hash_id_scope": scope}
    if scope is None:
        del session["hash_id_scope"]
    assert [r.scope for r in open_trace(write(path, [session]))] == [found]


def test_cc_empty_session_and_sub_agent(path: Path) -> None:
    rows = [cc_session([]), cc_session([cc_subagent(1.0, [])]), CC]
    assert [r.line for r in open_trace(write(path, rows))] == [3]


@pytest.mark.parametrize("num_ids", [1, 2])
def test_partial_last_block_may_have_an_id_or_none(path: Path, num_ids: int) -> None:
    row = {**MOONCAKE, "hash_ids": list(range(num_ids))}
    assert len(list(open_trace(write(path, [row])))) == 1


# --- malformed rows --------------------------------------------------------------------


def without(row: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != field}


BAD_MOONCAKE: dict[str, tuple[Any, str]] = {
    "not JSON": (b'{"timestamp": 1,', "not JSON: EOF while parsing a value at column 16"),
    "binary": (b"\x00\xff\x17\x80", "not JSON"),
    "bad UTF-8": (b'{"timestamp": "\xff"}', "not JSON: invalid unicode"),
    "two rows on a line": (to_line(MOONCAKE) * 2, "not JSON: trailing characters"),
    "too deep": (b"[" * 9_000, "not JSON: recursion limit"),
    "5,000 digits": (b'{"timestamp": ' + b"9" * 5_000 + b"}", "not JSON: number out of range"),
    "list": ([1], "not a JSON object, got [1]"),
    "null": (None, "not a JSON object, got None"),
    "missing field": (without(MOONCAKE, "hash_ids"), "field 'hash_ids': missing"),
    "empty object": ({}, "field 'input_length': missing (and 2 more in this row)"),
    "string for int": (
        {**MOONCAKE, "input_length": "600"},
        "field 'input_length': should be a valid integer, got '600'",
    ),
    "float for int": ({**MOONCAKE, "output_length": 3.0}, "field 'output_length': should be a"),
    "null for list": ({**MOONCAKE, "hash_ids": None}, "field 'hash_ids': should be a valid array"),
    "bool as int": (
        {**MOONCAKE, "output_length": True},
        "field 'output_length': should be a valid integer, got True",
    ),
    "bool as time": ({**MOONCAKE, "timestamp": False}, "field 'timestamp': should be a valid num"),
    "bool as id": ({**MOONCAKE, "hash_ids": [0, True]}, "field 'hash_ids[1]': should be a valid"),
    "negative length": (
        {**MOONCAKE, "output_length": -3},
        "field 'output_length': should be greater than or equal to 0, got -3",
    ),
    "negative time": ({**MOONCAKE, "timestamp": -0.5}, "field 'timestamp': should be greater"),
    "negative id": ({**MOONCAKE, "hash_ids": [-1, 7]}, "field 'hash_ids[0]': should be greater"),
    "no prompt": ({**MOONCAKE, "input_length": 0}, "field 'input_length': should be greater"),
    "NaN": ({**MOONCAKE, "timestamp": float("nan")}, "field 'timestamp': should be a finite"),
    "infinite": ({**MOONCAKE, "timestamp": float("inf")}, "field 'timestamp': should be a finite"),
    "huge time": ({**MOONCAKE, "timestamp": 1e300}, "field 'timestamp': should be less than"),
    "huge length": ({**MOONCAKE, "output_length": 10**30}, "field 'output_length': should be less"),
    "huge id": ({**MOONCAKE, "hash_ids": [2**64, 7]}, "field 'hash_ids[0]': should be less than"),
    "too few ids": (
        {**MOONCAKE, "input_length": 1600},
        "field 'hash_ids': 2 ids for 1600 prompt tokens in blocks of 512, expected 3 or 4",
    ),
    "too many ids": (
        {**MOONCAKE, "input_length": 512},
        "field 'hash_ids': 2 ids for 512 prompt tokens in blocks of 512, expected 1",
    ),
    "bailian in mooncake": (BAILIAN, "mixed schemas: a bailian row in a mooncake trace"),
    # The block counts of these fit both block sizes; only the field names tell.
    "bailian root in mooncake": (
        without({**BAILIAN, "input_length": 16, "hash_ids": [1]}, "parent_chat_id"),
        "mixed schemas: a bailian row in a mooncake trace",
    ),
    "bailian without id in mooncake": (
        without({**BAILIAN, "input_length": 16, "hash_ids": [1]}, "chat_id"),
        "mixed schemas: a bailian row in a mooncake trace",
    ),
    "cc in mooncake": (CC, "mixed schemas: a cc-traces row in a mooncake trace"),
}
BAD_BAILIAN: dict[str, tuple[Any, str]] = {
    "no id": (without(BAILIAN, "chat_id"), "field 'chat_id': missing"),
    "id": ({**BAILIAN, "chat_id": "x"}, "field 'chat_id': should be a valid integer, got 'x'"),
    "turn": ({**BAILIAN, "turn": None}, "field 'turn': should be a valid integer, got None"),
    "blocks": ({**BAILIAN, "hash_ids": [1]}, "field 'hash_ids': 1 ids for 33 prompt tokens in"),
    "mooncake": (MOONCAKE, "mixed schemas: a mooncake row in a bailian trace"),
}
GOOD_CC = cc_request(0.0, [1])
BAD_CC: dict[str, tuple[Any, str]] = {
    "nested missing": (
        cc_session([GOOD_CC, cc_subagent(1.0, [without(GOOD_CC, "in")])]),
        "field 'requests[1].requests[0].in': missing",
    ),
    "nested ids": (
        cc_session([GOOD_CC, cc_subagent(1.0, [cc_request(0.0, [1, -1])])]),
        "field 'requests[1].requests[0].hash_ids[1]': should be greater",
    ),
    "nested blocks": (
        cc_session([cc_subagent(1.0, [{**GOOD_CC, "in": 640}])]),
        "field 'requests[0].requests[0].hash_ids': 1 ids for 640 prompt tokens in blocks of 64",
    ),
    "no hash ids": (
        cc_session([without(GOOD_CC, "hash_ids")]),
        "field 'requests[0].hash_ids': missing",
    ),
    "no kind": (cc_session([without(GOOD_CC, "type")]), "field 'requests[0].type': missing"),
    "unknown kind": (
        cc_session([{**GOOD_CC, "type": "z"}]),
        "field 'requests[0].type': should be one of 'n', 's', 'subagent', got 'z'",
    ),
    "request no object": (cc_session([3]), "field 'requests[0]': should be an object, got 3"),
    "sub-agent without requests": (
        cc_session([without(cc_subagent(1.0, []), "requests")]),
        "field 'requests[0].requests': missing",
    ),
    "scope": (cc_session([], hash_id_scope="x"), "field 'hash_id_scope': should be 'local' or"),
    "no id": (cc_session([], id=""), "field 'id': String should have at least 1"),
    "block size 0": (cc_session([], block_size=0), "field 'block_size': should be greater"),
    "other block size": (cc_session([], block_size=32), "field 'block_size': 32 in a trace of 64"),
}
BAD_ROWS = [
    pytest.param(good, bad, part, id=f"{schema}: {kind}")
    for schema, good, rows in (
        ("mooncake", MOONCAKE, BAD_MOONCAKE),
        ("bailian", BAILIAN, BAD_BAILIAN),
        ("cc", CC, BAD_CC),
    )
    for kind, (bad, part) in rows.items()
]


@pytest.mark.parametrize(("good", "bad", "part"), BAD_ROWS)
def test_malformed_row_is_named_and_nothing_else_is_lost(
    path: Path, good: Any, bad: Any, part: str
) -> None:
    write(path, [good, b"", bad, good])
    seen: list[int] = []
    with pytest.raises(TraceError) as caught:
        seen.extend(request.line for request in open_trace(path))
    assert seen == [1]
    assert str(caught.value).startswith(f"{path}:3: {part}")
    assert "\n" not in str(caught.value)

    requests, errors = read(path)
    assert [request.line for request in requests] == [1, 4]
    assert errors == [str(caught.value)]


@pytest.mark.parametrize("bad", [bad for bad, _ in BAD_MOONCAKE.values()][:8])
def test_first_row_malformed(path: Path, bad: Any) -> None:
    write(path, [bad, MOONCAKE])
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: "):
        open_trace(path)
    errors: list[TraceError] = []
    trace = open_trace(path, on_error=errors.append)
    assert errors == []  # opening looks ahead; each iteration reports once
    for passes in (1, 2):
        assert [request.line for request in trace] == [2]
        assert len(errors) == passes


def test_unknown_schema_lists_the_known_ones(path: Path) -> None:
    write(path, [{"prompt": "hi", "max_tokens": 3}])
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:1: unknown schema with fields ['prompt', 'max_tokens']; ")
    assert "mooncake (timestamp, input_length, output_length, hash_ids)" in message
    assert "chat_id, parent_chat_id" in message
    assert "cc-traces (id, block_size, hash_id_scope, requests)" in message
    with pytest.raises(ConfigError, match="no row can be read; line 1: unknown schema"):
        open_trace(path, on_error=lambda error: None)


def test_git_lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(TraceError, match="a Git LFS pointer, not the trace: run 'git lfs pull'"):
        open_trace(path)


def test_row_too_long(path: Path) -> None:
    long = {**MOONCAKE, "hash_ids": list(range(2_000)), "input_length": 2_000 * 512}
    write(path, [MOONCAKE, long, MOONCAKE])
    errors: list[TraceError] = []
    trace = open_trace(path, on_error=errors.append, max_row_bytes=200)
    assert [request.line for request in trace] == [1, 3]
    assert [str(error) for error in errors] == [f"{path}:2: row longer than 200 bytes"]


def test_callback_may_stop(path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(error: TraceError) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        list(open_trace(write(path, [MOONCAKE, b"{"]), on_error=stop))


# --- files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)]
)
def test_empty_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read trace '.*trace\.jsonl': no rows"):
        open_trace(path)


def test_unreadable_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory") as caught:
        open_trace(tmp_path / "none.jsonl")
    assert "\n" not in str(caught.value)
    assert "none.jsonl" in str(caught.value)
    with pytest.raises(ConfigError, match="no file in it ends in"):
        open_trace(tmp_path)
    with pytest.raises(ConfigError, match="null"):
        open_trace("a\0b")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_trace(tmp_path / "pipe")


def test_no_permission(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, [MOONCAKE])

    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot read trace .*: Permission denied"):
        open_trace(path)


def test_file_gone_between_iterations(path: Path) -> None:
    trace = open_trace(write(path, [MOONCAKE]))
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        list(trace)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf%s\n%s\n",
        b"%s\r\n%s\r\n",
        b"%s\n%s",
        b"\n \n%s\n\t\n\r\n%s\n\n",
        b"\xef\xbb\xbf\r\n  %s  \r\n%s",
    ],
    ids=["BOM", "CRLF", "no newline at the end", "blank lines", "all"],
)
def test_line_shapes(tmp_path: Path, content: bytes, compress: Any) -> None:
    # The name says nothing: the first bytes tell whether it is gzip.
    path = tmp_path / "trace.dat"
    path.write_bytes(compress(content % (to_line(MOONCAKE), to_line(MOONCAKE))))
    requests, errors = read(path)
    assert [request.hash_ids for request in requests] == [(0, 7), (0, 7)]
    assert errors == []


def test_truncated_gzip_yields_every_whole_row(path: Path) -> None:
    rows = [{**MOONCAKE, "timestamp": zlib.crc32(b"%d" % i)} for i in range(60)]
    whole = gzip.compress(b"".join(to_line(row) + b"\n" for row in rows))
    checked = 0
    for size in range(20, len(whole), 7):
        path.write_bytes(whole[:size])
        num_whole = zlib.decompressobj(31).decompress(whole[:size]).count(b"\n")
        if not num_whole:
            continue
        requests, errors = read(path)
        assert len(requests) == num_whole
        assert errors == [
            f"{path}:{num_whole + 1}: gzip data truncated or damaged from here on: "
            "Compressed file ended before the end-of-stream marker was reached"
        ]
        checked += 1
    assert checked > 20
    with pytest.raises(TraceError, match=r"trace\.jsonl:\d+: gzip data truncated"):
        list(open_trace(path))


def test_damaged_gzip(path: Path) -> None:
    whole = gzip.compress(to_line(MOONCAKE) + b"\n")
    for damaged in (whole[:-8] + b"\0" * 8, whole + b"garbage"):
        path.write_bytes(damaged)
        requests, errors = read(path)
        assert len(requests) == 1
        assert len(errors) == 1
        assert f"{path}:2: gzip data truncated or damaged" in errors[0]
    path.write_bytes(b"\x1f\x8b garbage")
    with pytest.raises(TraceError, match="gzip data"):
        open_trace(path)
    with pytest.raises(ConfigError, match="no row can be read; line 1: gzip data"):
        open_trace(path, on_error=lambda error: None)


# --- streaming -------------------------------------------------------------------------


def mooncake_row(request: TraceRequest) -> dict[str, Any]:
    return {
        "timestamp": round(request.arrival_s * 1000),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "hash_ids": list(request.hash_ids),
    }


def test_generated_trace_survives_a_file(path: Path) -> None:
    write(path, map(mooncake_row, generate_trace(num_requests=300)))
    # Mooncake rows do not say what they continue.
    generated = [replace(one, continues=None) for one in generate_trace(num_requests=300)]
    assert list(open_trace(path)) == generated


def peak_bytes(requests: Iterable[TraceRequest]) -> int:
    tracemalloc.start()
    try:
        for _ in requests:
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compressed", [False, True])
def test_memory_does_not_grow_with_the_trace(tmp_path: Path, compressed: bool) -> None:
    content = b"".join(
        to_line(mooncake_row(request)) + b"\n" for request in generate_trace(num_requests=500)
    )
    peaks = []
    for copies in (10, 40):  # more than the 128 KiB that gzip reads at once from Python 3.12 on
        path = tmp_path / f"{copies}"
        path.write_bytes(gzip.compress(content * copies, 1) if compressed else content * copies)
        trace = open_trace(path)
        list(itertools.islice(trace, 50))  # what is allocated once is no growth
        peaks.append(peak_bytes(trace))
    assert peaks[1] < peaks[0] + 64_000 < 40 * len(content) / 10


def test_memory_does_not_grow_with_a_row_too_long(path: Path) -> None:
    path.write_bytes(to_line(MOONCAKE) + b"\n" + b"9" * 16_000_000 + b"\n" + to_line(MOONCAKE))
    errors: list[TraceError] = []
    trace = open_trace(path, on_error=errors.append, max_row_bytes=1_000)
    assert peak_bytes(trace) < 4_000_000
    assert len(errors) == 1
    assert [request.line for request in trace] == [1, 3]


def test_progress(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    content = b"".join(to_line(mooncake_row(r)) + b"\n" for r in generate_trace(num_requests=2_000))
    # Not compressed: from Python 3.12 on, gzip reads 128 KiB at once.
    path.write_bytes(gzip.compress(content * 2, 0))
    trace = open_trace(path)
    assert trace.total_bytes == path.stat().st_size
    assert trace.bytes_read == 0
    read_bytes = [trace.bytes_read for _ in trace]
    assert read_bytes == sorted(read_bytes)
    assert len(set(read_bytes)) > 3
    assert trace.bytes_read == trace.total_bytes


def test_abandoned_iteration_closes_the_file(path: Path) -> None:
    # An open file would fail here: ResourceWarning is an error.
    iterator = iter(open_trace(write(path, [MOONCAKE] * 3)))
    next(iterator)
    del iterator


# --- real files, or those that are like them (tests/traces) -----------------------------


def prefix_hit_rate(requests: Iterable[TraceRequest]) -> tuple[int, int, int, float]:
    """Requests, references, unique ids, hit rate of an infinite cache."""
    seen: set[tuple[str, int]] = set()
    num_requests = references = hits = 0
    for request in requests:
        num_requests += 1
        references += len(request.hash_ids)
        keys = [(request.scope, hash_id) for hash_id in request.hash_ids]
        hits += sum(1 for _ in itertools.takewhile(seen.__contains__, keys))
        seen.update(keys)
    return num_requests, references, len(seen), hits / max(references, 1)


def test_mooncake_file() -> None:
    file = trace_file(MOONCAKE_NAME)
    trace = open_trace(file.path)
    requests = list(trace)
    num_requests, references, unique, hit_rate = prefix_hit_rate(requests)
    assert num_requests == 12_031
    if file.is_real:
        assert (references, unique) == (288_500, 182_790)
        assert hit_rate == pytest.approx(0.366, abs=0.001)
        assert (requests[0].arrival_s, requests[-1].arrival_s) == (0.0, 3536.999)
    assert references == pytest.approx(288_500, rel=0.1)
    assert unique == pytest.approx(182_790, rel=0.1)
    assert hit_rate == pytest.approx(0.366, abs=0.03)
    assert requests[-1].arrival_s == pytest.approx(3537, rel=0.1)
    assert all(len(r.hash_ids) == -(-r.num_prompt_tokens // 512) for r in requests)
    assert trace.bytes_read == trace.total_bytes == file.path.stat().st_size


def test_cc_file() -> None:
    trace = open_trace(trace_file(CC_NAME).path)
    assert (trace.schema, trace.block_size) == ("cc-traces", 64)
    num_requests = num_nested = 0
    last_line, last_arrival_s = 0, 0.0
    ids: set[str] = set()
    for request in trace:
        num_requests += 1
        num_nested += "." in request.request_id
        ids.add(request.request_id)
        assert len(request.hash_ids) == request.num_prompt_tokens // 64
        assert request.request_id.startswith(f"{request.scope}/")
        if request.line == last_line:
            assert request.arrival_s >= last_arrival_s
        last_line, last_arrival_s = request.line, request.arrival_s
    assert (num_requests, num_nested, last_line) == (3_330, 121, 40)
    assert len(ids) == num_requests


@pytest.mark.parametrize("line", [1, 2, 150])
def test_slice_of_mooncake_with_one_bad_row(path: Path, line: int) -> None:
    with trace_file(MOONCAKE_NAME).path.open("rb") as file:
        rows = [row.rstrip(b"\n") for row in itertools.islice(file, 200)]
    expected = list(open_trace(write(path, rows)))
    assert len(expected) == 200
    rows[line - 1] = rows[line - 1][:-1]
    requests, errors = read(write(path, rows))
    assert requests == expected[: line - 1] + expected[line:]
    assert len(errors) == 1
    assert f"trace.jsonl:{line}: not JSON: EOF" in errors[0]


def test_slice_of_cc_with_one_bad_nested_request(path: Path) -> None:
    with gzip.open(trace_file(CC_NAME).path) as file:
        rows = [json.loads(row) for row in itertools.islice(file, 3)]
    expected = list(open_trace(write(path, rows)))
    nested = next(entry for entry in rows[2]["requests"] if entry["type"] == "subagent")
    nested["requests"][1]["out"] = "12"
    requests, errors = read(write(path, rows))
    assert requests == [request for request in expected if request.line < 3]
    place = rows[2]["requests"].index(nested)
    what = f"field 'requests[{place}].requests[1].out': should be a valid integer, got '12'"
    assert errors == [f"{path}:3: {what}"]


# --- fuzz ------------------------------------------------------------------------------


@st.composite
def mutated_rows(draw: st.DrawFn) -> bytes:
    """A good row with one bit flipped, cut, doubled, or with one value replaced."""
    row = draw(st.sampled_from([MOONCAKE, BAILIAN, CC]))
    line = bytearray(to_line(row))
    how = draw(st.sampled_from(["flip", "cut", "insert", "value"]))
    at = draw(st.integers(0, len(line) - 1))
    if how == "flip":
        line[at] ^= 1 << draw(st.integers(0, 7))
    elif how == "cut":
        del line[at : at + draw(st.integers(1, 9))]
    elif how == "insert":
        line[at:at] = draw(st.binary(max_size=9))
    else:
        json_value = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=3),
        )
        changed = {**row, draw(st.sampled_from(sorted(row))): draw(json_value)}
        line = bytearray(to_line(changed))
    return bytes(line).replace(b"\n", b"")


garbage = st.binary(max_size=40).map(lambda row: row.replace(b"\n", b""))


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(mutated_rows() | garbage, max_size=4), data=st.data())
def test_fuzzed_rows_lose_no_good_row(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    schema = data.draw(st.sampled_from([MOONCAKE, BAILIAN, CC]))
    good = to_line(schema)
    lines = list(rows)
    for _ in range(data.draw(st.integers(1, 3))):
        lines.insert(data.draw(st.integers(0, len(lines))), good)
    # A file whose first row is whole has that row's schema.
    lines.insert(0, good)
    requests, errors = read(write(path, lines))
    yielded = [request.line for request in requests]
    assert {line for line, row in enumerate(lines, 1) if row == good} <= set(yielded)
    # Each line is read, or reported, or blank (or a session without requests); none is two.
    reported = [int(error.removeprefix(f"{path}:").split(":")[0]) for error in errors]
    blank = [line for line, row in enumerate(lines, 1) if not row.strip()]
    everything = list(range(1, len(lines) + 1))
    if schema is CC:
        assert not set(yielded) & set(reported)
    else:
        assert sorted(yielded + reported + blank) == everything


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary(max_size=200), magic=st.sampled_from([b"", b"\x1f\x8b", b"\x1f\x8b\x08\0"])
)
def test_random_bytes_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, magic: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.jsonl"
    path.write_bytes(magic + content)
    with pytest.raises((TraceError, ConfigError)):
        list(open_trace(path))
    with pytest.raises(ConfigError):
        list(open_trace(path, on_error=lambda error: None))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_gzip_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gz"
    content = bytearray(gzip.compress((to_line(MOONCAKE) + b"\n") * 3))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        requests, _ = read(path)
    except ConfigError:
        return
    assert len(requests) <= 3
