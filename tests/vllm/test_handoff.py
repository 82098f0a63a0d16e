"""Handoffs between two schedulers of the installed vLLM."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
from click.testing import CliRunner

from kvview import ConfigError
from kvview.cli.commands import cli
from kvview.targets import load_target
from kvview.testing.connector import Add
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.effort import Effort
from kvview.testing.handoff import HandoffConformance, pd_factory
from kvview.testing.suites.conformance import find_failures
from kvview_reference.handoff.pull import PullConnector
from kvview_vllm.releases import installed
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config
from tests.mutants.handoff import MUTANTS
from tests.mutants.mutant import Mutant
from tests.vllm.server import EXAMPLE, NUM_TOKENS, Server

SEEDS = 10
TARGET = "kvview_reference.handoff.pull:PullConnector"
HANDOFFS = {"wire": "kvview_reference.handoff.zmq_wire:ZmqWire", "address": "tcp://127.0.0.1:*"}
SEEN_EARLY = {
    "DropsFailedLoads",
    "NeverConfirms",
    "OffersWithoutHolding",
    "ReleasesAtTheFirstRead",
    "ServesConsumed",
    "SuccessOfCut",
    "WritesLatePages",
}
"""Wrong connectors that a few runs detect."""
BREAKS_FIRST = {"ReleasesAtTheFirstRead": ("HAND-2",), "DropsFailedLoads": ("HAND-6",)}
"""The laws that a connector may break before its own, because the same fault breaks both."""
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
NIXL_BREAKS = {"HAND-4", "HAND-5", "HAND-6", "HAND-7", "HAND-9"}
"""The laws that NixlConnector breaks in two schedulers (docs/handoff.md)."""
_NAME = attrgetter("name")

needs_loads_between_steps = pytest.mark.skipif(
    not installed().connector.worker_metadata, reason="a step waits for its loads"
)


def _start(state: Any) -> None:
    """Start two small engines of one rank."""
    state.start(
        groups="full",
        split="none",
        consumer="alike",
        num_blocks=(20, 20),
        max_running=(3, 3),
        pin_budget=None,
        lease=16,
        seed=90,  # the consumer in the other model runner
    )


@needs_loads_between_steps
def test_two_schedulers_hand_over() -> None:
    suite = pd_factory(PullConnector, "vllm")
    state: Any = suite.Machine()
    _start(state)
    state.hand_over(has_unused=True, num_blocks=2, way="load")  # fails unless the KV is loaded
    state.teardown()
    assert find_failures(suite, Effort(seeds=SEEDS)) == {}


@needs_loads_between_steps
@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.name in SEEN_EARLY], ids=_NAME)
def test_a_wrong_connector_is_detected(mutant: Mutant) -> None:
    connector: Any = mutant.factory
    suite = pd_factory(connector.connector, "vllm")
    (law,) = find_failures(suite, Effort(seeds=400, is_brief=True))
    assert law in {mutant.law, *BREAKS_FIRST.get(mutant.name, ())}


@needs_loads_between_steps
def test_an_error_of_vllm_breaks_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    # VSIM-1
    suite = pd_factory(PullConnector, "vllm")

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("a defect of vLLM")

    pool: Any = pytest.importorskip("vllm.v1.core.block_pool")
    monkeypatch.setattr(pool.BlockPool, "cache_full_blocks", fail)
    with pytest.raises(InvariantBroken, match=r"ENGINE: .*KeyError"):
        find_failures(suite, Effort(seeds=10, is_brief=True))


def test_a_release_that_waits_for_loads_within_a_step_is_refused() -> None:
    result = CliRunner().invoke(
        cli, ["check", TARGET, "--pd", "--engine", "vllm", "--seeds", "1", "--steps", "1"]
    )
    if installed().connector.worker_metadata:
        assert result.exit_code == 0, result.output
    else:
        assert result.exit_code == 2
        assert "handoffs need 0.18.0 or later" in result.output


def test_a_connector_of_vllm_is_checked_in_real_engines() -> None:
    target = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
    result = CliRunner().invoke(cli, ["check", target, "--pd", "--engine", "vllm"])
    assert result.exit_code == 2
    assert "MultiConnector cannot run in two simulated engines" in result.output


@pytest.fixture
def nixl() -> type[HandoffConformance]:
    pytest.importorskip(f"{NIXL}.pull_worker", reason="NixlConnector has other modules")
    return pd_factory(load_target(f"{NIXL}:NixlConnector"), "vllm")


def test_nixl_loads_right_kv_in_two_schedulers(nixl: type[HandoffConformance]) -> None:
    # the positive control: without stale and foreign handoffs
    state: Any = nixl.Machine()
    _start(state)
    for family in range(3):
        state.prefill(
            "P",
            number=0,
            family=family,
            num_tokens=12,
            num_shared_blocks=0,
            num_outputs=None,
            seconds=3,
        )
        [kept] = state.run.new_offers()
        state.run.route("D", kept, kept.add, "right")
        state.run.tick(12)
    num_loaded = state.run.counters("D")[1]
    state.teardown()
    assert num_loaded > 0


def test_nixl_frees_the_blocks_of_handoffs_that_have_ended(nixl: type[HandoffConformance]) -> None:
    """The stand-in for the side channel once lacked a method of 0.24 and 0.25, so none was read."""
    state: Any = nixl.Machine()
    state.start(
        groups="full",
        max_running=(1, 1),
        seed=55689247,
        pin_budget=None,
        num_blocks=(14, 14),
        lease=16,
        consumer="alike",
        split="none",
    )
    state.route(family=8, number=1, seconds=0, to_itself=False)
    state.route_again(age=2, is_evicted=True, seconds=1, to_itself=False)
    state.abort(request=("D", "again2"))
    state.route_again(age=1, is_evicted=False, seconds=3, to_itself=False)
    state.restart(how="reset", name="D")
    state.pass_time(seconds=15)
    state.teardown()


def test_nixl_breaks_the_laws_of_its_findings(nixl: type[HandoffConformance]) -> None:
    failures = find_failures(nixl, Effort(seeds=30))
    assert {"HAND-5", "HAND-6"} <= set(failures)
    assert set(failures) <= NIXL_BREAKS
    assert nixl.replaced


@needs_loads_between_steps
@pytest.mark.parametrize(
    ("target", "handoffs", "message"),
    [
        (TARGET, None, "needs 'handoffs' in kv_connector_extra_config"),
        (TARGET, {**HANDOFFS, "lease_seconds": 0}, "handoffs.lease_seconds"),
        (EXAMPLE, HANDOFFS, "has no hooks for handoffs"),
    ],
)
def test_a_wrong_setting_is_refused(
    target: str, handoffs: dict[str, Any] | None, message: str
) -> None:
    config = connector_config(target)
    if handoffs is not None:
        config["kv_connector_extra_config"]["handoffs"] = handoffs
    with pytest.raises(ConfigError, match=message):
        Server(config)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    servers = []
    for name in ("P", "D"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        config = connector_config(TARGET) | {"engine_id": name}
        handoffs = {"wire": HANDOFFS["wire"], "address": address, "lease_seconds": 60}
        config["kv_connector_extra_config"]["handoffs"] = handoffs
        servers.append(Server(config))
    yield servers
    for server in servers:
        server.shutdown()


@needs_loads_between_steps
def test_two_engines_hand_over_by_tcp(servers: list[Server]) -> None:
    producer, consumer = servers
    num_free = producer.num_free_blocks()
    prompt = Add("p", 1, NUM_TOKENS, 1)
    producer.add_prefill(prompt, 0)
    producer.step()
    params, _ = producer.take_offered()["p"]
    assert (params["engine_id"], params["num_tokens"]) == ("P", 96)
    assert params["do_remote_prefill"]
    assert producer.num_free_blocks() == num_free - 6  # held after the request has ended
    consumer.add_decode(prompt, 0, params)
    for _ in range(5000):
        producer.step()
        consumer.step()
        if producer.num_free_blocks() == num_free and not consumer.unfinished():
            break
        time.sleep(0.001)
    assert consumer.hits["p"] == 96
    assert (consumer.num_loaded_blocks, consumer.stats.mismatches) == (6, 0)
    assert producer.num_free_blocks() == num_free
