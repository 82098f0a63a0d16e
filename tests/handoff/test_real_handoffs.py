"""Two engines of the installed vLLM that hand over KV."""

from __future__ import annotations

import gc
import socket
import warnings
from typing import Any

import pytest

from kvview import ConfigError
from kvview_reference.handoff.pull import PullConnector
from kvview_vllm.handoff.side_channel import FaultySideChannel, SideChannelFault

KNOWN_WRONG = {
    "consumed handoff, blocks reused",
    "expired handoff, blocks reused",
    "handoff of another prompt",
}
"""Cases in which vLLM 0.32.0 with NIXL 1.5.1 gives wrong tokens (docs/handoff.md)."""


@pytest.mark.parametrize(
    ("fault", "received"), [("silent", None), ("closed", b""), ("garbage", b"\x00garbage")]
)
def test_a_faulty_side_channel(fault: SideChannelFault, received: bytes | None) -> None:
    server = FaultySideChannel(fault)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(0.2 if received is None else 10)
        if received is None:
            with pytest.raises(TimeoutError):
                connection.recv(8)
        else:
            assert connection.recv(8) == received
    server.close()


def test_no_connection_stays_open() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(200):  # the server may get a connection while it closes
            server = FaultySideChannel("garbage")
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.recv(8)
                server.close()
            del server
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.slow
def test_the_findings_are_those_of_the_page() -> None:
    pytest.importorskip("nixl")
    nixl: Any = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl")
    from kvview_vllm.handoff.cases import play_handoffs

    cases = {case.name: case for case in play_handoffs(nixl.NixlConnector, {}, print)}
    assert cases["right handoff"].is_right, cases["right handoff"]
    assert cases["control: KV overwritten before it is read"].is_right
    assert {name for name in KNOWN_WRONG if cases[name].is_right} == set()


@pytest.mark.slow
def test_the_reference_connector_is_right_in_real_engines() -> None:
    server: Any = pytest.importorskip("kvview_vllm.inference.server")
    try:
        server.require_vllm()
    except ConfigError as error:
        pytest.skip(str(error))
    from kvview_vllm.handoff.cases import play_handoffs

    wrong = [case for case in play_handoffs(PullConnector, {}, print) if not case.is_right]
    assert wrong == []
