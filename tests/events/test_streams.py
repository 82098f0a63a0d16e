"""Streams of KV events: the fold, the channel, recordings and the command."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from click.testing import CliRunner, Result

from kvview import ConfigError, WireFormatError
from kvview.cli.commands import cli
from kvview.events.channel import Listener, read_frames
from kvview.events.formats import find_format
from kvview.events.recording import Message, Recording, read_recording
from kvview.events.wire import Batch, codec, encode
from kvview.testing.events.stream_fold import StreamFold
from tests.events.publisher import Publisher

HERE = Path(__file__).parent
pack = msgspec.msgpack.encode
FIRST, SECOND = 1 << 40, 1 << 41


def batch_of(name: str, *events: tuple[str, dict[str, Any]]) -> Batch:
    writer = codec(find_format(name))
    made = [writer.make(tag, **values) for tag, values in events]
    return Batch(1.5, made, 0, writer.wire_format)


def stored(*hashes: int, medium: str = "GPU", **values: Any) -> tuple[str, dict[str, Any]]:
    defaults = {"token_ids": [7] * 4 * len(hashes), "block_size": 4, "group_idx": 0}
    defaults |= {"kv_cache_spec_kind": "full_attention"}
    return "BlockStored", {"block_hashes": [*hashes], "medium": medium, **defaults, **values}


def removed(*hashes: int, medium: str = "GPU") -> tuple[str, dict[str, Any]]:
    return "BlockRemoved", {"block_hashes": [*hashes], "medium": medium, "group_idx": 0}


CLEARED: tuple[str, dict[str, Any]] = ("AllBlocksCleared", {})


def payload_of(*events: tuple[str, dict[str, Any]], name: str = "vllm-0.30") -> bytes:
    return encode(batch_of(name, *events))


EMPTY = payload_of()

# --- the fold ---


def laws(fold: StreamFold, sequence: int, *events: tuple[str, dict[str, Any]]) -> list[str]:
    return [finding.law for finding in fold.apply(sequence, payload_of(*events))]


def test_the_blocks_of_each_medium() -> None:
    fold = StreamFold()
    assert laws(fold, 0, stored(1, 2), stored(1, medium="CPU")) == []
    assert laws(fold, 1, stored(1), removed(1), removed(2)) == []
    assert {medium: set(held) for medium, held in fold.held.items()} == {
        "GPU": {(1, 0)},
        "CPU": {(1, 0)},
    }
    assert laws(fold, 2, CLEARED) == []
    assert [*fold.held] == ["CPU"]
    assert laws(fold, 3, removed(1)) == ["EVENT-1"]
    assert laws(fold, 4, stored(1, medium="CPU")) == ["EVENT-1"]
    assert laws(fold, 5, removed(1, medium="CPU")) == []
    assert laws(fold, 6, removed(1, medium="CPU")) == ["EVENT-1"]
    assert laws(fold, 7, stored(3, token_ids=[1])) == ["FORMAT"]


def test_parents_and_tokens_agree_if_the_start_is_known() -> None:
    first = stored(1), stored(2, parent_block_hash=1, token_ids=[8] * 4)
    for first_sequence, is_known in ((0, True), (5, False)):
        fold = StreamFold()
        assert laws(fold, first_sequence, *first, stored(2, medium="CPU", token_ids=[])) == []
        wrong = (
            stored(3, parent_block_hash=9),  # never published
            stored(2, medium="DISK", token_ids=[8] * 4),  # another parent
            stored(1, medium="DISK", token_ids=[9] * 4),  # other tokens
        )
        right = stored(4, medium="DISK", parent_block_hash=2, group_idx=None)
        found = laws(fold, first_sequence + 1, *wrong, right)
        assert found == (["EVENT-2"] * 3 if is_known else [])


def test_a_store_of_a_window_names_some_of_its_blocks() -> None:
    """As vLLM writes it: the tokens are those of three blocks."""
    fold = StreamFold()
    values: dict[str, Any] = {"token_ids": [7] * 12, "group_idx": 1}
    assert laws(fold, 0, stored(1, **values, kv_cache_spec_kind="sliding_window")) == []
    assert laws(fold, 1, stored(**values, kv_cache_spec_kind="sliding_window")) == []
    assert laws(fold, 2, stored(2, **values)) == ["FORMAT"]
    values |= {"block_size": 5, "kv_cache_spec_kind": "mamba"}
    assert laws(fold, 3, stored(3, **values)) == ["FORMAT"]


def test_numbers_without_gaps() -> None:
    fold = StreamFold()
    assert laws(fold, 5, removed(9)) == []  # the start is missing, so the key may have been stored
    assert laws(fold, 7) == ["EVENT-3"]
    assert laws(fold, 7) == ["EVENT-3"]
    assert laws(fold, 6, stored(1)) == ["EVENT-3"]  # late, and not applied
    assert fold.held == {"GPU": {}}
    assert laws(fold, 0, stored(1)) == ["EVENT-3"]  # the publisher restarted
    assert laws(fold, 1, removed(1), removed(2)) == ["EVENT-1"]
    assert [finding.law for finding in fold.apply(2, b"junk")] == ["FORMAT"]
    assert laws(fold, 3, removed(5)) == []  # the unreadable batch may have stored it


def test_a_publisher_that_restarted_before_the_listener_connected() -> None:
    fold = StreamFold()
    assert laws(fold, 0, stored(1), stored(1, medium="CPU")) == []
    later = encode(replace(batch_of("vllm-0.30", stored(2)), ts=2.5))
    assert laws(fold, 1) == laws(fold, 2) == laws(fold, 3) == []
    (finding,) = fold.apply(2, later)
    assert finding.what == "the publisher restarted after 3, and its first 2 messages are missing"
    assert [*fold.held] == ["GPU"]
    assert [*fold.held["GPU"]] == [(2, 0)]
    assert not fold.knows_all


# --- the channel ---


def test_messages_come_in_order() -> None:
    with Publisher(topic="kv") as publisher, Listener(publisher.endpoint) as listener:
        first = None
        while first is None:  # until the subscription has arrived
            publisher.publish(b"first")
            first = listener.receive(0.05)
        last = publisher.publish(b"last")
        heard = [first, *(listener.receive(5) for _ in range(first.sequence, last))]
        assert [one and one.sequence for one in heard] == [*range(first.sequence, last + 1)]
        assert {one and (one.payload, one.topic) for one in heard[:-1]} == {(b"first", "kv")}
        assert listener.receive(0.01) is None
    with pytest.raises(ConfigError, match="the listener was closed"):
        listener.receive(0)


def test_a_wrong_endpoint() -> None:
    with pytest.raises(ConfigError, match=r"endpoint 'nonsense': .*expected tcp://HOST:PORT"):
        Listener("nonsense")


@contextmanager
def publishing(publish: Callable[[], object]) -> Iterator[None]:
    """Call ``publish`` again and again during the ``with`` block."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(0.01):
            publish()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_frames_of_a_foreign_protocol() -> None:
    for frames in ([b"hello"], [b"", b"1", b""], [b""] * 4):
        with pytest.raises(WireFormatError, match="not a KV event message: "):
            read_frames(frames)


# --- recordings ---


def test_a_recording_is_read_again(tmp_path: Path) -> None:
    messages = [Message(number, bytes([number, 255]), "kv", 1.5) for number in range(3)]
    for name in ("a.jsonl", "a.jsonl.gz"):
        with Recording(str(tmp_path / name)) as recording:
            for message in messages:
                recording.write(message)
        assert [*read_recording(str(tmp_path / name))] == messages
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-12])
    with pytest.raises(WireFormatError, match="cut off or not in gzip format"):
        list(read_recording(str(cut)))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_recording(str(tmp_path / "none.jsonl")))
    (tmp_path / "deep.jsonl").write_text('{"sequence": ' + "1" * 5000 + "}\n" + "[" * 99999)
    with pytest.raises(WireFormatError, match=r"deep\.jsonl:1: not a recorded message"):
        list(read_recording(str(tmp_path / "deep.jsonl")))
    (tmp_path / "long.jsonl.gz").write_bytes(gzip.compress(b" " * (65 << 20)))
    with pytest.raises(WireFormatError, match="longer than 25165824 bytes"):
        list(read_recording(str(tmp_path / "long.jsonl.gz")))
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(WireFormatError, match=r"other\.jsonl:1: not a recorded message"):
        list(read_recording(str(tmp_path / "other.jsonl")))


# --- the command ---


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["events", *map(str, args)])


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    def write(*payloads: bytes, first: int = 0) -> Path:
        path = tmp_path / "stream.jsonl"
        with Recording(str(path)) as recording:
            for number, payload in enumerate(payloads, start=first):
                recording.write(Message(number, payload, "kv"))
        return path

    return write


def test_a_recording_is_validated(recorded: Any) -> None:
    path = recorded(payload_of(stored(1, 2), stored(1, medium="CPU")), payload_of(removed(2)))
    done = run(path)
    assert done.exit_code == 0, done.output
    assert done.output == ("2 messages, 3 events, vllm-0.30\nCPU: 1 blocks\nGPU: 1 blocks\n")
    assert run(path, "--messages", 1).output.startswith("1 messages, 2 events")
    done = run(recorded(payload_of(removed(1)), b"junk"))
    assert done.exit_code == 1
    assert "message 0: EVENT-1: event 0 removes block 1 from GPU" in done.output
    assert "message 1: FORMAT: not a batch of vllm-0.33: " in done.output


def test_gaps_are_found_and_a_recording_repeats_them(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl.gz"
    with Publisher() as publisher:
        live, lost = publisher.socket, publisher.context.socket(zmq.PUB)

        def publish() -> None:
            for publisher.socket in (lost, live):  # every second message is lost
                publisher.publish(EMPTY)

        with publishing(publish):
            missed = run(publisher.endpoint, "--messages", 12, "--record", path)
        silent = run(publisher.endpoint, "--seconds", "0.05")
        lost.close(linger=0)
    assert missed.exit_code == 1
    assert "EVENT-3: 1 messages from" in missed.output
    assert missed.output.endswith("so the list of blocks is incomplete\n")
    assert run(path).output == missed.output
    assert (silent.exit_code, silent.output) == (4, "0 messages, 0 events, no format\n")
