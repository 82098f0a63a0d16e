"""Handoffs in ``KVViewConnector``: their setting, and their parameters in vLLM's requests.

A router sends ``{"do_remote_decode": true}`` with a prompt to the producer. The router copies the
``kv_transfer_params`` of the response, in which ``do_remote_prefill`` is true, into the request for
the consumer. These are the two names that vLLM's own connectors use, so routers for these
connectors work.

Source: ``kv_transfer_params`` in vllm/distributed/kv_transfer/kv_connector/v1/nixl, 0.11.0 to
0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvview import ConfigError, UnsupportedEngineError
from kvview.handoff import HandoffScheduler, HandoffWorker, Peer, Wire
from kvview.targets import load_target
from kvview_vllm.releases import ConnectorSeam, engine_version

OFFER, ACCEPT = "do_remote_decode", "do_remote_prefill"


class HandoffOptions(BaseModel):
    """The setting ``handoffs``.

    Args:
        wire: Target of the wire's class, which is called with the address and a worker's rank.
        address: Address at which the peers of this engine can reach it.
        lease_seconds: Seconds for which an offer waits for its consumer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    wire: str
    address: str
    lease_seconds: float = Field(default=30.0, gt=0)

    def peer(self, engine_id: str, life: str, split: str) -> Peer:
        """Describe this life of the engine to other engines."""
        return Peer(engine_id, life, self.address, split)

    def make_wire(self, rank: int) -> Wire:
        """Make the wire of a worker in this life."""
        wire: Wire = load_target(self.wire)(self.address, rank)
        return wire


def require_handoffs(
    half: object,
    target: str,
    options: HandoffOptions | None,
    num_groups: int,
    release: ConnectorSeam,
) -> HandoffOptions | None:
    """Check the setting ``handoffs`` of a connector.

    Args:
        half: One half of the connector.
        target: Target of the connector.
        options: The setting.
        num_groups: Number of KV-cache groups of the engine.
        release: Flags of the release: whether requests wait for their loads between steps, and
            which loads may fail.

    Returns:
        The setting; None for a connector without the hooks for handoffs.

    Raises:
        ConfigError: The setting is missing or has no effect.
        UnsupportedEngineError: A step of this release would wait for another engine, or this engine
            could not continue after a failed handoff (WORK-2).
    """
    if not isinstance(half, HandoffScheduler | HandoffWorker):
        if options is not None:
            raise ConfigError(f"connector {target} has no hooks for handoffs; drop 'handoffs'")
        return None
    if options is None:
        raise ConfigError(
            f"connector {target} hands KV to other engines and needs 'handoffs' in "
            f"kv_connector_extra_config, with a wire and an address (docs/handoff.md)"
        )
    if not release.worker_metadata:
        raise UnsupportedEngineError(
            f"a step of vLLM {engine_version()} waits for its loads, so it would wait for another "
            f"engine; handoffs need 0.18.0 or later"
        )
    if num_groups > 1 and not release.failed_requests:
        raise UnsupportedEngineError(
            f"vLLM {engine_version()} accepts no report of a failed load with {num_groups} "
            "KV-cache groups, and the loads of handoffs may fail; use 0.30.0 or later"
        )
    return options


class WorkerWire:
    """The wire of a worker half.

    Args:
        half: The half.
        options: The setting.
        engine_id: Name of the engine.
        parallel: vLLM's ``ParallelConfig`` of the worker.
    """

    def __init__(
        self, half: HandoffWorker, options: HandoffOptions, engine_id: str, parallel: Any
    ) -> None:
        self._half, self._options, self._engine_id = half, options, engine_id
        self._split = split_of(parallel)
        self._wire = options.make_wire(parallel.rank)
        self._is_bound = False

    def bind(self, life: str) -> None:
        """Bind the wire at the first step, whose message names the life of the engine."""
        if not self._is_bound:
            self._is_bound = True
            me = self._options.peer(self._engine_id, life, self._split)
            self._half.bind_wire(me, self._wire, self._options.lease_seconds)

    def close(self) -> None:
        """Close the wire."""
        self._wire.close()


def split_of(parallel: Any) -> str:
    """Describe how vLLM splits KV over workers."""
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    return "tensor {}, pipeline {}".format(*sizes) if parallel.world_size > 1 else ""


def params_with(request: Any, name: str) -> Mapping[str, Any] | None:
    """Return the handoff parameters of a ``Request``, or None unless the named entry is true."""
    params: Mapping[str, Any] | None = request.kv_transfer_params
    return params if params and params.get(name) else None
