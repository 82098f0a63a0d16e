"""Handoffs between two processes over TCP, with a killed producer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvview_reference.engine.request import Request
from kvview_reference.handoff.engine import PDEngine
from kvview_reference.handoff.zmq_wire import ZmqWire
from tests.handoff.engines import make_engine, prompt

LEASE = 3.0


@pytest.fixture
def producer() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.handoff.producer", str(LEASE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def consumer() -> Iterator[PDEngine]:
    engine, wire = make_engine("D", LEASE)
    yield engine
    assert engine.shutdown() == {}
    wire.close()


def line(producer: subprocess.Popen[str]) -> Any:
    assert producer.stdout is not None
    return json.loads(producer.stdout.readline())


def decode(engine: PDEngine, request: Request, params: Any) -> None:
    engine.add_decode(request, params)
    while engine.has_work():
        engine.step()
        time.sleep(0.001)


def test_a_prompt_is_handed_over_and_the_producer_is_free(
    producer: subprocess.Popen[str], consumer: PDEngine
) -> None:
    for number in range(2):
        decode(consumer, prompt(number, 8), line(producer))
    assert consumer.stats.cpu_hit_blocks == 60
    assert consumer.stats.mismatches == 0
    assert line(producer) == {}  # before the lease has passed, or the process still runs


@pytest.mark.slow
def test_a_killed_producer_costs_a_lease_and_no_token(
    producer: subprocess.Popen[str], consumer: PDEngine
) -> None:
    params = line(producer)
    producer.kill()
    producer.wait()
    decode(consumer, prompt(0, 8), params)
    assert consumer.stats.cpu_hit_blocks == 0
    assert (consumer.stats.finished, consumer.stats.mismatches) == (1, 0)


def test_a_message_reaches_the_same_rank_of_another_engine(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/{name}:0" for name in "PD"]
    wires = [[ZmqWire(address, rank) for rank in range(2)] for address in addresses]
    for rank, wire in enumerate(wires[0]):
        lost = wire.send("tcp://without a port", [b""])
        wire.send(addresses[1], [b"%d" % rank])
        assert lost in wire.sent()
    for rank, wire in enumerate(wires[1]):
        messages: list[Any] = []
        for _ in range(5000):
            messages += wire.receive()
            if messages:
                break
            time.sleep(0.001)
        assert messages == [[b"%d" % rank]]
    for wire in (*wires[0], *wires[1]):
        wire.close()


GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_both_roles_run_on_each_device(device: str) -> None:
    engines = [make_engine(name, LEASE, device) for name in "PD"]
    (producer, _), (consumer, _) = engines

    def step(engine: PDEngine) -> None:
        if device == "cuda" and torch.cuda.current_stream().query():
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # kernels end late
        engine.step()

    for number in range(4):
        request = prompt(number)
        producer.add_prefill(request)
        while request.request_id not in producer.offered:
            step(producer)
        params, _ = producer.offered.pop(request.request_id)
        consumer.add_decode(prompt(number, 8), params)
        while consumer.has_work():
            step(consumer)
            step(producer)
    assert consumer.stats.cpu_hit_blocks == 120
    assert consumer.stats.mismatches == 0
    for engine, wire in engines:
        assert engine.shutdown() == {}
        wire.close()
