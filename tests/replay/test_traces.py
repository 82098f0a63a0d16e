"""Reading request traces: real files, every kind of bad input, streaming, fuzzing."""

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
from kvview_reference.replay.traces import Lost, TraceRequest, open_trace
from kvview_reference.replay.workload import generate_trace
from tests.cases import read_cases
from tests.traces import CC as CC_NAME
from tests.traces import MOONCAKE as MOONCAKE_NAME
from tests.traces import mooncake_row, trace_file

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


def cc_subagent(t: float, *requests: Any) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "agent_001", "requests": requests}


def cc_session(*requests: Any, **changes: Any) -> dict[str, Any]:
    head = {"id": "trace_1", "block_size": 64, "hash_id_scope": "local"}
    return {**head, "requests": requests, **changes}


CC = cc_session(cc_request(0.0, [1, 2]))


def to_line(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).encode()


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_bytes(b"".join(to_line(row) + b"\n" for row in rows))
    return path


def read(path: Path, **options: Any) -> tuple[list[TraceRequest], list[str]]:
    """Requests, and the messages of the malformed rows."""
    errors: list[TraceError] = []
    requests = list(open_trace(path, on_error=errors.append, **options))
    return requests, [str(error) for error in errors]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


# --- the three schemas ---


def test_mooncake(path: Path) -> None:
    trace = open_trace(write(path, [MOONCAKE, {**MOONCAKE, "hash_ids": [8]}]))
    assert (trace.schema, trace.block_size) == ("mooncake", 512)
    assert list(trace) == [
        TraceRequest("1", 1.5, 600, 3, (0, 7), "", 1),
        TraceRequest("2", 1.5, 600, 3, (8,), "", 2),  # the partial last block may have no id
    ]


def test_bailian(path: Path) -> None:
    trace = open_trace(write(path, [BAILIAN]))
    assert (trace.schema, trace.block_size) == ("bailian", 16)
    assert list(trace) == [TraceRequest("159", 61.114, 33, 132, (1089, 1090, 6326), "", 1, "55")]


def test_cc_sub_agents_nest_and_arrive_in_time_order(path: Path) -> None:
    session = cc_session(
        cc_request(0.0, [1, 2]),
        cc_subagent(10.0, cc_request(0.0, [9]), cc_request(4.0, [9, 10], type="s")),
        cc_request(12.0, [1, 2, 3]),
        # In other releases a sub-agent's requests have the session's own clock.
        cc_subagent(20.0, cc_request(21.0, [9]), cc_subagent(30.0, cc_request(0.5, [9]))),
    )
    trace = open_trace(write(path, [session]))
    assert (trace.schema, trace.block_size) == ("cc-traces", 64)
    assert [(r.request_id, r.arrival_s, r.hash_ids, r.continues) for r in trace] == [
        ("trace_1/0", 0.0, (1, 2), None),
        ("trace_1/1.0", 10.0, (9,), None),
        ("trace_1/2", 12.0, (1, 2, 3), "trace_1/0"),
        ("trace_1/1.1", 14.0, (9, 10), "trace_1/1.0"),
        ("trace_1/3.0", 21.0, (9,), None),
        ("trace_1/3.1.0", 30.5, (9,), None),
    ]
    assert {(r.scope, r.line) for r in trace} == {("trace_1", 1)}


def test_cc_scopes_and_empty_sessions(path: Path) -> None:
    sessions = [{**CC, "hash_id_scope": "global"}, cc_session(), cc_session(cc_subagent(1.0))]
    sessions.append({name: value for name, value in CC.items() if name != "hash_id_scope"})
    found = [(r.line, r.scope) for r in open_trace(write(path, sessions))]
    assert found == [(1, ""), (4, "trace_1")]


# --- malformed rows ---


def of_mooncake(**changes: Any) -> dict[str, Any]:
    return {**MOONCAKE, **changes}


GOOD_CC = cc_request(0.0, [1])
GOOD = {"mooncake": MOONCAKE, "bailian": BAILIAN, "cc-traces": CC}
BAD = [
    *read_cases(Path(__file__).with_name("bad_rows.txt")),
    ("mooncake", b"\x00\xff\x17\x80", "not JSON"),
    ("mooncake", b'{"timestamp": "\xff"}', "not JSON: invalid unicode"),
    ("mooncake", b"[" * 9_000, "not JSON: recursion limit"),
    ("mooncake", b'{"timestamp": ' + b"9" * 5_000 + b"}", "not JSON: number out of range"),
]


@pytest.mark.parametrize(("schema", "bad", "part"), BAD)
def test_a_malformed_row_is_named_and_no_other_row_is_lost(
    path: Path, schema: str, bad: str | bytes, part: str
) -> None:
    row = bad.encode() if isinstance(bad, str) else bad
    write(path, [GOOD[schema], b"", row, GOOD[schema]])
    seen: list[int] = []
    with pytest.raises(TraceError) as caught:
        seen.extend(request.line for request in open_trace(path))
    assert seen == [1]
    assert str(caught.value).startswith(f"{path}:3: {part}")
    assert "\n" not in str(caught.value)
    requests, errors = read(path)
    assert [request.line for request in requests] == [1, 4]
    assert errors == [str(caught.value)]


def test_a_malformed_first_row_is_reported_by_each_iteration(path: Path) -> None:
    write(path, [b"{", MOONCAKE])
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: "):
        open_trace(path)
    errors: list[TraceError] = []
    trace = open_trace(path, on_error=errors.append)
    assert errors == []
    for passes in (1, 2):
        assert [request.line for request in trace] == [2]
        assert len(errors) == passes


def test_an_unknown_schema_lists_the_known_ones(path: Path) -> None:
    write(path, [{"prompt": "hi", "max_tokens": 3}])
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    message = str(caught.value)
    assert message.startswith(
        f"{path}:1: the fields ['prompt', 'max_tokens'] fit no known schema; "
    )
    assert "mooncake (timestamp, input_length, output_length, hash_ids)" in message
    assert "cc-traces (id, block_size, hash_id_scope, requests)" in message
    with pytest.raises(ConfigError, match="no row can be read; line 1: the fields"):
        open_trace(path, on_error=lambda error: None)


def test_a_git_lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(TraceError, match="a Git LFS pointer, not the trace; run 'git lfs pull'"):
        open_trace(path)


def test_losses_are_bounded() -> None:
    lost = Lost()
    shown = [lost.add(TraceError(f"row {number}")) for number in range(20_000)]
    assert (sum(shown), lost.num_rows, len(lost.rows)) == (20, 20_000, 10_000)


# --- files ---


@pytest.mark.parametrize(
    "content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)]
)
def test_an_empty_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read trace '.*trace\.jsonl': no rows"):
        open_trace(path)


def test_a_path_that_becomes_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = open_trace(write(tmp_path / "gone", [MOONCAKE]))
    (tmp_path / "gone").unlink()
    with pytest.raises(ConfigError, match="No such file"):
        list(trace)

    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    write(tmp_path / "secret", [MOONCAKE])
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot read trace .*: Permission denied"):
        open_trace(tmp_path / "secret")


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("content", [b"%s\n%s", b"\xef\xbb\xbf\r\n  %s  \r\n\t\n%s\n\n"])
def test_line_shapes(tmp_path: Path, content: bytes, compress: Any) -> None:
    path = tmp_path / "trace.dat"  # gzip is recognised by the first bytes, not by the name
    path.write_bytes(compress(content % (to_line(MOONCAKE), to_line(MOONCAKE))))
    requests, errors = read(path)
    assert [request.hash_ids for request in requests] == [(0, 7), (0, 7)]
    assert errors == []


def test_truncated_gzip_yields_every_whole_row(path: Path) -> None:
    rows = [of_mooncake(timestamp=zlib.crc32(b"%d" % i)) for i in range(60)]
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


def test_damaged_gzip(path: Path) -> None:
    whole = gzip.compress(to_line(MOONCAKE) + b"\n")
    for damaged in (whole[:-8] + b"\0" * 8, whole + b"garbage"):
        path.write_bytes(damaged)
        requests, errors = read(path)
        assert (len(requests), len(errors)) == (1, 1)
        assert f"{path}:2: gzip data truncated or damaged" in errors[0]
    path.write_bytes(b"\x1f\x8b garbage")
    with pytest.raises(ConfigError, match="no row can be read; line 1: gzip data"):
        open_trace(path, on_error=lambda error: None)


def test_a_folder_is_a_trace(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.json", [cc_session(GOOD_CC, GOOD_CC, id=name)])
    (tmp_path / "README.md").write_text("not a trace")
    trace = open_trace(tmp_path)
    assert [request.scope for request in trace] == ["a", "a", "b", "b"]
    assert trace.bytes_read == trace.total_bytes
    write(tmp_path / "other.json", [MOONCAKE])
    requests, (error,) = read(tmp_path)
    assert len(requests) == 4
    assert "mooncake in blocks of 512, but the files before it are cc-traces" in error
    with pytest.raises(ConfigError, match="other"):
        open_trace(tmp_path)


# --- streaming ---


def test_a_generated_trace_is_read_unchanged_from_a_file(path: Path) -> None:
    write(path, map(mooncake_row, generate_trace(num_requests=300)))
    # Mooncake rows do not name the request that they continue.
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
    content = b"".join(to_line(mooncake_row(r)) + b"\n" for r in generate_trace(num_requests=500))
    peaks = []
    for copies in (10, 40):  # more than the 128 KiB that gzip reads at once from Python 3.12 on
        path = tmp_path / f"{copies}"
        path.write_bytes(gzip.compress(content * copies, 1) if compressed else content * copies)
        trace = open_trace(path)
        list(itertools.islice(trace, 50))  # one-time allocations do not count
        peaks.append(peak_bytes(trace))
    assert peaks[1] < peaks[0] + 64_000 < 40 * len(content) / 10


@pytest.mark.parametrize(
    ("row", "limit"),
    [(b"9" * 16_000_000, 1_000), (b'{"hash_ids":[' + b"1," * 6_000_000 + b"1]}", 32 << 20)],
)
def test_memory_does_not_grow_with_a_long_row(path: Path, row: bytes, limit: int) -> None:
    write(path, [MOONCAKE, row, MOONCAKE])
    errors: list[TraceError] = []
    trace = open_trace(path, on_error=errors.append, max_row_bytes=limit)
    assert peak_bytes(trace) < 4_000_000 + 3 * min(limit, len(row))
    (error,) = errors
    assert (str(error) == f"{path}:2: row longer than {limit} bytes") is (len(row) > limit)
    assert [request.line for request in trace] == [1, 3]


def test_progress(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    content = b"".join(to_line(mooncake_row(r)) + b"\n" for r in generate_trace(num_requests=2_000))
    # Not compressed: from Python 3.12 on, gzip reads 128 KiB at once.
    path.write_bytes(gzip.compress(content * 2, 0))
    trace = open_trace(path)
    assert trace.total_bytes == path.stat().st_size
    read_bytes = [trace.bytes_read for _ in trace]
    assert read_bytes == sorted(read_bytes)
    assert len(set(read_bytes)) > 3
    assert trace.bytes_read == trace.total_bytes


def test_an_abandoned_iteration_closes_the_file(path: Path) -> None:
    # An open file would fail here, because ResourceWarning is an error.
    iterator = iter(open_trace(write(path, [MOONCAKE] * 3)))
    next(iterator)
    del iterator


# --- real files (tests/traces) ---


def prefix_hit_rate(requests: Iterable[TraceRequest]) -> tuple[int, int, int, float]:
    """Requests, references, different ids, hit rate of an infinite cache."""
    seen: set[tuple[str, int]] = set()
    num_requests = references = hits = 0
    for request in requests:
        num_requests += 1
        references += len(request.hash_ids)
        keys = [(request.scope, hash_id) for hash_id in request.hash_ids]
        hits += sum(1 for _ in itertools.takewhile(seen.__contains__, keys))
        seen.update(keys)
    return num_requests, references, len(seen), hits / max(references, 1)


def test_the_mooncake_file() -> None:
    requests = list(open_trace(trace_file(MOONCAKE_NAME)))
    num_requests, references, unique, hit_rate = prefix_hit_rate(requests)
    assert (num_requests, references, unique) == (12_031, 288_500, 182_790)
    assert hit_rate == pytest.approx(0.366, abs=0.001)
    assert (requests[0].arrival_s, requests[-1].arrival_s) == (0.0, 3536.999)
    assert all(len(r.hash_ids) == -(-r.num_prompt_tokens // 512) for r in requests)


def test_the_cc_file() -> None:
    requests = list(open_trace(trace_file(CC_NAME)))
    assert sum("." in request.request_id for request in requests) == 121
    assert len({request.request_id for request in requests}) == len(requests) == 3_330
    assert requests[-1].line == 40
    for before, after in itertools.pairwise(requests):
        assert before.line < after.line or before.arrival_s <= after.arrival_s
    assert all(len(r.hash_ids) == r.num_prompt_tokens // 64 for r in requests)


# --- fuzzing ---


@st.composite
def mutated_rows(draw: st.DrawFn) -> bytes:
    """A good row with one bit flipped, a part deleted or inserted, or one value replaced."""
    row = draw(st.sampled_from([MOONCAKE, BAILIAN, CC]))
    line = bytearray(to_line(row))
    kind = draw(st.sampled_from(["flip", "cut", "insert", "value"]))
    at = draw(st.integers(0, len(line) - 1))
    if kind == "flip":
        line[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "cut":
        del line[at : at + draw(st.integers(1, 9))]
    elif kind == "insert":
        line[at:at] = draw(st.binary(max_size=9))
    else:
        json_value = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=3),
        )
        line = bytearray(to_line({**row, draw(st.sampled_from(sorted(row))): draw(json_value)}))
    return bytes(line).replace(b"\n", b"")


GARBAGE = st.binary(max_size=40).map(lambda row: row.replace(b"\n", b""))


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(mutated_rows() | GARBAGE, max_size=4), data=st.data())
def test_fuzzed_rows_lose_no_good_row(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    schema = data.draw(st.sampled_from([MOONCAKE, BAILIAN, CC]))
    good = to_line(schema)
    lines = list(rows)
    for _ in range(data.draw(st.integers(1, 3))):
        lines.insert(data.draw(st.integers(0, len(lines))), good)
    lines.insert(0, good)  # the first row determines the schema
    requests, errors = read(write(path, lines))
    yielded = [request.line for request in requests]
    assert {line for line, row in enumerate(lines, 1) if row == good} <= set(yielded)
    # Each line is read once, or reported, or blank, or a session without requests.
    reported = [int(error.removeprefix(f"{path}:").split(":")[0]) for error in errors]
    blank = [line for line, row in enumerate(lines, 1) if not row.strip()]
    if schema is CC:
        assert not set(yielded) & set(reported)
    else:
        assert sorted(yielded + reported + blank) == list(range(1, len(lines) + 1))
